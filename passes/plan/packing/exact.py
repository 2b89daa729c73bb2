"""Exact packing into a capacity: a search that ends with a packing, or with the proof that there is none.

Any packing can be made canonical: blocks placed in the order of their offsets, each as low as those before it allow. So a node
places one block, at the lowest offset that it can have, and offsets never fall along a path (MiniMalloc: Moffitt, ASPLOS 2023).
A node is left when

    dominance   another block would fit entirely below the offset of this one;
    sections    at some time, the lowest offset of what is left and the sum of what is left exceed the capacity;
    hatless     nothing stands above the block just placed: other places for it change nothing.

Where nothing that is left crosses a moment, the parts before and after it are solved one by one. No order of the candidates is
good for all instances: several take turns, with limits that double (Luby, Sinclair and Zuckerman, Optimal Speedup of Las Vegas
Algorithms, 1993, on why). Each node has arrays of its own, so that there is neither undo nor recursion; all that may follow a
node are tested together, as rows of one array. Work is counted in nodes, never in seconds: equal input gives equal output on all
machines.

Blocks of zero bytes are not part of it. Pinned blocks have one place, and others stand below or above it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from .instance import MOST_BYTES, Instance

_ORDERS = ("WAT", "TAW", "TWA")  # W: width in time, A: area, T: the largest sum of a section; the greatest first
_PLACED = np.int64(4 * MOST_BYTES)  # above all offsets, and a bit that the sum of two of them has not
_HEIGHTS = _PLACED - 1
_MOST_KEPT = 1000  # parts whose members are kept
_MOST_DENSE = 1000  # blocks whose rows are kept
_TESTED = 4096  # heights of skylines: that many candidates of a node are tested together, and kept
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

    A block is in sections [first, last). `neighbours` are the blocks that it meets, `sums` [2, sections] the bytes of each
    section and the number of its blocks that are in the next one, too.
    """

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.first, self.last, self.sections = _sections(instance)
        first, last = self.first, self.last
        members = [np.flatnonzero((first <= section) & (section < last)) for section in range(self.sections)]
        self.flat = np.concatenate(members) if members else np.zeros(0, np.int64)
        self.starts = np.concatenate(([0], np.cumsum([len(some) for some in members]))).astype(np.int64)
        totals = [instance.sizes[some].sum() for some in members]
        crossing = [np.count_nonzero(last[some] > section + 1) for section, some in enumerate(members)]
        self.sums = np.array([totals, crossing], np.int64)
        everyone = np.arange(instance.count)
        self.neighbours = [np.flatnonzero((first < last[i]) & (last > first[i]) & (everyone != i)) for i in everyone]
        pinned = np.flatnonzero(instance.pins >= 0)
        self.pinned = pinned[np.argsort(instance.pins[pinned], kind="stable")]
        self._members: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        self._all_rows = self._rows(everyone) if instance.count <= _MOST_DENSE else None

    def rows(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each of these blocks a row of 0 where another one meets it, else `_PLACED`, and its part of `sums`."""
        if self._all_rows is None:
            return self._rows(blocks)
        return self._all_rows[0].take(blocks, axis=0), self._all_rows[1].take(blocks, axis=0)

    def _rows(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        first, last, sections = self.first[blocks, None], self.last[blocks, None], np.arange(self.sections)
        apart = np.where((self.first < last) & (self.last > first), np.int64(0), _PLACED)
        apart[np.arange(len(blocks)), blocks] = _PLACED
        is_in = (sections >= first) & (sections < last)
        return apart, np.stack([is_in * self.instance.sizes[blocks, None], is_in & (sections < last - 1)], axis=1)

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


class _Part(NamedTuple):
    """Blocks in sections [begin, end) of which `left` are still to be placed, and what follows when they are: a linked list.

    `items` are all of the part's blocks, in the order in which the search prefers them, and `sizes` theirs; `lows` the heights of
    the skyline under each block of the problem, `_PLACED` for those that are placed; `sums` the problem's, of what is left;
    `fail` the frame below which a failure of this part goes back.
    """

    items: np.ndarray
    sizes: np.ndarray
    left: int
    begin: int
    end: int
    lows: np.ndarray
    sums: np.ndarray
    fail: int
    then: _Part | None


class _Candidate(NamedTuple):
    """A block as (offset, rank), and when it is placed: the skyline, the sections' sums, what may follow, and the least number of
    blocks that cross from one of the part's sections into the next."""

    placed: tuple[int, int]
    lows: np.ndarray
    sums: np.ndarray
    following: list[tuple[int, int]]
    crossing: int


@dataclass(slots=True)
class _Frame:
    """A node: a part, and what may be placed next, the last first: (offset, rank) to be tested, and candidates that passed."""

    part: _Part
    untested: list[tuple[int, int]]
    candidates: list[_Candidate] = field(default_factory=list)


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
            while frame.untested and not frame.candidates:
                self._test(frame)
            if not frame.candidates:
                del self._stack[frame.part.fail + 1 :]
                continue
            if self.nodes >= limit:
                return None
            if self._place(frame.part, frame.candidates.pop()):
                return self._offsets
        self.is_over = True
        return None

    def _whole(self) -> _Part | None:
        problem = self._problem
        lows = np.zeros(problem.instance.count, np.int64)
        cuts = [0, *(np.flatnonzero(problem.sums[1] == 0) + 1).tolist()]
        everyone = np.arange(problem.instance.count)
        whole = _Part(everyone, self._sizes, len(everyone), 0, problem.sections, lows, problem.sums, -1, None)
        return self._split(whole, cuts) if problem.sections else None

    def _split(self, part: _Part, cuts: list[int]) -> _Part | None:
        """What is left between neighbouring sections of `cuts`, as parts before those that follow."""
        items = part.items[part.lows[part.items] < _PLACED]
        first, last = self._problem.first[items], self._problem.last[items]
        agenda = part.then
        for begin, end in reversed(list(pairwise(cuts))):
            inside = items[(first < end) & (last > begin)]
            if len(inside):
                agenda = part._replace(items=inside, left=len(inside), begin=begin, end=end, then=agenda)
        return agenda

    def _open(self, part: _Part) -> None:
        """Begin with a part: its blocks in the order of this search."""
        items = part.items[np.lexsort([part.items, *(-key for key in reversed(list(self._keys(part))))])]
        part = part._replace(items=items, sizes=self._sizes[items])
        following = self._following(part, [(0, 0)], np.zeros((1, 1), np.int64), part.lows[None], part.sums[None])
        self._stack.append(_Frame(part, following[0]))

    def _keys(self, part: _Part) -> Iterator[np.ndarray]:
        instance, items = self._problem.instance, part.items
        for letter in self._order:
            if letter == "T":
                spans = zip(self._problem.first[items].tolist(), self._problem.last[items].tolist(), strict=True)
                yield np.array([part.sums[0, first:last].max() for first, last in spans], np.int64)
            else:
                width = instance.duration[items]
                yield width if letter == "W" else width * instance.sizes[items].astype(np.float64)

    def _following(
        self, part: _Part, placed: Sequence[tuple[int, int]], offsets: np.ndarray, lows: np.ndarray, sums: np.ndarray
    ) -> list[list[tuple[int, int]]]:
        """For each of several nodes, a row of `lows` and of `sums` each, what may come next, the last first: the (offset, rank)
        from the one just placed on that nothing dominates and beneath which no section needs more than the capacity."""
        if len(self._problem.pinned):
            lows = np.array([self._around_pins(part, row, low) for row, (low, _) in zip(lows, placed, strict=True)])
        places = lows.take(part.items, axis=1)
        high = np.minimum(
            _least(places + part.sizes, axis=1) - 1, self._capacity - _greatest(sums[:, 0, part.begin : part.end], axis=1)
        )
        fits = ((places >= offsets) & (places <= high[:, None])).ravel().nonzero()[0]
        following: list[list[tuple[int, int]]] = [[] for _ in placed]
        if len(fits):
            width = len(part.items)
            for index, offset in zip(fits.tolist(), places.take(fits).tolist(), strict=True):
                row, rank = divmod(index, width)
                if (offset, rank) >= placed[row]:
                    following[row].append((offset, rank))
            for pairs in following:
                pairs.sort(reverse=True)
        return following

    def _around_pins(self, part: _Part, lows: np.ndarray, low: int) -> np.ndarray:
        """The skyline with pinned blocks at their offsets, and others above these where they must be; `_PLACED` for all blocks
        where a pinned one cannot have its own offset any more."""
        problem, places = self._problem, lows.copy()
        left = part.items[lows[part.items] < _PLACED]
        for pin in problem.pinned[np.isin(problem.pinned, left)].tolist():
            start, end = int(problem.instance.pins[pin]), int(problem.instance.pins[pin] + self._sizes[pin])
            if max(int(lows[pin]), low) > start:
                return np.full_like(lows, _PLACED)
            around = problem.neighbours[pin]
            meets = (places[around] < end) & (places[around] + self._sizes[around] > start)
            raised = around[meets & (problem.instance.pins[around] < 0)]
            places[raised] = end
            places[pin] = start
        return places

    def _test(self, frame: _Frame) -> None:
        """Keep of the next candidates, all of them at once, those that leave each section able to end within the capacity.

        Only sections whose lowest offset has risen can fail: `_following` left none in which the candidate's own offset would.
        """
        part, problem = frame.part, self._problem
        count = min(max(1, _TESTED // len(part.lows)), len(frame.untested))
        tried = frame.untested[: -count - 1 : -1]
        del frame.untested[-count:]
        offsets, ranks = np.array(tried).T
        blocks = part.items.take(ranks)
        apart, inside = problem.rows(blocks)
        offsets = offsets[:, None]
        lows = np.maximum(part.lows, offsets + part.sizes.take(ranks)[:, None] - apart)
        for row, block in enumerate(blocks.tolist()):
            lows[row, block] = _PLACED
        sums = part.sums - inside
        flat, starts = problem.members(part.begin, part.end)
        lowest = np.minimum.reduceat(lows.take(flat, axis=1), starts, axis=1)
        ends = _greatest((lowest + sums[:, 0, part.begin : part.end]) & _HEIGHTS, axis=1).tolist()
        if count > 1 or frame.untested:
            hats = _least(part.lows | apart, axis=1).tolist()
            if _PLACED in hats:  # hatless
                count = hats.index(_PLACED) + 1
                frame.untested.clear()
        right = [row for row in range(count) if ends[row] <= self._capacity]
        if right:
            placed, lows, sums = [tried[row] for row in right], lows.take(right, axis=0), sums.take(right, axis=0)
            following = self._following(part, placed, offsets.take(right, axis=0), lows, sums)
            crossing = _least(sums[:, 1, part.begin : part.end - 1], axis=1, initial=1).tolist()
            frame.candidates = list(map(_Candidate, placed, lows, sums, following, crossing))[::-1]

    def _place(self, part: _Part, chosen: _Candidate) -> bool:
        """Go on with a block placed; true when that was the last of all."""
        self.nodes += 1
        offset, rank = chosen.placed
        self._offsets[part.items[rank]] = offset
        is_whole = chosen.crossing > 0 and part.left > 1
        if is_whole and not chosen.following:
            return False
        left = part._replace(left=part.left - 1, lows=chosen.lows, sums=chosen.sums, fail=len(self._stack) - 1)
        if is_whole:
            self._stack.append(_Frame(left, chosen.following))
            return False
        cuts = (np.flatnonzero(left.sums[1, part.begin : part.end - 1] == 0) + part.begin + 1).tolist()
        agenda = self._split(left, [part.begin, *cuts, part.end]) if left.left else part.then
        if agenda is not None:
            self._open(agenda)
        return agenda is None
