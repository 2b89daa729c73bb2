"""NVIDIA's driver through its C interface, with ctypes: the few calls that running a program takes.

The driver is a shared library that comes with the GPU's kernel module, so nothing of CUDA need be installed. All calls work in
the primary context of the first GPU, which torch uses too: its tensors can be given to a program as they are.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Protocol

_LIBRARY = "libcuda.so.1"
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
_MEMORY_TYPE, _ON_DEVICE = 2, 2  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_MEMORYTYPE_DEVICE
_MAX_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_SHARED_BYTES = 48 * 1024  # that every launch may ask for
_WITHOUT_TIME = 2  # CU_EVENT_DISABLE_TIMING
OUT_OF_MEMORY, WRONG_BINARY = 2, (200, 209, 218, 222)  # CUresult; not loadable: image, architecture, PTX, its version

Handle = int
Arguments = ctypes.Array[ctypes.c_void_p]  # addresses of a launch's arguments


class DriverError(Exception):
    """The driver is absent or a call failed; `code` is its CUresult, 0 where there is none."""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


class Driver(Protocol):
    """What a program needs of a GPU. Addresses and handles are integers; what is given to one stream runs there in order, beside
    what is given to others, and an event lets one stream wait for what another has been given before."""

    def active(self) -> AbstractContextManager[None]:
        """A context manager inside of which the calling thread may use the GPU."""

    def architecture(self) -> str: ...
    def allocate(self, size_bytes: int) -> int: ...
    def free(self, address: int) -> None: ...
    def is_device_address(self, address: int) -> bool: ...
    def load(self, binary: bytes) -> Handle: ...
    def unload(self, module: Handle) -> None: ...
    def function(self, module: Handle, name: str, shared_bytes: int) -> Handle: ...
    def allocate_host(self, size_bytes: int) -> int: ...
    def free_host(self, address: int) -> None: ...
    def new_stream(self) -> Handle: ...
    def new_event(self) -> Handle: ...
    def free_event(self, event: Handle) -> None: ...
    def record(self, event: Handle, stream: Handle) -> None: ...
    def wait(self, stream: Handle, event: Handle) -> None: ...
    def copy_in(self, device: int, host: int, size_bytes: int, stream: Handle) -> None: ...
    def copy_out(self, host: int, device: int, size_bytes: int, stream: Handle) -> None: ...
    def copy(self, destination: int, source: int, size_bytes: int, stream: Handle) -> None: ...
    def launch(
        self, function: Handle, blocks: int, threads: int, shared_bytes: int, arguments: Arguments, stream: Handle
    ) -> None: ...
    def synchronize(self, stream: Handle) -> None: ...


class CudaDriver:
    """The first GPU of this machine.

    Raises:
        DriverError: there is no driver or no GPU.
    """

    def __init__(self, library: str = _LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise DriverError(f"this machine has no NVIDIA driver ({error})") from error
        self._call("cuInit", ctypes.c_uint(0))
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
        self._device = device
        self._context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self._launch = self._library.cuLaunchKernel
        number, handle = ctypes.c_uint, ctypes.c_void_p
        self._launch.argtypes = [handle, *[number] * 7, handle, handle, handle]

    @contextmanager
    def active(self) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def architecture(self) -> str:
        """Such as "sm_90"."""
        values = []
        for attribute in (_MAJOR, _MINOR):
            value = ctypes.c_int()
            self._call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(attribute), self._device)
            values.append(value.value)
        return f"sm_{values[0]}{values[1]}"

    def allocate(self, size_bytes: int) -> int:
        """Device memory, aligned to 256 bytes."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(size_bytes, 1)))
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def allocate_host(self, size_bytes: int) -> int:
        """Pinned memory of the host, from which copies run beside everything else."""
        address = ctypes.c_void_p()
        self._call("cuMemAllocHost_v2", ctypes.byref(address), ctypes.c_size_t(max(size_bytes, 1)))
        return address.value or 0

    def free_host(self, address: int) -> None:
        self._call("cuMemFreeHost", ctypes.c_void_p(address))

    def is_device_address(self, address: int) -> bool:
        """Whether an address is of device memory. The driver does not know ordinary memory of the host: that is no error."""
        kind = ctypes.c_uint()
        code = self._library.cuPointerGetAttribute(ctypes.byref(kind), ctypes.c_int(_MEMORY_TYPE), ctypes.c_uint64(address))
        return code == 0 and kind.value == _ON_DEVICE

    def load(self, binary: bytes) -> Handle:
        module = ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(binary))
        return module.value or 0

    def unload(self, module: Handle) -> None:
        self._call("cuModuleUnload", ctypes.c_void_p(module))

    def function(self, module: Handle, name: str, shared_bytes: int) -> Handle:
        """A function of a module, which may be launched with so many bytes of shared memory for each block.

        Raises DriverError, too, where the GPU has less than that.
        """
        found = ctypes.c_void_p()
        try:
            self._call("cuModuleGetFunction", ctypes.byref(found), ctypes.c_void_p(module), ctypes.c_char_p(name.encode()))
        except DriverError as error:
            raise DriverError(f"{error}: no function {name}", error.code) from error
        if shared_bytes > _SHARED_BYTES:
            size = ctypes.c_int(shared_bytes)
            self._call("cuFuncSetAttribute", found, ctypes.c_int(_MAX_SHARED_BYTES), size)
        return found.value or 0

    def new_stream(self) -> Handle:
        """A stream that waits for, and is waited for by, the default stream, on which torch works."""
        stream = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(0))
        return stream.value or 0

    def new_event(self) -> Handle:
        """An event without a time."""
        event = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(_WITHOUT_TIME))
        return event.value or 0

    def free_event(self, event: Handle) -> None:
        self._call("cuEventDestroy_v2", ctypes.c_void_p(event))

    def record(self, event: Handle, stream: Handle) -> None:
        self._call("cuEventRecord", ctypes.c_void_p(event), ctypes.c_void_p(stream))

    def wait(self, stream: Handle, event: Handle) -> None:
        self._call("cuStreamWaitEvent", ctypes.c_void_p(stream), ctypes.c_void_p(event), ctypes.c_uint(0))

    def copy_in(self, device: int, host: int, size_bytes: int, stream: Handle) -> None:
        pair = ctypes.c_uint64(device), ctypes.c_void_p(host)
        self._call("cuMemcpyHtoDAsync_v2", *pair, ctypes.c_size_t(size_bytes), ctypes.c_void_p(stream))

    def copy_out(self, host: int, device: int, size_bytes: int, stream: Handle) -> None:
        pair = ctypes.c_void_p(host), ctypes.c_uint64(device)
        self._call("cuMemcpyDtoHAsync_v2", *pair, ctypes.c_size_t(size_bytes), ctypes.c_void_p(stream))

    def copy(self, destination: int, source: int, size_bytes: int, stream: Handle) -> None:
        pair = ctypes.c_uint64(destination), ctypes.c_uint64(source)
        self._call("cuMemcpyDtoDAsync_v2", *pair, ctypes.c_size_t(size_bytes), ctypes.c_void_p(stream))

    def launch(
        self, function: Handle, blocks: int, threads: int, shared_bytes: int, arguments: Arguments, stream: Handle
    ) -> None:
        if code := self._launch(function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, arguments, None):
            raise self._error("cuLaunchKernel", code)

    def synchronize(self, stream: Handle) -> None:
        self._call("cuStreamSynchronize", ctypes.c_void_p(stream))

    def _call(self, name: str, *arguments: object) -> None:
        if code := getattr(self._library, name)(*arguments):
            raise self._error(name, code)

    def _error(self, name: str, code: int) -> DriverError:
        text = ctypes.c_char_p()
        self._library.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
        return DriverError(f"{name}: {(text.value or b'error').decode()} ({code})", code)


_lock = threading.Lock()


def driver() -> CudaDriver:
    """The driver of this process.

    Raises:
        DriverError: there is no driver or no GPU.
    """
    with _lock:
        return _driver()


@cache
def _driver() -> CudaDriver:
    return CudaDriver()


def first_architecture() -> str:
    """The architecture of this machine's first GPU, such as "sm_90".

    Raises:
        DriverError: there is no driver or no GPU.
    """
    return driver().architecture()
