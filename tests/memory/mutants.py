"""Plans of streamed programs with one thing wrong, each kind in all ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import TypeAlias

from prefuse.runtime.plan import (
    ALIGNMENT,
    ARENA_ROLES,
    COMPUTE,
    PAGE,
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

Mutate: TypeAlias = Callable[[Plan], Iterator[Plan]]


def with_steps(plan: Plan, steps: list[Step]) -> Plan:
    return replace(plan, steps=tuple(steps))


def copies_of(plan: Plan) -> list[int]:
    return [index for index, step in enumerate(plan.steps) if isinstance(step, Copy) and step.stream != COMPUTE]


def without_events(plan: Plan) -> Iterator[Plan]:
    """A Wait is missing; or a Record, and what waits for it."""
    for index, step in enumerate(plan.steps):
        if isinstance(step, Wait):
            yield with_steps(plan, [one for number, one in enumerate(plan.steps) if number != index])
        elif isinstance(step, Record):
            gone = {number for number, one in enumerate(plan.steps) if isinstance(one, Wait) and one.event == step.event}
            yield with_steps(plan, [one for number, one in enumerate(plan.steps) if number not in {index, *gone}])


def with_earlier_copies(plan: Plan) -> Iterator[Plan]:
    """A copy begins before what it waits for."""
    for index in copies_of(plan):
        if index and isinstance(plan.steps[index - 1], Wait):
            steps = list(plan.steps)
            steps[index - 1], steps[index] = steps[index], steps[index - 1]
            yield with_steps(plan, steps)


def with_later_copies(plan: Plan) -> Iterator[Plan]:
    """The arrival of a copy is recorded before the copy."""
    for index in copies_of(plan):
        recorded = [step for step in plan.steps[index + 1 : index + 2] if isinstance(step, Record)]
        if recorded:  # none waits for a copy that is for the next call
            yield with_steps(plan, [*plan.steps[:index], *recorded, plan.steps[index], *plan.steps[index + 2 :]])


def with_swapped_slots(plan: Plan) -> Iterator[Plan]:
    """Two copies arrive where the other one is waited for."""
    for one, other in combinations(copies_of(plan), 2):
        steps = list(plan.steps)
        first, second = steps[one], steps[other]
        assert isinstance(first, Copy)
        assert isinstance(second, Copy)
        steps[one] = replace(first, destination=second.destination)
        steps[other] = replace(second, destination=first.destination)
        yield with_steps(plan, steps)


def with_shifted_slots(plan: Plan) -> Iterator[Plan]:
    """A slot lies elsewhere: on bytes of another, outside of the arena, or within a page."""
    slots = {step.destination.buffer for step in plan.steps if isinstance(step, Copy) and step.stream != COMPUTE}
    arena = {buffer.name: buffer for buffer in plan.buffers if buffer.name in slots}
    for name, buffer in arena.items():
        assert buffer.offset is not None
        for offset in (buffer.offset - 64, buffer.offset + 64, plan.space(buffer.space).size_bytes):
            yield _with_buffer(plan, replace(arena[name], offset=offset))


def with_short_copies(plan: Plan) -> Iterator[Plan]:
    """A copy leaves out the last page of a weight."""
    for index in copies_of(plan):
        step = plan.steps[index]
        assert isinstance(step, Copy)
        size = step.source.size_bytes - PAGE
        steps = list(plan.steps)
        source, destination = (Region(region.buffer, region.offset, size) for region in (step.source, step.destination))
        steps[index] = Copy(source, destination, step.stream)
        yield with_steps(plan, steps)


def with_less_capacity(plan: Plan) -> Iterator[Plan]:
    """The arena has less room than it takes."""
    spaces = (replace(one, capacity_bytes=one.size_bytes - 1) if one.name == "arena" else one for one in plan.spaces)
    yield replace(plan, spaces=tuple(spaces))


def with_direct_reads(plan: Plan) -> Iterator[Plan]:
    """A kernel reads what lies in the file, or a kernel's own stream copies it."""
    stored = next(buffer for buffer in plan.buffers if buffer.space == STORAGE)
    for index, step in enumerate(plan.steps):
        steps = list(plan.steps)
        if isinstance(step, Copy) and step.stream != COMPUTE:
            steps[index] = replace(step, stream=COMPUTE)
            yield with_steps(plan, steps)
        elif isinstance(step, Launch):
            reads = (Region(stored.name, 0, step.reads[0].size_bytes), *step.reads[1:])
            steps[index] = replace(step, reads=reads)
            yield with_steps(plan, steps)


