"""Carries out a schedule in simulated time and looks for what is wrong with it. It trusts nothing that made the schedule.

Streams do nothing but wait for what the schedule says; then bytes are counted in the order of time. Replayed with a problem
whose steps and tiers take other times, a schedule has to be as right as before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from .problem import Problem
from .schedule import CopyIn, CopyOut, Drop, Schedule
from .timeline import Span, Timeline

_Change: TypeAlias = tuple[float, int, str]  # a moment, bytes that come (or go, if negative), and what they are


@dataclass(frozen=True, slots=True)
class Replay:
    """What happened in the last call (in the only one, of a problem that is not periodic), and all faults of all calls.

    `stalls`: for each step, the seconds that it waited for copies. `busy_in`, `busy_out`: seconds in which each tier's stream
    copied. `bytes_in`, `bytes_out`: copied in a call. `peak_bytes`: most that was ever inside.
    """

    seconds: float
    stalls: tuple[float, ...]
    busy_in: tuple[float, ...]
    busy_out: tuple[float, ...]
    bytes_in: int
    bytes_out: int
    peak_bytes: int
    faults: tuple[str, ...]


def replay(problem: Problem, schedule: Schedule, calls: int = 4) -> Replay:
    """What becomes of a schedule; of a periodic problem's, in so many calls one after the other."""
    calls = calls if problem.is_periodic else 1
    if fault := _misfit(problem, schedule):
        return _failed(fault)
    timeline = Timeline(problem, schedule, calls)
    if fault := timeline.run():
        return _failed(fault)
    memory = _Memory(timeline)
    memory.check()
    count = len(problem.steps)
    last = timeline.steps[(calls - 1) * count :]
    begin = timeline.steps[(calls - 1) * count - 1].end if calls > 1 else 0.0
    ends = [begin, *(span.end for span in last)]
    sizes = [item.size_bytes for item in problem.objects]
    busy_in, busy_out = [0.0] * len(problem.tiers), [0.0] * len(problem.tiers)
    for copy in schedule.copies_in:
        busy_in[copy.tier] += problem.tiers[copy.tier].seconds_in(sizes[copy.object])
    for out in schedule.copies_out:
        busy_out[out.tier] += problem.tiers[out.tier].seconds_out(sizes[out.object])
    return Replay(
        seconds=ends[-1] - begin,
        stalls=tuple(span.begin - before for span, before in zip(last, ends, strict=False)),
        busy_in=tuple(busy_in),
        busy_out=tuple(busy_out),
        bytes_in=sum(sizes[copy.object] for copy in schedule.copies_in),
        bytes_out=sum(sizes[copy.object] for copy in schedule.copies_out),
        peak_bytes=memory.peak_bytes,
        faults=tuple(memory.faults),
    )


def _failed(fault: str) -> Replay:
    return Replay(0.0, (), (), (), 0, 0, 0, (fault,))


def _misfit(problem: Problem, schedule: Schedule) -> str:
    """Why a schedule is none of this problem at all."""
    leaving = {drop.object for drop in schedule.drops}
    coming = {copy.object for copy in schedule.copies_in}
    written = {copy.object for copy in schedule.copies_out}
    named = leaving.union(coming, written, schedule.inside, schedule.dirty, schedule.residents)
    if any(not 0 <= j < len(problem.objects) for j in named):
        return "the schedule names an object that the problem does not have"
    tiers = {copy.tier for copy in schedule.copies_in}.union(copy.tier for copy in schedule.copies_out)
    if any(not 0 <= tier < len(problem.tiers) for tier in tiers):
        return "the schedule names a tier that the problem does not have"
    if any(len(copy.after_outs) != len(problem.tiers) for copy in schedule.copies_in):
        return "a copy waits for copies out of other tiers than the problem has"
    if not schedule.dirty <= schedule.inside:
        return "what is dirty as a call begins is not inside"
    if moved := schedule.residents & (coming | leaving):
        return f"object {min(moved)} is a resident, but moves"
    if any(problem.dies(problem.objects[j]) for j in schedule.inside):
        return "something that is dead between calls is inside as one begins"
    return ""


@dataclass(frozen=True, slots=True)
class _Event:
    """A copy in, use, copy out or drop of an object; those of one step come in the order of their rank."""

    step: int
    rank: int
    item: CopyIn | CopyOut | Drop | bool  # of a use, whether it writes
    span: Span

    @property
    def key(self) -> tuple[int, int]:
        return self.step, self.rank


