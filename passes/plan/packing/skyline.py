"""The skyline: for each moment, how high the blocks lie that are placed by then. New blocks stand upon it.

A segment of the lowest height between two higher ones takes, of the blocks whose lives lie within it, that of the greatest
key; where there is none, it is raised to the lower of its neighbours and joins it (the lowest gap first, as in Burke, Kendall and
Whitwell, A New Placement Heuristic for the Orthogonal Stock-Cutting Problem, Operations Research 52/4, 2004; lives have their
places here). Each block and each raise is one step, so that 60,000 blocks take a second.
"""

from __future__ import annotations

import heapq

import numpy as np

from .instance import Instance

_TAKEN = -np.inf
_SCARCITY = 16  # of 60,000 long lives 1.5% over the bound; 4: 3.0%, 8: 1.9%


def keys(instance: Instance) -> tuple[np.ndarray, ...]:
    """Keys to try: by area, by duration, by duration where memory is scarce (what must lie low), by size."""
    duration = instance.duration.astype(np.float64)
    scarce = duration * (instance.mean_live / max(instance.bound, 1)) ** _SCARCITY
    return duration * instance.sizes, duration, scarce, instance.sizes.astype(np.float64)


def place(instance: Instance, key: np.ndarray) -> np.ndarray:
    """An offset for each block; of those that fit a segment, that of the greatest key stands first."""
    order = np.lexsort((instance.upper, instance.lower))
    lower, upper, sizes = (array[order] for array in (instance.lower, instance.upper, instance.sizes))
    left = key[order].astype(np.float64)
    begins = np.searchsorted(lower, np.arange(instance.moments))  # the first block that begins at a moment or later
    line, offsets = _Skyline(instance.moments - 1), np.empty(instance.count, np.int64)
    remaining = instance.count
    while remaining:
        start, end, height = line.lowest()
        some = slice(begins[start], begins[end])
        fitting = np.where(upper[some] <= end, left[some], _TAKEN)
        best = int(fitting.argmax()) if len(fitting) else -1
        if best < 0 or fitting[best] == _TAKEN:
            line.rise(start)
            continue
        best += int(begins[start])
        offsets[order[best]], left[best] = height, _TAKEN
        line.stand(start, int(lower[best]), int(upper[best]), height + int(sizes[best]))
        remaining -= 1
    return offsets


class _Skyline:
    """Segments of equal height, in a doubly linked list by their first moments, and a heap by height."""

    def __init__(self, end: int) -> None:
        self._end = end
        self._heights: dict[int, int] = {0: 0}
        self._ends: dict[int, int] = {0: end}
        self._before: dict[int, int] = {0: -1}
        self._heap = [(0, 0, end)]

    def lowest(self) -> tuple[int, int, int]:
        """First moment, end and height of the lowest segment; of several, of the earliest."""
        while True:
            height, start, end = self._heap[0]
            if self._heights.get(start) == height and self._ends[start] == end:
                return start, end, height
            heapq.heappop(self._heap)

    def rise(self, start: int) -> None:
        """Raise a segment to the lower of its neighbours, and join those of that height."""
        end, before = self._ends[start], self._before[start]
        neighbours = [one for one in (before, end) if one >= 0 and one != self._end]
        height = min(self._heights[one] for one in neighbours)
        if end != self._end and self._heights[end] == height:
            joined = end
            end = self._ends.pop(joined)
            del self._heights[joined], self._before[joined]
        if before >= 0 and self._heights[before] == height:
            del self._heights[start], self._ends[start], self._before[start]
            start = before
        self._set(start, end, height)
        if end != self._end:
            self._before[end] = start

    def stand(self, start: int, lower: int, upper: int, top: int) -> None:
        """Put a block of the moments [lower, upper) onto the segment that begins at `start`."""
        end, height, before = self._ends[start], self._heights.pop(start), self._before.pop(start)
        del self._ends[start]
        for first, last, level in ((start, lower, height), (lower, upper, top), (upper, end, height)):
            if first < last:
                self._set(first, last, level)
                self._before[first], before = before, first
        if end != self._end:
            self._before[end] = before

    def _set(self, start: int, end: int, height: int) -> None:
        self._heights[start], self._ends[start] = height, end
        heapq.heappush(self._heap, (height, start, end))
