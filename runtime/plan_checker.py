"""Whether a Plan is right, decided from the Plan alone: it shares no code with what plans, and trusts none of it.

Order means happens-before: steps of one stream run in order, and a `Wait` runs after the `Record` of its event. Every step gets a
vector clock: how many steps of each stream are complete when it starts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from .gpu.tensor_maps import BLOCK_SHARED_BYTES, tensor_map_fault
from .memory.regions import close_between, close_pairs, region_fault
from .plan import (
    ALIGNMENT,
    DIMENSIONS,
    SHARED,
    VECTOR_ALIGNMENT,
    Buffer,
    Copy,
    Grid,
    Kernel,
    Launch,
    Plan,
    Port,
    Record,
    Region,
    Role,
    Step,
    Wait,
    step_reads,
    step_writes,
)
from .state_checker import coverage_faults, slot_faults, state_faults, storage_faults
from .symbolic.size_text import size_faults

_COUNT_BYTES = 8  # one int64
_BLOCK_THREADS = 1024  # of any GPU
_AMD_GRID_THREADS = 2**32  # that a dispatch cannot count
_MOST_STREAMS = 16  # each step has a clock of each
_CALLER_ROLES = (Role.INPUT, Role.OUTPUT)
_ARENA_ROLES = (Role.ACTIVATION, Role.WORKSPACE, Role.SLOT)
_SCRATCH_ROLES = (Role.WORKSPACE, Role.BARRIER)
_KEPT_ROLES = (Role.STATE, Role.SLOT)  # of what one call leaves for the next


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong in a plan, and where."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


def check_plan(plan: Plan) -> tuple[Fault, ...]:
    """Everything that is wrong with a plan whose memory is planned; empty for a sound one.

    Names and sizes come first; where those are wrong, order and sharing are not looked at.
    """
    return tuple(plan_faults(plan))


def plan_faults(plan: Plan) -> Iterator[Fault]:
    """The faults of `check_plan`, of which a stranger's plan may have as many as the square of its size: take the first."""
    buffers = {buffer.name: buffer for buffer in plan.buffers}
    faults = [*_check_names(plan), *_check_buffers(plan), *_check_ports(plan, buffers), *_check_steps(plan, buffers)]
    faults += (Fault(where, what) for where, what in (*state_faults(plan), *slot_faults(plan), *storage_faults(plan)))
    streams = len({step.stream for step in plan.steps})
    if streams > _MOST_STREAMS:
        faults.append(Fault("plan", f"its steps are on {streams} streams, of {_MOST_STREAMS} at most"))
    if faults:
        yield from faults
        return
    schedule = _Schedule(plan)
    for check in (_check_overlap_in_steps, _check_single_writes, _check_coverage, _check_races, _check_sharing):
        yield from check(schedule)


# Names, sizes, roles


def _check_names(plan: Plan) -> Iterator[Fault]:
    kinds: Mapping[str, Iterable[str]] = {
        "space": (space.name for space in plan.spaces),
        "buffer": (buffer.name for buffer in plan.buffers),
        "kernel": (kernel.symbol for kernel in plan.kernels),
        "input": (port.name for port in plan.inputs),
        "output": (port.name for port in plan.outputs),
        "port of buffer": plan.parameters,
    }
    for kind, names in kinds.items():
        yield from (Fault(f"{kind} {name}", f"{count} have this name") for name, count in Counter(names).items() if count > 1)


def _check_buffers(plan: Plan) -> Iterator[Fault]:
    spaces = {space.name: space for space in plan.spaces}
    roles: dict[str, set[Role]] = defaultdict(set)
    for buffer in plan.buffers:
        where = f"buffer {buffer.name}"
        space = spaces.get(buffer.space)
        if space is None:
            yield Fault(where, f"its space {buffer.space} does not exist")
        if buffer.size_bytes < 0:
            yield Fault(where, f"its size is {buffer.size_bytes} bytes")
        if buffer.role in _CALLER_ROLES:
            if buffer.offset is not None:
                yield Fault(where, f"{buffer.role} belongs to the caller and has an offset")
            continue
        roles[buffer.space].add(buffer.role)
        if buffer.space == SHARED:
            if (buffer.role, buffer.offset) != (Role.CONSTANT, None):
                yield Fault(where, "what is shared is a constant, at an address of its own")
        elif buffer.offset is None:
            yield Fault(where, "it has no offset")
        elif buffer.offset < 0 or buffer.offset % ALIGNMENT:
            yield Fault(where, f"its offset {buffer.offset} is not a multiple of {ALIGNMENT}")
        elif space and buffer.offset + buffer.size_bytes > space.size_bytes:
            yield Fault(where, f"it ends at {buffer.offset + buffer.size_bytes}; space {space.name} has {space.size_bytes} bytes")
    for space in plan.spaces:
        if space.capacity_bytes is not None and space.size_bytes > space.capacity_bytes:
            yield Fault(f"space {space.name}", f"{space.size_bytes} bytes are more than its capacity {space.capacity_bytes}")
        if Role.CONSTANT in roles[space.name] and len(roles[space.name]) > 1:
            yield Fault(f"space {space.name}", "it holds constants, which all contexts share, and buffers of one context")


