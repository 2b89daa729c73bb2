"""The numbers a model should give, from engines that are not ours, and the pass after which it no longer gives them."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import onnx_ir as ir

from ..ir.constants import constant_tensor
from ..ir.facts import dtype_name
from ..ir.functions import inline_all
from ..pipeline import Context, Pass, PassError, run_pipeline

Engine = Literal["onnxruntime", "reference"]
Arrays = dict[str, np.ndarray]

_SYMBOLIC_SIZES = (2, 3, 4)  # what symbolic dimensions are bound to, in order of appearance
_MAX_ONNXRUNTIME_IR = 13  # the newest file format that ONNX Runtime 1.31 reads; what it lacks of later ones changes no numbers
_MAX_PROTO_BYTES = 1_900_000_000  # protobuf holds less than 2 GiB; leave room for what is not weights


def random_inputs(model: ir.Model, seed: int = 0) -> Arrays:
    """Inputs that the model accepts: floats of the standard normal distribution, integers small enough to index with.

    A symbolic dimension gets the same small size wherever its name stands. Deterministic in the model and `seed`.
    """
    generator = np.random.default_rng(seed)
    sizes: dict[str, int] = {}
    inputs = {}
    for value in model.graph.inputs:
        if value.is_initializer():
            continue
        assert value.dtype is not None, f"input {value.name} has no element type"
        assert value.shape is not None, f"input {value.name} has no shape"
        shape = tuple(dim if isinstance(dim, int) else _size_of(dim, sizes) for dim in value.shape)
        inputs[str(value.name)] = _random_array(generator, shape, value)
    return inputs


def run_model(
    model: ir.Model, inputs: Mapping[str, np.ndarray], engine: Engine = "onnxruntime", *, optimize: bool = False
) -> Arrays:
    """The outputs of a model by name, from ONNX Runtime (with its graph optimizations off unless `optimize`) or onnx.reference.

    Raises:
        Exception: whatever the engine raises for a model that it cannot run.
    """
    names = [str(value.name) for value in model.graph.outputs]
    results = _run_onnxruntime(model, inputs, optimize) if engine == "onnxruntime" else _run_reference(model, inputs)
    return dict(zip(names, map(np.asarray, results), strict=True))


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """|actual - expected| / |expected| in the 2-norm, in float64. Equal infinities and NaNs differ by nothing.

    Infinite where the shapes differ or only one of them is finite; against an expected norm of 0 it is the norm of `actual`.
    """
    if actual.shape != expected.shape:
        return float("inf")
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
    """
    expected = run_model(model, inputs, engine)
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


def _run_onnxruntime(model: ir.Model, inputs: Mapping[str, np.ndarray], optimize: bool) -> Sequence[np.ndarray]:
    import onnxruntime  # slow to import, and only the debugging verbs need it

    options = onnxruntime.SessionOptions()
    levels = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimize else levels.ORT_DISABLE_ALL
    options.log_severity_level = 3  # errors only
    if model.ir_version > _MAX_ONNXRUNTIME_IR:
        model = model.clone()
        model.ir_version = _MAX_ONNXRUNTIME_IR
    with tempfile.TemporaryDirectory() as folder:
        session = onnxruntime.InferenceSession(_serialize(model, folder), options, providers=["CPUExecutionProvider"])
        results: Sequence[np.ndarray] = session.run(None, dict(inputs))
    return results


def _run_reference(model: ir.Model, inputs: Mapping[str, np.ndarray]) -> Sequence[np.ndarray]:
    from onnx.reference import ReferenceEvaluator  # imports every operator's implementation

    with tempfile.TemporaryDirectory() as folder:
        return list(ReferenceEvaluator(_serialize(model, folder)).run(None, dict(inputs)))


def _serialize(model: ir.Model, folder: str) -> str | bytes:
    """One message, or a file in `folder` where the weights do not fit into a message or lie in files of their own."""
    weights = [value.const_value for value in model.graph.initializers.values() if value.const_value is not None]
    is_external = any(isinstance(tensor, ir.ExternalTensor) for tensor in weights)
    if not is_external and sum(tensor.nbytes for tensor in weights) <= _MAX_PROTO_BYTES:
        message: bytes = ir.to_proto(model).SerializeToString()
        return message
    path = Path(folder) / "model.onnx"
    ir.save(model, path, external_data="weights")
    return str(path)


def _random_array(generator: np.random.Generator, shape: tuple[int, ...], value: ir.Value) -> np.ndarray:
    assert value.dtype is not None
    dtype = np.dtype(dtype_name(value.dtype))
    if value.dtype.is_floating_point():
        return generator.standard_normal(shape).astype(dtype)
    return generator.integers(0, _index_bound(value), shape).astype(dtype)


def _index_bound(value: ir.Value) -> int:
    """A bound below which an integer is legal for every Gather that reads `value` directly or through a Cast; 2 elsewhere."""
    bounds = []
    for user, index in value.uses():
        if user.op_type == "Cast":
            bounds.append(_index_bound(user.outputs[0]))
        elif user.op_type.startswith("Gather") and index == 1 and user.inputs[0] is not None:
            bounds.append(_gathered_size(user, user.inputs[0]))
        else:
            bounds.append(2)
    return max(min(bounds, default=2), 1)


def _gathered_size(gather: ir.Node, data: ir.Value) -> int:
    tensor = constant_tensor(data)
    shape = data.shape if tensor is None else tensor.shape
    attribute = gather.attributes.get("axis")
    axis = 0 if attribute is None else attribute.as_int()
    size = None if shape is None or gather.op_type == "GatherND" else shape[axis]
    return size if isinstance(size, int) else 2


def _size_of(dim: ir.SymbolicDim, sizes: dict[str, int]) -> int:
    """The size of a symbolic dimension; an unnamed one gets the first size."""
    if dim.value is None:
        return _SYMBOLIC_SIZES[0]
    return sizes.setdefault(dim.value, _SYMBOLIC_SIZES[len(sizes) % len(_SYMBOLIC_SIZES)])


def _flat_float64(array: np.ndarray) -> np.ndarray:
    return np.asarray(array, np.complex128 if array.dtype.kind == "c" else np.float64).reshape(-1)
