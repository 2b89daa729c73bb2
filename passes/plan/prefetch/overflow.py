"""What goes to the second tier, where the first one cannot hold all that has to leave.

The second tier's streams are slow, so they have to be busy for as long as there is anything for them: what is to go there does so
as soon as its stream is idle, and is absent from then on until it has to come back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from .problem import Problem


@dataclass(frozen=True, slots=True)
class Absence:
    """An object goes out to the second tier after step `last`, is expected to be there as step `out` begins, and comes back for
    step `due`."""

    object: int
    last: int
    out: int
    due: int


@dataclass(frozen=True, slots=True)
class _Gap:
    """The longest time between two uses of an object: steps and seconds. Seconds also of its copies out and in."""

    object: int
    last: int
    due: int
    begin: float
    end: float
    out: float
    back: float

    def mirrored(self) -> _Gap:
        """The same if time ran backwards."""
        return replace(self, begin=-self.end, end=-self.begin, out=self.back, back=self.out)


def absences(problem: Problem, excess_bytes: Sequence[int], *, is_mirrored: bool) -> Mapping[int, Absence]:
    """Objects that go to the second tier, in the order in which they do, such that at each step that many bytes have gone.

    As many as the streams of that tier can move if no step is stalled; where they cannot, fewer. Objects are picked as the
    stream out, or if `is_mirrored` the stream in, would take them if it were always busy: this stream gets no crowds, for which
    memory would have to be kept. `excess_bytes`: what the first tier would hold beyond its capacity, step by step.
    """
    ends = list(accumulate((step.seconds for step in problem.steps), initial=0.0))
    gaps = list(_gaps(problem, ends))
    picked = _picked([gap.mirrored() for gap in gaps] if is_mirrored else gaps, problem, excess_bytes)
    found: dict[int, Absence] = {}
    now = 0.0
    for gap in sorted((gap for gap in gaps if gap.object in picked), key=lambda gap: gap.begin):
        out = max(now, gap.begin) + gap.out
        if out + gap.back <= gap.end:
            found[gap.object] = Absence(gap.object, gap.last, int(np.searchsorted(ends, out)), gap.due)
            now = out
    return found


def _picked(gaps: Sequence[_Gap], problem: Problem, excess_bytes: Sequence[int]) -> set[int]:
    """As the stream is idle, it takes what has been there for the shortest time, if that helps."""
    gaps = sorted(gaps, key=lambda gap: gap.begin)
    left = np.array(excess_bytes, np.int64)
    picked: set[int] = set()
    waiting: list[_Gap] = []
    now, rank = -math.inf, 0
    while waiting or rank < len(gaps):
        now = now if waiting else max(now, gaps[rank].begin)
        while rank < len(gaps) and gaps[rank].begin <= now:
            waiting.append(gaps[rank])
            rank += 1
        gap = waiting.pop()
        helps = left[gap.last + 1 : gap.due].max(initial=0) >= max(left.max(initial=0), 1)
        if helps and now + gap.out + gap.back <= gap.end:
            left[gap.last + 1 : gap.due] -= problem.objects[gap.object].size_bytes
            now += gap.out
            picked.add(gap.object)
    return picked


def _gaps(problem: Problem, ends: Sequence[float]) -> Iterator[_Gap]:
    tier = problem.tiers[1]
    for j, item in enumerate(problem.objects):
        if not item.is_outside and item.size_bytes:
            times = tier.seconds_out(item.size_bytes), tier.seconds_in(item.size_bytes)
            pairs = ((a.step, b.step) for a, b in pairwise(item.uses) if b.step > a.step + 1)
            gaps = [_Gap(j, last, due, ends[last + 1], ends[due], *times) for last, due in pairs]
            if gaps:
                yield max(gaps, key=lambda gap: gap.end - gap.begin)
