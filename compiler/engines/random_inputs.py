"""Inputs that a model accepts, made up from its graph."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...runtime.errors import InputError
from ..ir.constants import constant_tensor
from ..ir.facts import dtype_name

_SYMBOLIC_SIZES = (2, 3, 4)  # what symbolic dimensions are bound to, in order of appearance


def random_inputs(model: ir.Model, seed: int = 0) -> dict[str, np.ndarray]:
    """Inputs that the model accepts: floats of the standard normal distribution, integers small enough to index with.

    A symbolic dimension gets the same small size wherever its name stands. Deterministic in the model and `seed`.

    Raises:
        InputError: an input is no tensor of numbers, or nobody knows of which.
    """
    generator = np.random.default_rng(seed)
    sizes: dict[str, int] = {}
    inputs = {}
    for value in model.graph.inputs:
        if value.is_initializer():
            continue
        if (kind := _made_up_by_nobody(value)) or value.shape is None:
            raise not_made_up(str(value.name), kind or "tensor of any rank")
        shape = tuple(dim if isinstance(dim, int) else _size_of(dim, sizes) for dim in value.shape)
        inputs[str(value.name)] = _random_array(generator, shape, value)
    return inputs


def not_made_up(name: str, kind: str) -> InputError:
    """The fault of an input that needs a value from the user."""
    return InputError(f"input {name!r}", f"a {kind} cannot be made up", "give --inputs if it is a tensor, else call it in Python")


def _made_up_by_nobody(value: ir.Value) -> str:
    """What an input is, in a word, if it is no tensor of numbers; else nothing."""
    if isinstance(value.type, ir.SequenceType):
        return "sequence"
    if isinstance(value.type, ir.OptionalType):
        return "optional"
    if value.dtype is None:
        return "tensor of any type"
    return f"string{value.shape or ''}" if value.dtype == ir.DataType.STRING else ""


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
