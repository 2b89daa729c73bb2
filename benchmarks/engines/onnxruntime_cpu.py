"""ONNX Runtime's CPU provider with all its graph optimizations."""

from __future__ import annotations

from pathlib import Path

import onnxruntime

from .engine import Outputs, Run, Task


def prepare(task: Task) -> Run:
    """See `Engine`."""
    return runner(task, task.onnx_path)


def session_of(path: Path, threads: int) -> onnxruntime.InferenceSession:
    """A file, ready to run."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def runner(task: Task, path: Path) -> Run:
    """Runs a file on the inputs of `task`."""
    session = session_of(path, task.threads)

    def run() -> Outputs:
        outputs: Outputs = session.run(None, task.inputs)
        return outputs

    return run
