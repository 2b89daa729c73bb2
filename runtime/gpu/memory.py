"""Memory of the GPU and pinned memory of the host, freed with their last reference; and a caller's stream."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress

from .driver import OUT_OF_MEMORY, Driver, DriverError, Handle


class GpuMemoryError(Exception):
    """There are not so many bytes: what was asked for, and what there is."""


class _Memory:
    """Bytes that a driver gives, and gets back with the last reference."""

    def __init__(
        self, driver: Driver, allocate: Callable[[], int], free: Callable[[int], None], missing: Callable[[], str]
    ) -> None:
        self._driver, self._free = driver, free
        self.address = 0
        with driver.active():
            try:
                self.address = allocate()
            except DriverError as error:
                if error.code != OUT_OF_MEMORY:
                    raise
                raise GpuMemoryError(missing()) from error

    def __del__(self) -> None:
        if self.address:
            with suppress(DriverError), self._driver.active():  # the driver may be gone before the process
                self._free(self.address)


class DeviceMemory(_Memory):
    """Bytes on the GPU.

    Raises:
        GpuMemoryError: there are not so many.
        DriverError: the driver fails otherwise.
    """

    def __init__(self, driver: Driver, size_bytes: int, what: str) -> None:
        def missing() -> str:
            free, total = driver.free_bytes()
            return f"no memory for {size_bytes} bytes of {what} on the GPU: {free} of its {total} bytes are free"

        super().__init__(driver, lambda: driver.allocate(size_bytes), driver.free, missing)


class PinnedMemory(_Memory):
    """Bytes of the host from and to which the GPU copies beside its kernels.

    Raises:
        GpuMemoryError: there are not so many.
        DriverError: the driver fails otherwise.
    """

    def __init__(self, driver: Driver, size_bytes: int, what: str) -> None:
        missing = f"no pinned memory for {size_bytes} bytes of {what} on the host"
        super().__init__(driver, lambda: driver.allocate_host(size_bytes), driver.free_host, lambda: missing)
        self.bytes = memoryview((ctypes.c_ubyte * size_bytes).from_address(self.address)).cast("B")


class CallerStream:
    """A stream of one caller, and an event that says how far its last call is."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.stream: Handle = driver.new_stream()
        self.done: Handle = driver.new_event()

    def __del__(self) -> None:
        with suppress(DriverError, AttributeError), self._driver.active():
            self._driver.free_stream(self.stream)
            self._driver.free_event(self.done)
