"""Loops over vectors of pointwise groups whose operands or results lie in turns (real and imaginary parts, corners of boxes).

Whole vectors are loaded and stored, and shuffles take them apart and put them together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

from tvm import tirx

from ...runtime.symbolic.sizes import Size, SizeLike, least_of
from ..codegen.builder import Buffer, Expr, Index, KernelBuilder, int32_of, unravel
from ..groups.group import Group
from ..template.values import Reader
from .joined_results import Joins
from .strided_operands import Strided, Views

_MOST = 4  # in turns: of more, a vector that is loaded holds little of each

Results = Callable[[Index, Mapping[str, Reader]], Sequence[Expr]]  # at an index, some operands being read so


def turns_of(view: Strided, group: Group) -> int:
    """How many tensors lie in turns where a view reads one of them; 0 where there is one, or not all can be loaded together."""
    numbers = (view.base, *view.strides)
    elements = group.types[view.source].elements
    if not view.strides or any(isinstance(number, Size) for number in (*numbers, elements)):
        return 0
    *outer, count = (int(number) for number in view.strides)
    is_whole = int(view.base) >= 0 and all(stride >= 0 and stride % max(count, 1) == 0 for stride in outer)
    return count if 2 <= count <= _MOST and is_whole and elements % count == 0 else 0


def can_interleave(joins: Joins) -> bool:
    """Whether the results lie in turns: one element of each, then the next of each."""
    if not joins or any(isinstance(number, Size) for one in joins for number in (one.base, *one.strides)):
        return False
    strides = joins[0].strides
    is_alike = strides[-1:] == (len(joins),) and all(one.strides == strides for one in joins)
    return is_alike and len(joins) <= _MOST and sorted(one.base for one in joins) == list(range(len(joins)))


def lies_in_turns(group: Group, shape: Sequence[SizeLike], lanes: int, views: Views, joins: Joins) -> bool:
    """Whether operands or results of a loop over `shape` lie in turns, and its rows fill a vector."""
    if not shape or isinstance(shape[-1], Size) or least_of(shape[-1]) < lanes:
        return False
    return can_interleave(joins) or any(turns_of(view, group) for view in views.values())


def map_in_turns(
    builder: KernelBuilder,
    group: Group,
    shape: tuple[SizeLike, ...],
    lanes: int,
    work: SizeLike,
    views: Views,
    results: Results,
    store: Callable[[Index, Sequence[Expr]], None] | None,
    joins: Joins,
) -> None:
    """Compute the results of a loop over `shape` by vectors along its last dimension; the last of a row overlaps the one before.

    They are stored by `store`; None: in turns, as `joins` say, of one tensor.
    """
    *outer, inner = shape
    turning = {name: count for name, view in views.items() if (count := turns_of(view, group))}
    blocks = -(-inner // lanes)
    with builder.chunks(prod(outer) * blocks, work) as i:
        *row, number = (builder.bind(one) for one in unravel(i, (*outer, blocks)))
        first = builder.bind(tirx.min(number * lanes, inner - lanes))
        loaded = {name: _every(builder, group, views[name], (*row, first), count, lanes) for name, count in turning.items()}
        dtype = group.types[group.outputs[0]].dtype
        parts = builder.local(len(joins) * lanes, dtype, "parts") if store is None else None
        with builder.loop(lanes, "vectorized", "lane") as lane:
            readers = {name: _reader(vector, lane) for name, vector in loaded.items()}
            index = (*row, first + lane)
            found = results(index, readers)
            if store is not None:
                store(index, found)
            else:
                for place, result in enumerate(found):
                    builder.store(parts, place * lanes + lane, result)
        if parts is not None:
            order = sorted(range(len(joins)), key=lambda one: joins[one].base)
            _store_in_turns(builder, group, joins, (*row, first), parts, order, lanes)


def _reader(vector: Buffer, lane: Expr) -> Reader:
    return lambda index: vector[lane]


def _every(builder: KernelBuilder, group: Group, view: Strided, index: Index, count: int, lanes: int) -> Buffer:
    """The elements of a view from an index on: every so many-th of its source."""
    kind, turn = group.types[view.source], int(view.base) % count
    source = builder.parameter(view.source, kind.elements, kind.dtype)
    steps = [i * stride for i, stride in zip(index, view.strides, strict=True)]
    begin = builder.bind(int32_of(sum(steps, start=view.base - turn)))
    vector = builder.local(lanes, kind.dtype, "turn")
    neighbours, places = source[tirx.Ramp(begin, 1, count * lanes)], [turn + count * one for one in range(lanes)]
    builder.store(vector, tirx.Ramp(int32_of(0), 1, lanes), tirx.Shuffle([neighbours], places))
    return vector


def _store_in_turns(
    builder: KernelBuilder, group: Group, joins: Joins, index: Index, parts: Buffer, order: Sequence[int], lanes: int
) -> None:
    """Vectors, which lie behind one another in `parts`, as one tensor from an index on: number `order[t]` at turn t."""
    count, kind = len(order), group.types[group.outputs[0]]
    result = builder.parameter(group.outputs[0], kind.elements, kind.dtype)
    origin = builder.bind(int32_of(joins[order[0]].place(index)))
    whole = parts[tirx.Ramp(int32_of(0), 1, count * lanes)]
    for begin in range(0, count * lanes, lanes):
        places = [order[e % count] * lanes + e // count for e in range(begin, begin + lanes)]
        builder.store(result, tirx.Ramp(origin + begin, 1, lanes), tirx.Shuffle([whole], places))