def slots_of(plan: Plan) -> list[tuple[Buffer, Buffer]]:
    """What a call finds, and what it leaves there."""
    buffers = {buffer.name: buffer for buffer in plan.buffers}
    return [(buffers[left.renews], left) for left in plan.buffers if left.role is Role.SLOT and left.renews is not None]


def with_broken_seams(plan: Plan) -> Iterator[Plan]:
    """What a call finds is not what the one before it has left there: nothing, something else, or elsewhere."""
    stored = [buffer for buffer in plan.buffers if buffer.space == STORAGE]
    for found, left in slots_of(plan):
        assert left.offset is not None
        yield _with_buffer(plan, replace(left, role=Role.ACTIVATION, renews=None))
        yield _with_buffer(plan, replace(left, offset=left.offset + PAGE))
        yield replace(plan, buffers=(*plan.buffers, replace(left, name="another")))
        index = next(i for i in copies_of(plan) if step_writes(plan.steps[i])[0].buffer == left.name)
        half = left.size_bytes // 2
        other = next((one.name for one in stored if one.name != stored[0].name and one.size_bytes >= left.size_bytes), None)
        if other is not None and half % PAGE == 0 and stored[0].size_bytes >= half:
            parts = [
                Copy(Region(source, start, half), Region(left.name, start, half), plan.steps[index].stream)
                for start, source in ((0, stored[0].name), (half, other))
            ]
            yield with_steps(plan, [*plan.steps[:index], *parts, *plan.steps[index + 1 :]])
        yield with_steps(plan, [step for number, step in enumerate(plan.steps) if number != index])
        reader = next(i for i, step in enumerate(plan.steps) if any(r.buffer == found.name for r in step_reads(step)))
        yield with_steps(plan, [*plan.steps[: index + 1], plan.steps[reader], *plan.steps[index + 1 :]])


def with_shared_seams(plan: Plan) -> Iterator[Plan]:
    """Something else lies in a slot before what a call finds there is read, or after what it leaves there has come."""
    uses: dict[str, list[int]] = {}
    for index, step in enumerate(plan.steps):
        for region in step_reads(step) + step_writes(step):
            uses.setdefault(region.buffer, []).append(index)
    for found, left in slots_of(plan):
        for buffer in plan.buffers:
            is_met = buffer.role is Role.ACTIVATION and (
                min(uses[buffer.name]) < max(uses[found.name]) or max(uses[buffer.name]) > min(uses[left.name])
            )
            if is_met:
                yield _with_buffer(plan, replace(buffer, offset=left.offset))


def with_shared_scratch(plan: Plan) -> Iterator[Plan]:
    """Two activations lie in the same bytes of the scratch file while both are there."""
    outside = [buffer for buffer in plan.buffers if buffer.space == SCRATCH]
    uses = {buffer.name: _uses(plan, buffer.name) for buffer in outside}
    for one, other in combinations(outside, 2):
        if uses[one.name][0] < uses[other.name][-1] and uses[other.name][0] < uses[one.name][-1]:
            yield _with_buffer(plan, replace(one, offset=other.offset))


