"""The numbers a model should give, from engines that are not ours, and the pass after which it no longer gives them."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from ...runtime.errors import UnsupportedModelError
from ..engines.onnxruntime_session import OnnxRuntimeSession, serialized
from ..engines.random_inputs import random_inputs
from ..engines.results import Arrays, arrays_by_name
from ..ir.functions import inline_all
from ..pipeline import Context, Pass, PassError, run_pipeline

Engine = Literal["onnxruntime", "reference"]

_STRINGS = frozenset("USOT")  # kinds of NumPy's types

__all__ = [
    "Arrays",
    "BisectResult",
    "Engine",
    "bisect_pipeline",
    "engine_refused",
    "random_inputs",
    "relative_error",
    "run_model",
]


def run_model(
    model: ir.Model, inputs: Mapping[str, np.ndarray], engine: Engine = "onnxruntime", *, optimize: bool = False
) -> Arrays:
    """The outputs of a model, as `arrays_by_name` gives them, from ONNX Runtime (with its graph optimizations off unless
    `optimize`) or onnx.reference.

    Raises:
        Exception: whatever the engine raises for a model that it cannot run.
    """
    names = [str(value.name) for value in model.graph.outputs]
    if engine == "onnxruntime":
        results = OnnxRuntimeSession(model, optimize=optimize).run(inputs)
    else:
        results = _run_reference(model, inputs)
    return arrays_by_name(zip(names, results, strict=True))


def engine_refused(where: str, engine: str, error: Exception) -> UnsupportedModelError:
    """The fault of a model that an engine, with which numbers shall be compared, cannot run."""
    lines = str(error).splitlines() or [type(error).__name__]
    return UnsupportedModelError(where, f"{engine} cannot run it: {lines[0]}", "compare with another engine, or with none")


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """|actual - expected| / |expected| in the 2-norm, in float64. Equal infinities and NaNs differ by nothing.

    Infinite where the shapes differ or only one of them is finite, or strings are not equal; against an expected norm of 0 it is
    the norm of `actual`.
    """
    if actual.shape != expected.shape:
        return float("inf")
    if {actual.dtype.kind, expected.dtype.kind} & _STRINGS:
        return 0.0 if np.array_equal(actual.astype(np.str_), expected.astype(np.str_)) else float("inf")
    a, b = (_flat_float64(array) for array in (actual, expected))
    differs = ~((a == b) | (np.isnan(a) & np.isnan(b)))
    if not differs.any():
        return 0.0
    finite = np.isfinite(b)
    error = float(np.linalg.norm(a[differs] - b[differs]))
    norm = float(np.linalg.norm(b[finite]))
    return error / norm if norm and np.isfinite(error) else error if np.isfinite(error) else float("inf")


@dataclass(frozen=True, slots=True)
class BisectResult:
    """The first pass that breaks a model; `pass_name` is None if none does.

    `tensor` is the first value, in the order of execution, that exists before and after the pass and differs; `error` is the
    relative error there. `failure` is the message of a pass or engine that crashed, and then nothing was compared.
    """

    pass_name: str | None = None
    position: int | None = None
    tensor: str | None = None
    error: float = 0.0
    failure: str | None = None


def bisect_pipeline(
    model: ir.Model,
    passes: Sequence[Pass],
    context: Context,
    inputs: Mapping[str, np.ndarray],
    tolerance: float = 1e-4,
    engine: Engine = "onnxruntime",
) -> BisectResult:
    """Find the first of `passes` after which the outputs differ from the original model's by more than `tolerance`.

    `model` is left as it is.

    Raises:
        UnsupportedModelError: the engine cannot run the original model.
    """
    try:
        expected = run_model(model, inputs, engine)
    except Exception as error:
        raise engine_refused("model", engine, error) from error
    current = model.clone()
    for position, one in enumerate(passes):
        before = current.clone()
        try:
            run_pipeline(current, [one], context)
            actual = run_model(current, inputs, engine)
        except PassError as error:
            return BisectResult(one.name, position, failure=str(error.__cause__))
        except Exception as error:  # an engine may raise anything on a broken model
            return BisectResult(one.name, position, failure=str(error))
        errors = {
            name: relative_error(actual[name], array) if name in actual else float("inf") for name, array in expected.items()
        }
        worst = max(errors, key=lambda name: errors[name], default=None)
        if worst is not None and errors[worst] > tolerance:
            tensor, error_there = _first_difference(before, current, inputs, tolerance, engine) or (worst, errors[worst])
            return BisectResult(one.name, position, tensor, error_there)
    return BisectResult()


def _first_difference(
    before: ir.Model, after: ir.Model, inputs: Mapping[str, np.ndarray], tolerance: float, engine: Engine
) -> tuple[str, float] | None:
    """The first value of both models that differs, in the order of `after`, with its relative error."""
    old, new = before.clone(), after.clone()
    inline_all(old)
    inline_all(new)
    shared = _inner_values(old).keys() & _inner_values(new).keys()
    results = []
    for model in (old, new):
        _expose(model, [value for name, value in _inner_values(model).items() if name in shared])
        results.append(run_model(model, inputs, engine))
    for name in _inner_values(new):
        if name in results[0] and name in results[1]:
            error = relative_error(results[1][name], results[0][name])
            if error > tolerance:
                return name, error
    return None


def _inner_values(model: ir.Model) -> dict[str, ir.Value]:
    """Named tensors that the nodes of the main graph produce, in order."""
    values = (value for node in model.graph for value in node.outputs)
    return {value.name: value for value in values if value.name and isinstance(value.type, ir.TensorType)}


def _expose(model: ir.Model, values: Sequence[ir.Value]) -> None:
    present = set(model.graph.outputs)
    model.graph.outputs.extend(value for value in values if value not in present)


def _run_reference(model: ir.Model, inputs: Mapping[str, np.ndarray]) -> Sequence[np.ndarray]:
    from onnx.reference import ReferenceEvaluator  # imports every operator's implementation

    with tempfile.TemporaryDirectory() as folder:
        return list(ReferenceEvaluator(serialized(model, folder)).run(None, dict(inputs)))


def _flat_float64(array: np.ndarray) -> np.ndarray:
    return np.asarray(array, np.complex128 if array.dtype.kind == "c" else np.float64).reshape(-1)
