"""The streams of a Plan beside the kernels': what they do, and the semaphores on which they meet the kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .errors import ProgramFileError
from .plan import COMPUTE, STORAGE, Copy, Plan, Record, Role, Wait
from .streaming.copier import Await, CopyStreams, Fetch, Operation, Post


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
            source, place = (
                (buffers[step.source.buffer], buffers[step.destination.buffer]) if isinstance(step, Copy) else (None, None)
            )
            if source is None or place is None or source.space != STORAGE or place.role is not Role.ACTIVATION:
                what = f"step {index} on stream {step.stream} is no copy from the program's file"
                raise ProgramFileError("plan", what, "compile the model again")
            assert isinstance(step, Copy)
            stored, offset = (source.offset or 0) + step.source.offset, (place.offset or 0) + step.destination.offset
            operations.append(Fetch(index, stored, offset, step.source.size_bytes))
    return CopyStreams(tuple(map(tuple, streams.values())), len(waits.by_step))
