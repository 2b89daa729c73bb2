"""What goes wrong in two calls of a Plan: decided by carrying it out on named bytes, and looking at each pair of steps.

A call is over when all its streams are. What is written is who wrote it: the buffer, and the place in it; so what a step reads
is right where each place holds what was meant for it. A slot and a state hold in the second call what the first has left there.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from prefuse.runtime.plan import (
    SCRATCH,
    STORAGE,
    Buffer,
    Copy,
    Launch,
    Plan,
    Record,
    Region,
    Role,
    Step,
    Wait,
    step_reads,
    step_writes,
)

_UNIT = 64  # bytes


def faults_of_two_calls(plan: Plan) -> Iterator[str]:
    """What is wrong with a plan whose regions begin and end at multiples of 64 bytes, and each Record stands before its Waits."""
    yield from _races(plan)
    yield from _Memory(plan).faults()


def _races(plan: Plan) -> Iterator[str]:
    """Two steps that may run in either order and use the same bytes, one of which writes; and events that nobody records."""
    after: list[set[int]] = []  # for each step those that are over when it begins
    last: dict[int, int] = {}
    recorded: dict[int, int] = {}
    for index, step in enumerate(plan.steps):
        known: set[int] = set()
        if (before := last.get(step.stream)) is not None:
            known |= after[before] | {before}
        if isinstance(step, Wait):
            if step.event not in recorded:
                yield f"step {index} waits for nothing"
                return
            known |= after[recorded[step.event]] | {recorded[step.event]}
        if isinstance(step, Record):
            recorded[step.event] = index
        last[step.stream] = index
        after.append(known)
    buffers = {buffer.name: buffer for buffer in plan.buffers}
    reads = [[place for one in step_reads(step) for place in _places(buffers, one)] for step in plan.steps]
    writes = [[place for one in step_writes(step) for place in _places(buffers, one)] for step in plan.steps]
    for second in range(len(plan.steps)):
        for first in range(second):
            if first not in after[second] and (
                _meet(writes[first], reads[second] + writes[second]) or _meet(reads[first], writes[second])
            ):
                yield f"steps {first} and {second} race"


def _places(buffers: dict[str, Buffer], region: Region) -> Iterator[tuple[str, int, int]]:
    """Where each row of a region begins and ends."""
    buffer = buffers[region.buffer]
    space = buffer.name if buffer.offset is None else f"space {buffer.space}"
    for row in range(region.rows):
        start = (buffer.offset or 0) + region.offset + row * region.pitch
        yield space, start, start + region.size_bytes // region.rows


def _meet(some: list[tuple[str, int, int]], others: list[tuple[str, int, int]]) -> bool:
    return any(one[0] == other[0] and one[1] < other[2] and other[1] < one[2] for one in some for other in others)


class _Memory:
    """What each unit of each space holds: a number of a buffer's value, and a place in it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.buffers = {buffer.name: buffer for buffer in plan.buffers}
        numbers = {name: (number + 1) << 32 for number, name in enumerate(self.buffers)}
        # What a call finds is, in the second call, what the first one left; a slot holds the weight that is copied there.
        self.numbers = numbers | {b.name: numbers[b.renews] for b in plan.buffers if b.renews is not None and b.role is Role.SLOT}
        self.meant = self._weights()
        self.spaces = {space.name: np.zeros(-(-space.size_bytes // _UNIT), np.int64) for space in plan.spaces}
        self.own = {b.name: np.zeros(-(-b.size_bytes // _UNIT), np.int64) for b in plan.buffers if b.offset is None}

    def _weights(self) -> dict[str, int]:
        """The number of the value that each buffer is meant to hold: of a copy of a weight, or of what has left, that of its
        source."""
        meant = dict(self.numbers)
        for step in self.plan.steps:
            if isinstance(step, Copy) and {self._space(step.source), self._space(step.destination)} & {STORAGE, SCRATCH}:
                source, made = step.source.buffer, step.destination.buffer
                meant[made] = meant[source] if step.source.offset == step.destination.offset else -1
                if (renewed := self.buffers[made].renews) is not None:
                    meant[renewed] = meant[made]
        return meant

    def _space(self, region: Region) -> str:
        return self.buffers[region.buffer].space

    def _units(self, region: Region) -> np.ndarray:
        """The units of each row of a region, as they are in memory: assigning to them writes there."""
        buffer = self.buffers[region.buffer]
        memory = self.own[buffer.name] if buffer.offset is None else self.spaces[buffer.space]
        return _rows(memory[(buffer.offset or 0) // _UNIT :], region)

    def _expected(self, region: Region) -> np.ndarray:
        return self.meant[region.buffer] + _rows(np.arange(-(-region.end // _UNIT)), region)

    def faults(self) -> Iterator[str]:
        for buffer in self.plan.buffers:
            whole = Region(buffer.name, 0, buffer.size_bytes)
            if buffer.role in (Role.INPUT, Role.CONSTANT) or (buffer.role in (Role.STATE, Role.SLOT) and buffer.renews is None):
                self._units(whole)[:] = self._expected(whole)
        yield from self._call("first")
        for buffer in self.plan.buffers:  # the new value of a state is the old one of the next call
            if buffer.role is Role.STATE and buffer.renews is not None:
                whole = Region(buffer.name, 0, buffer.size_bytes)
                if not np.array_equal(self._units(whole), self._expected(whole)):
                    yield f"{buffer.renews} is not renewed"
                self._units(whole)[:] = self._expected(Region(buffer.renews, 0, buffer.size_bytes))
        yield from self._call("second")

    def _call(self, name: str) -> Iterator[str]:
        for index, step in enumerate(self.plan.steps):
            if isinstance(step, Copy) and SCRATCH in (self._space(step.source), self._space(step.destination)):
                self._units(step.destination)[:] = self._units(step.source)  # whole pages, some of which nobody has written
                continue
            for region in step_reads(step):
                if not np.array_equal(self._units(region), self._expected(region)):
                    yield f"step {index} of the {name} call reads wrong bytes of {region.buffer}"
            for region in step_writes(step):
                self._units(region)[:] = self._written(step, region)
            if isinstance(step, Launch):
                for region in step.scratch:
                    self._units(region)[:] = 0
        for port in self.plan.outputs:
            whole = Region(port.buffer, 0, self.buffers[port.buffer].size_bytes)
            if not np.array_equal(self._units(whole), self._expected(whole)):
                yield f"output {port.name} of the {name} call is not written"
            self._units(whole)[:] = 0

    def _written(self, step: Step, region: Region) -> np.ndarray:
        """A copy of a weight brings what is there."""
        if isinstance(step, Copy) and self._space(step.source) == STORAGE:
            return self._units(step.source).copy()
        return self._expected(region)


def _rows(memory: np.ndarray, region: Region) -> np.ndarray:
    """Units of a region's rows in those of its buffer; a last one may be a part."""
    begin, width = region.offset // _UNIT, -(-(region.size_bytes // region.rows) // _UNIT)
    if region.rows == 1:
        return memory[begin : -(-region.end // _UNIT)]
    assert region.offset % _UNIT == region.pitch % _UNIT == 0
    strides = (region.pitch // _UNIT * memory.itemsize, memory.itemsize)
    return np.lib.stride_tricks.as_strided(memory[begin:], (region.rows, width), strides)