def _check_ports(plan: Plan, buffers: Mapping[str, Buffer]) -> Iterator[Fault]:
    held = set(plan.parameters)
    for role, ports in ((Role.INPUT, plan.inputs), (Role.OUTPUT, plan.outputs)):
        for port in ports:
            where, buffer = f"{role} {port.name}", buffers.get(port.buffer)
            if buffer is None or buffer.role is not role:
                yield Fault(where, f"its buffer {port.buffer} is no {role} buffer")
            elif port.type.size_bytes != buffer.size_bytes:
                yield Fault(where, f"{port.type} has {port.type.size_bytes} bytes, its buffer {buffer.size_bytes}")
            yield from _check_extents(where, port, buffers)
            sizes = [(sized.axis, sized.text) for sized in port.sizes]
            yield from (Fault(where, what) for what in size_faults(sizes, port.type.shape, plan.dims))
    table = buffers.get(DIMENSIONS)
    if plan.dims and (table is None or table.role is not Role.INPUT or table.size_bytes != 4 * len(plan.dims)):
        yield Fault(f"buffer {DIMENSIONS}", f"it is no input of {len(plan.dims)} numbers of 32 bits")
    given = {sized.text for port in plan.inputs for sized in port.sizes}
    yield from (Fault(f"dimension {dim.name}", "no axis of an input has its size") for dim in plan.dims if dim.name not in given)
    for buffer in plan.buffers:
        if buffer.role in _CALLER_ROLES and buffer.name not in held:
            yield Fault(f"buffer {buffer.name}", f"no {buffer.role} of the program is in it")


def _check_extents(where: str, port: Port, buffers: Mapping[str, Buffer]) -> Iterator[Fault]:
    """Only outputs have extents, one an axis, each in a buffer for one int64 that the program writes."""
    if port.extents and where.startswith(Role.INPUT):
        yield Fault(where, "an input has no extents")
    axes = [extent.axis for extent in port.extents]
    if len(set(axes)) < len(axes) or not all(0 <= axis < len(port.type.shape) for axis in axes):
        yield Fault(where, f"its extents are of the axes {axes}, it has {len(port.type.shape)}")
    for extent in port.extents:
        buffer = buffers.get(extent.buffer)
        if buffer is None or buffer.role is not Role.OUTPUT or buffer.size_bytes != _COUNT_BYTES:
            yield Fault(where, f"its extent {extent.buffer} is no output buffer of {_COUNT_BYTES} bytes")


def _check_steps(plan: Plan, buffers: Mapping[str, Buffer]) -> Iterator[Fault]:
    kernels = {kernel.symbol: kernel for kernel in plan.kernels}
    recorded: set[int] = set()
    for index, step in enumerate(plan.steps):
        where = f"step {index}"
        for region in step_reads(step) + step_writes(step):
            yield from _check_region(where, region, buffers)
            if region.rows > 1 and not (isinstance(step, Launch) and not _has_grids(step, kernels)):
                yield Fault(where, f"rows of {region.buffer} have a pitch, which kernels of CPUs alone know of")
        for region in step_writes(step):
            buffer = buffers.get(region.buffer)
            if buffer and (buffer.role in (Role.CONSTANT, Role.INPUT) or (buffer.role in _KEPT_ROLES and buffer.renews is None)):
                yield Fault(where, f"it writes {buffer.name}, which is {buffer.role}")
        match step:
            case Launch():
                arguments = len(step.reads) + len(step.writes) + len(step.scratch)
                if step.kernel not in kernels:
                    yield Fault(where, f"its kernel {step.kernel} does not exist")
                elif kernels[step.kernel].arguments != arguments:
                    yield Fault(where, f"kernel {step.kernel} takes {kernels[step.kernel].arguments} arguments, not {arguments}")
                yield from _check_inplace(where, step)
                if step.inplace and step.kernel in kernels and len(kernels[step.kernel].grids) > 1:
                    yield Fault(where, "several grids run in place: one may read what another has overwritten")
            case Copy():
                if step.source.size_bytes != step.destination.size_bytes:
                    yield Fault(where, f"it copies {step.source.size_bytes} bytes to {step.destination.size_bytes}")
            case Record():
                if step.event in recorded:
                    yield Fault(where, f"event {step.event} is recorded a second time")
                recorded.add(step.event)
            case Wait():
                if step.event not in recorded:
                    yield Fault(where, f"it waits for event {step.event}, which no earlier step records")
    yield from _check_workspaces(plan, buffers)
    yield from _check_grids(plan)


