"""TopK: the greatest or least elements of each row along one dimension, in order, with the places where they stood.

Of equal elements the one with the lower index comes first; the zeros are equal; NaN counts as greater than all numbers, as
it does for NumPy and torch. Candidates that beat the k-th best so far are appended to a buffer; when it is full, it is sorted and
the best k stay: O(n log k) at worst. Contiguous rows are compared by whole vectors. Where k is small against the row, a first
pass finds a threshold that little more than k elements pass. Results are sorted even where `sorted` is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import numpy as np
from tvm import tirx

from ...runtime.symbolic.sizes import Size, SizeLike, greatest_of, hint_of, least_of, maximum_of
from ...runtime.target import Target
from ..codegen.builder import Buffer, Expr, KernelBuilder
from ..codegen.lane_masks import first_lane, lanes_not_above
from ..codegen.work_stealing import Shares
from ..groups.group import Group
from ..reduction.reduction import number_of
from ..template.contract import BuiltKernel
from ..template.kernel import finish, new_builder
from .sorting import Entries, Sorter, key_type, order_key

OPERATORS = frozenset(["TopK"])
_LEAST_ROOM = 32  # entries of the buffer, at least; sorting fewer at a time costs more than it saves
_MOST_GROUPS = 2048
_MOST_RANKED = 128  # numbers that are ranked by comparing all with all
_LEAST_OF_GROUP = 3  # elements of a group, at least: with smaller groups the threshold lets too many pass
_UNROLLED = 16  # vectors of an unrolled loop, at most


def obstacle(group: Group, target: Target) -> str:
    """Why the kernel cannot be written for a group; empty if it can."""
    (op,) = group.ops
    shape, found = group.types[op.inputs[0]].shape, group.types[group.outputs[0]].shape
    axis = op.attribute("axis", -1) % len(shape)
    return f"{found[axis]} elements are asked for, a row has {shape[axis]}" if found[axis] > shape[axis] else ""


def row_extents(group: Group) -> tuple[SizeLike, SizeLike, SizeLike, SizeLike]:
    """Elements of a row, how far they are apart, how many are kept, and how many rows there are."""
    (op,) = group.ops
    shape, found = group.types[op.inputs[0]].shape, group.types[group.outputs[0]].shape
    axis = op.attribute("axis", -1) % len(shape)
    inner = prod(shape[axis + 1 :])
    return shape[axis], inner, found[axis], prod(shape[:axis]) * inner


def build(group: Group, target: Target) -> BuiltKernel:
    """Takes TopK alone; K is the extent of its results."""
    (op,) = group.ops
    kind = group.types[op.inputs[0]]
    length, inner, kept, rows = row_extents(group)
    builder = new_builder(target)
    work = hint_of(6 * kind.elements)
    if greatest_of(rows) and greatest_of(kept):
        threads = min(builder.threads_for(work), greatest_of(rows))
        room = min(greatest_of(length), max(2 * greatest_of(kept), _LEAST_ROOM))
        selection = _Selection(
            builder,
            Sorter(builder, room, key_type(kind.dtype), threads),
            builder.parameter(op.inputs[0], kind.elements, kind.dtype),
            kind.dtype,
            length,
            inner,
            kept,
            bool(op.attribute("largest", 1)),
        )
        shares = Shares(builder, threads, rows, work)
        with (
            builder.loop(threads, "parallel", "thread") as thread,
            shares.of(thread) as (begin, end),
            builder.loop(end - begin, name="row") as i,
        ):
            row = builder.bind(begin + i)
            outer, column = builder.bind(tirx.floordiv(row, inner)), builder.bind(tirx.floormod(row, inner))
            start = builder.bind(outer * (length * inner) + column)
            selection.select(thread, start)
            _store(group, selection, thread, builder.bind(outer * (kept * inner) + column), start)
    return finish("topk", builder, group, flops=work)


def _store(group: Group, selection: _Selection, thread: Expr, begin: Expr, start: Expr) -> None:
    """Write what was selected of the row that starts at `start` to the outputs, from `begin` on."""
    builder, inner = selection.builder, selection.inner
    entries = selection.sorter.entries(thread)
    with builder.loop(selection.kept, name="rank") as rank:
        place = builder.bind(entries.place(rank))
        store_element(builder, group, begin + rank * inner, selection.source[start + place * inner], place)


def store_element(builder: KernelBuilder, group: Group, offset: Expr, value: Expr, place: Expr) -> None:
    """Write one element and its place to those outputs that are wanted."""
    (op,) = group.ops
    for name, one in zip(op.outputs, (value, tirx.Cast("int64", place)), strict=False):
        if name:
            out = group.types[name]
            builder.store(builder.parameter(name, out.elements, out.dtype), offset, one)


@dataclass(frozen=True)
class _Selection:
    """How the best `kept` of `length` elements, `inner` apart, are found: the first entries of the sorter, in order."""

    builder: KernelBuilder
    sorter: Sorter
    source: Buffer
    dtype: str
    length: SizeLike
    inner: SizeLike
    kept: SizeLike
    largest: bool

    def select(self, thread: Expr, start: Expr) -> None:
        builder, sorter = self.builder, self.sorter
        has_room = sorter.capacity >= greatest_of(self.length)
        room = self.length if has_room else sorter.capacity
        if not has_room and isinstance(self.length, Size):
            room = builder.bind(tirx.min(sorter.capacity, self.length))
        entries = sorter.entries(thread)
        groups = self._groups()
        if not groups:
            with builder.loop(room, name="first") as i:
                entries.put(i, self._key(start, i), i)
            sorter.sort(thread, room)
            if has_room:
                return
        count, worst = builder.local(1, "int32", "count"), builder.local(1, key_type(self.dtype), "worst")
        if groups:
            builder.store(count, 0, tirx.const(0, "int32"))
            builder.store(worst, 0, self._threshold(start, groups))
        else:
            self._restart(entries, count, worst)
        first = 0 if groups else room
        lanes = builder.lanes(key_type(self.dtype))
        rest = self.length - first if isinstance(first, int) else builder.bind(self.length - first)
        vectors = rest // lanes if isinstance(rest, int | Size) else builder.bind(tirx.floordiv(rest, lanes))
        if not self._is_contiguous or builder.is_grid:
            vectors = 0
        if not isinstance(vectors, int) or vectors:
            with builder.loop(vectors, name="v") as v:
                self._scan(thread, start, builder.bind(first + v * lanes), count, worst)
        with builder.loop(rest - vectors * lanes, name="i") as i:
            place = builder.bind(first + vectors * lanes + i)
            with builder.when(builder.name(self._key(start, place)) <= worst[0]):
                self._take(thread, start, place, count, worst)
        sorter.sort(thread, builder.bind(count[0]))

    @property
    def _is_contiguous(self) -> bool:
        return isinstance(self.inner, int) and self.inner == 1

    def _groups(self) -> int:
        """Groups into which a row is divided to find a threshold; 0 where a threshold does not pay."""
        if not self._is_contiguous:
            return 0
        groups = self.builder.lanes(key_type(self.dtype))
        while groups < 2 * greatest_of(self.kept):
            groups *= 2
        return groups if groups <= _MOST_GROUPS and least_of(self.length) >= _LEAST_OF_GROUP * groups else 0

    def _key(self, start: Expr, i: Expr) -> Expr:
        x = self.source[start + i * self.inner]
        return order_key(x, self.dtype, self.builder.name, descending=self.largest)

    def _threshold(self, start: Expr, groups: int) -> Expr:
        """A key that at least `kept` elements of a row do not exceed, and few others.

        Each of `groups` lanes has the least of every `groups`-th element; the threshold is the `kept`-th least of these.
        """
        builder, kind = self.builder, key_type(self.dtype)
        least = builder.local(groups, kind, "least")
        with self._lanes(groups) as lane:
            builder.store(least, lane, self._key(start, lane))
        with builder.loop(self.length // groups - 1, name="row") as row:
            begin = builder.bind((row + 1) * groups)
            with self._lanes(groups) as lane:
                builder.store(least, lane, tirx.min(least[lane], self._key(start, begin + lane)))
        return self._bisected(least, groups) if groups > _MOST_RANKED else self._ranked(least, groups)

    def _ranked(self, least: Buffer, groups: int) -> Expr:
        """The greatest number of which fewer than `kept` are less, found by comparing all with all."""
        builder, kind = self.builder, key_type(self.dtype)
        ranks = builder.local(groups, kind, "ranks")
        with self._lanes(groups) as lane:
            builder.store(ranks, lane, tirx.const(0, kind))
        with builder.loop(groups, name="other") as other:
            key = builder.bind(least[other])
            with self._lanes(groups) as lane:
                builder.store(ranks, lane, ranks[lane] + tirx.Cast(kind, key < least[lane]))
        with self._lanes(groups) as lane:
            is_best = ranks[lane] < number_of(self.kept, kind)
            builder.store(least, lane, tirx.Select(is_best, least[lane], tirx.const(np.iinfo(kind).min, kind)))
        return self._folded(least, groups, tirx.max)

    def _bisected(self, least: Buffer, groups: int) -> Expr:
        """The same by bisection over the bits of the number, from the highest: each candidate is compared with all."""
        builder, kind = self.builder, key_type(self.dtype)
        lanes = builder.lanes(kind)
        found, less = builder.local(1, kind, "found"), builder.local(lanes, kind, "less")
        builder.store(found, 0, tirx.const(np.iinfo(kind).min, kind))
        with builder.loop(np.iinfo(kind).bits, name="bit") as bit:
            shift = tirx.Cast(kind, np.iinfo(kind).bits - 1 - bit)
            tried = builder.bind(found[0] ^ (tirx.const(1, kind) << shift))
            with self._lanes(lanes) as lane:
                builder.store(less, lane, tirx.const(0, kind))
            with builder.loop(groups // lanes, name="v") as v, self._lanes(lanes) as lane:
                builder.store(less, lane, less[lane] + tirx.Cast(kind, least[v * lanes + lane] < tried))
            few = builder.name(self._folded(less, lanes, lambda a, b: a + b) < number_of(self.kept, kind))
            builder.store(found, 0, tirx.Select(few, tried, found[0]))
        return found[0]

    def _folded(self, numbers: Buffer, extent: int, combine: Callable[[Expr, Expr], Expr]) -> Expr:
        """A tree reduction of the numbers, a power of two of them, in place."""
        while extent > 1:
            extent //= 2
            with self._lanes(extent) as lane:
                self.builder.store(numbers, lane, combine(numbers[lane], numbers[extent + lane]))
        return numbers[0]

    @contextmanager
    def _lanes(self, extent: int) -> Iterator[Expr]:
        """Loops over the elements of whole vectors, or of a part of one; few are unrolled, so that they stay in registers."""
        builder = self.builder
        lanes = min(builder.lanes(key_type(self.dtype)), extent)
        vectors = extent // lanes
        with builder.loop(vectors, "unrolled" if vectors <= _UNROLLED else "serial", "v") as v:
            first = builder.bind(v * lanes)
            with builder.loop(lanes, "vectorized", "lane") as lane:
                yield first + lane

    def _restart(self, entries: Entries, count: Buffer, worst: Buffer) -> None:
        """The entries are in order: keep the best, and take only what is better, as of equal ones the earlier is."""
        least = tirx.const(np.iinfo(key_type(self.dtype)).min + 1, key_type(self.dtype))
        self.builder.store(count, 0, number_of(self.kept, "int32"))
        last = self.kept - 1 if least_of(self.kept) else maximum_of(self.kept - 1, 0)  # of none it does not matter
        self.builder.store(worst, 0, tirx.max(entries.key(last), least) - 1)

    def _scan(self, thread: Expr, start: Expr, first: Expr, count: Buffer, worst: Buffer) -> None:
        """Append those elements of one vector that beat the worst of the best."""
        builder, kind = self.builder, key_type(self.dtype)
        lanes = builder.lanes(kind)
        keys, mask = builder.local(lanes, kind, "keys"), builder.local(1, "int32", "mask")
        with builder.loop(lanes, "vectorized", "lane") as lane:
            builder.store(keys, lane, self._key(start, first + lane))
        builder.store(mask, 0, lanes_not_above(builder, keys, worst[0]))
        with builder.while_true(tirx.NE(mask[0], tirx.const(0, "int32"))):
            place = builder.bind(first + first_lane(mask[0]))
            builder.store(mask, 0, mask[0] & (mask[0] - 1))
            self._take(thread, start, place, count, worst)

    def _take(self, thread: Expr, start: Expr, place: Expr, count: Buffer, worst: Buffer) -> None:
        """Append an element to the entries; when the buffer is full, sort it and keep the best."""
        builder, sorter = self.builder, self.sorter
        entries = sorter.entries(thread)
        entries.put(builder.bind(count[0]), builder.name(self._key(start, place)), place)
        builder.store(count, 0, count[0] + 1)
        with builder.when(count[0] >= sorter.capacity):
            sorter.sort(thread, sorter.capacity)
            self._restart(entries, count, worst)
