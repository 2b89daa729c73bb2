"""A Plan played back with a time for each step: streams run beside each other, events order them, the longest path is the time.

It is the critical path method (Kelley, Walker: Critical-Path Planning and Scheduling, 1959) on the order that a Plan means: the
steps of one stream run one after the other, and a Wait holds its stream until its event's Record has been reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...runtime.plan import Plan, Record, Wait


@dataclass(frozen=True, slots=True)
class Replay:
    """When each step begins and ends, in microseconds from the beginning, and the steps on the longest path, in order."""

    begins_us: tuple[float, ...]
    ends_us: tuple[float, ...]
    critical: tuple[int, ...]

    @property
    def time_us(self) -> float:
        return max(self.ends_us, default=0.0)

    def stalls_us(self, plan: Plan) -> tuple[float, ...]:
        """How long each step that does something waits after the one before it on its stream, through the Waits between them."""
        free: dict[int, float] = {}  # since when a stream has nothing to do
        found = []
        for step, begin, end in zip(plan.steps, self.begins_us, self.ends_us, strict=True):
            is_event = isinstance(step, (Record, Wait))
            found.append(0.0 if is_event else begin - free.get(step.stream, 0.0))
            if not is_event:
                free[step.stream] = end
        return tuple(found)


def replay(plan: Plan, times_us: Sequence[float]) -> Replay:
    """The Plan with `times_us[i]` for step `i`; Records and Waits have times, too.

    Raises:
        ValueError: there is not one time for each step, one is negative, or an event is waited for that no earlier step records.
    """
    if len(times_us) != len(plan.steps):
        raise ValueError(f"{len(times_us)} times for {len(plan.steps)} steps")
    last: dict[int, int] = {}  # of each stream, its step before
    events: dict[int, int] = {}  # of each event, its Record
    begins, ends, before = list[float](), list[float](), list[int | None]()
    for number, (step, time_us) in enumerate(zip(plan.steps, times_us, strict=True)):
        if not time_us >= 0:
            raise ValueError(f"step {number} takes {time_us} us")
        causes = [last[step.stream]] if step.stream in last else []
        if isinstance(step, Wait):
            if step.event not in events:
                raise ValueError(f"step {number} waits for event {step.event}, which nothing has recorded")
            causes.append(events[step.event])
        cause = max(causes, key=lambda one: ends[one], default=None)
        begins.append(0.0 if cause is None else ends[cause])
        ends.append(begins[-1] + time_us)
        before.append(cause)
        last[step.stream] = number
        if isinstance(step, Record):
            events[step.event] = number
    return Replay(tuple(begins), tuple(ends), _path(ends, before))


def _path(ends: Sequence[float], before: Sequence[int | None]) -> tuple[int, ...]:
    """From the step that ends last back to the beginning, turned."""
    found: list[int] = []
    at = max(range(len(ends)), key=lambda one: ends[one], default=None)
    while at is not None:
        found.append(at)
        at = before[at]
    return tuple(reversed(found))
