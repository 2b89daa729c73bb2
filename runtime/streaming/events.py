"""Events of a Plan as semaphores, on which native code and threads of Python meet."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from ..plan import Plan, Record, Wait

EVENT_BYTES = 64  # of one semaphore (sem_t has 32): a cache line, so that none disturbs another


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


class Events:
    """Semaphores in a row, which native code finds at `address`; none is posted."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._memory = ctypes.create_string_buffer((count + 1) * EVENT_BYTES)
        start = ctypes.addressof(self._memory)
        self.address = start + -start % EVENT_BYTES
        self.reset()

    def reset(self) -> None:
        """As new. Nobody may be waiting."""
        for number in range(self._count):
            _libc().sem_init(self._at(number), 0, 0)

    def wait(self, number: int) -> None:
        """Hold this thread, without Python's lock, until a semaphore has been posted; a signal does not end it."""
        while _libc().sem_wait(self._at(number)):
            pass

    def post(self, number: int) -> None:
        """Let one that waits go on."""
        _libc().sem_post(self._at(number))

    def _at(self, number: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.address + number * EVENT_BYTES)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
