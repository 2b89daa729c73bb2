"""What rewrites ask of the graph: shapes, operands and constants, each None where it is not known."""

from __future__ import annotations

import onnx_ir as ir

from .constants import constant_array, constant_tensor
from .symbolic.symbols import sizes_of

_MAX_UNIFORM_ELEMENTS = 4096  # larger constants are not searched for a single repeated value


def is_read(value: ir.Value) -> bool:
    return bool(value.uses()) or value.is_graph_output()


def static_shape(value: ir.Value | None) -> tuple[int, ...] | None:
    """The dimensions of a value, numbers and sizes that a call decides; None where one is unknown."""
    return sizes_of(value)


def rank_of(value: ir.Value | None) -> int | None:
    return None if value is None or value.shape is None else len(value.shape)


def has_same_shape(first: ir.Value, second: ir.Value) -> bool:
    """Whether the shapes are known to be equal: the same numbers and the same named dimensions."""
    if first.shape is None or second.shape is None or len(first.shape) != len(second.shape):
        return False
    return all(
        a == b and (isinstance(a, int) or a.value is not None) for a, b in zip(first.shape.dims, second.shape.dims, strict=True)
    )


def input_at(node: ir.Node, index: int) -> ir.Value | None:
    """The input at a position; None where an optional one is absent."""
    return node.inputs[index] if index < len(node.inputs) else None


def is_constant(value: ir.Value | None) -> bool:
    """Whether a value is a constant of numbers; nothing is read of it."""
    tensor = None if value is None else constant_tensor(value)
    return tensor is not None and tensor.dtype != ir.DataType.STRING


def int_constants(value: ir.Value | None) -> tuple[int, ...] | None:
    """The elements of a constant integer tensor."""
    array = constant_array(value)
    return None if array is None else tuple(int(element) for element in array.reshape(-1))


def uniform_constant(value: ir.Value | None) -> float | int | bool | None:
    """The number that every element of a constant is; None if they differ, or there are none or too many to look."""
    tensor = None if value is None else constant_tensor(value)
    array = constant_array(value) if tensor is not None and 1 <= tensor.size <= _MAX_UNIFORM_ELEMENTS else None
    if array is None:
        return None
    first = array.reshape(-1)[0]
    if array.size > 1 and not bool((array == first).all()):
        return None
    element = first.item()
    return element if isinstance(element, (bool, int)) else float(element)


def is_floating(value: ir.Value | None) -> bool:
    return value is not None and value.dtype is not None and value.dtype.is_floating_point()


def producer_of(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The node that makes a value, if it is an ONNX operator of that type."""
    producer = None if value is None else value.producer()
    return producer if producer is not None and producer.op_type == op_type and producer.domain == "" else None
