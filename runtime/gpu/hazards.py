"""Which of many operations, given in an order in which they are right, must wait for which: the rest may run side by side.

Two operations conflict where both touch a byte and one writes it. `dependencies` sweeps over them once, with the last writer and
the readers since of every interval of bytes; `unordered_conflicts` trusts nobody and compares all pairs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes [begin, end) of a memory. Bytes of two memories are never the same."""

    memory: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Access:
    """What an operation touches, and operations before it which it must wait for whatever they touch."""

    reads: tuple[Span, ...]
    writes: tuple[Span, ...]
    after: tuple[int, ...] = ()


def dependencies(accesses: Sequence[Access]) -> list[tuple[int, ...]]:
    """For each operation those before it that it waits for, without any that it waits for through another one, ascending.

    O(n log n) intervals and, for n operations, n bits for each.
    """
    memories: dict[str, _Intervals] = {}
    ancestors: list[int] = []  # of each operation, itself included, a bit for each
    found: list[tuple[int, ...]] = []
    for number, access in enumerate(accesses):
        before = set(access.after)
        for span in access.reads:
            memories.setdefault(span.memory, _Intervals()).read(span, number, before)
        for span in access.writes:
            memories.setdefault(span.memory, _Intervals()).write(span, number, before)
        before.discard(number)
        covered, kept = 0, []
        for one in sorted(before, reverse=True):
            if not covered >> one & 1:
                kept.append(one)
                covered |= ancestors[one]
        ancestors.append(covered | 1 << number)
        found.append(tuple(reversed(kept)))
    return found


def unordered_conflicts(accesses: Sequence[Access], after: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Pairs of operations that conflict, where none waits for the other. Quadratic; for tests and tools."""
    ancestors: list[int] = []
    for number, before in enumerate(after):
        mask = 1 << number
        for one in before:
            mask |= ancestors[one]
        ancestors.append(mask)
        for earlier in range(number):
            if not mask >> earlier & 1 and _conflict(accesses[earlier], accesses[number]):
                yield earlier, number


def _conflict(one: Access, other: Access) -> bool:
    pairs = [(a, b) for a in one.writes for b in (*other.reads, *other.writes)]
    pairs += [(a, b) for a in one.reads for b in other.writes]
    return any(a.memory == b.memory and max(a.begin, b.begin) < min(a.end, b.end) for a, b in pairs)


class _Intervals:
    """Disjoint intervals of a memory in order: the last writer of each, or none, and who has read it since."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._owners: list[tuple[int | None, frozenset[int]]] = []

    def read(self, span: Span, number: int, before: set[int]) -> None:
        """Add what a reader waits for to `before`."""
        for at in self._covering(span):
            writer, readers = self._owners[at]
            if writer is not None:
                before.add(writer)
            self._owners[at] = writer, readers | {number}

    def write(self, span: Span, number: int, before: set[int]) -> None:
        """Add what a writer waits for to `before`."""
        covering = self._covering(span)
        for at in covering:
            writer, readers = self._owners[at]
            before.update(readers if writer is None else {*readers, writer})
        if covering:
            self._replace(covering.start, covering.stop, [(span.begin, span.end, (number, frozenset()))])

    def _covering(self, span: Span) -> range:
        """The places of intervals that cover a span exactly, made by cutting and adding some."""
        if span.begin >= span.end:
            return range(0)
        first = max(bisect_right(self._begins, span.begin) - 1, 0)
        stop = first
        pieces: list[tuple[int, int, tuple[int | None, frozenset[int]]]] = []
        place = span.begin
        while stop < len(self._begins) and self._begins[stop] < span.end:
            begin, end, owner = self._begins[stop], self._ends[stop], self._owners[stop]
            stop += 1
            if end <= span.begin:
                pieces.append((begin, end, owner))
                continue
            if begin < span.begin:
                pieces.append((begin, span.begin, owner))
            if place < begin:
                pieces.append((place, begin, (None, frozenset())))
            pieces.append((max(begin, span.begin), min(end, span.end), owner))
            place = min(end, span.end)
            if end > span.end:
                pieces.append((span.end, end, owner))
        if place < span.end:
            pieces.append((place, span.end, (None, frozenset())))
        self._replace(first, stop, pieces)
        begin = next(at for at in range(first, first + len(pieces)) if self._begins[at] == span.begin)
        return range(begin, begin + sum(span.begin <= one < span.end for one, _, _ in pieces))

    def _replace(self, first: int, stop: int, pieces: list[tuple[int, int, tuple[int | None, frozenset[int]]]]) -> None:
        self._begins[first:stop] = [begin for begin, _, _ in pieces]
        self._ends[first:stop] = [end for _, end, _ in pieces]
        self._owners[first:stop] = [owner for _, _, owner in pieces]
