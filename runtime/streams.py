"""The streams of a Plan beside the kernels': what they do, and the semaphores on which they meet the kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .errors import ProgramFileError
from .plan import ARENA_ROLES, COMPUTE, SCRATCH, STORAGE, Buffer, Copy, Plan, Record, Role, Wait
from .streaming.copier import Await, CopyStreams, Fetch, Leave, Move, Operation, Post, Return


@dataclass(frozen=True, slots=True)
class Waits:
    """A semaphore for each Wait of a Plan that waits for another stream: by its step, and all of those that a Record posts."""

    by_step: Mapping[int, int]
    by_event: Mapping[int, Sequence[int]]

    def number(self, step: int) -> int:
        """The semaphore on which a Wait waits."""
        return self.by_step[step]

    def of_event(self, event: int) -> Sequence[int]:
        """The semaphores that a Record posts."""
        return self.by_event.get(event, ())


def waits_of(plan: Plan) -> Waits:
    """Number the semaphores of a Plan."""
    by_step: dict[int, int] = {}
    by_event: dict[int, list[int]] = {step.event: [] for step in plan.steps if isinstance(step, Record)}
    for index, step in enumerate(plan.steps):
        if isinstance(step, Wait):
            by_event[step.event].append(len(by_step))
            by_step[index] = len(by_step)
    return Waits(by_step, by_event)


def slot_copies(plan: Plan) -> tuple[Copy, ...]:
    """The copies of weights for the next call: a first call, for which none has made them, makes them itself before all else."""
    renewed = {buffer.name for buffer in plan.buffers if buffer.role is Role.SLOT and buffer.renews is not None}
    return tuple(step for step in plan.steps if isinstance(step, Copy) and step.destination.buffer in renewed)


def copy_streams(plan: Plan) -> CopyStreams:
    """Prepare the streams of a sound Plan.

    Raises:
        ProgramFileError: they do what no thread beside the kernels can.
    """
    waits = waits_of(plan)
    buffers = {buffer.name: buffer for buffer in plan.buffers}
    streams: dict[int, list[Operation]] = {}
    for index, step in enumerate(plan.steps):
        if step.stream == COMPUTE:
            continue
        operations = streams.setdefault(step.stream, [])
        if isinstance(step, Wait):
            operations.append(Await(waits.number(index)))
        elif isinstance(step, Record):
            operations.append(Post(tuple(waits.of_event(step.event))))
        else:
            move = _move(index, step, buffers) if isinstance(step, Copy) else None
            if move is None:
                what = f"step {index} on stream {step.stream} is no copy from the program's file, or from or to a scratch file"
                raise ProgramFileError("plan", what, "compile the model again")
            operations.append(move)
    first = tuple(_fetch(plan.steps.index(step), step, buffers) for step in slot_copies(plan))
    return CopyStreams(tuple(map(tuple, streams.values())), len(waits.by_step), first)


def _move(index: int, step: Copy, buffers: Mapping[str, Buffer]) -> Move | None:
    """What a thread beside the kernels does for a copy; None for one that it cannot make."""
    source, place = buffers[step.source.buffer], buffers[step.destination.buffer]
    if source.space == STORAGE and place.role in (Role.ACTIVATION, Role.SLOT) and place.space != SCRATCH:
        return _fetch(index, step, buffers)
    if source.role not in ARENA_ROLES or place.role not in ARENA_ROLES or (source.space == SCRATCH) is (place.space == SCRATCH):
        return None
    begins = (source.offset or 0) + step.source.offset, (place.offset or 0) + step.destination.offset
    if source.space == SCRATCH:
        return Return(index, begins[0], begins[1], step.source.size_bytes)
    return Leave(index, begins[1], begins[0], step.source.size_bytes)


def _fetch(index: int, step: Copy, buffers: Mapping[str, Buffer]) -> Fetch:
    source, place = buffers[step.source.buffer], buffers[step.destination.buffer]
    stored, offset = (source.offset or 0) + step.source.offset, (place.offset or 0) + step.destination.offset
    return Fetch(index, stored, offset, step.source.size_bytes)