def _has_grids(step: Launch, kernels: Mapping[str, Kernel]) -> bool:
    return step.kernel in kernels and bool(kernels[step.kernel].grids)


def _check_region(where: str, region: Region, buffers: Mapping[str, Buffer]) -> Iterator[Fault]:
    buffer = buffers.get(region.buffer)
    if buffer is None:
        yield Fault(where, f"buffer {region.buffer} does not exist")
    elif what := region_fault(region, buffer.size_bytes):
        yield Fault(where, what)


def _check_grids(plan: Plan) -> Iterator[Fault]:
    """Launches that no GPU has, operands where vectors do not begin, tensor maps that see more than their operand."""
    kernels = {kernel.symbol: kernel for kernel in plan.kernels if kernel.grids}
    grids = [(kernel, grid) for kernel in kernels.values() for grid in kernel.grids]
    yield from (
        Fault(f"kernel {kernel.symbol}", what) for kernel, grid in grids for what in _grid_faults(kernel, grid, plan.target)
    )
    launches = [(number, step) for number, step in enumerate(plan.steps) if isinstance(step, Launch) and step.kernel in kernels]
    for number, step in launches:
        for region in (*step.reads, *step.writes):
            if region.offset % VECTOR_ALIGNMENT:
                yield Fault(f"step {number}", f"{region} begins at no multiple of {VECTOR_ALIGNMENT} bytes")
        regions = (*step.reads, *step.writes, *step.scratch)
        for one in (one for grid in kernels[step.kernel].grids for one in grid.maps if one.argument < len(regions)):
            if not tensor_map_fault(one) and one.size_bytes > regions[one.argument].size_bytes:
                yield Fault(f"step {number}", f"a tensor map sees {one.size_bytes} bytes of {regions[one.argument]}")


def _grid_faults(kernel: Kernel, grid: Grid, target: str) -> Iterator[str]:
    if not (0 < grid.blocks < 2**31 and 0 < grid.threads <= _BLOCK_THREADS and 0 <= grid.shared_bytes <= BLOCK_SHARED_BYTES):
        yield f"no device runs {grid.blocks} blocks of {grid.threads} threads with {grid.shared_bytes} bytes of shared memory"
    elif target.startswith("rocm") and grid.blocks * grid.threads >= _AMD_GRID_THREADS:
        yield f"no AMD GPU runs {grid.blocks} blocks of {grid.threads} threads, which are 2^32 or more"
    for one in grid.maps:
        if not 0 <= one.argument < kernel.arguments:
            yield f"a tensor map is of pointer {one.argument}, of {kernel.arguments}"
        elif what := tensor_map_fault(one):
            yield f"the tensor map of pointer {one.argument} {what}"


def _check_inplace(where: str, step: Launch) -> Iterator[Fault]:
    for write, read in step.inplace:
        if not (0 <= write < len(step.writes) and 0 <= read < len(step.reads)):
            yield Fault(where, f"in-place pair {write}={read} names no write and read of it")


def _check_workspaces(plan: Plan, buffers: Mapping[str, Buffer]) -> Iterator[Fault]:
    """Scratch is a workspace or a barrier, and these are scratch, of one step each."""
    owner: dict[str, int] = {}
    for index, step in enumerate(plan.steps):
        scratch = {region.buffer for region in step.scratch} if isinstance(step, Launch) else set()
        for name in dict.fromkeys(region.buffer for region in step_reads(step) + step_writes(step)):
            role = buffers[name].role if name in buffers else None
            is_private = role in _SCRATCH_ROLES
            if is_private and name not in scratch:
                yield Fault(f"step {index}", f"{name} is a {role}, used as data")
            elif name in scratch and not is_private:
                yield Fault(f"step {index}", f"{name} is no workspace or barrier, used as scratch")
            elif is_private and owner.setdefault(name, index) != index:
                yield Fault(f"step {index}", f"{role} {name} belongs to step {owner[name]}")


