"""Parts in reversed order, as rotary position embeddings write them (Su et al.: RoFormer, arXiv 2104.09864, 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import onnx_ir as ir

from ....compiler.ir.matching import static_shape
from ....compiler.ir.rewriter import literal_shape, operation
from .scope import Replacement, Rule, Scope
from .views import slice_numbers


@dataclass(frozen=True, slots=True)
class _Part:
    """Elements `start`, `start` + `step`, ... of a value along an axis, with their signs turned or not; as a column of a new last
    axis, or as they are."""

    source: ir.Value
    axis: int
    start: int
    step: int
    is_negative: bool
    is_column: bool


def reverse_parts(node: ir.Node, scope: Scope) -> Replacement | None:
    """Concat(Neg(x[h:]), x[:h]) is x as [2, h], seen in reverse, times -1 and 1; and so are elements of odd before even numbers.

    A view, and a number that a product of its reader takes: no part of x is copied.
    """
    shape = static_shape(node.outputs[0])
    if shape is None or len(node.inputs) != 2 or node.outputs[0].dtype is None or not node.outputs[0].dtype.is_floating_point():
        return None
    first, second = (_part_of(value) for value in node.inputs)
    axis = node.attributes.get_int("axis", 0) % len(shape)
    if first is None or second is None or (first.source, first.axis, first.step) != (second.source, second.axis, second.step):
        return None
    whole = static_shape(first.source)
    if whole is None or 0 in shape or first.is_column != second.is_column:
        return None
    half = whole[first.axis] // 2
    if 2 * half != whole[first.axis] or second.start != 0:
        return None
    if first.is_column:  # [..., 2h] to [..., h, 2]
        is_reversed = (first.start, first.step, first.axis, axis) == (1, 2, len(whole) - 1, len(whole))
        split, turned = (*whole[:-1], half, 2), len(whole)
    else:
        is_reversed = (first.start, first.step, first.axis) == (half, 1, axis)
        split, turned = (*whole[:axis], 2, half, *whole[axis + 1 :]), axis
    if not is_reversed or prod(split) != prod(shape):
        return None
    name = node.outputs[0].name
    nodes = [operation("Reshape", [first.source, scope.ints(split, name)], **literal_shape(split))]
    bounds = [scope.ints([number], name) for number in (1, -3, turned, -1)]
    nodes.append(operation("Slice", [nodes[-1].outputs[0], *bounds]))
    if split != shape:
        nodes.append(operation("Reshape", [nodes[-1].outputs[0], scope.ints(shape, name)], **literal_shape(shape)))
    if first.is_negative or second.is_negative:
        signs = np.array([-1.0 if part.is_negative else 1.0 for part in (first, second)])
        behind = len(shape) - axis - 1
        signs = np.repeat(signs, shape[axis] // 2).reshape(-1, *[1] * behind).astype(node.outputs[0].dtype.numpy())
        nodes.append(operation("Mul", [nodes[-1].outputs[0], scope.constant(signs, name)]))
    return Replacement(tuple(nodes), (nodes[-1].outputs[0],))


def _part_of(value: ir.Value | None) -> _Part | None:
    """The part of another value that a value is; None where it is none, or of a size that only a call tells."""
    is_negative = is_column = False
    while value is not None and (node := value.producer()) is not None and node.domain == "":
        if node.op_type == "Neg":
            is_negative = not is_negative
        elif node.op_type == "Reshape" and not is_column and _is_column(node):
            is_column = True
        else:
            found = _cut(node, value)
            return None if found is None else _Part(*found, is_negative, is_column)
        value = node.inputs[0]
    return None


def _is_column(node: ir.Node) -> bool:
    before, after = static_shape(node.inputs[0]), static_shape(node.outputs[0])
    return before is not None and after == (*before, 1)


def _cut(node: ir.Node, value: ir.Value) -> tuple[ir.Value, int, int, int] | None:
    """Source, axis, first place and step of a Slice along one axis, or of a part of a Split; it has half of the elements."""
    source, shape = node.inputs[0], static_shape(value)
    whole = static_shape(source)
    if source is None or whole is None or shape is None:
        return None
    if node.op_type == "Split":
        axis, step = node.attributes.get_int("axis", 0) % len(whole), 1
        shapes = [static_shape(part) for part in node.outputs[: node.outputs.index(value)]]
        before = [part[axis] for part in shapes if part is not None]
        if len(before) < len(shapes):
            return None
        start = sum(before)
    elif node.op_type == "Slice" and (numbers := slice_numbers(node, len(whole))) is not None and len(numbers[2]) == 1:
        (start,), _, (axis,), (step,) = numbers
        start = start + whole[axis] if start < 0 else start
    else:
        return None
    expected = (*whole[:axis], whole[axis] // 2, *whole[axis + 1 :])
    return (source, axis, start, step) if shape == expected else None


RULES: dict[str, tuple[Rule, ...]] = {"Concat": (reverse_parts,)}
