"""prefuse, from the ONNX file, without its cache."""

from __future__ import annotations

import prefuse
from prefuse.runtime.precision import Precision

from .engine import Outputs, Run, Task


def prepare(task: Task) -> Run:
    """See `Engine`."""
    return _prepare(task, "default")


def prepare_fast(task: Task) -> Run:
    """With errors of up to 2e-5 relative to the norm of an output."""
    return _prepare(task, "default", "float32-fast")


def prepare_bfloat16(task: Task) -> Run:
    """With bfloat16 operands of products."""
    return _prepare(task, "default", "bfloat16")


def prepare_unfused(task: Task) -> Run:
    """The same kernels for single operators: what the fusing passes are worth."""
    return _prepare(task, "no-fusion")


def _prepare(task: Task, pipeline: str, precision: Precision = "float32") -> Run:
    compiled = prefuse.compile(task.onnx_path, cache=False, precision=precision, threads=task.threads, pipeline=pipeline)
    inputs = tuple(task.inputs.values())

    def run() -> Outputs:
        outputs = compiled(*inputs)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    return run
