"""Packing of blocks with known lifetimes into one range of memory: offline dynamic storage allocation, which is NP-hard.

A packing is built block by block: each goes into a gap between the blocks placed so far that live at the same time, the smallest
that holds it (best fit) or the lowest (first fit). What decides is the order. Several known ones are tried (by size: Pisarchyk
and Lee 2020, "Efficient Memory Management for Deep Neural Net Inference"; by contention: minimalloc, ASPLOS 2023). If none
reaches the lower bound, the best are improved by squeaky wheel optimisation (Joslin and Clements 1999): blocks that stick out
above the bound move forward in the order, and the packing is built again. Equal input gives equal output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_PLACEMENTS = 60_000  # of single blocks, over all attempts: below a second
_IMPROVED = 2  # how many of the first attempts are improved


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes that are needed during the half-open interval [lower, upper) of time."""

    lower: int
    upper: int
    size_bytes: int

    def __post_init__(self) -> None:
        assert self.lower < self.upper, self
        assert self.size_bytes >= 0, self


@dataclass(frozen=True, slots=True)
class Packing:
    """Where each block lies, in the order in which the blocks were given, and the bytes that all of them need together."""

    offsets: tuple[int, ...]
    total_bytes: int


def lower_bound(blocks: Sequence[Block], alignment: int = 1) -> int:
    """The largest sum of sizes, rounded up to the alignment, that live at one time. No packing is smaller."""
    return int(_Instance(blocks, alignment).contention.max(initial=0))


def pack(blocks: Sequence[Block], alignment: int = 1) -> Packing:
    """Give each block an offset, a multiple of `alignment`, such that no two blocks that live at one time share bytes."""
    instance = _Instance(blocks, alignment)
    bound = int(instance.contention.max(initial=0))
    budget = max(_PLACEMENTS, 2 * len(blocks))
    attempts: list[_Attempt] = []
    for order in instance.orders():
        for is_best_fit in (True, False):
            if not attempts or budget >= len(blocks):
                budget -= len(blocks)
                attempts.append(instance.place(order, is_best_fit))
                if attempts[-1].total_bytes <= bound:
                    return attempts[-1].packing()
    attempts.sort(key=lambda attempt: attempt.total_bytes)
    rounds = budget // (_IMPROVED * max(len(blocks), 1))
    improved = (_improve(instance, attempt, bound, rounds) for attempt in attempts[:_IMPROVED])
    return min(improved, key=lambda attempt: attempt.total_bytes).packing()


@dataclass(frozen=True, slots=True)
class _Attempt:
    order: np.ndarray
    is_best_fit: bool
    offsets: np.ndarray
    total_bytes: int

    def packing(self) -> Packing:
        return Packing(tuple(map(int, self.offsets)), self.total_bytes)


def _improve(instance: _Instance, attempt: _Attempt, bound: int, rounds: int) -> _Attempt:
    """Move the blocks that stick out above the bound a tenth of the order forward, round after round; return the best attempt."""
    best = attempt
    stride = 20 + len(attempt.order) // 10
    rank = np.empty(len(attempt.order), np.int64)
    for _ in range(rounds):
        if best.total_bytes <= bound:
            break
        rank[attempt.order] = np.arange(len(rank))
        sticks_out = attempt.offsets + instance.sizes > bound
        attempt = instance.place(np.argsort(rank - stride * sticks_out, kind="stable"), attempt.is_best_fit)
        best = min(best, attempt, key=lambda found: found.total_bytes)
    return best


class _Instance:
    """The blocks as arrays; `contention` is, for each block, the largest sum of sizes while it lives."""

    def __init__(self, blocks: Sequence[Block], alignment: int) -> None:
        self.lower = np.array([block.lower for block in blocks], np.int64)
        self.upper = np.array([block.upper for block in blocks], np.int64)
        self.sizes = np.array([-(-block.size_bytes // alignment) * alignment for block in blocks], np.int64)
        times, index = np.unique(np.concatenate([self.lower, self.upper]), return_inverse=True)
        first, last = index[: len(blocks)], index[len(blocks) :]
        change = np.zeros(len(times) + 1, np.int64)
        np.add.at(change, first, self.sizes)
        np.subtract.at(change, last, self.sizes)
        live = np.cumsum(change)
        self.contention = np.array([live[start:end].max() for start, end in zip(first, last, strict=True)], np.int64)

    def orders(self) -> list[np.ndarray]:
        """Orders to try, the ones that do best on neural networks first."""
        duration = self.upper - self.lower
        area = duration * self.sizes
        keys = (
            (-duration, -self.sizes),
            (self.lower, -self.sizes),
            (-area, -self.contention),
            (-self.sizes, -duration),
            (-area, -duration, -self.contention),
            (-self.sizes, -self.contention),
        )
        return [np.lexsort((*reversed(key),)) for key in keys]

    def place(self, order: np.ndarray, is_best_fit: bool) -> _Attempt:
        """Place the blocks in the given order."""
        offsets = np.full(len(order), -1, np.int64)
        for block in order:
            lives = (self.lower < self.upper[block]) & (self.upper > self.lower[block]) & (offsets >= 0)
            offsets[block] = self._gap(offsets[lives], self.sizes[lives], int(self.sizes[block]), is_best_fit)
        return _Attempt(order, is_best_fit, offsets, int((offsets + self.sizes).max(initial=0)))

    @staticmethod
    def _gap(offsets: np.ndarray, sizes: np.ndarray, size_bytes: int, is_best_fit: bool) -> int:
        """Where `size_bytes` fit between blocks, or else after the last."""
        if not len(offsets):
            return 0
        order = np.argsort(offsets)
        ends = np.maximum.accumulate((offsets + sizes)[order])
        starts = np.concatenate(([0], ends[:-1]))
        room = offsets[order] - starts
        fitting = np.flatnonzero(room >= size_bytes)
        if not len(fitting):
            return int(ends[-1])
        return int(starts[fitting[np.argmin(room[fitting])] if is_best_fit else fitting[0]])
