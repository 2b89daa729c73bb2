"""What is taken out of a Concat again: the piece that it comes from. Real and imaginary parts are stacked and taken apart so."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ....compiler.ir.constants import scalar_constant
from ....compiler.ir.matching import input_at, int_constants, producer_of, rank_of
from ....compiler.ir.rewriter import operation
from .scope import Replacement, Rule, Scope, becomes, spelled
from .views import literal_target, reshape_to


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


RULES: dict[str, tuple[Rule, ...]] = {"Gather": (take_element,), "Slice": (take_piece,)}
