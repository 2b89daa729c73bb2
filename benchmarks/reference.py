"""What every engine is given and held to: one ONNX file, one set of inputs, and the outputs that torch computes in float64."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from prefuse.examples.models import export_onnx
from prefuse.runtime.files.whole_file import whole_file

from .engines.engine import Outputs, Task
from .nets import build, recipe


class NoReferenceError(Exception):
    """A model whose exact outputs are not finite: nothing is right or wrong beside them."""


def make_task(model: str, small: bool, batch: int, threads: int, folder: Path) -> tuple[Task, list[np.ndarray]]:
    """Build a model, write it to `folder` as ONNX with its weights beside it, and compute its outputs in float64.

    What an earlier run of the same recipes has left in the folder is taken as it is.

    Raises:
        UnknownModelError: there is no such model.
        NoReferenceError: an exact output is not finite.
    """
    path = folder / f"{model.replace('/', '-')}{'-small' * small}-{batch}-{recipe()}.onnx"
    known = path.with_suffix(".npz")
    if not known.exists():
        _write(model, small, batch, path, known)
    with np.load(known) as found:
        arrays = {name.removeprefix("input "): found[name] for name in found.files if name.startswith("input ")}
        exact = [found[name] for name in found.files if name.startswith("output ")]
    if not all(np.isfinite(one).all() for one in exact):
        raise NoReferenceError(f"{model} has outputs in float64 that are not finite: nothing can be compared with them")
    return Task(model, small, batch, path, arrays, threads), exact


def _write(model: str, small: bool, batch: int, path: Path, known: Path) -> None:
    """Write a model, and at last its inputs and exact outputs: where these are, the model is whole."""
    module, inputs = build(model, small, batch)
    names = export_onnx(module, inputs, path)
    arrays = {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)}
    outputs = module.double()(*(tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs))
    exact = outputs if isinstance(outputs, tuple) else (outputs,)
    results = {f"output {number:03d}": tensor.numpy() for number, tensor in enumerate(exact)}
    with whole_file(known) as waiting, open(waiting, "wb") as file:  # a file, as to a path NumPy adds a suffix
        np.savez(file, allow_pickle=False, **{f"input {name}": array for name, array in arrays.items()}, **results)


def worst_error(outputs: Outputs, exact: Sequence[np.ndarray]) -> float:
    """The largest relative error, |output - exact| / |exact| in the 2-norm, of any output; infinite where one of another shape
    or with numbers that are not finite is among them."""
    return max(relative_error(np.asarray(output), array) for output, array in zip(outputs, exact, strict=True))


def relative_error(output: np.ndarray, exact: np.ndarray) -> float:
    """That of one output."""
    if output.shape != exact.shape or not np.isfinite(output.astype(np.float64)).all():
        return float("inf")
    difference, norm = np.linalg.norm(output.astype(np.float64) - exact), np.linalg.norm(exact)
    if not difference:
        return 0.0
    return float(difference / norm) if norm else float("inf")
