"""TopK on a GPU: a block of threads for each row finds the last entry that is kept, digit by digit, and sorts those up to it.

An entry is the key of an element with its place behind it, so that no two are equal and the order is that of the CPU's kernel.
Its digits are of base four: in each turn all threads count how many entries are below three candidates (radix selection: Alabi
et al., Fast k-Selection Algorithms for Graphics Processing Units, 2012). What is kept is sorted in shared memory by a bitonic
network (Batcher, 1968).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from tvm import tirx

from ...runtime.target import Target
from ..codegen.builder import Buffer, Expr
from ..codegen.gpu_builder import GpuBuilder
from ..groups.group import Group
from ..reduction.thread_block import SHORT_ROW, combined_threads, scanned_threads, threads_of_rows
from ..template.contract import BuiltKernel, Refusal
from ..template.kernel import finish, new_builder
from .sorting import key_type, order_key
from .topk import row_extents, store_element

_MANY_ROWS = 1 << 14  # enough threads by themselves
_MOST_KEPT = 1 << 12  # entries of 8 bytes in the 48 KiB of shared memory of a block, beside the sums of its threads
_DIGIT_BITS = 2
_KEY_BITS = 32
_MOST_PLACE_BITS = 30  # one more is another digit, whose candidates fill the sign


def build(group: Group, target: Target) -> BuiltKernel | Refusal:
    """Takes TopK alone, of long rows of which few elements are kept; K is the extent of its results."""
    (op,) = group.ops
    kind = group.types[op.inputs[0]]
    length, inner, kept, rows = row_extents(group)
    if key_type(kind.dtype) == "int64":
        return Refusal("keys of 8 bytes leave no room for places")
    if kept > _MOST_KEPT:
        return Refusal(f"shared memory holds {_MOST_KEPT} entries, not {kept}")
    if length > 1 << _MOST_PLACE_BITS:
        return Refusal("a key and a place fill more than an entry")
    if length < SHORT_ROW or not 0 < rows < _MANY_ROWS or not kept:
        return Refusal("a thread for each row does better")
    builder = new_builder(target)
    assert isinstance(builder, GpuBuilder)
    source = builder.parameter(op.inputs[0], kind.elements, kind.dtype)
    _, threads = threads_of_rows(builder, None, length)
    with builder.blocks(rows, threads) as (block, thread):
        outer, column = builder.bind(tirx.floordiv(block, inner)), builder.bind(tirx.floormod(block, inner))
        start = builder.bind(outer * (length * inner) + column)
        row = _Row(builder, source, start, length, inner, kept, bool(op.attribute("largest", 1)), thread, threads)
        entries = row.selected()
        begin = builder.bind(outer * (kept * inner) + column)
        with row.each_of(kept) as rank:
            place = builder.bind(row.place(entries[rank]))
            store_element(builder, group, begin + rank * inner, source[start + place * inner], place)
    return finish("gpu_topk", builder, group, flops=6 * kind.elements)


@dataclass(frozen=True)
class _Row:
    """A row of `length` elements, `inner` apart from `start` on; element i is that of thread i % `threads` of the block."""

    builder: GpuBuilder
    source: Buffer
    start: Expr
    length: int
    inner: int
    kept: int
    largest: bool
    thread: Expr
    threads: int

    @property
    def place_bits(self) -> int:
        """Bits of an entry's place."""
        return max(self.length - 1, 1).bit_length()

    @property
    def capacity(self) -> int:
        """Entries that are sorted: a power of two."""
        return 1 << (self.kept - 1).bit_length()

    def selected(self) -> Buffer:
        """The entries that are kept, in order, in shared memory."""
        builder = self.builder
        entries = builder.shared(self.capacity, "int64", "entries")
        with self.each_of(self.capacity) as i:
            builder.store(entries, i, tirx.const(np.iinfo(np.int64).max, "int64"))
        if self.kept == self.length:
            with self.each_of(self.length) as place:
                builder.store(entries, place, self._entry(place))
        else:
            self._gather(entries, self._last_kept())
        builder.barrier()
        self._sort(entries)
        return entries

    def place(self, entry: Expr) -> Expr:
        """The place of an entry, an int32."""
        return tirx.Cast("int32", entry & tirx.const((1 << self.place_bits) - 1, "int64"))

    @contextmanager
    def each_of(self, extent: int) -> Iterator[Expr]:
        """Those of so many numbers that are this thread's."""
        with self.builder.loop(-(-extent // self.threads), name="turn") as turn:
            number = self.builder.bind(turn * self.threads + self.thread)
            with self.builder.when(number < extent):
                yield number

    def _entry(self, place: Expr) -> Expr:
        """A number that is not negative, and less than those of elements that come later."""
        builder = self.builder
        x = self.source[self.start + place * self.inner]
        key = tirx.Cast("int64", order_key(x, str(self.source.dtype), builder.name, descending=self.largest))
        key = key + tirx.const(1 << (_KEY_BITS - 1), "int64")
        return builder.name((key << tirx.const(self.place_bits, "int64")) | tirx.Cast("int64", place))

    def _last_kept(self) -> Expr:
        """The greatest number that fewer than `kept` entries are less than: the last entry that is kept."""
        builder, candidates = self.builder, range(1, 1 << _DIGIT_BITS)
        digits = -(-(_KEY_BITS + self.place_bits) // _DIGIT_BITS)
        found = builder.local(1, "int64", "found")
        below = builder.local(len(candidates), "int32", "below")
        builder.store(found, 0, tirx.const(0, "int64"))
        with builder.loop(digits, name="digit") as digit:
            shift = builder.bind(tirx.Cast("int64", (digits - 1 - digit) * _DIGIT_BITS))
            tried = [builder.bind(found[0] | (tirx.const(one, "int64") << shift)) for one in candidates]
            for i in range(len(tried)):
                builder.store(below, i, tirx.const(0, "int32"))
            with self.each_of(self.length) as place:
                entry = self._entry(place)
                for i, one in enumerate(tried):
                    builder.store(below, i, below[i] + tirx.Cast("int32", entry < one))
            counts = combined_threads(builder, [below[i] for i in range(len(tried))], self.thread, self.threads, _plus)
            taken = found[0]
            for count, one in zip(counts, tried, strict=True):
                taken = tirx.Select(count < self.kept, one, taken)
            builder.store(found, 0, taken)
            builder.barrier()  # before the next turn overwrites the counts
        return found[0]

    def _gather(self, entries: Buffer, last: Expr) -> None:
        """Store the entries up to the last that is kept, each thread's behind those of the threads before it."""
        builder, zero = self.builder, tirx.const(0, "int32")
        own = builder.local(1, "int32", "own")
        builder.store(own, 0, zero)
        with self.each_of(self.length) as place:
            builder.store(own, 0, own[0] + tirx.Cast("int32", self._entry(place) <= last))
        before, _ = scanned_threads(builder, own[0], zero, self.thread, self.threads, _plus)
        builder.store(own, 0, before)
        with self.each_of(self.length) as place:
            entry = self._entry(place)
            with builder.when(entry <= last):
                builder.store(entries, own[0], entry)
                builder.store(own, 0, own[0] + 1)

    def _sort(self, entries: Buffer) -> None:
        """A bitonic sort, ascending: in each stage, pairs a power of two apart are put in the order of their run."""
        builder, runs = self.builder, (self.capacity - 1).bit_length()
        for run in range(1, runs + 1):
            for distance in (1 << bit for bit in reversed(range(run))):
                with self.each_of(self.capacity // 2) as pair:
                    low = builder.bind(tirx.floordiv(pair, distance) * (2 * distance) + tirx.floormod(pair, distance))
                    high = builder.bind(low + distance)
                    a, b = builder.name(entries[low]), builder.name(entries[high])
                    ascends = tirx.EQ(tirx.floormod(tirx.floordiv(low, 1 << run), 2), 0)
                    swaps = builder.name(tirx.Select(ascends, b < a, a < b))
                    builder.store(entries, low, tirx.Select(swaps, b, a))
                    builder.store(entries, high, tirx.Select(swaps, a, b))
                builder.barrier()


def _plus(a: Expr, b: Expr) -> Expr:
    return a + b
