"""Weights that are in memory for part of a call only: which steps of a Plan copy them, and what waits for what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ....runtime.plan import (
    COMPUTE,
    PAGE,
    STORAGE,
    Buffer,
    Copy,
    Host,
    Launch,
    Plan,
    Record,
    Region,
    Role,
    Space,
    Step,
    Wait,
    step_reads,
)

COPIES = 1  # the stream of the copies


@dataclass(frozen=True, slots=True)
class Residency:
    """A constant in memory between two steps of a Plan.

    Its copy may begin when step `after` is complete (-1: with the call); steps `first` to `last` read it, none where `first` is
    behind `last`. With `until`, it is kept for the next call, whose steps up to `until` read it.
    """

    constant: str
    after: int
    first: int
    last: int
    until: int | None = None


def with_residencies(plan: Plan, residencies: Sequence[Residency], arena: str) -> Plan:
    """The Plan, on the kernels' stream alone so far, that copies constants from the program's file, in the order given.

    A residency is a buffer of its own in the space `arena`, in whole pages; one that is kept for the next call is two: what the
    copy of this call fills, and what that of the call before has left. Nothing has a place.
    """
    return _Emission(plan, residencies, arena).plan()


class _Emission:
    def __init__(self, plan: Plan, residencies: Sequence[Residency], arena: str) -> None:
        self.given = plan
        self.residencies = residencies
        self.arena = arena
        self.steps: list[Step] = []
        self.events = 0
        self.buffers = {buffer.name: replace(buffer, offset=None) for buffer in plan.buffers}
        self.slots: list[str] = []
        for number, one in enumerate(residencies):
            stored = self.buffers[one.constant]
            self.buffers[one.constant] = stored = replace(stored, size_bytes=whole_pages(stored.size_bytes), space=STORAGE)
            name = f"{one.constant}@{number}"
            if one.until is None:
                self.buffers[name] = Buffer(name, Role.ACTIVATION, stored.size_bytes, arena)
            else:
                found = f"{name} before"
                self.buffers[found] = Buffer(found, Role.SLOT, stored.size_bytes, arena)
                self.buffers[name] = Buffer(name, Role.SLOT, stored.size_bytes, arena, renews=found)
            self.slots.append(name)

    def plan(self) -> Plan:
        begins: dict[int, list[int]] = {}  # the copies that may begin after a step
        reads: dict[int, dict[str, int]] = {}  # which residency of a constant a step reads
        found: dict[int, dict[str, str]] = {}  # and which buffer, where the call before has copied it
        for number, one in enumerate(self.residencies):
            begins.setdefault(one.after, []).append(number)
            for index in range(one.first, one.last + 1):
                reads.setdefault(index, {})[one.constant] = number
            for index in range(0 if one.until is None else one.until + 1):
                found.setdefault(index, {})[one.constant] = f"{self.slots[number]} before"
        arrived, awaited = dict[int, int](), -1  # the event of each copy; the last copy that the kernels have waited for
        for index in range(-1, len(self.given.steps)):
            if index >= 0:
                step = self.given.steps[index]
                names = {region.buffer for region in step_reads(step)}
                read = {name: number for name, number in reads.get(index, {}).items() if name in names}
                kept = {name: slot for name, slot in found.get(index, {}).items() if name in names}
                if (last := max(read.values(), default=-1)) > awaited:
                    self.steps.append(Wait(arrived[last], COMPUTE))
                    awaited = last
                self.steps.append(_reading(step, {**kept, **{name: self.slots[number] for name, number in read.items()}}))
            for position, number in enumerate(begins.get(index, ())):
                if position == 0 and index >= 0:
                    event = self._event()
                    self.steps += [Record(event, COMPUTE), Wait(event, COPIES)]
                arrived[number] = self._copy(number)
        spaces = tuple(replace(space, size_bytes=0) for space in self.given.spaces)
        steps = _without_idle_records(self.steps)
        return replace(self.given, steps=steps, buffers=tuple(self.buffers.values()), spaces=(*spaces, Space(STORAGE)))

    def _copy(self, number: int) -> int:
        """Append a copy; return the event of its arrival."""
        one, slot = self.residencies[number], self.slots[number]
        size_bytes, event = self.buffers[slot].size_bytes, self._event()
        self.steps += [Copy(Region(one.constant, 0, size_bytes), Region(slot, 0, size_bytes), COPIES), Record(event, COPIES)]
        return event

    def _event(self) -> int:
        self.events += 1
        return self.events - 1


def _without_idle_records(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Steps without the events that nothing waits for."""
    awaited = {step.event for step in steps if isinstance(step, Wait)}
    return tuple(step for step in steps if not isinstance(step, Record) or step.event in awaited)


def _reading(step: Step, places: Mapping[str, str]) -> Step:
    """A step that reads buffers at other places."""
    if not places:
        return step

    def moved(region: Region) -> Region:
        return replace(region, buffer=places.get(region.buffer, region.buffer))

    match step:
        case Launch() | Host():
            return replace(step, reads=tuple(map(moved, step.reads)))
        case Copy():
            return replace(step, source=moved(step.source))
        case _:
            raise AssertionError(f"a step {type(step).__name__} reads nothing")


def whole_pages(size_bytes: int) -> int:
    """The bytes that a constant takes in the file, and in memory when it is copied."""
    return -(-size_bytes // PAGE) * PAGE
