"""Memory of the GPU and pinned memory of the host, freed with their last reference; weights on the GPU; and a caller's stream."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np

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


_shared: WeakKeyDictionary[Driver, WeakValueDictionary[str, DeviceMemory]] = WeakKeyDictionary()
_sharing = threading.Lock()


def shared_weights(driver: Driver, content: str, data: np.ndarray) -> DeviceMemory:
    """A constant of this content on the GPU, which is there once, as long as a program has it.

    Raises:
        GpuMemoryError: there is no memory for it.
    """
    with _sharing:
        known = _shared.setdefault(driver, WeakValueDictionary())
        found = known.get(content)
        if found is None:
            found = known[content] = uploaded(driver, data)
        return found


def uploaded(driver: Driver, data: np.ndarray) -> DeviceMemory:
    """Weights in memory of their own on the GPU. Raises GpuMemoryError."""
    memory = DeviceMemory(driver, data.size, "weights")
    if data.size:
        own = CallerStream(driver)
        driver.copy_in(memory.address, data.ctypes.data, data.size, own.stream)
        driver.synchronize(own.stream)
    return memory


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
