"""Constants of a graph: reading them without a copy, and adding new ones under unused names."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from ...runtime.symbolic.sizes import Size
from .names import fresh_name
from .symbolic.symbols import SizeTensor

_CONSTANT_DTYPES = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}

MADE_OF = "prefuse.made"  # of a tensor's `meta`: how it was made, as text, and of which tensors

_BLOCK_COLUMNS, _BLOCKED_ELEMENTS = 64, 1 << 16


def constant_tensor(value: ir.Value) -> ir.TensorProtocol | None:
    """The tensor of a value that is an initializer (not also an input, which a caller may override) or a Constant's output.

    None of sizes, which are no numbers before a call.
    """
    if value.is_initializer():
        return None if value.is_graph_input() or isinstance(value.const_value, SizeTensor) else value.const_value
    producer = value.producer()
    if producer is None or producer.op_type != "Constant" or producer.domain != "":
        return None
    attribute = next(iter(producer.attributes.values()))
    if attribute.is_ref():
        return None
    if attribute.name == "value" and attribute.type == ir.AttributeType.TENSOR:
        tensor: ir.TensorProtocol = attribute.value  # `as_tensor` would ask it for all members of the protocol, each time
        return tensor
    if attribute.name in _CONSTANT_DTYPES:
        return ir.Tensor(np.array(attribute.value, _CONSTANT_DTYPES[attribute.name]), name=value.name)
    if attribute.name == "value_string":
        return ir.StringTensor(np.array(attribute.as_string().encode(), object), name=value.name)
    if attribute.name == "value_strings":
        return ir.StringTensor(np.array([text.encode() for text in attribute.as_strings()], object), name=value.name)
    return None


def constant_array(value: ir.Value | None) -> np.ndarray | None:
    """The array of a constant value, memory-mapped or shared with the model where possible; None if it is not constant.

    The array may be read-only; do not write to it.
    """
    tensor = None if value is None else constant_tensor(value)
    return None if tensor is None or tensor.dtype == ir.DataType.STRING else tensor.numpy()


def contiguous(array: np.ndarray) -> np.ndarray:
    """As `np.ascontiguousarray`; a transposed matrix is copied by blocks of columns, so that what is read lies in the caches."""
    if array.ndim != 2 or array.flags.c_contiguous or array.size < _BLOCKED_ELEMENTS:
        return np.ascontiguousarray(array)
    found = np.empty(array.shape, array.dtype)
    for begin in range(0, array.shape[1], _BLOCK_COLUMNS):
        found[:, begin : begin + _BLOCK_COLUMNS] = array[:, begin : begin + _BLOCK_COLUMNS]
    return found


def derived_tensor(
    how: tuple[object, ...],
    sources: Sequence[ir.TensorProtocol],
    make: Callable[[], np.ndarray],
    dtype: ir.DataType,
    shape: Sequence[int],
) -> ir.LazyTensor:
    """A tensor that `make` computes of others when it is read. `how` says what it does to them: two that are made alike of equal
    tensors are equal, which their text tells.
    """
    tensor = ir.LazyTensor(lambda: ir.tensor(make(), dtype=dtype), dtype=dtype, shape=ir.Shape(shape))
    tensor.meta[MADE_OF] = repr(how), tuple(sources)
    return tensor


def scalar_constant(value: ir.Value | None) -> float | int | bool | None:
    """The one element of a constant value, of whatever rank, as a Python number; None if it is no such thing."""
    tensor = None if value is None else constant_tensor(value)
    if tensor is None or tensor.size != 1 or tensor.dtype == ir.DataType.STRING:
        return None
    element = tensor.numpy().reshape(()).item()
    return element if isinstance(element, (bool, int)) else float(element)


def add_constant(owner: ir.Model | ir.Graph, contents: np.ndarray | ir.LazyTensor | SizeTensor, name_hint: str) -> ir.Value:
    """Add an initializer named after `name_hint`, with its facts, and return its value. Nothing is copied, nor a tensor read."""
    graph = owner.graph if isinstance(owner, ir.Model) else owner
    name = fresh_name(owner, name_hint)
    tensor = contents if isinstance(contents, (ir.LazyTensor, SizeTensor)) else ir.Tensor(np.asarray(contents), name=name)
    tensor.name = name
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape), const_value=tensor)
    graph.register_initializer(value)
    return value


def add_sizes(owner: ir.Model | ir.Graph, numbers: Sequence[int], name_hint: str) -> ir.Value:
    """Add a vector of int64, such as a shape, some of whose numbers may be sizes that a call decides."""
    is_sized = any(isinstance(number, Size) for number in numbers)
    return add_constant(owner, SizeTensor(np.array(numbers, object)) if is_sized else np.array(numbers, np.int64), name_hint)


def share_constant(owner: ir.Model | ir.Graph, value: ir.Value) -> ir.Value:
    """Add the tensor of an initializer of some subgraph as one of `owner`, under an unused name, and return its value."""
    graph = owner.graph if isinstance(owner, ir.Model) else owner
    name = fresh_name(owner, str(value.name))
    new = ir.Value(name=name, type=value.type, shape=value.shape, const_value=value.const_value)
    graph.register_initializer(new)
    return new
