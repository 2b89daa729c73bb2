"""ONNX Runtime's CPU provider with all its graph optimizations."""

from __future__ import annotations

import onnxruntime

from .engine import Outputs, Run, Task


def prepare(task: Task) -> Run:
    """See `Engine`."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = task.threads
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(task.onnx_path, options, providers=["CPUExecutionProvider"])

    def run() -> Outputs:
        outputs: Outputs = session.run(None, task.inputs)
        return outputs

    return run
