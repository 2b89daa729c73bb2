"""One spelling for changes of shape: Reshape to a literal shape, and a single Transpose.

A literal shape has no 0 (which would copy a dimension) and at most one -1, for the only dimension that is not a known number.
"""

from __future__ import annotations

from math import prod

import numpy as np
import onnx_ir as ir

from ....compiler.ir.matching import input_at, int_constants, producer_of, rank_of, static_shape
from ....compiler.ir.rewriter import literal_shape, operation
from ....runtime.symbolic.shapes import broadcast_shape, equal
from .scope import Replacement, Rule, Scope, spelled


def reshape_literally(node: ir.Node, scope: Scope) -> Replacement | None:
    """Flatten, Squeeze, Unsqueeze and Reshape become Reshape to a literal shape, through an inner Reshape if there is one."""
    value, target = node.inputs[0], literal_target(node.outputs[0], scope.opset)
    if value is None or target is None:
        return None
    inner = producer_of(value, "Reshape")
    if inner is None and node.op_type == "Reshape" and int_constants(node.inputs[1]) == target:
        return None
    source = inner.inputs[0] if inner is not None else value
    return spelled(reshape_to(source, target, node, scope))


def reshape_instead(node: ir.Node, scope: Scope) -> Replacement | None:
    """Transposing dimensions of 1 and reducing over them only changes the shape."""
    value, before, after = node.inputs[0], static_shape(node.inputs[0]), static_shape(node.outputs[0])
    target = literal_target(node.outputs[0], scope.opset)
    if before is None or after is None or target is None or 0 in before:
        return None
    if node.op_type == "Transpose":
        order = node.attributes.get_ints("perm") or tuple(range(len(before)))[::-1]
        moved = [axis for axis in order if before[axis] != 1]
        is_view = moved == sorted(moved)
    else:
        is_view = equal(prod(before), prod(after))
    return spelled(reshape_to(value, target, node, scope)) if is_view else None


def compose_transposes(node: ir.Node, scope: Scope) -> Replacement | None:
    """Transpose of Transpose is one Transpose."""
    inner, rank = producer_of(node.inputs[0], "Transpose"), rank_of(node.outputs[0])
    if inner is None or rank is None:
        return None
    reverse = tuple(range(rank))[::-1]
    first, second = (one.attributes.get_ints("perm") or reverse for one in (inner, node))
    return spelled(operation("Transpose", [inner.inputs[0]], perm=[first[axis] for axis in second]))


def compose_expands(node: ir.Node, scope: Scope) -> Replacement | None:
    """Expand of Expand is one Expand, where the outer result is as large as its shape says."""
    inner, dims = producer_of(node.inputs[0], "Expand"), static_shape(node.outputs[0])
    if inner is None or dims is None:
        return None
    return spelled(operation("Expand", [inner.inputs[0], scope.ints(dims, _shape_name(node))]))


def expand_literally(node: ir.Node, scope: Scope) -> Replacement | None:
    """ConstantOfShape that is too large to fold becomes an Expand of its one element."""
    dims = static_shape(node.outputs[0])
    if dims is None:
        return None
    tensor = node.attributes.get_tensor("value")
    element = np.zeros((), np.float32) if tensor is None else tensor.numpy().reshape(())
    name = node.outputs[0].name
    return spelled(operation("Expand", [scope.constant(element, name), scope.ints(dims, _shape_name(node))]))


def compose_slices(node: ir.Node, scope: Scope) -> Replacement | None:
    """A Slice of a Slice along other axes is one Slice, as exporters write x[:, a:b, c:d] one axis after the other."""
    inner, rank = producer_of(node.inputs[0], "Slice"), rank_of(node.outputs[0])
    if inner is None or not rank:
        return None
    first, second = slice_numbers(inner, rank), slice_numbers(node, rank)
    if first is None or second is None or set(first[2]) & set(second[2]):
        return None
    names = ("starts", "ends", "axes", "steps")
    operands = [scope.ints(a + b, f"{node.outputs[0].name}_{name}") for a, b, name in zip(first, second, names, strict=True)]
    return spelled(operation("Slice", [inner.inputs[0], *operands]))


