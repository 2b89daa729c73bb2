"""From a schedule of whole calls to the stays of weights in memory, each with the steps that read it: a pure function.

A schedule (`passes/plan/prefetch/`) says which copies a call makes, and what is inside as it begins. A weight that a copy brings
is there for its readers up to the next copy of it; where the weight is inside as calls begin, the last copy of one call is there
for the first readers of the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeAlias

from ..prefetch.problem import Problem
from ..prefetch.schedule import CopyIn, Schedule


@dataclass(frozen=True, slots=True)
class Stay:
    """A weight from its copy, which may begin when step `after` is complete (-1: with the call), to its last reader.

    `first` and `last` of those that read it in this call; none do where `first` is the number of steps. Where `until` is given,
    it stays from the end of the call on to that step of the next one.
    """

    weight: int
    after: int
    first: int
    last: int
    until: int | None = None

    @property
    def is_read(self) -> bool:
        """In the call that copies it."""
        return self.first <= self.last


Stays: TypeAlias = tuple[Stay, ...]


def stays_of(problem: Problem, schedule: Schedule) -> Stays:
    """The stays that a schedule of read-only weights makes, in the order of their copies.

    A copy that waits for the last step of a call is one that the next call begins with.
    """
    count = len(problem.steps)
    starts: dict[int, list[int]] = {}  # of each weight, the first readers of its stays
    for copy in schedule.copies_in:
        starts.setdefault(copy.object, []).append(copy.before_step % count)
    early = [copy for copy in schedule.copies_in if copy.after_step >= count - 1]
    rest = [copy for copy in schedule.copies_in if copy.after_step < count - 1]
    moved = [replace(copy, after_step=-1, before_step=copy.before_step - count) for copy in early]
    found = [_stay(copy, problem, sorted(starts[copy.object]), copy.object in schedule.inside) for copy in (*moved, *rest)]
    begins = accumulate((stay.after for stay in found), max, initial=-1)  # a stream does one after the other
    next(begins)
    return tuple(replace(stay, after=after) for stay, after in zip(found, begins, strict=True))


def _stay(copy: CopyIn, problem: Problem, starts: Sequence[int], is_inside: bool) -> Stay:
    """The stay that a copy begins; `starts` are the first readers of all stays of its weight, in order."""
    uses, count = [use.step for use in problem.objects[copy.object].uses], len(problem.steps)
    start = copy.before_step % count
    end = next((other for other in starts if other > start), count)
    last = max(use for use in uses if start <= use < end)
    after = max(copy.after_step, -1)
    if copy.before_step >= count:
        return Stay(copy.object, after, count, count - 1, until=last)
    until = uses[0] < starts[0] and end == count and is_inside
    return Stay(copy.object, after, start, last, max(use for use in uses if use < starts[0]) if until else None)


def on_demand(problem: Problem, stays: Stays) -> Stays:
    """The same stays, each begun when its first reader is next: nothing is copied ahead, or for the next call."""
    late = [part for stay in stays for part in _parts(problem, stay)]
    return tuple(sorted(late, key=lambda stay: (stay.after, stay.weight)))


def _parts(problem: Problem, stay: Stay) -> Iterator[Stay]:
    if stay.is_read:
        yield replace(stay, after=stay.first - 1, until=None)
    if stay.until is not None:
        first = problem.objects[stay.weight].uses[0].step
        yield Stay(stay.weight, first - 1, first, stay.until)


def seconds_of(problem: Problem, stays: Stays) -> float:
    """How long a call takes in which kernels and copies run side by side, and which is over when both are.

    It begins with what the call before has left for it.
    """
    tier, begins = problem.tiers[0], dict[int, list[Stay]]()
    for stay in stays:
        begins.setdefault(stay.after, []).append(stay)
    arrivals: dict[int, float] = {}  # of what a step is the first to read
    copied = now = 0.0
    for index in range(-1, len(problem.steps)):
        if index >= 0:
            now = max(now, arrivals.get(index, 0.0)) + problem.steps[index].seconds
        for stay in begins.get(index, ()):
            copied = max(copied, now) + tier.seconds_in(problem.objects[stay.weight].size_bytes)
            arrivals[stay.first] = max(arrivals.get(stay.first, 0.0), copied)
    return max(now, copied)
