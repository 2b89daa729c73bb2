"""Nodes that compute nothing: each becomes one of its inputs.

A rule here is exact for every element, NaN and infinities included; only the sign of a zero may change (x + 0 where x is -0).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ....compiler.ir.constants import scalar_constant
from ....compiler.ir.matching import (
    has_same_shape,
    input_at,
    int_constants,
    is_constant,
    is_read,
    producer_of,
    rank_of,
    static_shape,
    uniform_constant,
)
from ....compiler.ir.rewriter import operation
from .scope import Replacement, Rule, Scope, becomes, can_replace, respelled


def drop_identity(node: ir.Node, scope: Scope) -> Replacement | None:
    """An Identity stays only where it names an output that is an input, a constant or another output too; no node reads it."""
    value, result = node.inputs[0], node.outputs[0]
    return becomes(node, value) if value is not None and (can_replace(result, value) or result.uses()) else None


def drop_dropout(node: ir.Node, scope: Scope) -> Replacement | None:
    """Dropout in inference keeps every element; its mask, where somebody reads it, is all true."""
    value, training = node.inputs[0], input_at(node, 2)
    if value is None or (scope.opset >= 12 and training is not None and scalar_constant(training) is not False):
        return None
    if len(node.outputs) < 2 or not is_read(node.outputs[1]):
        return becomes(node, value)
    dims = static_shape(value)
    if dims is None:
        return None
    true = scope.constant(np.array(True), node.outputs[1].name)
    mask = operation("Expand", [true, scope.ints(dims, node.outputs[1].name)])
    return Replacement((mask,), (value, mask.outputs[0]))


def drop_cast(node: ir.Node, scope: Scope) -> Replacement | None:
    """Cast to the type that the value has already."""
    value = node.inputs[0]
    return becomes(node, value) if value is not None and value.dtype == node.attributes["to"].as_int() else None


def drop_reshaping(node: ir.Node, scope: Scope) -> Replacement | None:
    """Reshape, Expand or Tile to the shape that the value has already."""
    value = node.inputs[0]
    return becomes(node, value) if value is not None and has_same_shape(value, node.outputs[0]) else None


def drop_slice(node: ir.Node, scope: Scope) -> Replacement | None:
    """A Slice that keeps every element in order: an axis of equal length under a positive step starts at 0 and skips none."""
    value, steps = node.inputs[0], input_at(node, 4)
    if value is None or static_shape(value) is None or not has_same_shape(value, node.outputs[0]):
        return None
    numbers = (1,) if steps is None else int_constants(steps)
    return becomes(node, value) if numbers is not None and all(step > 0 for step in numbers) else None


def drop_pad(node: ir.Node, scope: Scope) -> Replacement | None:
    """Pad by nothing on every side."""
    value, pads = node.inputs[0], int_constants(input_at(node, 1))
    return becomes(node, value) if value is not None and pads is not None and not any(pads) else None


def drop_concat_inputs(node: ir.Node, scope: Scope) -> Replacement | None:
    """Concat of one value, and the empty inputs of any Concat."""
    rank, axis = rank_of(node.outputs[0]), node.attributes["axis"].as_int()
    values = [value for value in node.inputs if value is not None]
    if rank and -rank <= axis < rank:
        kept = [value for value in values if value.shape is None or value.shape[axis] != 0] or values[:1]
    else:
        kept = values
    if len(kept) == 1 and (len(values) == 1 or has_same_shape(kept[0], node.outputs[0])):
        return becomes(node, kept[0])
    return respelled(node, kept, node.attributes) if len(kept) < len(values) else None


def drop_split(node: ir.Node, scope: Scope) -> Replacement | None:
    """Split into one part."""
    value = node.inputs[0]
    return becomes(node, value) if value is not None and len(node.outputs) == 1 else None


def drop_single(node: ir.Node, scope: Scope) -> Replacement | None:
    """Sum, Mean, Max or Min of one value."""
    value = node.inputs[0]
    return becomes(node, value) if value is not None and len(node.inputs) == 1 else None


def drop_unbounded_clip(node: ir.Node, scope: Scope) -> Replacement | None:
    """Clip without bounds."""
    value = node.inputs[0]
    unbounded = all(bound is None for bound in node.inputs[1:])
    return becomes(node, value) if value is not None and unbounded else None


def drop_transpose(node: ir.Node, scope: Scope) -> Replacement | None:
    """Transpose by the identity."""
    value, order = node.inputs[0], node.attributes.get_ints("perm")
    is_identity = order is not None and list(order) == sorted(order)
    return becomes(node, value) if value is not None and (is_identity or rank_of(value) in (0, 1)) else None


def drop_repeated(node: ir.Node, scope: Scope) -> Replacement | None:
    """Relu of Relu, Abs of Abs and the like are idempotent."""
    value = node.inputs[0]
    return becomes(node, value) if value is not None and producer_of(value, node.op_type) else None


def drop_inverse(node: ir.Node, scope: Scope) -> Replacement | None:
    """Neg of Neg and Not of Not."""
    inner = producer_of(node.inputs[0], node.op_type)
    return becomes(node, inner.inputs[0]) if inner is not None and inner.inputs[0] is not None else None


def drop_reduction(node: ir.Node, scope: Scope) -> Replacement | None:
    """A reduction told to reduce nothing: no axes, and `noop_with_empty_axes` set."""
    value, axes = node.inputs[0], input_at(node, 1)
    if value is None or not node.attributes.get_int("noop_with_empty_axes", 0) or "axes" in node.attributes:
        return None
    return becomes(node, value) if axes is None or int_constants(axes) == () else None


def drop_where(node: ir.Node, scope: Scope) -> Replacement | None:
    """Where with one answer everywhere."""
    condition = uniform_constant(node.inputs[0])
    if condition is None:
        return None
    chosen = node.inputs[1 if condition else 2]
    return becomes(node, chosen) if chosen is not None and has_same_shape(chosen, node.outputs[0]) else None


def _drop_neutral(neutral: float | bool, *, either_side: bool) -> Rule:
    """A rule for a binary operator that leaves its left input (either input) as it is where the other one is `neutral`."""

    def rule(node: ir.Node, scope: Scope) -> Replacement | None:
        sides = [(0, 1), (1, 0)] if either_side else [(0, 1)]
        for kept, other in sides:
            value, constant = node.inputs[kept], node.inputs[other]
            if value is None or constant is None or uniform_constant(constant) != neutral or value.dtype != node.outputs[0].dtype:
                continue
            if not is_constant(value) and (rank_of(constant) == 0 or has_same_shape(value, node.outputs[0])):
                return becomes(node, value)
        return None

    return rule


_REDUCTIONS = ("ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum")

RULES: dict[str, tuple[Rule, ...]] = {
    "Add": (_drop_neutral(0, either_side=True),),
    "And": (_drop_neutral(True, either_side=True),),
    "Cast": (drop_cast,),
    "Clip": (drop_unbounded_clip,),
    "Concat": (drop_concat_inputs,),
    "Div": (_drop_neutral(1, either_side=False),),
    "Dropout": (drop_dropout,),
    "Identity": (drop_identity,),
    "Mul": (_drop_neutral(1, either_side=True),),
    "Or": (_drop_neutral(False, either_side=True),),
    "Pad": (drop_pad,),
    "Pow": (_drop_neutral(1, either_side=False),),
    "Slice": (drop_slice,),
    "Split": (drop_split,),
    "Sub": (_drop_neutral(0, either_side=False),),
    "Transpose": (drop_transpose,),
    "Where": (drop_where,),
    "Xor": (_drop_neutral(False, either_side=True),),
    **dict.fromkeys(("Expand", "Flatten", "Reshape", "Squeeze", "Tile", "Unsqueeze"), (drop_reshaping,)),
    **dict.fromkeys(("Max", "Mean", "Min", "Sum"), (drop_single,)),
    **dict.fromkeys(("Abs", "Ceil", "Floor", "Relu", "Round", "Sign"), (drop_repeated,)),
    **dict.fromkeys(("Neg", "Not"), (drop_inverse,)),
    **dict.fromkeys(_REDUCTIONS, (drop_reduction,)),
}
