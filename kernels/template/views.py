"""Views: operators whose every element is one element of their first operand, at an index computed from its own.

A template that reads its operands through views copies nothing. Reshapes are computed by common factors of the dimensions, so
that one that only splits dimensions needs no division when it is read through, and one that only merges them none when it is
stored through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from ...runtime.symbolic.shapes import is_one
from ...runtime.symbolic.sizes import maximum_of, minimum_of
from ..codegen.builder import Expr, Index, broadcast_index, row_major, unravel
from ..groups.group import Group, Op, literal_ints


@dataclass(frozen=True)
class View:
    """`source(group, op, result, index)` is the index in the operand of the element at `index` of a result.

    `obstacle`: why there is no such index, "" if there is. `result(group, op, index)` is the inverse, of one-to-one views only.
    """

    source: Callable[[Group, Op, str, Index], Index]
    obstacle: Callable[[Group, Op], str] = lambda group, op: ""
    result: Callable[[Group, Op, Index], Index] | None = None


def view_of(group: Group, op: Op) -> View | None:
    """How to read through an operator; None if it is no view, or one whose indices are known at run time only."""
    view = _VIEWS.get(op.op_type)
    return None if view is None or view.obstacle(group, op) else view


def result_of(group: Group, op: Op) -> Callable[[Group, Op, Index], Index] | None:
    """Where an operator puts the element at an index of its operand; None if it is no one-to-one view."""
    view = view_of(group, op)
    return None if view is None else view.result


def reshape_index(index: Index, shape: Sequence[int], source: Sequence[int]) -> Index:
    """The index in shape `source` of the element at `index` of `shape`; both are row-major with equally many elements."""
    place: list[Expr] = [0] * len(source)
    if prod(source) == 0:
        return tuple(place)
    ours = [axis for axis, extent in enumerate(shape) if not is_one(extent)]
    theirs = [axis for axis, extent in enumerate(source) if not is_one(extent)]
    while ours:
        run, other = [ours.pop(0)], [theirs.pop(0)]
        while (size := prod(shape[axis] for axis in run)) != (size_there := prod(source[axis] for axis in other)):
            if size < size_there:
                run.append(ours.pop(0))
            else:
                other.append(theirs.pop(0))
        offset = row_major([index[axis] for axis in run], [shape[axis] for axis in run])
        for axis, i in zip(other, unravel(offset, [source[axis] for axis in other]), strict=True):
            place[axis] = i
    return tuple(place)


def slice_places(group: Group, op: Op) -> list[tuple[int, int]] | None:
    """First index and step of a Slice along each dimension; None if they are known at run time only."""
    shape = group.types[op.inputs[0]].shape
    starts, axes, steps = (_ints_or(group, op, position) for position in (1, 3, 4))
    if starts is None or axes is None or steps is None:
        return None
    places = [(0, 1)] * len(shape)
    for axis, start, step in zip(axes or range(len(starts)), starts, steps or (1,) * len(starts), strict=True):
        extent = shape[axis]
        first = minimum_of(maximum_of(start + extent if start < 0 else start, 0), extent if step > 0 else extent - 1)
        places[axis % len(shape)] = (first, step)
    return places


def permutation(group: Group, op: Op) -> tuple[int, ...]:
    """A Transpose's permutation: for each dimension of the result the operand's."""
    rank = len(group.types[op.inputs[0]].shape)
    return tuple(op.attribute("perm") or reversed(range(rank)))


def _ints_or(group: Group, op: Op, position: int) -> tuple[int, ...] | None:
    """A constant operand of integers, () where it is absent; None if it is known at run time only."""
    if position >= len(op.inputs) or not op.inputs[position]:
        return ()
    return literal_ints(group, op.inputs[position])


def _reshape_source(group: Group, op: Op, result: str, index: Index) -> Index:
    return reshape_index(index, group.types[result].shape, group.types[op.inputs[0]].shape)


def _reshape_result(group: Group, op: Op, index: Index) -> Index:
    return reshape_index(index, group.types[op.inputs[0]].shape, group.types[op.outputs[0]].shape)


def _transpose_source(group: Group, op: Op, result: str, index: Index) -> Index:
    order = permutation(group, op)
    return tuple(index[order.index(axis)] for axis in range(len(order)))


def _transpose_result(group: Group, op: Op, index: Index) -> Index:
    return tuple(index[axis] for axis in permutation(group, op))


def _slice_source(group: Group, op: Op, result: str, index: Index) -> Index:
    places = slice_places(group, op)
    assert places is not None
    return tuple(i if place == (0, 1) else i * place[1] + place[0] for i, place in zip(index, places, strict=True))


def _slice_obstacle(group: Group, op: Op) -> str:
    known = len(op.inputs) > 1 and slice_places(group, op) is not None
    return "" if known else "Slice has places that only a run knows"


def _split_source(group: Group, op: Op, result: str, index: Index) -> Index:
    axis = op.attribute("axis", 0) % len(index)
    before = op.outputs[: op.outputs.index(result)]
    begin = sum(group.types[name].shape[axis] for name in before)
    return (*index[:axis], index[axis] + begin, *index[axis + 1 :])


def _split_obstacle(group: Group, op: Op) -> str:
    return "" if all(op.outputs) else "Split has a part without a name"


def _expand_source(group: Group, op: Op, result: str, index: Index) -> Index:
    shape, source = group.types[result].shape, group.types[op.inputs[0]].shape
    return broadcast_index(index, shape, source)


def _gather_source(group: Group, op: Op, result: str, index: Index) -> Index:
    source, indices = group.types[op.inputs[0]].shape, group.types[op.inputs[1]].shape
    axis = op.attribute("axis", 0) % len(source)
    (at,) = literal_ints(group, op.inputs[1]) or (0,)
    return (*index[:axis], at % source[axis], *index[axis + len(indices) :])


def _gather_obstacle(group: Group, op: Op) -> str:
    at = literal_ints(group, op.inputs[1])
    extent = group.types[op.inputs[0]].shape[op.attribute("axis", 0)]
    return "" if at is not None and len(at) == 1 and -extent <= at[0] < extent else "Gather is not of one known place"


_RESHAPE = View(_reshape_source, result=_reshape_result)
_VIEWS: dict[str, View] = {
    "Expand": View(_expand_source),
    "Flatten": _RESHAPE,
    "Gather": View(_gather_source, _gather_obstacle),
    "Reshape": _RESHAPE,
    "Slice": View(_slice_source, _slice_obstacle),
    "Split": View(_split_source, _split_obstacle),
    "Squeeze": _RESHAPE,
    "Transpose": View(_transpose_source, result=_transpose_result),
    "Unsqueeze": _RESHAPE,
}
