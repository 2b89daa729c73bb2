"""OpenVINO's CPU plugin, kept to float32: it would take bfloat16 by itself where the CPU has matrix units."""

from __future__ import annotations

import openvino

from .engine import Outputs, Run, Task


def prepare(task: Task) -> Run:
    """See `Engine`."""
    options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": task.threads, "PERFORMANCE_HINT": "LATENCY"}
    request = openvino.Core().compile_model(task.onnx_path, "CPU", options).create_infer_request()
    inputs = list(task.inputs.values())

    def run() -> Outputs:
        return list(request.infer(inputs, share_inputs=True, share_outputs=True).values())

    return run
