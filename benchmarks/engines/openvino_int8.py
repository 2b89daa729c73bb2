"""OpenVINO on a model that NNCF has quantized, in its mixed preset; what is not quantized in float32 or bfloat16, whichever is
faster."""

from __future__ import annotations

import time
from pathlib import Path

import openvino

from .calibration import calibration_batches
from .engine import Run, Task

_TRIAL_CALLS = 6
_TRANSFORMERS = ("bert", "gpt2", "vit")  # for which NNCF has rules of their own, SmoothQuant among them


def prepare(task: Task) -> Run:
    """See `Engine`."""
    path = task.onnx_path.with_suffix(".nncf.xml")
    if not path.exists():
        _quantize(task, path)
    core, inputs = openvino.Core(), list(task.inputs.values())
    has_bfloat16 = "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")

    def compiled(precision: str) -> Run:
        options = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": task.threads, "PERFORMANCE_HINT": "LATENCY"}
        request = core.compile_model(path, "CPU", options).create_infer_request()
        return lambda: list(request.infer(inputs, share_inputs=True, share_outputs=True).values())

    return min(map(compiled, ("f32", "bf16") if has_bfloat16 else ("f32",)), key=_least_seconds)


def _least_seconds(run: Run) -> float:
    times = []
    for _ in range(_TRIAL_CALLS):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def _quantize(task: Task, path: Path) -> None:
    import nncf

    batches = calibration_batches(task)
    kind = nncf.ModelType.TRANSFORMER if task.model.startswith(_TRANSFORMERS) else None
    model = openvino.Core().read_model(task.onnx_path)
    quantized = nncf.quantize(
        model, nncf.Dataset(batches), model_type=kind, preset=nncf.QuantizationPreset.MIXED, subset_size=len(batches)
    )
    openvino.save_model(quantized, path, compress_to_fp16=False)