class _Memory:
    """Follows each object through all calls, then counts bytes in the order of time."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.problem = timeline.problem
        self.faults: list[str] = []
        self.peak_bytes = 0
        self.changes: list[_Change] = []
        self.outside: list[list[_Change]] = [[] for _ in self.problem.tiers]

    def check(self) -> None:
        for j, events in self._events().items():
            _Object(self, j).follow(sorted(events, key=lambda event: event.key))
        for step, span in enumerate(self.timeline.steps):
            here = step % self.timeline.count
            self.hold(span.begin, span.end, self.problem.steps[here].workspace_bytes, f"the workspace of step {here}")
        self.peak_bytes = self._most(self.changes, self.problem.limit_bytes, "inside")
        for tier, changes in enumerate(self.outside):
            self._most(changes, self.problem.tiers[tier].capacity_bytes, f"in tier {tier}")

    def hold(self, begin: float, end: float | None, size_bytes: int, what: str) -> None:
        """Bytes are inside from one moment to another; None: to the end."""
        self.changes.append((begin, size_bytes, what))
        if end is not None:
            self.changes.append((end, -size_bytes, what))

    def _most(self, changes: Iterable[_Change], limit_bytes: int | None, where: str) -> int:
        """The most bytes at any moment. At one moment, those that go do so before others come."""
        now = most = 0
        for moment, size, what in sorted(changes):
            now += size
            if limit_bytes is not None and now > max(most, limit_bytes):
                self.faults.append(f"{now} bytes {where} at {moment} s, with {what}")
            most = max(most, now)
        return most

    def _events(self) -> dict[int, list[_Event]]:
        line, count = self.timeline, self.timeline.count
        events: dict[int, list[_Event]] = defaultdict(list)
        for tier in range(len(self.problem.tiers)):
            for (call, copy), span in zip(line.ins[tier], line.spans_in[tier], strict=False):
                events[copy.object].append(_Event(call * count + copy.before_step, 0, copy, span))
            for (call, out), span in zip(line.outs[tier], line.spans_out[tier], strict=False):
                events[out.object].append(_Event(call * count + out.after_step, 2, out, span))
        for call in range(line.calls):
            first = call * count
            for drop in line.schedule.drops:
                events[drop.object].append(_Event(first + drop.after_step, 3, drop, Span(0.0, 0.0)))
            for j, item in enumerate(self.problem.objects):
                events[j].extend(_Event(first + u.step, 1, u.is_written, line.steps[first + u.step]) for u in item.uses)
        return events


class _Object:
    """An object on its way through the events of all calls."""

    def __init__(self, memory: _Memory, index: int) -> None:
        self.memory = memory
        self.index = index
        self.item = memory.problem.objects[index]
        schedule = memory.timeline.schedule
        self.is_inside = index in schedule.inside
        self.is_dirty = index in schedule.dirty
        self.has_value = self.item.is_outside  # outside
        self.tier = 0  # of that value
        self.begin = 0.0  # of its bytes inside
        self.ready = 0.0  # the end of its copy in
        self.used = 0.0  # the end of its last use
        self.out = 0.0  # the end of its last copy out
        self.stored: tuple[int, float] | None = None  # of what is born inside: the tier, and since when it is there

    def follow(self, events: list[_Event]) -> None:
        last = self.item.uses[-1].step if self.item.uses else 0
        for event in events:
            if isinstance(event.item, CopyIn):
                self._come_in(event.item, event)
            elif isinstance(event.item, CopyOut):
                self._go_out(event.item, event)
            elif isinstance(event.item, Drop):
                self._drop()
            else:
                self._use(event.item, event)
                if event.step % self.memory.timeline.count == last and self.memory.problem.dies(self.item):
                    self._die()
        if self.is_inside:
            self.memory.hold(self.begin, None, self.item.size_bytes, f"object {self.index}")

    def _fault(self, what: str) -> None:
        self.memory.faults.append(f"object {self.index} {what}")

    def _come_in(self, copy: CopyIn, event: _Event) -> None:
        if self.is_inside:
            self._fault(f"comes in for step {copy.before_step} while it is inside")
            return
        if not self.has_value:
            self._fault(f"comes in for step {copy.before_step}, but has no value outside")
        if copy.tier != self.tier:
            self._fault(f"comes in from tier {copy.tier}, but lies in tier {self.tier}")
        if event.span.begin < self.out:
            self._fault(f"comes in for step {copy.before_step} before it has been written out")
        call = event.step // self.memory.timeline.count
        if not self.item.is_kept and self.item.is_outside and call and event.span.begin < self._call_begin(call):
            self._fault("is an input of a call, but comes in before the call begins")
        self.is_inside, self.is_dirty = True, False
        self.begin, self.ready, self.used = event.span.begin, event.span.end, event.span.end

    def _call_begin(self, call: int) -> float:
        return self.memory.timeline.steps[call * self.memory.timeline.count - 1].end

    def _use(self, is_written: bool, event: _Event) -> None:
        step = event.step % self.memory.timeline.count
        if not self.is_inside:
            if self.item.is_outside or step != self.item.uses[0].step:
                self._fault(f"is used by step {step} while it is absent")
                return
            self.is_inside, self.begin, self.ready = True, event.span.begin, event.span.begin
        if event.span.begin < self.ready:
            self._fault(f"is used by step {step} before it has arrived")
        if is_written and event.span.begin < self.out:
            self._fault(f"is written by step {step} while it goes out")
        self.is_dirty |= is_written
        self.used = event.span.end

    def _go_out(self, copy: CopyOut, event: _Event) -> None:
        if not self.is_inside:
            self._fault(f"goes out after step {copy.after_step} while it is absent")
            return
        if event.span.begin < self.ready:
            self._fault(f"goes out after step {copy.after_step} before it has arrived")
        self.is_dirty, self.has_value, self.tier, self.out = False, True, copy.tier, event.span.end
        if not self.item.is_outside and self.stored is None:
            self.stored = (copy.tier, event.span.begin)

    def _drop(self) -> None:
        if not self.is_inside:
            self._fault("is dropped while it is absent")
            return
        if self.is_dirty:
            self._fault("is dropped while it is newer than its value outside")
        self._free()

    def _die(self) -> None:
        if self.is_inside:
            self._free()
        if self.stored:
            tier, since = self.stored
            self.memory.outside[tier].append((since, self.item.size_bytes, f"object {self.index}"))
            self.memory.outside[tier].append((max(self.used, self.out), -self.item.size_bytes, f"object {self.index}"))
        self.stored, self.is_dirty, self.has_value, self.tier = None, False, self.item.is_outside, 0
        self.out = 0.0  # what is born in the next call has other bytes

    def _free(self) -> None:
        self.memory.hold(self.begin, max(self.used, self.out), self.item.size_bytes, f"object {self.index}")
        self.is_inside = False
