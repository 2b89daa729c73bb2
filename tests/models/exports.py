"""The example models, small, as torch's exporter writes them: exported once in a run of the tests, for all its processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from filelock import FileLock
from prefuse.examples.models import MODELS, export_onnx


@dataclass(frozen=True)
class Export:
    """An ONNX file, which nobody may change, and example inputs by name."""

    path: Path
    inputs: dict[str, np.ndarray]


Exports = Callable[[str], Export]


def exported(name: str, folder: Path) -> Export:
    """The export of a model in a folder of this run; the first process that asks for it makes it, others wait for that."""
    path, inputs = folder / name / "model.onnx", folder / name / "inputs.npz"
    with FileLock(folder / f"{name}.lock"):
        if not inputs.exists():
            path.parent.mkdir(exist_ok=True)
            module, tensors = MODELS[name].build(small=True)
            names = export_onnx(module, tensors, path)
            np.savez(inputs, allow_pickle=False, **{key: tensor.numpy() for key, tensor in zip(names, tensors, strict=True)})
    with np.load(inputs) as arrays:
        return Export(path, dict(arrays))
