"""A binary heap of entries: pops the least of many, where not all may be needed."""

from __future__ import annotations

from tvm import tirx

from ..codegen.builder import Expr, KernelBuilder
from .sorting import Entries


class Heap:
    """A min-heap of the first `count` entries of `entries`, whose keys contain their places.

    Invariant: entry i is not greater than entries 2i + 1 and 2i + 2.
    """

    def __init__(self, builder: KernelBuilder, entries: Entries, count: Expr) -> None:
        self._builder = builder
        self._entries = entries
        self._size = builder.local(1, "int32", "size")
        builder.store(self._size, 0, count)
        with builder.loop(builder.bind(tirx.floordiv(count, 2)), name="parent") as i:
            self._sift(builder.bind(tirx.floordiv(count, 2) - 1 - i))

    @property
    def size(self) -> Expr:
        """How many entries are left."""
        return self._size[0]

    def pop(self) -> Expr:
        """Take the least entry out, and return its place. There must be one."""
        builder, entries = self._builder, self._entries
        place = builder.bind(entries.place(0))
        builder.store(self._size, 0, self._size[0] - 1)
        entries.copy(0, entries, self._size[0])
        self._sift(tirx.const(0, "int32"))
        return place

    def _sift(self, start: Expr) -> None:
        """Sift an entry down until it is not greater than its children."""
        builder, keys, base = self._builder, self._entries.keys, self._entries.base
        sinking = builder.local(1, "int64", "sinking")
        at = builder.local(1, "int32", "at")
        builder.store(sinking, 0, keys[base + start])
        builder.store(at, 0, start)
        left = at[0] * 2 + 1
        last = tirx.max(self._size[0] - 1, 0)
        first, second = tirx.min(left, last), tirx.min(left + 1, last)
        lesser = tirx.Select(keys[base + second] < keys[base + first], second, first)
        with builder.while_true(tirx.And(left < self._size[0], keys[base + lesser] < sinking[0])):
            child = builder.bind(lesser)
            builder.store(keys, base + at[0], keys[base + child])
            builder.store(at, 0, child)
        builder.store(keys, base + at[0], sinking[0])
