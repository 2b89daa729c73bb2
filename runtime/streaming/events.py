"""Events as semaphores, on which native code and threads of Python meet."""

from __future__ import annotations

import ctypes
from functools import cache

EVENT_BYTES = 64  # of one semaphore (sem_t has 32): a cache line, so that none disturbs another


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
