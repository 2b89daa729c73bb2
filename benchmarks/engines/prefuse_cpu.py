"""prefuse, from the ONNX file, without its cache."""

from __future__ import annotations

import prefuse

from .engine import Outputs, Run, Task


def prepare(task: Task) -> Run:
    """See `Engine`."""
    compiled = prefuse.compile(task.onnx_path, cache=False, threads=task.threads)
    inputs = tuple(task.inputs.values())

    def run() -> Outputs:
        outputs = compiled(*inputs)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    return run
