"""What every engine is given and held to: one ONNX file, one set of inputs, and the outputs that torch computes in float64."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from prefuse.examples.models import export_onnx

from .engines.engine import Outputs, Task
from .nets import build


def make_task(model: str, small: bool, batch: int, threads: int, folder: Path) -> tuple[Task, list[np.ndarray]]:
    """Build a model, write it to `folder` as ONNX with its weights beside it, and compute its outputs in float64.

    What an earlier run has left in the folder is taken as it is.
    """
    path = folder / f"{model.replace('/', '-')}{'-small' * small}-{batch}.onnx"
    known = path.with_suffix(".npz")
    if not known.exists():
        _write(model, small, batch, path, known)
    with np.load(known) as found:
        arrays = {name.removeprefix("input "): found[name] for name in found.files if name.startswith("input ")}
        exact = [found[name] for name in found.files if name.startswith("output ")]
    return Task(model, small, batch, path, arrays, threads), exact


def _write(model: str, small: bool, batch: int, path: Path, known: Path) -> None:
    """Write a model, and its inputs and exact outputs."""
    module, inputs = build(model, small, batch)
    names = export_onnx(module, inputs, path)
    arrays = {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)}
    outputs = module.double()(*(tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs))
    exact = outputs if isinstance(outputs, tuple) else (outputs,)
    results = {f"output {number:03d}": tensor.numpy() for number, tensor in enumerate(exact)}
    np.savez(known, allow_pickle=False, **{f"input {name}": array for name, array in arrays.items()}, **results)


def worst_error(outputs: Outputs, exact: Sequence[np.ndarray]) -> float:
    """The largest relative error, |output - exact| / |exact| in the 2-norm, of any output."""
    return max(_relative_error(np.asarray(output), array) for output, array in zip(outputs, exact, strict=True))


def _relative_error(output: np.ndarray, exact: np.ndarray) -> float:
    if output.shape != exact.shape:
        return float("inf")
    return float(np.linalg.norm(output.astype(np.float64) - exact) / np.linalg.norm(exact))
