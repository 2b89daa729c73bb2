"""Sequences whose every element is known by its place: what is taken out of one is taken from what it was made of."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...compiler.ir.constants import constant_array, scalar_constant
from .scope import Replacement, Rule, Scope, becomes, input_at, operation, producer_of, spelled, static_shape


def take_element(node: ir.Node, scope: Scope) -> Replacement | None:
    """SequenceAt of a SequenceConstruct is that element; of a SplitToSequence, a Slice."""
    position = scalar_constant(node.inputs[1])
    if position is None:
        return None
    if construct := producer_of(node.inputs[0], "SequenceConstruct"):
        count = len(construct.inputs)
        element = construct.inputs[int(position)] if -count <= position < count else None
        return becomes(node, element) if element is not None else None
    split = producer_of(node.inputs[0], "SplitToSequence")
    bounds = None if split is None else _bounds(split)
    if split is None or bounds is None or not -len(bounds) <= position < len(bounds):
        return None
    start, end = bounds[int(position)]
    axis, name = split.attributes.get_int("axis", 0), node.outputs[0].name
    if input_at(split, 1) is None and not split.attributes.get_int("keepdims", 1):
        return spelled(operation("Gather", [split.inputs[0], scope.constant(np.array(start), name)], axis=axis))
    starts, ends, axes = (scope.ints([number], name) for number in (start, end, axis))
    return spelled(operation("Slice", [split.inputs[0], starts, ends, axes]))


def count_elements(node: ir.Node, scope: Scope) -> Replacement | None:
    """SequenceLength of such a sequence."""
    if construct := producer_of(node.inputs[0], "SequenceConstruct"):
        count = len(construct.inputs)
    elif (split := producer_of(node.inputs[0], "SplitToSequence")) and (bounds := _bounds(split)) is not None:
        count = len(bounds)
    else:
        return None
    return Replacement((), (scope.constant(np.array(count), node.outputs[0].name),), are_constants=True)


def concat_elements(node: ir.Node, scope: Scope) -> Replacement | None:
    """ConcatFromSequence of a SequenceConstruct is Concat."""
    construct = producer_of(node.inputs[0], "SequenceConstruct")
    if construct is None or ("new_axis" in node.attributes and node.attributes["new_axis"].as_int()):
        return None
    return spelled(operation("Concat", construct.inputs, axis=node.attributes["axis"].as_int()))


def _bounds(split: ir.Node) -> list[tuple[int, int]] | None:
    """Where each part of a SplitToSequence begins and ends; None where that is not known."""
    dims, sizes = static_shape(split.inputs[0]), input_at(split, 1)
    lengths = np.array(1) if sizes is None else constant_array(sizes)
    axis = split.attributes.get_int("axis", 0)
    if dims is None or lengths is None or not -len(dims) <= axis < len(dims):
        return None
    if lengths.ndim == 0:
        starts = range(0, dims[axis], int(lengths))
        return [(start, min(start + int(lengths), dims[axis])) for start in starts]
    ends = np.cumsum(lengths)
    return [(int(end - length), int(end)) for end, length in zip(ends, lengths, strict=True)]


RULES: dict[str, tuple[Rule, ...]] = {
    "ConcatFromSequence": (concat_elements,),
    "SequenceAt": (take_element,),
    "SequenceLength": (count_elements,),
}
