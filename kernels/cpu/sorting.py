"""Sorting inside a kernel: elements as integers of the same order, and a stable merge sort of entries in a workspace.

An entry is a key and the place that its element had. Keys of 32 bits share an int64 with their place, so that an entry is one
number and no two are equal; keys of 64 bits have the places beside them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tvm import tirx

from .. import math
from ..builder import Buffer, Expr, KernelBuilder

RUN = 8  # entries that are ranked at once; the runs are merged
_LAST = 2**63 - 1  # the key of an entry that belongs behind all others


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
        key = bits ^ (sign & tirx.const(largest, kind))  # of negative numbers the greater size is the lesser one
        key = tirx.Select(tirx.EQ(x, tirx.const(0, dtype)), tirx.const(0, kind), key)
        key = tirx.Select(tirx.isnan(x), tirx.const(largest, kind), key)
    elif dtype in ("uint32", "uint64"):
        key = tirx.reinterpret(kind, x) ^ tirx.const(np.iinfo(kind).min, kind)
    else:
        key = x if dtype == kind else tirx.Cast(kind, x)
    return ~key if descending else key


@dataclass(frozen=True)
class Entries:
    """Room for `capacity` entries of one thread, from `base` on; a multiple of RUN. Entries are numbered from 0.

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
        self.capacity = -(-capacity // RUN) * RUN
        room = 2 * threads * self.capacity + 1  # two sides for each; a merge looks at the entry behind its second run
        self._keys = builder.workspace(room, "int64")
        self._places = builder.workspace(room, "int32") if kind == "int64" else None

    def entries(self, thread: Expr) -> Entries:
        """Where a thread puts its entries, and finds them sorted."""
        return self._side(thread, 0)

    def sort(self, thread: Expr, count: Expr) -> None:
        """Bring the first `count` entries of a thread into ascending order, equal keys as they were. What is behind is lost."""
        builder = self.builder
        padded, widest = _whole_runs(count), self.capacity
        if isinstance(padded, int):
            widest = padded
        else:
            padded = builder.bind(padded)
        entries = self.entries(thread)
        with builder.loop(padded - count, name="pad") as i:
            builder.store(entries.keys, entries.base + count + i, tirx.const(_LAST, "int64"))
        passes = (max(widest // RUN, 1) - 1).bit_length()  # from one side to the other each, the last one to the first side
        self._rank_runs(entries, self._side(thread, passes % 2), padded)
        with builder.loop(passes, name="merge") as number:
            side = builder.bind(tirx.floormod(passes - number, 2))
            width = builder.bind(tirx.const(RUN, "int32") << number)
            self._merge_runs(self._side(thread, side), self._side(thread, builder.bind(1 - side)), width, padded)

    def _side(self, thread: Expr, side: Expr) -> Entries:
        return Entries(self.builder, self._keys, self._places, self.builder.bind((thread * 2 + side) * self.capacity))

    def _rank_runs(self, source: Entries, target: Entries, count: Expr) -> None:
        """Sort each run of RUN entries: the rank of one is the number of those before it, found for all at once."""
        builder = self.builder
        with builder.loop(_quotient(count, RUN), name="run") as run:
            begin = builder.bind(run * RUN)
            keys, ranks = builder.local(RUN, "int64", "keys"), builder.local(RUN, "int32", "ranks")
            places = None if source.places is None else builder.local(RUN, "int32", "places")
            with builder.loop(RUN, "vectorized", "lane") as lane:
                builder.store(keys, lane, source.keys[source.base + begin + lane])
                if places is not None and source.places is not None:
                    builder.store(places, lane, source.places[source.base + begin + lane])
            with builder.loop(RUN, "vectorized", "lane") as lane:
                rank: Expr = tirx.const(0, "int32")
                for other in range(RUN):
                    is_before = tirx.Select(lane > other, keys[other] <= keys[lane], keys[other] < keys[lane])
                    rank = rank + tirx.Cast("int32", is_before)
                builder.store(ranks, lane, rank)
            with builder.loop(RUN, "unrolled", "i") as i:
                place = builder.bind(target.base + begin + ranks[i])
                builder.store(target.keys, place, keys[i])
                if places is not None and target.places is not None:
                    builder.store(target.places, place, places[i])

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


def _whole_runs(count: Expr) -> Expr:
    return _quotient(count + (RUN - 1), RUN) * RUN


def _quotient(a: Expr, b: Expr) -> Expr:
    return a // b if isinstance(a, int) and isinstance(b, int) else tirx.floordiv(a, b)
