"""OpenVINO's CPU plugin in the precision asked for: it would take bfloat16 by itself where the CPU has matrix units."""

from __future__ import annotations

import openvino

from .engine import Outputs, Run, Task


def prepare(task: Task) -> Run:
    """See `Engine`."""
    return _prepare(task, "f32")


def prepare_bfloat16(task: Task) -> Run:
    """With bfloat16 wherever OpenVINO has a kernel of it."""
    return _prepare(task, "bf16")


def _prepare(task: Task, precision: str) -> Run:
    options = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": task.threads, "PERFORMANCE_HINT": "LATENCY"}
    request = openvino.Core().compile_model(task.onnx_path, "CPU", options).create_infer_request()
    inputs = list(task.inputs.values())

    def run() -> Outputs:
        return list(request.infer(inputs, share_inputs=True, share_outputs=True).values())

    return run