# Order


class _Schedule:
    """Who uses which bytes, and which steps are before which.

    `before[i]` counts, for each stream, the steps that are complete when step i starts; `position[i]` is the place of step i in
    its own stream. Streams are numbered in the order of their first step.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.buffers = {buffer.name: buffer for buffer in plan.buffers}
        self.uses = _uses(plan.steps)
        numbers = {stream: number for number, stream in enumerate(dict.fromkeys(step.stream for step in plan.steps))}
        self.streams = len(numbers)
        self.stream = [numbers[step.stream] for step in plan.steps]
        self.position: list[int] = []
        self.before: list[tuple[int, ...]] = []
        clocks = [[0] * self.streams for _ in numbers]
        events: dict[int, list[int]] = {}
        for step, number in zip(plan.steps, self.stream, strict=True):
            clock = clocks[number]
            self.before.append(tuple(clock))
            self.position.append(clock[number])
            clock[number] += 1
            if isinstance(step, Record):
                events[step.event] = clock.copy()
            elif isinstance(step, Wait):
                clocks[number] = [max(own, other) for own, other in zip(clock, events[step.event], strict=True)]

    def is_before(self, first: int, second: int) -> bool:
        """Whether step `first` is complete when step `second` starts."""
        return self.position[first] < self.before[second][self.stream[first]]

    def place(self, region: Region) -> Region:
        """The region in its space; a caller's buffer is a space of its own."""
        buffer = self.buffers[region.buffer]
        if buffer.offset is None:
            return replace(region, buffer=f"buffer {buffer.name}")
        return replace(region, buffer=f"space {buffer.space}", offset=buffer.offset + region.offset)


@dataclass(frozen=True, slots=True)
class _Use:
    step: int
    region: Region
    is_write: bool


def _uses(steps: Sequence[Step]) -> dict[str, list[_Use]]:
    """Uses of each buffer, in the order of the steps."""
    uses: dict[str, list[_Use]] = defaultdict(list)
    for index, step in enumerate(steps):
        for regions, is_write in ((step_reads(step), False), (step_writes(step), True)):
            for region in regions:
                uses[region.buffer].append(_Use(index, region, is_write))
    return dict(uses)


def _check_coverage(schedule: _Schedule) -> Iterator[Fault]:
    """Every byte read was written by a step before, and every output is written."""
    yield from (Fault(where, what) for where, what in coverage_faults(schedule.plan, schedule.is_before))


def _check_races(schedule: _Schedule) -> Iterator[Fault]:
    """A write and another use of the same bytes of a buffer are ordered."""
    if schedule.streams == 1:
        return
    for name, uses in schedule.uses.items():
        if not any(use.is_write for use in uses):  # of many readers of one place there are as many pairs as their number squared
            continue
        for pair in close_pairs([(use.region, use) for use in uses]):
            first, second = sorted(pair, key=lambda use: use.step)
            conflicts = (first.is_write or second.is_write) and first.step != second.step
            if conflicts and not schedule.is_before(first.step, second.step):
                yield Fault(f"step {second.step}", f"its use of {name} is not ordered with that of step {first.step}")


# Sharing of bytes


def _check_overlap_in_steps(schedule: _Schedule) -> Iterator[Fault]:
    """What a step writes shares no byte with anything else it uses, except in an in-place pair at the same address."""
    for index, step in enumerate(schedule.plan.steps):
        reads = list(map(schedule.place, step_reads(step)))
        writes = list(map(schedule.place, step_writes(step)))
        pairs = set(step.inplace) if isinstance(step, Launch) else set()
        numbered = [(write, number) for number, write in enumerate(writes)]
        for number, _ in close_pairs(numbered):
            yield Fault(f"step {index}", f"two of its writes share bytes of {writes[number].buffer}")
        for number, place in close_between(numbered, [(read, place) for place, read in enumerate(reads)]):
            if reads[place] != writes[number] or (number, place) not in pairs:
                yield Fault(f"step {index}", f"its write {number} and read {place} share bytes of {writes[number].buffer}")


