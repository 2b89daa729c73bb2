"""TopK: the greatest or least elements of each row along one dimension, in order, with the places where they stood.

Of equal elements the one with the lower index comes first; the zeros are equal; NaN counts as greater than all numbers, as
it does for NumPy and torch. A row is read once: what is better than the worst of the best so far is put behind them, and
whenever there is no more room, they are sorted and the best stay. That is O(n log k) at worst, and near n comparisons where k
is small. Results are in order also where `sorted` is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
from tvm import tirx

from ...runtime.target import Target
from ..builder import Buffer, Expr, KernelBuilder, share
from ..group import Group, Op
from ..template import BuiltKernel, Refusal
from .common import finish, new_builder
from .sorting import Entries, Sorter, key_type, order_key

OPERATORS = frozenset(["TopK"])
_LEAST_ROOM = 32  # entries; sorting fewer at a time costs more than it saves
_BLOCK = 64  # elements of a contiguous row of which none may be good enough


def build(group: Group, target: Target) -> BuiltKernel | Refusal:
    """Takes TopK alone. K is what the shape of the results says."""
    (op,) = group.ops
    kind = group.types[op.inputs[0]]
    found = group.types[group.outputs[0]].shape
    axis = op.attribute("axis", -1) % len(kind.shape)
    length, inner, kept = kind.shape[axis], prod(kind.shape[axis + 1 :]), found[axis]
    rows = prod(kind.shape[:axis]) * inner
    builder = new_builder(target)
    work = 6 * kind.elements
    if kept > length:
        return Refusal(f"{kept} elements are asked for, a row has {length}")
    if rows and kept:
        threads = min(builder.threads_for(work), rows)
        room = length if length <= max(2 * kept, _LEAST_ROOM) else max(2 * kept, _LEAST_ROOM)
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
        with builder.loop(threads, "parallel", "thread") as thread:
            begin, end = share(thread, threads, rows)
            with builder.loop(end - begin, name="row") as i:
                row = builder.bind(begin + i)
                outer, column = builder.bind(tirx.floordiv(row, inner)), builder.bind(tirx.floormod(row, inner))
                start = builder.bind(outer * (length * inner) + column)
                selection.select(thread, start)
                _store(group, op, selection, thread, builder.bind(outer * (kept * inner) + column), start)
    return finish("topk", builder, group, flops=work)


def _store(group: Group, op: Op, selection: _Selection, thread: Expr, begin: Expr, start: Expr) -> None:
    """Write what was selected of the row that starts at `start` to the outputs, from `begin` on."""
    builder, inner = selection.builder, selection.inner
    entries = selection.sorter.entries(thread)
    with builder.loop(selection.kept, name="rank") as rank:
        place = builder.bind(entries.place(rank))
        for name, value in zip(op.outputs, (selection.source[start + place * inner], tirx.Cast("int64", place)), strict=False):
            if name:
                out = group.types[name]
                builder.store(builder.parameter(name, out.elements, out.dtype), begin + rank * inner, value)


@dataclass(frozen=True)
class _Selection:
    """How the best `kept` of `length` elements, `inner` apart, are found: the first entries of the sorter, in order."""

    builder: KernelBuilder
    sorter: Sorter
    source: Buffer
    dtype: str
    length: int
    inner: int
    kept: int
    largest: bool

    def select(self, thread: Expr, start: Expr) -> None:
        builder, sorter, room = self.builder, self.sorter, min(self.sorter.capacity, self.length)
        entries = sorter.entries(thread)
        with builder.loop(room, name="first") as i:
            entries.put(i, self._key(start, i), i)
        sorter.sort(thread, room)
        if room == self.length:
            return
        count, worst = builder.local(1, "int32", "count"), builder.local(1, key_type(self.dtype), "worst")
        self._restart(entries, count, worst)
        rest = self.length - room
        blocks = rest // _BLOCK if self.inner == 1 else 0
        with builder.loop(blocks, name="block") as b:
            first = builder.bind(room + b * _BLOCK)
            with builder.when(self._least_of_block(start, first) < worst[0]):
                self._take(thread, start, first, _BLOCK, count, worst)
        self._take(thread, start, room + blocks * _BLOCK, rest - blocks * _BLOCK, count, worst)
        sorter.sort(thread, builder.bind(count[0]))

    def _key(self, start: Expr, i: Expr) -> Expr:
        x = self.source[start + i * self.inner]
        return order_key(x, self.dtype, self.builder.name, descending=self.largest)

    def _restart(self, entries: Entries, count: Buffer, worst: Buffer) -> None:
        """The entries are in order: keep the best."""
        self.builder.store(count, 0, tirx.const(self.kept, "int32"))
        self.builder.store(worst, 0, entries.key(self.kept - 1))

    def _take(self, thread: Expr, start: Expr, first: Expr, extent: int, count: Buffer, worst: Buffer) -> None:
        """Put those of `extent` elements that are better than the worst behind the entries; of equal ones the earlier is."""
        builder, sorter = self.builder, self.sorter
        entries = sorter.entries(thread)
        with builder.loop(extent, name="i") as i:
            place = builder.bind(first + i)
            key = builder.name(self._key(start, place))
            number = builder.bind(count[0])
            entries.put(number, key, place)
            builder.store(count, 0, number + tirx.Cast("int32", key < worst[0]))
            with builder.when(count[0] >= sorter.capacity):
                sorter.sort(thread, sorter.capacity)
                self._restart(entries, count, worst)

    def _least_of_block(self, start: Expr, first: Expr) -> Expr:
        """The least key of _BLOCK elements side by side."""
        builder = self.builder
        kind = key_type(self.dtype)
        lanes = builder.lanes(kind)
        least = builder.local(lanes, kind, "least")
        with builder.loop(lanes, "vectorized", "lane") as lane:
            builder.store(least, lane, tirx.const(np.iinfo(kind).max, kind))
        with builder.loop(_BLOCK // lanes, "unrolled", "v") as v, builder.loop(lanes, "vectorized", "lane") as lane:
            builder.store(least, lane, tirx.min(least[lane], self._key(start, first + v * lanes + lane)))
        while lanes > 1:
            lanes //= 2
            with builder.loop(lanes, "vectorized", "lane") as lane:
                builder.store(least, lane, tirx.min(least[lane], least[lanes + lane]))
        return least[0]
