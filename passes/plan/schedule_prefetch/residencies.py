"""Weights and activations that are in memory for part of a call only: which steps of a Plan copy them, what waits for what."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from ....runtime.plan import (
    COMPUTE,
    SCRATCH,
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
)
from .spills import Departure, Return, Spills, whole_pages

COPIES = 1  # the stream of the copies


@dataclass(frozen=True, slots=True)
class Residency:
    """A constant in memory between two steps of a Plan.

    Its copy may begin when step `after` is complete (-1: with the call), and stands behind step `position`; steps `first` to
    `last` read it, none where `first` is behind `last`. With `until`, it is kept for the next call, whose steps up to `until`
    read it.
    """

    constant: str
    after: int
    first: int
    last: int
    until: int | None
    position: int

    @property
    def waiting(self) -> int | None:
        """The step that waits for the copy."""
        return self.first if self.first <= self.last else None


Movement: TypeAlias = Residency | Departure | Return


def with_residencies(plan: Plan, movements: Sequence[Movement], arena: str) -> Plan:
    """The Plan, on the kernels' stream alone so far, with a stream that makes copies beside them, in the order given: of
    constants from the program's file, and of activations to a scratch file and back.

    A residency is a buffer of its own in the space `arena`, in whole pages; one that is kept for the next call is two: what the
    copy of this call fills, and what that of the call before has left. Nothing has a place.
    """
    return _Emission(plan, movements, arena).plan()


class _Emission:
    def __init__(self, plan: Plan, movements: Sequence[Movement], arena: str) -> None:
        self.given = plan
        self.movements = movements
        self.steps: list[Step] = []
        self.events = 0
        self.buffers = {buffer.name: replace(buffer, offset=None) for buffer in plan.buffers}
        self.spills = Spills(plan, {n: one for n, one in enumerate(movements) if not isinstance(one, Residency)}, arena)
        self.buffers |= self.spills.buffers
        self.slots: dict[int, str] = {}
        for number, one in enumerate(movements):
            if not isinstance(one, Residency):
                continue
            stored = self.buffers[one.constant]
            self.buffers[one.constant] = stored = replace(stored, size_bytes=whole_pages(stored.size_bytes), space=STORAGE)
            name = f"{one.constant}@{number}"
            if one.until is None:
                self.buffers[name] = Buffer(name, Role.ACTIVATION, stored.size_bytes, arena)
            else:
                found = f"{name} before"
                self.buffers[found] = Buffer(found, Role.SLOT, stored.size_bytes, arena)
                self.buffers[name] = Buffer(name, Role.SLOT, stored.size_bytes, arena, renews=found)
            self.slots[number] = name

    def plan(self) -> Plan:
        listed: dict[int, list[int]] = {}  # the copies that stand behind a step
        waited: dict[int, int] = {}  # the last copy that a step waits for
        passed: dict[int, int] = {}  # the event of a step that copies wait for
        awaited = -1  # the last copy that the kernels have waited for
        for number, one in enumerate(self.movements):
            listed.setdefault(one.position, []).append(number)
            if one.waiting is not None:
                assert one.waiting > one.position, f"{one} is waited for before it begins"
                waited[one.waiting] = number
        arrived = {number: self._event() for number in range(len(self.movements))}
        places, begun = self._places(), -1  # the last step that the copies have waited for
        for index in range(-1, len(self.given.steps)):
            if index >= 0:
                if waited.get(index, -1) > awaited:
                    awaited = waited[index]
                    self.steps.append(Wait(arrived[awaited], COMPUTE))
                self.steps.append(_moved(self.given.steps[index], partial(self._region, index, places.get(index, {}))))
                passed[index] = self._event()
                self.steps.append(Record(passed[index], COMPUTE))
            for number in listed.get(index, ()):
                if (after := self.movements[number].after) > begun:
                    begun = after
                    self.steps.append(Wait(passed[after], COPIES))
                self.steps += [*self._copies(number), Record(arrived[number], COPIES)]
        spaces = [replace(space, size_bytes=0) for space in self.given.spaces] + [Space(STORAGE)]
        spaces += [Space(SCRATCH)] if self.spills.buffers else []
        steps = _without_idle_records(self.steps)
        return replace(self.given, steps=steps, buffers=tuple(self.buffers.values()), spaces=tuple(spaces))

    def _places(self) -> dict[int, dict[str, str]]:
        """For each step that reads constants out of slots, which: those that this call fills, and those of the call before."""
        found: dict[int, dict[str, str]] = {}
        for number, name in self.slots.items():
            one = self.movements[number]
            assert isinstance(one, Residency)
            for index in range(0 if one.until is None else one.until + 1):
                found.setdefault(index, {})[one.constant] = f"{name} before"
        for number, name in self.slots.items():
            one = self.movements[number]
            assert isinstance(one, Residency)
            for index in range(one.first, one.last + 1):
                found.setdefault(index, {})[one.constant] = name
        return found

    def _region(self, index: int, places: Mapping[str, str], region: Region) -> Region:
        """Where step `index` finds a region of the Plan that was given."""
        return self.spills.place(replace(region, buffer=places.get(region.buffer, region.buffer)), index)

    def _copies(self, number: int) -> Iterator[Copy]:
        one = self.movements[number]
        if not isinstance(one, Residency):
            for source, destination in self.spills.pairs[number]:
                yield Copy(source, destination, COPIES)
        else:
            slot = self.slots[number]
            size_bytes = self.buffers[slot].size_bytes
            yield Copy(Region(one.constant, 0, size_bytes), Region(slot, 0, size_bytes), COPIES)

    def _event(self) -> int:
        self.events += 1
        return self.events - 1


def _without_idle_records(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Steps without the events that nothing waits for."""
    awaited = {step.event for step in steps if isinstance(step, Wait)}
    return tuple(step for step in steps if not isinstance(step, Record) or step.event in awaited)


def _moved(step: Step, place: Callable[[Region], Region]) -> Step:
    """A step that finds its buffers at other places."""
    match step:
        case Launch():
            return replace(step, reads=tuple(map(place, step.reads)), writes=tuple(map(place, step.writes)))
        case Host():
            return replace(step, reads=tuple(map(place, step.reads)), writes=tuple(map(place, step.writes)))
        case Copy():
            return replace(step, source=place(step.source), destination=place(step.destination))
        case _:
            raise AssertionError(f"a step {type(step).__name__} uses nothing")
