"""Arithmetic on sizes that a call decides: what computes shapes becomes constants of sizes, as it does of numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir

from ....compiler.ir.constants import constant_tensor
from ....compiler.ir.symbolic.symbols import MOST_SIZES, SizeDim, SizeTensor, as_sizes, constant_sizes, sizes_of
from ....runtime.symbolic.shapes import equal
from ....runtime.symbolic.sizes import Size, least_of, maximum_of, minimum_of
from .scope import Replacement, Rule, Scope

_WHOLE = (ir.DataType.INT64, ir.DataType.INT32)


def fold_shape_of_sizes(node: ir.Node, scope: Scope) -> Replacement | None:
    """Shape and Size of a value some of whose dimensions a call decides."""
    value = node.inputs[0]
    sizes = sizes_of(value)
    if value is None or sizes is None or not any(isinstance(dim, SizeDim) for dim in value.shape or ()):
        return None
    if node.op_type == "Size":
        return _constant(node, np.array(_product(sizes), object), scope)
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", len(sizes))
    return _constant(node, np.array([*sizes[start:end]], object), scope)


def fold_sizes(node: ir.Node, scope: Scope) -> Replacement | None:
    """A node that computes with constants of sizes."""
    if not any(constant_sizes(value) is not None for value in node.inputs) or len(node.outputs) != 1:
        return None
    operands = [_numbers(value) for value in node.inputs]
    if any(operand is None and value is not None for operand, value in zip(operands, node.inputs, strict=True)):
        return None
    try:
        found = _FOLDS[node.op_type](node, [operand for operand in operands if operand is not None])
        return None if found is None else _constant(node, found, scope)
    except (IndexError, OverflowError, ValueError):  # of numbers that are out of range, or do not fit together
        return None


def _numbers(value: ir.Value | None) -> np.ndarray | None:
    if (sizes := constant_sizes(value)) is not None:
        return sizes
    tensor = None if value is None else constant_tensor(value)
    if tensor is None or tensor.dtype not in (*_WHOLE, ir.DataType.BOOL):
        return None
    return as_sizes(tensor.numpy())


def _constant(node: ir.Node, numbers: np.ndarray, scope: Scope) -> Replacement:
    """The node's output as a constant: of sizes, or of numbers where none is left."""
    name = node.outputs[0].name
    kinds = {type(number) for number in numbers.flat}
    if Size in kinds:
        return Replacement((), (scope.constant(SizeTensor(numbers), name),), are_constants=True)
    dtype = np.bool_ if kinds == {bool} else np.int64
    return Replacement((), (scope.constant(numbers.astype(dtype), name),), are_constants=True)


def _product(numbers: Any) -> Any:
    total: Any = 1
    for number in numbers:
        total = total * number
    return total


def _elementwise(function: Callable[..., Any], arity: int = 2) -> Callable[[ir.Node, list[np.ndarray]], np.ndarray | None]:
    def fold(node: ir.Node, operands: list[np.ndarray]) -> np.ndarray | None:
        apply = np.frompyfunc(function, arity, 1)
        found = reduce(apply, operands) if arity == 2 else apply(*operands)
        found = np.array(found, object) if not isinstance(found, np.ndarray) else found
        return None if any(number is None for number in found.flat) else found

    return fold


def _quotient(a: Any, b: Any) -> Any:
    """ONNX rounds towards zero, which is downwards where nothing is negative."""
    return None if least_of(a) < 0 or least_of(b) <= 0 else a // b


def _remainder(node: ir.Node, operands: list[np.ndarray]) -> np.ndarray | None:
    """It has the divisor's sign, or, with fmod, the dividend's."""
    is_floored = not node.attributes.get_int("fmod", 0)

    def remainder(a: Any, b: Any) -> Any:
        if least_of(b) <= 0:
            return None
        if least_of(a) < 0:  # of a small number, the distance to the divisor
            return a + b if is_floored and least_of(a + b) >= 0 and least_of(-a) > 0 else None
        return a if least_of(b - a) > 0 else a % b

    return _elementwise(remainder)(node, operands)


def _same(a: Any, b: Any) -> Any:
    """Whether two numbers are equal; None where that differs from call to call."""
    if isinstance(a, Size) or isinstance(b, Size):
        return True if equal(a, b) else False if _never_equal(a, b) else None
    return bool(a == b)


