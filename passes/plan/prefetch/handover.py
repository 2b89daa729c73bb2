"""Which copy waits for what: bytes are handed over from what was used last to what comes next.

The order of a simulation's events says who frees bytes and who takes them. Whoever takes bytes waits for those that were free
first; so the waits, and not the times, keep the memory within its limit.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .events import Boundary, Event
from .problem import Problem
from .schedule import CopyIn, CopyOut, Drop, Schedule


@dataclass(frozen=True, slots=True, order=True)
class _Free:
    """Bytes that are free since a moment: once a step and a number of each tier's copies out were complete."""

    moment: int
    size_bytes: int
    step: int
    outs: tuple[int, ...]


def scheduled(problem: Problem, events: Sequence[Event], boundary: Boundary, seconds: float) -> Schedule:
    """The schedule of a call with these events that begins, and ends, with what the boundary says."""
    inside, dirty = boundary.inside, boundary.dirty
    order = _Order(problem, inside)
    # What is taken as a call begins was freed in the one before, and what is freed as it ends is taken in the next one: of three
    # equal calls, the second one says who waits for whom.
    for _ in range(3 if problem.is_periodic else 1):
        order.run(events)
    call = len(order.calls) // 2
    copies_in, copies_out, drops = order.calls[call]
    step = call * len(problem.steps)
    outs = [sum(copy.tier == tier for before in order.calls[:call] for copy in before[1]) for tier in range(len(problem.tiers))]
    staying = inside - {copy.object for copy in copies_in} - {drop.object for drop in drops}
    return Schedule(
        tuple(
            replace(
                copy,
                after_step=copy.after_step - step,
                before_step=copy.before_step - step,
                after_outs=tuple(count - before for count, before in zip(copy.after_outs, outs, strict=True)),
            )
            for copy in copies_in
        ),
        tuple(
            replace(
                copy, after_step=copy.after_step - step, before_step=None if copy.before_step is None else copy.before_step - step
            )
            for copy in copies_out
        ),
        tuple(replace(drop, after_step=drop.after_step - step) for drop in drops),
        inside,
        dirty,
        frozenset(j for j in staying if not problem.dies(problem.objects[j])),
        seconds,
    )


