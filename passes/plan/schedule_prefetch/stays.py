"""From a schedule of whole calls to the copies of one stream, each with the steps that it waits for and that wait for it.

A schedule (`passes/plan/prefetch/`) says which copies a call makes, and what is inside as it begins. A weight that a copy brings
is there for its readers up to the next copy of it; where the weight is inside as calls begin, the last copy of one call is there
for the first readers of the next. An activation that leaves is there up to its last use before it comes back.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, compress
from typing import TypeAlias

from ..prefetch.problem import Problem
from ..prefetch.schedule import CopyIn, Schedule


@dataclass(frozen=True, slots=True)
class Stay:
    """An object from its copy in, which may begin when step `after` is complete (-1: with the call), to its last user.

    `first` and `last` of those that use it in this call; none do where `first` is the number of steps. Where `until` is given,
    it stays from the end of the call on to that step of the next one. In the list of steps the copy stands behind step
    `behind`, where that is later than `after`: what stands behind the copy may take over bytes of what left before it.
    """

    object: int
    after: int
    first: int
    last: int
    until: int | None = None
    behind: int = -1

    @property
    def is_read(self) -> bool:
        """In the call that copies it."""
        return self.first <= self.last

    @property
    def position(self) -> int:
        """The step that the copy stands behind."""
        return max(self.after, self.behind)

    @property
    def waiting(self) -> int | None:
        """The step that waits for the copy."""
        return self.first if self.is_read else None


@dataclass(frozen=True, slots=True)
class Leave:
    """An object's value goes out when step `after` is complete, which has written it; step `before` waits for that, for it or
    what stands behind it may take over the object's bytes. None: no step of the call does."""

    object: int
    after: int
    before: int | None
    behind: int = -1

    @property
    def position(self) -> int:
        """The step that the copy stands behind."""
        return max(self.after, self.behind)

    @property
    def waiting(self) -> int | None:
        """The step that waits for the copy."""
        return self.before


Copies: TypeAlias = tuple[Stay | Leave, ...]


def copies_of(problem: Problem, schedule: Schedule) -> Copies:
    """The copies that a schedule makes of weights and activations, in the order in which one stream makes them.

    A copy that waits for the last step of a call is one that the next call begins with. What goes out and never comes back need
    not go.
    """
    count = len(problem.steps)
    starts: dict[int, list[int]] = {}  # of each object, the first users of its stays
    for copy in schedule.copies_in:
        starts.setdefault(copy.object, []).append(copy.before_step % count)
    early = [copy for copy in schedule.copies_in if copy.after_step >= count - 1]
    rest = [copy for copy in schedule.copies_in if copy.after_step < count - 1]
    moved = [replace(copy, after_step=-1, before_step=copy.before_step - count, after_outs=(0,)) for copy in early]
    copies = [*moved, *rest]
    found = [_stay(copy, problem, sorted(starts[copy.object]), copy.object in schedule.inside) for copy in copies]
    begins = accumulate((stay.after for stay in found), max, initial=-1)  # a stream does one after the other
    next(begins)
    stays = [replace(stay, after=after) for stay, after in zip(found, begins, strict=True)]
    is_needed = list(_come_back(schedule, starts))
    leaves = [Leave(out.object, out.after_step, out.before_step) for out in compress(schedule.copies_out, is_needed)]
    if not leaves:
        return tuple(stays)
    return _Turns(problem, stays, [sum(is_needed[: max(copy.after_outs[0], 0)]) for copy in copies], leaves).copies()


def _come_back(schedule: Schedule, starts: dict[int, list[int]]) -> Iterator[bool]:
    """For each copy out, whether what it writes is read before the next one of the same object."""
    for rank, out in enumerate(schedule.copies_out):
        later = (other.after_step for other in schedule.copies_out[rank + 1 :] if other.object == out.object)
        end = next(later, None)
        yield any(out.after_step < start and (end is None or start <= end) for start in starts.get(out.object, ()))


def _stay(copy: CopyIn, problem: Problem, starts: Sequence[int], is_inside: bool) -> Stay:
    """The stay that a copy begins; `starts` are the first users of all stays of its object, in order."""
    uses, count = [use.step for use in problem.objects[copy.object].uses], len(problem.steps)
    start = copy.before_step % count
    end = next((other for other in starts if other > start), count)
    last = max(use for use in uses if start <= use < end)
    after = max(copy.after_step, -1)
    if copy.before_step >= count:
        return Stay(copy.object, after, count, count - 1, until=last)
    until = uses[0] < starts[0] and end == count and is_inside
    return Stay(copy.object, after, start, last, max(use for use in uses if use < starts[0]) if until else None)


