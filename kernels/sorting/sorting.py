"""Sorting inside a kernel: elements as integer keys of the same order, and stable sorts of entries in a workspace.

An entry is a key and the place (index) of its element. 32-bit keys share an int64 with their place, so that an entry is one
number and no two are equal; 64-bit keys have an array of places of their own. Many 32-bit keys are sorted by LSD radix sort,
others by merge sort.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tvm import tirx

from ..codegen.builder import Buffer, Expr, KernelBuilder
from ..expressions import math

_LANES = 8  # entries that are ranked at once
_MOST_RANKED = 64  # entries of an initial run of the merge sort, which is sorted by comparing all with all
_DIGITS, _VALUES = 4, 256  # of a 32-bit key in the radix sort: bytes
_LAST = 2**63 - 1  # the key of padding entries, which sort last


def key_type(dtype: str) -> str:
    """The type of the keys of elements of a type: int32, or int64 for those of 8 bytes."""
    return "int64" if np.dtype(dtype).itemsize == 8 else "int32"


def order_key(x: Expr, dtype: str, name: math.Name, *, descending: bool = False) -> Expr:
    """A signed integer that compares as the element does. The zeros are equal, and NaN is beyond infinity."""
    kind = key_type(dtype)
    if dtype in ("float16", "bfloat16"):
        x, dtype = tirx.Cast("float32", x), "float32"
    if "float" in dtype:
        x = name(x)
        bits = name(tirx.reinterpret(kind, x))
        largest = np.iinfo(kind).max
        sign = bits >> tirx.const(np.iinfo(kind).bits - 1, kind)
        key = bits ^ (sign & tirx.const(largest, kind))  # negative numbers are in reverse order of their bits
        key = tirx.Select(tirx.EQ(x, tirx.const(0, dtype)), tirx.const(0, kind), key)
        key = tirx.Select(tirx.isnan(x), tirx.const(largest, kind), key)
    elif dtype in ("uint32", "uint64"):
        key = tirx.reinterpret(kind, x) ^ tirx.const(np.iinfo(kind).min, kind)
    else:
        key = x if dtype == kind else tirx.Cast(kind, x)
    return ~key if descending else key


@dataclass(frozen=True)
class Entries:
    """Room for `capacity` entries of one thread, from `base` on. Entries are numbered from 0.

    `places` is None where the keys hold them.
    """

    builder: KernelBuilder
    keys: Buffer
    places: Buffer | None
    base: Expr

    def put(self, number: Expr, key: Expr, place: Expr) -> None:
        """Store an entry; its key is of `key_type`."""
        if self.places is None:
            key = (tirx.Cast("int64", key) << tirx.const(32, "int64")) | tirx.Cast("int64", place)
        else:
            self.builder.store(self.places, self.base + number, place)
        self.builder.store(self.keys, self.base + number, key)

    def key(self, number: Expr) -> Expr:
        """The key of an entry, of `key_type`."""
        key = self.keys[self.base + number]
        return tirx.Cast("int32", key >> tirx.const(32, "int64")) if self.places is None else key

    def place(self, number: Expr) -> Expr:
        """The place of an entry, an int32."""
        if self.places is None:
            return tirx.Cast("int32", self.keys[self.base + number] & tirx.const(0x7FFFFFFF, "int64"))
        return self.places[self.base + number]

    def copy(self, number: Expr, source: Entries, other: Expr) -> None:
        """Store an entry of `source` here."""
        self.builder.store(self.keys, self.base + number, source.keys[source.base + other])
        if self.places is not None:
            assert source.places is not None
            self.builder.store(self.places, self.base + number, source.places[source.base + other])


class Sorter:
    """Sorts up to `capacity` entries (rounded up to whole runs) for each of `threads` threads, in workspaces of the kernel."""

    def __init__(self, builder: KernelBuilder, capacity: int, kind: str, threads: int) -> None:
        self.builder = builder
        self._run = min(_quotient(capacity + (_LANES - 1), _LANES) * _LANES, _MOST_RANKED)
        self.capacity = _whole_runs(capacity, self._run)
        room = 2 * threads * self.capacity + 1  # two buffers a thread; a merge reads the entry after its second run
        self._keys = builder.workspace(room, "int64")
        self._places = builder.workspace(room, "int32") if kind == "int64" else None
        is_counted = kind == "int32" and capacity > _MOST_RANKED
        self._counts = builder.workspace(threads * _VALUES * _DIGITS, "int32") if is_counted else None

    def entries(self, thread: Expr) -> Entries:
        """The entries of a thread: it stores them here, and finds them sorted here."""
        return self._side(thread, 0)

    def sort(self, thread: Expr, count: Expr) -> None:
        """Sort the first `count` entries of a thread in ascending order, stably. Entries after them are undefined afterwards."""
        if self._counts is not None:
            self._sort_digits(thread, count, self._counts)
        else:
            self._merge_sort(thread, count)

    def _sort_digits(self, thread: Expr, count: Expr, counts: Buffer) -> None:
        """LSD radix sort: for each digit, from the lowest, a counting sort from one buffer to the other."""
        builder = self.builder
        first = builder.bind(thread * (_VALUES * _DIGITS))

        def place_of_count(entry: Expr, digit: int) -> Expr:
            value = tirx.Cast("int32", entry >> tirx.const(32 + 8 * digit, "int64")) & tirx.const(_VALUES - 1, "int32")
            is_signed = digit == _DIGITS - 1
            return builder.bind(first + (value ^ (_VALUES // 2 if is_signed else 0)) * _DIGITS + digit)

        def zero(i: Expr) -> None:
            builder.store(counts, first + i, tirx.const(0, "int32"))

        builder.vector_loop(_VALUES * _DIGITS, builder.lanes("int32"), zero)
        entries = self.entries(thread)
        with builder.loop(count, name="i") as i:
            entry = builder.bind(entries.keys[entries.base + i])
            for digit in range(_DIGITS):
                place = place_of_count(entry, digit)
                builder.store(counts, place, counts[place] + 1)
        self._sum_counts(counts, first)
        for digit in range(_DIGITS):
            source, target = self._side(thread, digit % 2), self._side(thread, 1 - digit % 2)
            with builder.loop(count, name="i") as i:
                entry = builder.bind(source.keys[source.base + i])
                place = place_of_count(entry, digit)
                rank = builder.bind(counts[place])
                builder.store(target.keys, target.base + rank, entry)
                builder.store(counts, place, rank + 1)

    def _sum_counts(self, counts: Buffer, first: Expr) -> None:
        """Exclusive prefix sums: each digit value's count becomes the number of entries with a lesser value."""
        builder = self.builder
        less = builder.local(_DIGITS, "int32", "less")
        with builder.loop(_DIGITS, "vectorized", "digit") as digit:
            builder.store(less, digit, tirx.const(0, "int32"))
        with builder.loop(_VALUES, name="value") as value, builder.loop(_DIGITS, "vectorized", "digit") as digit:
            number = builder.name(counts[first + value * _DIGITS + digit])
            builder.store(counts, first + value * _DIGITS + digit, less[digit])
            builder.store(less, digit, less[digit] + number)

    def _merge_sort(self, thread: Expr, count: Expr) -> None:
        builder = self.builder
        padded, widest = _whole_runs(count, self._run), self.capacity
        if isinstance(padded, int):
            widest = padded
        else:
            padded = builder.bind(padded)
        entries = self.entries(thread)
        with builder.loop(padded - count, name="pad") as i:
            builder.store(entries.keys, entries.base + count + i, tirx.const(_LAST, "int64"))
        passes = (max(widest // self._run, 1) - 1).bit_length()  # each from one buffer to the other, the last one to the first
        self._rank_runs(entries, self._side(thread, passes % 2), padded)
        with builder.loop(passes, name="merge") as number:
            side = builder.bind(tirx.floormod(passes - number, 2))
            width = builder.bind(tirx.const(self._run, "int32") << number)
            self._merge_runs(self._side(thread, side), self._side(thread, builder.bind(1 - side)), width, padded)

    def _side(self, thread: Expr, side: Expr) -> Entries:
        return Entries(self.builder, self._keys, self._places, self.builder.bind((thread * 2 + side) * self.capacity))

    def _rank_runs(self, source: Entries, target: Entries, count: Expr) -> None:
        """Rank sort of each run: an entry's rank is the number of entries before it, counted for a vector of entries at once."""
        builder, size = self.builder, self._run
        with builder.loop(_quotient(count, size), name="run") as run:
            begin = builder.bind(run * size)
            keys, ranks = builder.local(size, "int64", "keys"), builder.local(size, "int64", "ranks")
            places = None if source.places is None else builder.local(size, "int32", "places")
            with builder.loop(size // _LANES, name="v") as v, builder.loop(_LANES, "vectorized", "lane") as lane:
                i = v * _LANES + lane
                builder.store(keys, i, source.keys[source.base + begin + i])
                builder.store(ranks, i, tirx.const(0, "int64"))
                if places is not None and source.places is not None:
                    builder.store(places, i, source.places[source.base + begin + i])
            for vector in range(size // _LANES):
                with builder.loop(_LANES, name="other") as other:
                    self._count_before(keys, ranks, vector, other)
            with builder.loop(size, name="i") as i:
                place = builder.bind(target.base + begin + tirx.Cast("int32", ranks[i]))
                builder.store(target.keys, place, keys[i])
                if places is not None and target.places is not None:
                    builder.store(target.places, place, places[i])

    def _count_before(self, keys: Buffer, ranks: Buffer, vector: int, other: Expr) -> None:
        """Add 1 to the ranks of those entries of a run that sort after entry `other` of a vector."""
        builder = self.builder
        key = builder.bind(keys[vector * _LANES + other])
        for begin in range(0, self._run, _LANES):
            with builder.loop(_LANES, "vectorized", "lane") as lane:
                own = keys[begin + lane]
                if begin == vector * _LANES:
                    is_behind = tirx.Select(lane > other, key <= own, key < own)
                else:
                    is_behind = key <= own if begin > vector * _LANES else key < own
                builder.store(ranks, begin + lane, ranks[begin + lane] + tirx.Cast("int64", is_behind))

    def _merge_runs(self, source: Entries, target: Entries, width: Expr, count: Expr) -> None:
        """Merge neighbouring runs of `width` entries; the last ones may be shorter, or alone."""
        builder = self.builder
        with builder.loop(builder.bind(_quotient(count + (2 * width - 1), 2 * width)), name="pair") as pair:
            begin = builder.bind(pair * (2 * width))
            middle = builder.bind(tirx.min(begin + width, count))
            end = builder.bind(tirx.min(begin + 2 * width, count))
            heads = builder.local(2, "int32", "heads")
            builder.store(heads, 0, begin)
            builder.store(heads, 1, middle)
            with builder.loop(end - begin, name="o") as o:
                left, right = builder.bind(heads[0]), builder.bind(heads[1])
                keys = source.keys
                is_less = keys[source.base + left] <= keys[source.base + right]
                is_left = builder.name(tirx.And(left < middle, tirx.Or(right >= end, is_less)))
                target.copy(begin + o, source, tirx.Select(is_left, left, right))
                builder.store(heads, 0, left + tirx.Cast("int32", is_left))
                builder.store(heads, 1, right + tirx.Cast("int32", tirx.Not(is_left)))


def _whole_runs(count: Expr, run: int) -> Expr:
    return _quotient(count + (run - 1), run) * run


def _quotient(a: Expr, b: Expr) -> Expr:
    return a // b if isinstance(a, int) and isinstance(b, int) else tirx.floordiv(a, b)