def _never_equal(a: Any, b: Any) -> bool:
    difference = a - b
    return least_of(difference) > 0 or least_of(-difference) > 0


def _has_sizes(operand: np.ndarray) -> bool:
    """Whether some of the numbers differ from call to call: shapes and places of what is folded must not."""
    return any(isinstance(number, Size) for number in operand.flat)


def _gather(node: ir.Node, operands: list[np.ndarray]) -> np.ndarray | None:
    data, indices = operands
    if _has_sizes(indices):
        return None
    return np.array(np.take(data, indices.astype(np.int64), axis=node.attributes.get_int("axis", 0)), object)


def _slice(node: ir.Node, operands: list[np.ndarray]) -> np.ndarray | None:
    if any(map(_has_sizes, operands[1:])):
        return None
    data, given = operands[0], [position for position, value in enumerate(node.inputs) if value is not None]
    places = {position: int(operand.reshape(-1)[0]) for position, operand in zip(given[1:], operands[1:], strict=True)}
    if data.ndim != 1 or any(operand.size != 1 for operand in operands[1:]):
        return None
    start, end, step = places[1], places[2], places.get(4, 1)
    if step < 0 and start < -len(data):  # from before the beginning they start at the first element
        start = 0
    return data[slice(start, end, step)]


def _concat(node: ir.Node, operands: list[np.ndarray]) -> np.ndarray | None:
    return np.concatenate(operands, axis=node.attributes.get_int("axis", 0))


def _reshaped(node: ir.Node, operands: list[np.ndarray]) -> np.ndarray | None:
    """Squeeze, Unsqueeze, Reshape and Expand of so few numbers."""
    if len(operands) > 1 and _has_sizes(operands[1]):
        return None
    data, numbers = operands[0], [int(number) for number in operands[1].reshape(-1)] if len(operands) > 1 else None
    match node.op_type:
        case "Reshape":
            return data.reshape(numbers)
        case "Unsqueeze":
            return np.expand_dims(data, tuple(numbers or ()))
        case "Expand":
            shape = np.broadcast_shapes(data.shape, tuple(numbers or ()))
            return np.broadcast_to(data, shape) if prod(shape) <= MOST_SIZES else None
        case _:
            return np.squeeze(data, None if numbers is None else tuple(numbers))


def _cast(node: ir.Node, operands: list[np.ndarray]) -> np.ndarray | None:
    return operands[0] if node.attributes.get_int("to", 0) == ir.DataType.INT64 else None


def _reduced(node: ir.Node, operands: list[np.ndarray]) -> np.ndarray | None:
    total = _product(operands[0].flat) if node.op_type == "ReduceProd" else sum(operands[0].flat)
    shape = (1,) * operands[0].ndim if node.attributes.get_int("keepdims", 1) else ()
    return np.array(total, object).reshape(shape) if len(operands) == 1 or operands[0].ndim == 1 else None


_FOLDS: dict[str, Callable[[ir.Node, list[np.ndarray]], np.ndarray | None]] = {
    "Add": _elementwise(lambda a, b: a + b),
    "Cast": _cast,
    "Concat": _concat,
    "Div": _elementwise(_quotient),
    "Equal": _elementwise(_same),
    "Expand": _reshaped,
    "Gather": _gather,
    "Max": _elementwise(maximum_of),
    "Min": _elementwise(minimum_of),
    "Mod": _remainder,
    "Mul": _elementwise(lambda a, b: a * b),
    "Neg": _elementwise(lambda a: -a, 1),
    "ReduceProd": _reduced,
    "ReduceSum": _reduced,
    "Reshape": _reshaped,
    "Slice": _slice,
    "Squeeze": _reshaped,
    "Sub": _elementwise(lambda a, b: a - b),
    "Unsqueeze": _reshaped,
    "Where": _elementwise(lambda condition, a, b: a if condition else b, 3),
}
RULES: dict[str, tuple[Rule, ...]] = {
    **dict.fromkeys(_FOLDS, (fold_sizes,)),
    "Shape": (fold_shape_of_sizes,),
    "Size": (fold_shape_of_sizes,),
}