def _check_single_writes(schedule: _Schedule) -> Iterator[Fault]:
    """No step overwrites a byte of a buffer that another step has written there: parts of a buffer are of different values.

    One fault a buffer tells it: of many writes to one place there are as many pairs as the square of their number.
    """
    for name, uses in schedule.uses.items():
        for first, second in close_pairs([(use.region, use) for use in uses if use.is_write]):
            if first.step != second.step:
                steps = sorted((first.step, second.step))
                what = f"it overwrites byte {second.region.offset} of {name}, which is of step {steps[0]}"
                yield Fault(f"step {steps[1]}", what)
                break


def _check_sharing(schedule: _Schedule) -> Iterator[Fault]:
    """Of each byte that two buffers share every use by one is before every use by the other, but for in-place pairs.

    Of a state the old value is first.
    """
    for new in schedule.plan.buffers:
        old = new.renews
        if old is not None and not _follows_in_place(old, new.name, schedule):
            yield Fault(f"{new.role} {old}", f"{new.name} is written where a step may still read the old value")
    for space in schedule.plan.spaces:
        placed = [buffer for buffer in schedule.plan.buffers if buffer.space == space.name and buffer.size_bytes]
        placed = sorted((buffer for buffer in placed if buffer.offset is not None), key=_offset)
        for first, second in pairwise(buffer for buffer in placed if buffer.role is Role.CONSTANT):
            if _offset(first) + first.size_bytes > _offset(second):
                yield Fault(f"space {space.name}", f"constants {first.name} and {second.name} share bytes")
        used = [buffer for buffer in placed if buffer.role in _ARENA_ROLES and buffer.name in schedule.uses]
        for one, other in _unordered_overlaps(used, schedule):
            if not (_hands_over(one, other, schedule) or _hands_over(other, one, schedule)):
                yield Fault(f"space {space.name}", f"{one} and {other} share bytes while both are in use")


def _offset(buffer: Buffer) -> int:
    assert buffer.offset is not None
    return buffer.offset


def _unordered_overlaps(buffers: Sequence[Buffer], schedule: _Schedule) -> Iterator[tuple[str, str]]:
    """Pairs of buffers, which are sorted by offset, that share bytes and are not used strictly one after the other."""
    last = np.full((len(buffers), schedule.streams), -1, np.int64)  # position of the last use in each stream
    earliest = np.empty((len(buffers), schedule.streams), np.int64)  # steps complete before any use
    for row, buffer in enumerate(buffers):
        steps = [use.step for use in schedule.uses[buffer.name]]
        for step in steps:
            last[row, schedule.stream[step]] = max(last[row, schedule.stream[step]], schedule.position[step])
        earliest[row] = np.min([schedule.before[step] for step in steps], axis=0)
        if buffer.role is Role.SLOT:  # what a call finds is in use from its beginning, what it leaves to its end
            (earliest if buffer.renews is None else last)[row] = 0 if buffer.renews is None else len(schedule.plan.steps)
    offsets = np.array([_offset(buffer) for buffer in buffers], np.int64)
    ends = np.searchsorted(offsets, [_offset(buffer) + buffer.size_bytes for buffer in buffers])
    for row, end in enumerate(ends):
        others = slice(row + 1, int(end))
        is_after = (last[row] < earliest[others]).all(axis=1)
        is_before = (last[others] < earliest[row]).all(axis=1)
        for other in np.flatnonzero(~(is_after | is_before)):
            yield buffers[row].name, buffers[row + 1 + int(other)].name


def _hands_over(first: str, second: str, schedule: _Schedule) -> bool:
    """Whether `second` may take over bytes of `first`: not before the call, and not of what the next one finds."""
    one, other = schedule.buffers[first], schedule.buffers[second]
    is_left, is_found = (one.role is Role.SLOT and one.renews is not None, other.role is Role.SLOT and other.renews is None)
    return not (is_left or is_found) and _follows_in_place(first, second, schedule)


def _follows_in_place(first: str, second: str, schedule: _Schedule) -> bool:
    """Whether each byte's uses as one of `first` are before those as one of `second`, but for a step that renews it in place."""
    uses = [[(schedule.place(use.region), use) for use in schedule.uses.get(name, ())] for name in (first, second)]
    return all(
        schedule.is_before(earlier.step, later.step) or _is_in_place(earlier, later, schedule)
        for earlier, later in close_between(*uses)
    )


def _is_in_place(read: _Use, write: _Use, schedule: _Schedule) -> bool:
    step = schedule.plan.steps[read.step]
    return (
        read.step == write.step
        and isinstance(step, Launch)
        and any(step.writes[w] == write.region and step.reads[r] == read.region for w, r in step.inplace)
        and schedule.place(read.region) == schedule.place(write.region)
    )
