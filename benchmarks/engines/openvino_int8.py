"""OpenVINO on a model that NNCF has quantized, in its mixed preset; what is not quantized in float32 or bfloat16, whichever is
faster."""

from __future__ import annotations

from functools import partial
from importlib.metadata import version
from pathlib import Path

import openvino

from .calibration import calibration_batches, kept_path
from .engine import Ready, Task
from .openvino_cpu import Compiled, hints, least_seconds, save_whole

_TRANSFORMERS = ("bert", "gpt2", "vit")  # in names of models for which NNCF has rules of their own, SmoothQuant among them


def prepare(task: Task) -> Ready:
    """See `Engine`."""
    path = kept_path(task, "nncf", ".xml", version("nncf"), version("openvino"))
    if not (is_kept := path.exists()):
        _quantize(task, path)
    inputs = list(task.inputs.values())
    offered = [Compiled(path, task.threads, precision) for precision in hints()]
    best = min(offered, key=lambda one: least_seconds(partial(one, inputs)))
    return Ready(partial(best, inputs), is_kept=is_kept, facts=best.facts)


def _quantize(task: Task, path: Path) -> None:
    import nncf

    batches = calibration_batches(task)
    kind = nncf.ModelType.TRANSFORMER if any(word in task.model for word in _TRANSFORMERS) else None
    model = openvino.Core().read_model(task.onnx_path)
    quantized = nncf.quantize(
        model, nncf.Dataset(batches), model_type=kind, preset=nncf.QuantizationPreset.MIXED, subset_size=len(batches)
    )
    save_whole(quantized, path)
