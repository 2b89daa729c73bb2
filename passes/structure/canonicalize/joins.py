"""What is taken out of a Concat again: the piece that it comes from. Real and imaginary parts are stacked and taken apart so.

And Concats and Splits of more parts than one kernel takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod

import numpy as np
import onnx_ir as ir

from ....compiler.ir.constants import scalar_constant
from ....compiler.ir.matching import input_at, int_constants, is_read, producer_of, rank_of, static_shape
from ....compiler.ir.rewriter import operation
from ....runtime.symbolic.shapes import equal
from .scope import Replacement, Rule, Scope, becomes, spelled
from .sequences import concatenate
from .views import literal_target, reshape_to

_MOST_PARTS = 256  # of one Concat or Split, whose kernel writes a loop for each


def take_element(node: ir.Node, scope: Scope) -> Replacement | None:
    """Gather of one element along the axis of a Concat is that of a piece, or a Reshape of a piece that has one alone."""
    pieces, index = _pieces(node.inputs[0], node.attributes.get_int("axis", 0)), scalar_constant(node.inputs[1])
    if pieces is None or index is None or rank_of(node.inputs[1]) != 0:
        return None
    axis, parts = pieces
    place = int(index) + (sum(extent for _, extent in parts) if index < 0 else 0)
    while parts and place >= parts[0][1]:
        place -= parts.pop(0)[1]
    if not parts or place < 0:
        return None  # out of range, of which the Gather's kernel takes care
    value, extent = parts[0]
    target = literal_target(node.outputs[0], scope.opset)
    if extent == 1 and target is not None:
        return spelled(reshape_to(value, target, node, scope))
    number = scope.constant(np.array(place, np.int64), node.outputs[0].name)
    return spelled(operation("Gather", [value, number], axis=axis))


def take_piece(node: ir.Node, scope: Scope) -> Replacement | None:
    """Slice of exactly one piece of a Concat, along its axis alone, is that piece."""
    starts, ends, axes, steps = (int_constants(input_at(node, place)) for place in (1, 2, 3, 4))
    if starts is None or ends is None or axes is None or len(axes) != 1 or (input_at(node, 4) is not None and steps != (1,)):
        return None
    pieces = _pieces(node.inputs[0], axes[0])
    if pieces is None:
        return None
    total = sum(extent for _, extent in pieces[1])
    first, last = (min(max(one + total if one < 0 else one, 0), total) for one in (starts[0], ends[0]))
    begin = 0
    for value, extent in pieces[1]:
        if (first, last) == (begin, begin + extent):
            return becomes(node, value)
        begin += extent
    return None


def _pieces(value: ir.Value | None, axis: int) -> tuple[int, list[tuple[ir.Value, int]]] | None:
    """The axis counted from 0 and the inputs of a Concat along it, with their extents; None if there is no such Concat."""
    rank, join = rank_of(value) if value is not None else None, producer_of(value, "Concat")
    if join is None or not rank or join.attributes["axis"].as_int() % rank != axis % rank:
        return None
    parts = []
    for one in join.inputs:
        extent = None if one is None or one.shape is None else one.shape[axis % rank]
        if one is None or not isinstance(extent, int):
            return None
        parts.append((one, extent))
    return axis % rank, parts


def join_in_a_tree(node: ir.Node, scope: Scope) -> Replacement | None:
    """Concat of more parts than one kernel joins."""
    parts = [value for value in node.inputs if value is not None]
    if not _are_many(parts, node.outputs[0], node):
        return None
    return spelled(*concatenate(parts, node.attributes.get_int("axis", 0)))


def slice_each_part(node: ir.Node, scope: Scope) -> Replacement | None:
    """Split into more parts than one kernel stores: a Slice for each that is read."""
    value, axis = node.inputs[0], node.attributes.get_int("axis", 0)
    if value is None or not _are_many(node.outputs, value, node):
        return None
    shapes = [shape for part in node.outputs if (shape := static_shape(part)) is not None]
    if len(shapes) < len(node.outputs):
        return None
    extents = [shape[axis] for shape in shapes]
    ends, name, cuts = list(accumulate(extents)), node.outputs[0].name, list[ir.Node | None]()
    axes = scope.ints([axis], name)
    for part, begin, end in zip(node.outputs, [0, *ends], ends, strict=False):
        bounds = (scope.ints([place], name) for place in (begin, end))
        cuts.append(operation("Slice", [value, *bounds, axes]) if is_read(part) else None)
    outputs = tuple(None if cut is None else cut.outputs[0] for cut in cuts)
    return Replacement(tuple(cut for cut in cuts if cut is not None), outputs)


def _are_many(parts: Sequence[ir.Value], whole: ir.Value, node: ir.Node) -> bool:
    """Whether parts are too many for a kernel, and not contiguous: those need none."""
    dims = static_shape(whole)
    if len(parts) <= _MOST_PARTS or not dims:
        return False
    return not equal(prod(dims[: node.attributes.get_int("axis", 0) % len(dims)]), 1)


RULES: dict[str, tuple[Rule, ...]] = {
    "Concat": (join_in_a_tree,),
    "Gather": (take_element,),
    "Slice": (take_piece,),
    "Split": (slice_each_part,),
}
