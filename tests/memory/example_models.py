"""Our example models within a share of what they take."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from prefuse.examples.models import MODELS, export_onnx

from .judge import Case, Verdict, judge


def judge_model(task: tuple[str, str, str], small: bool = False) -> Verdict:
    """A model by name, a precision and a percentage."""
    name, precision, limit = task
    module, inputs = MODELS[name].build(small)
    with tempfile.TemporaryDirectory(prefix="prefuse-memory-") as folder:
        path = Path(folder, "model.onnx")
        names = export_onnx(module, inputs, path)
        feeds = {name: value.numpy() for name, value in zip(names, inputs, strict=True)}
        del module
        calls = [feeds, _other(feeds), feeds]
        return judge(Case(" ".join(task), path, calls, {"threads": 2, "precision": precision}, float(limit[:-1]) / 100))


def _other(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Values of the same kinds in another order."""
    return {name: np.ascontiguousarray(array[..., ::-1]) for name, array in feeds.items()}