class _Order:
    """Calls with equal events, one after the other. Steps and copies out are counted over all of them."""

    def __init__(self, problem: Problem, inside: frozenset[int]) -> None:
        self._problem = problem
        self._sizes = [item.size_bytes for item in problem.objects]
        self._touched: list[list[tuple[int, bool, bool]]] = [[] for _ in problem.steps]
        for j, item in enumerate(problem.objects):
            for use in item.uses:
                is_last = use is item.uses[-1] and problem.dies(item)
                self._touched[use.step].append((j, use.is_written, is_last))
        self._inside = set(inside)
        self._begun = 0  # steps
        self._moment = 0  # events
        self._since = dict.fromkeys(range(len(self._sizes)), -1)  # the moment of an object's last use or copy out
        self._last_use = dict.fromkeys(self._since, -1)
        self._last_write = dict.fromkeys(self._since, -1)
        self._last_out: dict[int, tuple[int, int]] = {}  # its tier, and the number of copies out with it
        self._leaving: set[int] = set()
        self._doomed: set[int] = set()
        self._outs: list[list[CopyOut]] = [[] for _ in problem.tiers]
        self._nothing = (0,) * len(problem.tiers)
        self._inner = _Pool(problem.limit_bytes - sum(self._sizes[j] for j in inside), len(problem.tiers))
        self._outer = [_Pool(tier.capacity_bytes, len(problem.tiers)) for tier in problem.tiers]
        self._stored: dict[int, int] = {}  # the tier of what was born inside and went out
        self.calls: list[tuple[list[CopyIn], list[CopyOut], list[Drop]]] = []
        self._places: list[list[tuple[list[CopyOut], int]]] = [[] for _ in problem.tiers]

    def run(self, events: Sequence[Event]) -> None:
        self.calls.append(([], [], []))
        for event in events:
            self._moment += 1
            if event.what == "begin":
                self._begin()
            elif event.what == "end":
                self._end()
            elif event.what == "in":
                self._come_in(event.index, event.tier)
            elif event.what == "drop":
                self._drop(event.index)
            elif event.what == "out":
                self._go_out(event.index, event.tier)
            else:
                self._written(event.index)
        for j in sorted(self._leaving):  # as the call ends; who takes their bytes waits for it
            self._written(j)

    def _begin(self) -> None:
        here = self._begun % len(self._problem.steps)
        needed = self._problem.steps[here].workspace_bytes
        for j, is_written, _ in self._touched[here]:
            if j not in self._inside:
                self._inside.add(j)
                needed += self._sizes[j]
            elif is_written and j in self._last_out:
                self._wait_for_out(*self._last_out[j])
        for tier, count in enumerate(self._inner.take(needed)[1]):
            self._wait_for_out(tier, count)
        self._begun += 1

    def _wait_for_out(self, tier: int, count: int) -> None:
        """The step that begins waits for so many copies out; an earlier one may do so already."""
        if count:
            copies, place = self._places[tier][count - 1]
            if copies[place].before_step is None:
                copies[place] = replace(copies[place], before_step=self._begun)

    def _end(self) -> None:
        step = self._begun - 1
        here = step % len(self._problem.steps)
        self._inner.give(_Free(self._moment, self._problem.steps[here].workspace_bytes, step, self._nothing))
        for j, is_written, is_last in self._touched[here]:
            self._since[j], self._last_use[j] = self._moment, step
            if is_written:
                self._last_write[j] = step
            if is_last and j in self._leaving:
                self._doomed.add(j)
            elif is_last:
                self._leave(j)
                self._forget(j)

    def _come_in(self, j: int, tier: int) -> None:
        step, outs = self._inner.take(self._sizes[j])
        if j in self._last_out:
            outs = self._with_out(j, outs)  # the value that comes in is what that copy wrote
        due = self._next_use(j)
        if not self._problem.objects[j].is_kept:
            step = max(step, due - due % len(self._problem.steps) - 1)  # an input is there when its call begins
        self.calls[-1][0].append(CopyIn(j, max(step, self._last_use[j]), due, outs, tier))
        self._inside.add(j)

    def _next_use(self, j: int) -> int:
        uses = [use.step for use in self._problem.objects[j].uses]
        call, here = divmod(self._begun, len(self._problem.steps))
        rank = bisect_left(uses, here)
        return (call + rank // len(uses)) * len(self._problem.steps) + uses[rank % len(uses)]

    def _drop(self, j: int) -> None:
        after = self._last_use[j]
        if j in self._last_out:
            tier, count = self._last_out[j]
            copies, place = self._places[tier][count - 1]
            after = max(after, copies[place].after_step)
        self.calls[-1][2].append(Drop(j, after))
        self._leave(j)

    def _leave(self, j: int) -> None:
        self._inside.discard(j)
        outs = self._with_out(j, self._nothing) if j in self._last_out else self._nothing
        self._inner.give(_Free(self._since[j], self._sizes[j], self._last_use[j], outs))

    def _with_out(self, j: int, outs: tuple[int, ...]) -> tuple[int, ...]:
        tier, count = self._last_out[j]
        return (*outs[:tier], max(outs[tier], count), *outs[tier + 1 :])

    def _forget(self, j: int) -> None:
        """What is dead needs no place in its tier."""
        self._last_out.pop(j, None)
        if j in self._stored:
            self._outer[self._stored.pop(j)].give(_Free(self._moment, self._sizes[j], self._last_use[j], self._nothing))

    def _go_out(self, j: int, tier: int) -> None:
        copies = self.calls[-1][1]
        self._places[tier].append((copies, len(copies)))
        after = self._last_write[j]
        if not self._problem.objects[j].is_outside and j not in self._stored:
            self._stored[j] = tier
            after = max(after, self._outer[tier].take(self._sizes[j])[0])
        copies.append(CopyOut(j, after, None, tier))
        self._last_out[j] = (tier, len(self._places[tier]))
        self._leaving.add(j)

    def _written(self, j: int) -> None:
        self._leaving.discard(j)
        self._since[j] = self._moment
        if j in self._doomed:
            self._doomed.remove(j)
            self._leave(j)
            self._forget(j)


class _Pool:
    """Bytes of a memory that are free, and since when; None: there is no end of them."""

    def __init__(self, size_bytes: int | None, tiers: int) -> None:
        self._nothing = (0,) * tiers
        self._free: list[_Free] | None = None if size_bytes is None else [_Free(-1, size_bytes, -1, self._nothing)]

    def give(self, free: _Free) -> None:
        if free.size_bytes and self._free is not None:
            heapq.heappush(self._free, free)

    def take(self, size_bytes: int) -> tuple[int, tuple[int, ...]]:
        """The bytes that have been free for the longest time, and what is complete when they are: a step, and copies out."""
        step, outs = -1, self._nothing
        while size_bytes > 0 and self._free is not None:
            free = heapq.heappop(self._free)
            step, outs = max(step, free.step), tuple(map(max, outs, free.outs))
            if free.size_bytes > size_bytes:
                heapq.heappush(self._free, replace(free, size_bytes=free.size_bytes - size_bytes))
            size_bytes -= free.size_bytes
        return step, outs
