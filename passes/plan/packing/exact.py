"""Exact packing into a capacity: a search that ends with a packing, or with the proof that there is none.

Any packing can be made canonical: blocks placed in the order of their offsets, each as low as those before it allow. So a node
places one block, at the lowest offset that it can have, and offsets never fall along a path (MiniMalloc: Moffitt, ASPLOS 2023).
A node is left when

    dominance   another block would fit entirely below the offset of this one;
    sections    at some time, the lowest offset of what is left and the sum of what is left exceed the capacity;
    hatless     nothing stands above the block just placed: other places for it change nothing.

Where nothing that is left crosses a moment, the parts before and after it are solved one by one. No order of the candidates is
good for all instances: several take turns, with limits that double (Luby, Sinclair and Zuckerman, Optimal Speedup of Las Vegas
Algorithms, 1993, on why). A frame copies the arrays that it changes, so that there is neither undo nor recursion. Work is counted
in nodes, never in seconds: equal input gives equal output on every machine.

Blocks of zero bytes are not part of it. Pinned blocks have one place, and others stand below or above it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from .instance import MOST_BYTES, Instance

_ORDERS = ("WAT", "TAW", "TWA")  # W: width in time, A: area, T: the largest sum of a section; the greatest first
_PLACED = np.int64(2 * MOST_BYTES)
_MOST_KEPT = 1000  # parts whose members are kept
_least, _greatest = np.minimum.reduce, np.maximum.reduce


class Fitting:
    """A search for offsets within a capacity, which goes on where it was when it is run again."""

    def __init__(self, problem: Problem, capacity: int) -> None:
        self.problem, self._capacity = problem, capacity
        self._limit = 2 * problem.instance.count
        self._turn = 0
        self.nodes = 0
        self.is_impossible = problem.instance.bound > capacity  # proven

    def run(self, nodes: int) -> np.ndarray | None:
        """Offsets, if they are found by so many nodes, or by somewhat more: a turn that has begun ends."""
        end = self.nodes + nodes
        while not self.is_impossible and self.nodes < end:
            search = _Search(self.problem, self._capacity, _ORDERS[self._turn])
            found = search.run(min(self._limit, max(end - self.nodes, self._limit // 2)))
            self.nodes += search.nodes
            if found is not None:
                return found
            self.is_impossible = search.is_over
            self._turn = (self._turn + 1) % len(_ORDERS)
            if self._turn == 0:
                self._limit *= 2
        return None


class Problem:
    """An instance by its sections: the largest sets of blocks that live together, in the order of time.

    A block is in sections [first, last). `neighbours` are the blocks that it meets, `totals` the bytes of each section, and
    `crossing` counts, for each section, the blocks that are in the next one, too.
    """

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.first, self.last, self.sections = _sections(instance)
        first, last = self.first, self.last
        members = [np.flatnonzero((first <= section) & (section < last)) for section in range(self.sections)]
        self.flat = np.concatenate(members) if members else np.zeros(0, np.int64)
        self.starts = np.concatenate(([0], np.cumsum([len(some) for some in members]))).astype(np.int64)
        self.totals = np.array([instance.sizes[some].sum() for some in members], np.int64)
        self.crossing = np.array([np.count_nonzero(last[some] > section + 1) for section, some in enumerate(members)], np.int64)
        everyone = np.arange(instance.count)
        self.neighbours = [np.flatnonzero((first < last[i]) & (last > first[i]) & (everyone != i)) for i in everyone]
        pinned = np.flatnonzero(instance.pins >= 0)
        self.pinned = pinned[np.argsort(instance.pins[pinned], kind="stable")]
        self._members: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}

    def members(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """The blocks of sections [begin, end), those of each behind each other, and where each begins."""
        if (begin, end) not in self._members:
            if len(self._members) >= _MOST_KEPT:
                self._members.clear()
            starts = self.starts[begin:end]
            self._members[begin, end] = self.flat[starts[0] : self.starts[end]], starts - starts[0]
        return self._members[begin, end]

    @staticmethod
    def pairs(instance: Instance) -> int:
        """How many blocks meet how many others, nearly: what neighbours take to list."""
        live = np.zeros(instance.moments + 1, np.int64)
        np.add.at(live, instance.lower, 1)
        np.subtract.at(live, instance.upper, 1)
        return int(np.cumsum(live).max(initial=0)) * instance.count


def _sections(instance: Instance) -> tuple[np.ndarray, np.ndarray, int]:
    """The first section of each block, the one after its last, and their number: one ends where a block dies after a birth."""
    count = instance.count
    moments = np.concatenate([instance.upper, instance.lower])
    begins = np.repeat([False, True], count)
    first, last = np.zeros(count, np.int64), np.zeros(count, np.int64)
    sections, is_open = 0, False
    for event in np.lexsort((begins, moments)).tolist():  # at one moment deaths come first
        block = event % count
        if begins[event]:
            first[block], is_open = sections, True
        else:
            sections, is_open = sections + is_open, False
            last[block] = sections
    return first, last, sections


@dataclass(frozen=True, slots=True)
class _Part:
    """Blocks in sections [begin, end) that are still to be placed, and what follows when they are: a linked list.

    `lows` are the heights of the skyline under each block, `fail` the frame below which a failure of this part goes back.
    """

    items: np.ndarray
    begin: int
    end: int
    lows: np.ndarray
    totals: np.ndarray
    crossing: np.ndarray
    fail: int
    then: _Part | None


@dataclass(slots=True)
class _Frame:
    """A node: what is left of a part, in the search's order, and the (block, offset, rank, position) still to be tried, the last
    first. `agenda` are the parts that wait."""

    part: _Part
    ranks: np.ndarray
    agenda: _Part | None
    candidates: list[tuple[int, int, int, int]] = field(default_factory=list)


class _Search:
    """One search in one order of candidates."""

    def __init__(self, problem: Problem, capacity: int, order: str) -> None:
        self._problem, self._capacity, self._order = problem, capacity, order
        self._sizes = problem.instance.sizes
        self._offsets = np.full(problem.instance.count, -1, np.int64)
        self._stack: list[_Frame] = []
        self.nodes = 0
        self.is_over = False  # nothing is left to try

    def run(self, limit: int) -> np.ndarray | None:
        """Offsets, or None: `is_over` then says whether that is proven."""
        agenda = self._whole()
        if agenda is None:
            return self._offsets
        self._open(agenda)
        while self._stack:
            frame = self._stack[-1]
            if not frame.candidates:
                del self._stack[frame.part.fail + 1 :]
                continue
            if self.nodes >= limit:
                return None
            if self._place(frame, *frame.candidates.pop()):
                return self._offsets
        self.is_over = True
        return None

    def _whole(self) -> _Part | None:
        problem = self._problem
        lows = np.zeros(problem.instance.count, np.int64)
        cuts = [0, *(np.flatnonzero(problem.crossing == 0) + 1).tolist()]
        everyone = np.arange(problem.instance.count)
        whole = _Part(everyone, 0, problem.sections, lows, problem.totals, problem.crossing, -1, None)
        return self._split(whole, everyone, cuts, None) if problem.sections else None

    def _split(self, part: _Part, items: np.ndarray, cuts: list[int], agenda: _Part | None) -> _Part | None:
        """The blocks between neighbouring sections of `cuts`, as parts before the agenda."""
        first, last = self._problem.first[items], self._problem.last[items]
        for begin, end in reversed(list(pairwise(cuts))):
            inside = items[(first < end) & (last > begin)]
            if len(inside):
                agenda = _Part(inside, begin, end, part.lows, part.totals, part.crossing, part.fail, agenda)
        return agenda

    def _open(self, part: _Part) -> None:
        """Begin with a part: its blocks in the order of this search."""
        items = part.items[np.lexsort([part.items, *(-key for key in reversed(list(self._keys(part))))])]
        ordered = _Part(items, part.begin, part.end, part.lows, part.totals, part.crossing, part.fail, None)
        self._push(_Frame(ordered, np.arange(len(items)), part.then), 0, 0)

    def _keys(self, part: _Part) -> Iterator[np.ndarray]:
        instance, items = self._problem.instance, part.items
        for letter in self._order:
            if letter == "T":
                spans = zip(self._problem.first[items].tolist(), self._problem.last[items].tolist(), strict=True)
                yield np.array([part.totals[first:last].max() for first, last in spans], np.int64)
            else:
                width = instance.duration[items]
                yield width if letter == "W" else width * instance.sizes[items].astype(np.float64)

    def _push(self, frame: _Frame, low: int, low_rank: int) -> None:
        """Find a node's candidates: those from `low` on that nothing dominates and with which the sections can still fit."""
        part = frame.part
        places = self._places(part, low)
        fits = places < _least(places + self._sizes[part.items])
        if len(self._problem.pinned):
            fits &= bool((places < _PLACED).all())
        fits &= places <= self._capacity - _greatest(part.totals[part.begin : part.end])
        fits &= (places > low) | ((places == low) & (frame.ranks >= low_rank))
        positions = fits.nonzero()[0]
        if len(positions) > 1:
            positions = positions[places[positions].argsort(kind="stable")][::-1]
        columns = part.items[positions], places[positions], frame.ranks[positions], positions
        frame.candidates = list(zip(*(column.tolist() for column in columns), strict=True))
        self._stack.append(frame)

    def _places(self, part: _Part, low: int) -> np.ndarray:
        """The lowest offset that each block can have: on the skyline, and where pinned blocks that are left let it; `_PLACED` for
        a pinned block that cannot have its own any more."""
        problem = self._problem
        if not len(problem.pinned):
            return np.asarray(part.lows[part.items])
        places = part.lows.copy()
        for pin in problem.pinned[np.isin(problem.pinned, part.items)].tolist():
            start, end = int(problem.instance.pins[pin]), int(problem.instance.pins[pin] + self._sizes[pin])
            around = problem.neighbours[pin]
            meets = (places[around] < end) & (places[around] + self._sizes[around] > start)
            raised = around[meets & (problem.instance.pins[around] < 0)]
            places[raised] = end
            places[pin] = start if part.lows[pin] <= start and low <= start else _PLACED
        return np.asarray(places[part.items])

    def _place(self, frame: _Frame, block: int, offset: int, rank: int, position: int) -> bool:
        """Go on with a block placed; true when that was the last of all."""
        part, problem = frame.part, self._problem
        first, last = int(problem.first[block]), int(problem.last[block])
        lows, totals, around = part.lows.copy(), part.totals.copy(), problem.neighbours[block]
        lows[block] = _PLACED
        above = lows[around]
        if not np.count_nonzero(above < _PLACED):
            frame.candidates.clear()  # hatless
        lows[around] = np.maximum(above, offset + int(self._sizes[block]))
        totals[first:last] -= self._sizes[block]
        if self._is_beyond(part, lows, totals, offset):
            return False
        self.nodes += 1
        self._offsets[block] = offset
        crossing, cuts = part.crossing, []
        if last - first > 1:
            crossing = crossing.copy()
            crossing[first : last - 1] -= 1
            inside = crossing[first : last - 1]
            if np.count_nonzero(inside) < len(inside):
                cuts = (np.flatnonzero(inside == 0) + first + 1).tolist()
        index, items = len(self._stack) - 1, _without(part.items, position)
        left = _Part(items, part.begin, part.end, lows, totals, crossing, index, None)
        if not cuts and len(items):
            self._push(_Frame(left, _without(frame.ranks, position), frame.agenda), offset, rank)
            return False
        agenda = self._split(left, items, [part.begin, *cuts, part.end], frame.agenda) if len(items) else frame.agenda
        if agenda is not None:
            self._open(agenda)
        return agenda is None

    def _is_beyond(self, part: _Part, lows: np.ndarray, totals: np.ndarray, offset: int) -> bool:
        """Whether some section of a part can no longer end within the capacity."""
        flat, starts = self._problem.members(part.begin, part.end)
        lowest, left = np.minimum.reduceat(lows[flat], starts), totals[part.begin : part.end]
        return bool(np.count_nonzero((np.maximum(lowest, offset) + left > self._capacity) & (left > 0)))


def _without(array: np.ndarray, position: int) -> np.ndarray:
    """The array without one element. numpy.delete takes several times as long."""
    return np.concatenate((array[:position], array[position + 1 :]))
