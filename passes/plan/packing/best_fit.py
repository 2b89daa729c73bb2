"""Blocks placed one by one, each into a gap between those placed so far that live at the same time: the smallest that holds it
(best fit), or the lowest (first fit).

What decides is the order. Several known ones are tried (by size: Pisarchyk and Lee 2020, "Efficient Memory Management for Deep
Neural Net Inference"; by contention: minimalloc, ASPLOS 2023). If none reaches the lower bound, the best are improved by squeaky
wheel optimisation (Joslin and Clements 1999): blocks that stick out above the bound move forward in the order, and the packing is
built again. Pinned blocks are placed first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .instance import Instance

_PLACEMENTS, _ATTEMPTS = 60_000, 300  # of single blocks over all attempts, and attempts, at most
_MOST_BLOCKS = 10_000  # each of which is compared with all others
_IMPROVED = 2  # how many of the first attempts are improved


def place(instance: Instance, target: int, *, improves: bool = True) -> np.ndarray | None:
    """The best offsets found, by less than a second of attempts; no others are tried once they need `target` bytes or less.

    None where there are too many blocks; with pinned ones, which a skyline cannot place, there is one attempt at least. The best
    are not made better unless it `improves` them, for which most of the time goes.
    """
    if instance.count > _MOST_BLOCKS and not instance.has_pins:
        return None
    placements = max(min(_PLACEMENTS, _ATTEMPTS * instance.count), instance.count)
    attempts: list[_Attempt] = []
    for order in _orders(instance):
        for is_best_fit in (True, False):
            if placements >= instance.count:
                placements -= instance.count
                attempts.append(_place(instance, order, is_best_fit))
                if attempts[-1].total_bytes <= target:
                    return attempts[-1].offsets
    attempts.sort(key=lambda attempt: attempt.total_bytes)
    if not improves:
        return attempts[0].offsets
    rounds = placements // (_IMPROVED * max(instance.count, 1))
    improved = (_improve(instance, attempt, target, rounds) for attempt in attempts[:_IMPROVED])
    return min(improved, key=lambda attempt: attempt.total_bytes).offsets


@dataclass(frozen=True, slots=True)
class _Attempt:
    order: np.ndarray
    is_best_fit: bool
    offsets: np.ndarray
    total_bytes: int


def _improve(instance: Instance, attempt: _Attempt, target: int, rounds: int) -> _Attempt:
    """Move the blocks that stick out above the target a tenth of the order forward, round after round; return the best."""
    best = attempt
    stride = 20 + len(attempt.order) // 10
    rank = np.empty(len(attempt.order), np.int64)
    for _ in range(rounds):
        if best.total_bytes <= target:
            break
        rank[attempt.order] = np.arange(len(rank))
        sticks_out = attempt.offsets + instance.sizes > target
        order = np.lexsort((rank - stride * sticks_out, instance.pins < 0))
        attempt = _place(instance, order, attempt.is_best_fit)
        best = min(best, attempt, key=lambda found: found.total_bytes)
    return best


def _orders(instance: Instance) -> list[np.ndarray]:
    """Orders to try, the ones that do best on neural networks first."""
    sizes, duration = instance.sizes, instance.duration
    area = duration * sizes.astype(np.float64)
    keys = (
        (-duration, -sizes),
        (instance.lower, -sizes),
        (-area, -instance.contention),
        (-sizes, -duration),
        (-area, -duration, -instance.contention),
        (-sizes, -instance.contention),
    )
    return [np.lexsort((*reversed(key), instance.pins < 0)) for key in keys]


def _place(instance: Instance, order: np.ndarray, is_best_fit: bool) -> _Attempt:
    """Place the blocks in the given order."""
    offsets = np.full(len(order), -1, np.int64)
    for block in order:
        if instance.pins[block] >= 0:
            offsets[block] = instance.pins[block]
            continue
        lives = (instance.lower < instance.upper[block]) & (instance.upper > instance.lower[block]) & (offsets >= 0)
        offsets[block] = _gap(offsets[lives], instance.sizes[lives], int(instance.sizes[block]), is_best_fit)
    return _Attempt(order, is_best_fit, offsets, instance.total(offsets))


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