class _Turns:
    """Copies in and out as one stream makes them in simulated time: the one of the two that can begin first, then the next.

    A copy in that takes over bytes of what goes out stands behind the step that runs when it begins, and the step after that one
    waits for the copies out that it needs: in simulated time they are over by then.
    """

    def __init__(self, problem: Problem, stays: Sequence[Stay], needs: Sequence[int], leaves: Sequence[Leave]) -> None:
        """`needs`: for each copy in, how many copies out have to be over when it begins."""
        self._problem = problem
        self._stays, self._needs = stays, needs
        self._leaves = list(leaves)
        self._begins: list[float] = []  # of steps
        self._ends: list[float] = []
        self._awaited = 0  # copies out that a step waits for already
        self._arrivals: dict[int, float] = {}  # for each step, when what it waits for is there
        self._pending: dict[int, int] = {}  # and for how many copies it still waits
        copies: Copies = (*stays, *leaves)
        for copy in copies:
            if copy.waiting is not None:
                self._pending[copy.waiting] = self._pending.get(copy.waiting, 0) + 1

    def copies(self) -> Copies:
        order: list[Stay | int] = []  # a copy in, or the number of a copy out
        free, position, ins, outs = 0.0, -1, 0, 0
        while ins < len(self._stays) or outs < len(self._leaves):
            self._run_steps()
            moment, is_out = min(self._ready(free, ins, outs))
            copy = self._leaves[outs] if is_out else self._stays[ins]
            position = max(position, copy.after)
            if isinstance(copy, Stay) and self._needs[ins]:
                position = max(position, bisect_left(self._begins, moment) - 1)
                self._await_leaves(self._needs[ins], position + 1)
            tier, size_bytes = self._problem.tiers[0], self._problem.objects[copy.object].size_bytes
            free = moment + (tier.seconds_out(size_bytes) if is_out else tier.seconds_in(size_bytes))
            if copy.waiting is not None:
                self._arrivals[copy.waiting] = free
                self._pending[copy.waiting] -= 1
            if isinstance(copy, Stay):
                order.append(replace(copy, behind=position))
                ins += 1
            else:
                self._leaves[outs] = replace(copy, behind=position)
                order.append(outs)
                outs += 1
        return tuple(self._leaves[one] if isinstance(one, int) else one for one in order)

    def _await_leaves(self, count: int, step: int) -> None:
        """Let a step, which is no earlier than that of the call before, wait for the first so many copies out, which are over, if
        no earlier one does."""
        for number in range(self._awaited, count):
            leave = self._leaves[number]
            before = min(step, len(self._problem.steps) if leave.before is None else leave.before)
            self._leaves[number] = replace(leave, before=before if before < len(self._problem.steps) else None)
        self._awaited = max(self._awaited, count)

    def _run_steps(self) -> None:
        """Go on to the step that waits for a copy that has not been made."""
        for step in range(len(self._ends), len(self._problem.steps)):
            if self._pending.get(step):
                return
            begin = max(self._ends[-1] if step else 0.0, self._arrivals.get(step, 0.0))
            self._begins.append(begin)
            self._ends.append(begin + self._problem.steps[step].seconds)

    def _ready(self, free: float, ins: int, outs: int) -> Iterator[tuple[float, bool]]:
        """When the next copy in, and the next one out, can begin."""
        if ins < len(self._stays) and self._needs[ins] <= outs and self._stays[ins].after < len(self._ends):
            yield max(free, self._end(self._stays[ins].after)), False
        if outs < len(self._leaves) and self._leaves[outs].after < len(self._ends):
            yield max(free, self._end(self._leaves[outs].after)), True

    def _end(self, step: int) -> float:
        return self._ends[step] if step >= 0 else 0.0


def on_demand(problem: Problem, copies: Copies) -> Copies:
    """The same copies, each made when the step that needs it is next: nothing is copied ahead, or for the next call."""
    late = [part for copy in copies for part in _parts(problem, copy)]
    return tuple(sorted(late, key=lambda copy: (copy.after, isinstance(copy, Stay), copy.object)))


def _parts(problem: Problem, copy: Stay | Leave) -> Iterator[Stay | Leave]:
    if isinstance(copy, Leave):
        yield Leave(copy.object, copy.after, copy.after + 1)
        return
    if copy.is_read:
        yield Stay(copy.object, copy.first - 1, copy.first, copy.last)
    if copy.until is not None:
        first = problem.objects[copy.object].uses[0].step
        yield Stay(copy.object, first - 1, first, copy.until)


def seconds_of(problem: Problem, copies: Copies) -> float:
    """How long a call takes in which kernels and copies run side by side, and which is over when both are.

    It begins with what the call before has left for it.
    """
    tier, begins = problem.tiers[0], dict[int, list[Stay | Leave]]()
    for copy in copies:
        begins.setdefault(copy.position, []).append(copy)
    arrivals: dict[int | None, float] = {}  # of what a step waits for
    ends = {-1: 0.0}
    copied = now = 0.0
    for index in range(-1, len(problem.steps)):
        if index >= 0:
            now = ends[index] = max(now, arrivals.get(index, 0.0)) + problem.steps[index].seconds
        for copy in begins.get(index, ()):
            size_bytes = problem.objects[copy.object].size_bytes
            seconds = tier.seconds_in(size_bytes) if isinstance(copy, Stay) else tier.seconds_out(size_bytes)
            copied = max(copied, ends[copy.after]) + seconds
            arrivals[copy.waiting] = max(arrivals.get(copy.waiting, 0.0), copied)
    return max(now, copied)
