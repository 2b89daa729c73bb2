"""What every quantizing engine is shown, inputs like those that are measured and never these themselves; and where it keeps what
it makes of a model."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .engine import Task

BATCHES = 8


def calibration_batches(task: Task) -> list[dict[str, np.ndarray]]:
    """As many batches: floats of the normal distribution of the model's inputs, and their whole numbers in another order."""
    return [{name: _like(array, np.random.default_rng(seed)) for name, array in task.inputs.items()} for seed in range(BATCHES)]


def kept_path(task: Task, what: str, suffix: str, *versions: str) -> Path:
    """A file beside the model's, for these versions of whatever makes it."""
    return task.onnx_path.with_suffix("." + "-".join((what, *versions)) + suffix)


def _like(array: np.ndarray, random: np.random.Generator) -> np.ndarray:
    if array.dtype.kind != "f":
        return random.permuted(array.reshape(-1)).reshape(array.shape)
    drawn = random.normal(array.mean(), array.std(), array.shape)
    return drawn.astype(array.dtype)