def with_kept_bytes(plan: Plan) -> Iterator[Plan]:
    """What leaves lies where the step that waits for its copy writes, but that does not wait."""
    for index, step in enumerate(plan.steps):
        if isinstance(step, Wait) and step.stream == COMPUTE:
            yield with_steps(plan, [*plan.steps[:index], *plan.steps[index + 1 :], step])


def with_resident_scratch(plan: Plan) -> Iterator[Plan]:
    """A kernel uses what is out of memory, or a kernel's own stream copies it, or it is no activation."""
    for index, step in enumerate(plan.steps):
        steps = list(plan.steps)
        if isinstance(step, Copy) and step.stream != COMPUTE:
            steps[index] = replace(step, stream=COMPUTE)
            yield with_steps(plan, steps)
    buffers = {buffer.name: buffer for buffer in plan.buffers}
    for buffer in plan.buffers:
        if buffer.space == SCRATCH:
            yield _with_buffer(plan, replace(buffer, role=Role.WORKSPACE))
            source = next(s for s in plan.steps if isinstance(s, Copy) and s.destination.buffer == buffer.name).source.buffer
            yield _with_buffer(plan, replace(buffers[source], space=SCRATCH))


def _uses(plan: Plan, name: str) -> list[int]:
    """The steps that use a buffer."""
    return [n for n, step in enumerate(plan.steps) if any(r.buffer == name for r in step_reads(step) + step_writes(step))]


def _with_buffer(plan: Plan, changed: Buffer) -> Plan:
    return replace(plan, buffers=tuple(changed if buffer.name == changed.name else buffer for buffer in plan.buffers))


def with_swapped_steps(plan: Plan) -> Iterator[Plan]:
    """Two steps of a stream run in the other order, with nothing of that stream between them."""
    by_stream: dict[int, list[int]] = {}
    for index, step in enumerate(plan.steps):
        by_stream.setdefault(step.stream, []).append(index)
    for indices in by_stream.values():
        for first, second in pairwise(indices):
            steps = list(plan.steps)
            steps[first], steps[second] = steps[second], steps[first]
            yield with_steps(plan, steps)


def with_moved_copies(plan: Plan) -> Iterator[Plan]:
    """A copy begins before others of its stream, and before what they wait for."""
    for index in copies_of(plan):
        for place in range(index):
            steps = list(plan.steps)
            steps.insert(place, steps.pop(index))
            yield with_steps(plan, steps)


def with_short_lives(plan: Plan) -> Iterator[Plan]:
    """A buffer takes over the bytes of another one that is still in use."""
    spans: dict[str, list[int]] = {}
    for index, step in enumerate(plan.steps):
        for region in step_reads(step) + step_writes(step):
            spans.setdefault(region.buffer, []).append(index)
    placed = [one for one in plan.buffers if one.role in ARENA_ROLES and one.offset is not None and one.name in spans]
    for old in placed:
        for new in placed:
            if (
                old.space == new.space
                and old.offset != new.offset
                and spans[old.name][0] < spans[new.name][0] <= spans[old.name][-1]
            ):
                yield _with_buffer(plan, replace(new, offset=old.offset))


def with_moved_buffers(plan: Plan) -> Iterator[Plan]:
    """A buffer of a context lies elsewhere."""
    for buffer in plan.buffers:
        if buffer.role in ARENA_ROLES and buffer.offset is not None:
            for step in (-PAGE, -ALIGNMENT, ALIGNMENT, PAGE):
                yield _with_buffer(plan, replace(buffer, offset=buffer.offset + step))


# Any of these may leave a plan right: by chance it may still be in order.
MUTATIONS: Sequence[Mutate] = (
    without_events,
    with_earlier_copies,
    with_later_copies,
    with_swapped_slots,
    with_shifted_slots,
    with_broken_seams,
    with_shared_seams,
    with_shared_scratch,
    with_kept_bytes,
    with_swapped_steps,
    with_moved_copies,
    with_short_lives,
    with_moved_buffers,
)
