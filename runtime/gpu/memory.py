"""Memory of the GPU and pinned memory of the host, freed with their last reference; and a caller's stream."""

from __future__ import annotations

import ctypes
from contextlib import suppress

from .driver import OUT_OF_MEMORY, Driver, DriverError, Handle


class GpuMemoryError(Exception):
    """There are not so many bytes: what was asked for, and what there is."""


class DeviceMemory:
    """Bytes on the GPU.

    Raises:
        GpuMemoryError: there are not so many.
        DriverError: the driver fails otherwise.
    """

    def __init__(self, driver: Driver, size_bytes: int, what: str) -> None:
        self._driver = driver
        self.address = 0
        with driver.active():
            try:
                self.address = driver.allocate(size_bytes)
            except DriverError as error:
                if error.code != OUT_OF_MEMORY:
                    raise
                free, total = driver.free_bytes()
                text = f"no memory for {size_bytes} bytes of {what} on the GPU: {free} of its {total} bytes are free"
                raise GpuMemoryError(text) from error

    def __del__(self) -> None:
        if self.address:
            with suppress(DriverError), self._driver.active():  # the driver may be gone before the process
                self._driver.free(self.address)


class PinnedMemory:
    """Bytes of the host from and to which the GPU copies beside its kernels.

    Raises:
        GpuMemoryError: there are not so many.
        DriverError: the driver fails otherwise.
    """

    def __init__(self, driver: Driver, size_bytes: int, what: str) -> None:
        self._driver = driver
        self.address = 0
        with driver.active():
            try:
                self.address = driver.allocate_host(size_bytes)
            except DriverError as error:
                if error.code != OUT_OF_MEMORY:
                    raise
                raise GpuMemoryError(f"no pinned memory for {size_bytes} bytes of {what} on the host") from error
        self.bytes = memoryview((ctypes.c_ubyte * size_bytes).from_address(self.address)).cast("B")

    def __del__(self) -> None:
        if self.address:
            with suppress(DriverError), self._driver.active():
                self._driver.free_host(self.address)


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
