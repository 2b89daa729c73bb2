"""Sequences and optionals of known structure: they become SequenceConstruct, and what is taken out of them a tensor itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ....compiler.ir.constants import constant_array, scalar_constant
from ....compiler.ir.facts import source_of
from ....compiler.ir.matching import input_at, producer_of, static_shape
from ....compiler.ir.rewriter import Rejection, operation
from ....runtime.errors import InvalidModelError
from .scope import Replacement, Rule, Scope, becomes, spelled

_MOST_PARTS = 4096  # of a tensor that becomes a sequence: each is a node
_WIDEST_CONCAT = 64  # tensors that one Concat joins: its kernel takes a pointer and writes a loop for each of them
# What looks at the elements of a sequence through `elements_of`, and needs no node that makes it.
_READERS = frozenset(["ConcatFromSequence", "SequenceAt", "SequenceErase", "SequenceInsert", "SequenceLength", "SequenceMap"])


def elements_of(value: ir.Value | None) -> tuple[ir.Value, ...] | Rejection | None:
    """The tensors of a sequence, in order, after the insertions and removals that made it; None where they are not known.

    A Rejection names an insertion or removal that does not fit.
    """
    edits: list[ir.Node] = []
    while edit := producer_of(value, "SequenceInsert") or producer_of(value, "SequenceErase"):
        edits.append(edit)
        value = edit.inputs[0]
    construct = producer_of(value, "SequenceConstruct") or producer_of(value, "SequenceEmpty")
    if construct is None:
        return None
    elements = [element for element in construct.inputs if element is not None]
    for edit in reversed(edits):
        tensor = edit.inputs[1] if edit.op_type == "SequenceInsert" else None
        index, places = (input_at(edit, 1), len(elements)) if tensor is None else (input_at(edit, 2), len(elements) + 1)
        place = _position(edit, index, len(elements), places=places)
        if not isinstance(place, int):
            return place
        if tensor is None:
            del elements[place]
        else:
            elements.insert(place, tensor)
    return tuple(elements)


def sequence_of(elements: Sequence[ir.Value], dtype: ir.DataType | None) -> ir.Node:
    """The node that makes a sequence; `dtype` is that of its elements, which an empty one must say."""
    if elements:
        return operation("SequenceConstruct", elements)
    return operation("SequenceEmpty", (), dtype=int(dtype or ir.DataType.FLOAT))


def construct_at_once(node: ir.Node, scope: Scope) -> Replacement | Rejection | None:
    """A known sequence is made by one node, where something needs it whole. (Else its edits are read, and die.)"""
    result = node.outputs[0]
    if not result.is_graph_output() and all(reader.op_type in _READERS for reader in result.consumers()):
        return None
    elements = elements_of(result)
    return spelled(sequence_of(elements, result.dtype)) if isinstance(elements, tuple) else elements


def take_element(node: ir.Node, scope: Scope) -> Replacement | Rejection | None:
    """SequenceAt of a known sequence is that element."""
    elements = elements_of(node.inputs[0])
    if not isinstance(elements, tuple):
        return elements
    place = _position(node, node.inputs[1], len(elements), places=len(elements))
    return becomes(node, elements[place]) if isinstance(place, int) else place


def count_elements(node: ir.Node, scope: Scope) -> Replacement | Rejection | None:
    """SequenceLength of a known sequence."""
    elements = elements_of(node.inputs[0])
    if not isinstance(elements, tuple):
        return elements
    return Replacement((), (scope.constant(np.array(len(elements)), node.outputs[0].name),), are_constants=True)


def concat_elements(node: ir.Node, scope: Scope) -> Replacement | Rejection | None:
    """ConcatFromSequence of a known sequence is Concat, of its elements with a new dimension where `new_axis` says so."""
    elements, axis = elements_of(node.inputs[0]), node.attributes["axis"].as_int()
    if not isinstance(elements, tuple):
        return elements
    if not elements:
        return Rejection("ConcatFromSequence not resolved: nothing to concatenate", (node,))
    if not node.attributes.get_int("new_axis", 0):
        return spelled(*concatenate(elements, axis))
    return spelled(*stack(elements, axis, scope, node.outputs[0].name))


def stack(elements: Sequence[ir.Value], axis: int, scope: Scope, hint: str | None) -> list[ir.Node]:
    """Nodes that stack tensors along a new dimension; the last of them gives the result."""
    axes = scope.ints([axis], hint)
    parts = [operation("Unsqueeze", [element, axes]) for element in elements]
    return [*parts, *concatenate([part.outputs[0] for part in parts], axis)]


def concatenate(parts: Sequence[ir.Value], axis: int) -> list[ir.Node]:
    """Nodes that join tensors in a tree of bounded width; the last of them gives the result."""
    nodes: list[ir.Node] = []
    while len(parts) > _WIDEST_CONCAT:
        rows = [parts[begin : begin + _WIDEST_CONCAT] for begin in range(0, len(parts), _WIDEST_CONCAT)]
        level = [operation("Concat", row, axis=axis) for row in rows]
        nodes += level
        parts = [node.outputs[0] for node in level]
    return [*nodes, operation("Concat", parts, axis=axis)]


def split_into_elements(node: ir.Node, scope: Scope) -> Replacement | Rejection | None:
    """SplitToSequence becomes a SequenceConstruct of slices; those that nothing takes are dead code."""
    bounds, value = _bounds(node), node.inputs[0]
    if bounds is None or isinstance(bounds, Rejection) or value is None:
        return bounds if isinstance(bounds, Rejection) else None
    axis, name = node.attributes.get_int("axis", 0), node.outputs[0].name
    if input_at(node, 1) is None and not node.attributes.get_int("keepdims", 1):
        numbers = [scope.constant(np.array(start), name) for start, _ in bounds]
        parts = [operation("Gather", [value, number], axis=axis) for number in numbers]
    else:
        axes = scope.ints([axis], name)
        ends = [(scope.ints([start], name), scope.ints([end], name)) for start, end in bounds]
        parts = [operation("Slice", [value, start, end, axes]) for start, end in ends]
    return spelled(*parts, sequence_of([part.outputs[0] for part in parts], value.dtype))


def take_optional(node: ir.Node, scope: Scope) -> Replacement | Rejection | None:
    """OptionalGetElement of an Optional is what was put into it; that of a tensor or sequence is the tensor or sequence."""
    has, content = _content(node.inputs[0])
    if has is False:
        return Rejection("OptionalGetElement not resolved: its optional is empty", (node,))
    return None if content is None else becomes(node, content)


def decide_optional(node: ir.Node, scope: Scope) -> Replacement | None:
    """OptionalHasElement where that is known."""
    has, _ = _content(input_at(node, 0))
    if has is None:
        return None
    return Replacement((), (scope.constant(np.array(has), node.outputs[0].name),), are_constants=True)


def _content(value: ir.Value | None) -> tuple[bool | None, ir.Value | None]:
    """Whether an optional has an element (None: nobody knows), and the element where it is known."""
    if value is None:
        return False, None
    if optional := producer_of(value, "Optional"):
        content = input_at(optional, 0)
        return content is not None, content
    if value.type is None or isinstance(value.type, ir.OptionalType):
        return None, None
    return True, value


def _position(node: ir.Node, index: ir.Value | None, length: int, *, places: int) -> int | Rejection | None:
    """A constant index into a sequence, counted from its end if negative; the last of the `places` where there is none.

    None: it is not constant. A Rejection: it is none of the places.
    """
    number = places - 1 if index is None else scalar_constant(index)
    if number is None:
        return None
    place = int(number) + (length if number < 0 else 0)
    if 0 <= place < places:
        return place
    return Rejection(f"{node.op_type} not resolved: position {number} of a sequence of {length}", (node,))


def _bounds(split: ir.Node) -> list[tuple[int, int]] | Rejection | None:
    """Where each part of a SplitToSequence begins and ends; None where that is not known, a Rejection of too many.

    Raises:
        InvalidModelError: a length is negative, which inference does not notice.
    """
    dims, sizes = static_shape(split.inputs[0]), input_at(split, 1)
    lengths = np.array(1) if sizes is None else constant_array(sizes)
    axis = split.attributes.get_int("axis", 0)
    if dims is None or lengths is None or not -len(dims) <= axis < len(dims) or (lengths.ndim == 0 and lengths < 1):
        return None
    count = -(-dims[axis] // int(lengths)) if lengths.ndim == 0 else lengths.size
    if count > _MOST_PARTS:
        return Rejection(f"SplitToSequence not resolved: {count} parts are more than {_MOST_PARTS}", (split,))
    if lengths.ndim == 0:
        starts = range(0, dims[axis], int(lengths))
        return [(start, min(start + int(lengths), dims[axis])) for start in starts]
    if (lengths < 0).any():
        raise InvalidModelError(source_of(split), f"parts of {lengths.tolist()} elements", "give lengths that are not negative")
    ends = np.cumsum(lengths)
    return [(int(end - length), int(end)) for end, length in zip(ends, lengths, strict=True)]


RULES: dict[str, tuple[Rule, ...]] = {
    "ConcatFromSequence": (concat_elements,),
    "OptionalGetElement": (take_optional,),
    "OptionalHasElement": (decide_optional,),
    "SequenceAt": (take_element,),
    "SequenceErase": (construct_at_once,),
    "SequenceInsert": (construct_at_once,),
    "SequenceLength": (count_elements,),
    "SplitToSequence": (split_into_elements,),
}