def slice_numbers(node: ir.Node, rank: int) -> tuple[tuple[int, ...], ...] | None:
    """Starts, ends, axes and steps of a Slice, where they are constants."""
    starts, ends = int_constants(input_at(node, 1)), int_constants(input_at(node, 2))
    if starts is None or ends is None:
        return None
    axes = tuple(range(len(starts))) if input_at(node, 3) is None else int_constants(node.inputs[3])
    steps = (1,) * len(starts) if input_at(node, 4) is None else int_constants(node.inputs[4])
    return None if axes is None or steps is None else (starts, ends, tuple(axis % rank for axis in axes), steps)


def repeat_unit(node: ir.Node, scope: Scope) -> Replacement | None:
    """Tile along dimensions of 1 is Expand."""
    dims, repeats, target = static_shape(node.inputs[0]), int_constants(node.inputs[1]), static_shape(node.outputs[0])
    if dims is None or repeats is None or target is None or any(d != 1 and r != 1 for d, r in zip(dims, repeats, strict=True)):
        return None
    return spelled(operation("Expand", [node.inputs[0], scope.ints(target, _shape_name(node))]))


def broadcast_implicitly(node: ir.Node, scope: Scope) -> Replacement | None:
    """An operator that broadcasts needs no Expand of its inputs, as long as the shape of its result is the same without."""
    target = static_shape(node.outputs[0])
    expands = [producer_of(value, "Expand") for value in node.inputs]
    if target is None or not any(expands):
        return None
    inputs = list(node.inputs)
    for index, expand in enumerate(expands):
        candidate = [*inputs[:index], None if expand is None else expand.inputs[0], *inputs[index + 1 :]]
        shapes = [static_shape(value) for value in candidate]
        known = [shape for shape in shapes if shape is not None]
        if len(known) == len(shapes) and _broadcast(known) == target:
            inputs = candidate
    if inputs == list(node.inputs):
        return None
    return spelled(ir.Node("", node.op_type, inputs, node.attributes))


def _broadcast(shapes: list[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The shape that these broadcast to; None where that depends on the call."""
    try:
        return broadcast_shape(*shapes)
    except ValueError:
        return None


def reshape_to(value: ir.Value | None, target: tuple[int, ...], node: ir.Node, scope: Scope) -> ir.Node:
    shape = scope.ints(target, _shape_name(node))
    return operation("Reshape", [value, shape], **literal_shape(target))


def literal_target(output: ir.Value, opset: int) -> tuple[int, ...] | None:
    """What to write as the shape of a Reshape that makes `output`; None where its shape cannot be written as numbers."""
    if output.shape is None:
        return None
    dims = tuple(dim if isinstance(dim, int) else -1 for dim in output.shape)
    unknown = dims.count(-1)
    return dims if unknown <= 1 and (0 not in dims or (unknown == 0 and opset >= 14)) else None


def _shape_name(node: ir.Node) -> str:
    return f"{node.outputs[0].name}_shape"


_BROADCASTING = """
    Add And BitwiseAnd BitwiseOr BitwiseXor Div Equal Greater GreaterOrEqual Less LessOrEqual Max Mean Min Mod Mul Or Pow Sub Sum
    Where Xor"""
_REDUCTIONS = ("ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum")

RULES: dict[str, tuple[Rule, ...]] = {
    "ConstantOfShape": (expand_literally,),
    "Expand": (compose_expands,),
    "Slice": (compose_slices,),
    "Tile": (repeat_unit,),
    "Transpose": (compose_transposes, reshape_instead),
    **dict.fromkeys(("Flatten", "Reshape", "Squeeze", "Unsqueeze"), (reshape_literally,)),
    **dict.fromkeys(_REDUCTIONS, (reshape_instead,)),
    **dict.fromkeys(_BROADCASTING.split(), (broadcast_implicitly,)),
}
