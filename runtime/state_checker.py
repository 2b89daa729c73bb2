"""Whether what a Plan's steps find in memory is there: written before by steps of the same call, or kept from call to call.

States are kept where nothing else lies, and renewed by one buffer at most. A slot has the next call's weight as a call ends, and
shares its bytes with other buffers in between: what one call finds has to be what the one before it has left. As all streams have
come to their ends between two calls, it is enough that each buffer that a call finds is renewed by one in its bytes, and that
copies of one constant fill that. What lies in a file is copied from there in whole pages.

Steps stand in a list in which each comes after what it waits for, so one pass over it tells what has been written. A copy
from or to a scratch file moves whole pages; what it leaves at its destination is written where its source was, and nowhere else.
Who is before whom, and who shares bytes with whom, `plan_checker` decides.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from .memory.regions import first_missing, merged
from .plan import (
    COMPUTE,
    LASTING_ROLES,
    PAGE,
    SCRATCH,
    STATES,
    STORAGE,
    Buffer,
    Copy,
    Plan,
    Region,
    Role,
    Step,
    step_reads,
    step_writes,
)

Found = tuple[str, str]  # where, and what is wrong there


def state_faults(plan: Plan) -> Iterator[Found]:
    """What is wrong with the states of a plan and with their buffers, apart from steps."""
    buffers = {buffer.name: buffer for buffer in plan.buffers}
    kinds = {"state": (state.name for state in plan.states), "state of buffer": (state.buffer for state in plan.states)}
    for kind, names in kinds.items():
        yield from ((f"{kind} {name}", f"{count} have this name") for name, count in Counter(names).items() if count > 1)
    yield from _ports(plan, buffers)
    yield from _renewals(plan, buffers)
    yield from _places(plan)


def _ports(plan: Plan, buffers: Mapping[str, Buffer]) -> Iterator[Found]:
    """Each state has a buffer of its size, what it is at first is a constant of that size, and each such buffer is of a state."""
    for state in plan.states:
        where, buffer = f"state {state.name}", buffers.get(state.buffer)
        if buffer is None or buffer.role is not Role.STATE or buffer.renews is not None:
            yield where, f"its buffer {state.buffer} is no state buffer that a call finds"
        elif buffer.space != STATES:
            yield where, f"its buffer {state.buffer} is in space {buffer.space}, not in {STATES}"
        elif state.type.size_bytes != buffer.size_bytes:
            yield where, f"{state.type} has {state.type.size_bytes} bytes, its buffer {buffer.size_bytes}"
        if state.initial is not None:
            first = buffers.get(state.initial)
            if first is None or first.role is not Role.CONSTANT or first.size_bytes != state.type.size_bytes:
                yield where, f"what it is at first, {state.initial}, is no constant of {state.type.size_bytes} bytes"
    held = {state.buffer for state in plan.states}
    for buffer in plan.buffers:
        if buffer.role is Role.STATE and buffer.renews is None and buffer.name not in held:
            yield f"buffer {buffer.name}", "no state of the program is in it"


def _renewals(plan: Plan, buffers: Mapping[str, Buffer]) -> Iterator[Found]:
    """A buffer that renews a state is its only one, and has its bytes."""
    renewed: dict[str, str] = {}
    for buffer in plan.buffers:
        if buffer.renews is None:
            continue
        where, old = f"buffer {buffer.name}", buffers.get(buffer.renews)
        if buffer.role not in (Role.STATE, Role.SLOT):
            yield where, f"{buffer.role} renews {buffer.renews}, which is no state or slot"
        if old is None or old.role is not buffer.role or old.renews is not None:
            yield where, f"it renews {buffer.renews}, which is no {buffer.role} that a call finds"
        elif (old.space, old.offset, old.size_bytes) != (buffer.space, buffer.offset, buffer.size_bytes):
            yield where, f"it does not have the bytes of {buffer.renews}, which it renews"
        if (other := renewed.setdefault(buffer.renews, buffer.name)) != buffer.name:
            yield where, f"it renews {buffer.renews}, as {other} does"


def _places(plan: Plan) -> Iterator[Found]:
    """States and barriers keep their bytes between calls: they share them with nothing, and their spaces hold nothing else."""
    for space in plan.spaces:
        roles = {buffer.role for buffer in plan.buffers if buffer.space == space.name}
        if len(roles) > 1 and (found := roles.intersection(LASTING_ROLES)):
            yield f"space {space.name}", f"it holds {min(found)}s, which are kept between calls, and other buffers"
    kept = [buffer for buffer in plan.buffers if buffer.role in LASTING_ROLES and buffer.size_bytes and buffer.renews is None]
    placed = sorted(((one.space, one.offset, one) for one in kept if one.offset is not None), key=_start)
    for (name, offset, first), (other, start, second) in pairwise(placed):
        if name == other and offset + first.size_bytes > start:
            yield f"space {name}", f"{first.role}s {first.name} and {second.name} share bytes"


def _start(place: tuple[str, int, Buffer]) -> tuple[str, int]:
    return place[:2]


def slot_faults(plan: Plan) -> Iterator[Found]:
    """What is wrong with the slots of a plan, apart from the order of its steps."""
    slots = {buffer.name: buffer for buffer in plan.buffers if buffer.role is Role.SLOT}
    spaces = {buffer.name: buffer.space for buffer in plan.buffers}
    renewals = Counter(buffer.renews for buffer in slots.values() if buffer.renews is not None)
    for name, buffer in slots.items():
        if buffer.renews is None and renewals[name] != 1:
            yield f"buffer {name}", f"{renewals[name]} buffers renew it for the next call"
    sources: dict[str, set[str]] = {}
    for index, step in enumerate(plan.steps):
        for region in step_writes(step):
            if region.buffer not in slots:
                continue
            if not isinstance(step, Copy) or spaces.get(step.source.buffer) != STORAGE:
                yield f"step {index}", f"it writes {region.buffer}, which copies from the file alone fill"
            elif step.source.offset != region.offset:
                yield f"step {index}", f"it copies to another place of {region.buffer} than where it lies in {step.source.buffer}"
            else:
                sources.setdefault(region.buffer, set()).add(step.source.buffer)
    for name, names in sources.items():
        if len(names) > 1:
            yield f"buffer {name}", f"copies of {', '.join(sorted(names))} fill it, which are different weights"


def storage_faults(plan: Plan) -> Iterator[Found]:
    """What lies in a file is read, and in a scratch file written, by copies beside the kernels, in whole pages to whole pages."""
    buffers = {buffer.name: buffer for buffer in plan.buffers}
    for buffer in plan.buffers:
        if buffer.space == STORAGE and buffer.role is not Role.CONSTANT:
            yield f"buffer {buffer.name}", f"{buffer.role} in a file, which holds constants"
        elif buffer.space == SCRATCH and buffer.role is not Role.ACTIVATION:
            yield f"buffer {buffer.name}", f"{buffer.role} in a scratch file, which holds activations that have left memory"
    filed = {name for name, buffer in buffers.items() if buffer.space in (STORAGE, SCRATCH)}
    for index, step in enumerate(plan.steps):
        stored = [region for region in step_reads(step) + step_writes(step) if region.buffer in filed]
        if len(stored) > 1 and isinstance(step, Copy):
            yield f"step {index}", f"it copies {stored[0].buffer} from file to file"
        if stored and (not isinstance(step, Copy) or step.stream == COMPUTE):
            what = f"{stored[0].buffer} lies in a file, which only copies on other streams than the kernels' read and write"
            yield f"step {index}", what
        elif stored and isinstance(step, Copy):
            source, region = buffers.get(step.source.buffer), step.source
            if source is not None and source.space == STORAGE and (region.offset, region.size_bytes) != (0, source.size_bytes):
                yield f"step {index}", f"it copies a part of {source.name}, which has one checksum"
            for region in (step.source, step.destination):
                offset = buffers[region.buffer].offset if region.buffer in buffers else 0
                if offset is None or (offset + region.offset) % PAGE or region.size_bytes % PAGE:
                    what = f"{region.buffer} is copied from or to where no page of {PAGE} bytes begins or ends"
                    yield f"step {index}", what


@dataclass(frozen=True, slots=True)
class _Written:
    """Bytes that a step has written."""

    step: int
    region: Region


def coverage_faults(plan: Plan, is_before: Callable[[int, int], bool]) -> Iterator[Found]:
    """What a step reads though no step before it has written it, and what the caller or the next call would.

    `is_before` tells whether a step is complete when another one starts.
    """
    buffers = {buffer.name: buffer for buffer in plan.buffers}
    tracked = {one.name for one in plan.buffers if one.role in (Role.ACTIVATION, Role.OUTPUT) or one.renews is not None}
    scratch = {one.name for one in plan.buffers if one.space == SCRATCH}
    written: dict[str, list[_Written]] = defaultdict(list)

    def before(step: int, name: str) -> list[Region]:
        return [one.region for one in written[name] if is_before(one.step, step)]

    for index, step in enumerate(plan.steps):
        if isinstance(step, Copy) and scratch.intersection((step.source.buffer, step.destination.buffer)):
            written[step.destination.buffer] += [_Written(index, one) for one in _moved(step, before(index, step.source.buffer))]
            continue
        yield from _unwritten_reads(index, step, tracked, before)
        for region in step_writes(step):
            written[region.buffer].append(_Written(index, region))
    outputs = {port.buffer: f"output {port.name}" for port in plan.outputs}
    renewed = {one.name: f"{one.role} {one.renews}" for one in plan.buffers if one.renews is not None}
    for name, where in {**outputs, **renewed, **{name: f"extent {name}" for name in plan.counts}}.items():
        missing = first_missing(Region(name, 0, buffers[name].size_bytes), (one.region for one in written[name]))
        if missing is not None:
            yield where, f"byte {missing} is never written"


def _unwritten_reads(index: int, step: Step, tracked: set[str], before: Callable[[int, str], list[Region]]) -> Iterator[Found]:
    for region in step_reads(step):
        if region.buffer in tracked and (missing := first_missing(region, before(index, region.buffer))) is not None:
            yield f"step {index}", f"it reads byte {missing} of {region.buffer}, which no step before it has written"


def _moved(step: Copy, written: Iterable[Region]) -> Iterator[Region]:
    """What a copy leaves at its destination of what has been written of its source."""
    behind = step.destination.offset - step.source.offset
    for region in (one for one in merged(written) if one.rows == 1):
        start = max(region.offset, step.source.offset)
        end = min(region.offset + region.size_bytes, step.source.offset + step.source.size_bytes)
        if start < end:
            yield Region(step.destination.buffer, start + behind, end - start)
