"""A driver by its shared library and ctypes: what CUDA and HIP have in common, which is nearly everything."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from .driver import DriverError, Handle, KernelLaunch, Transfer, Work, handles
from .entry_points import ENTRY_POINTS, bound
from .tensor_maps import TensorMap

_MEMORY_TYPE, _ON_DEVICE = 2, 2  # *_POINTER_ATTRIBUTE_MEMORY_TYPE, and its value for memory of a device
_WITHOUT_TIME = 2  # CU_EVENT_DISABLE_TIMING, hipEventDisableTiming
_COOPERATIVE = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE, hipLaunchAttributeCooperative
_ATTRIBUTE_WORDS = 8  # of a value of CUlaunchAttributeValue, hipLaunchAttributeValue
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: not tied to the default stream, which would be a hidden wait


class LibraryDriver(ABC):
    """The first GPU of this machine. `api` is "cuda" or "hip"."""

    name = ""
    api = ""
    graphs_cooperate = True
    least = ""  # the oldest version of the driver that has all entry points, for people

    def __init__(self, library: Any, own: Mapping[str, tuple[str, tuple[Any, ...]]]) -> None:
        """Raises DriverError where an entry point is absent."""
        symbols = {name: (getattr(entry, self.api), entry.arguments) for name, entry in ENTRY_POINTS.items()}
        self._symbols = {name: symbol for name, (symbol, _) in (symbols | dict(own)).items()}
        self._functions = bound(library, symbols | dict(own), self.least)
        self._call("init", 0)

    @abstractmethod
    def active(self) -> AbstractContextManager[None]:
        """A context manager inside of which the calling thread may use the GPU."""

    @abstractmethod
    def architecture(self) -> str:
        """Such as "sm_90" or "gfx942"."""

    @abstractmethod
    def version(self) -> str:
        """Of the driver, as its maker counts."""

    @abstractmethod
    def _allow_shared(self, function: Handle, shared_bytes: int) -> None:
        """Let a function be launched with so many bytes of shared memory. Raises DriverError where the GPU has less."""

    @abstractmethod
    def _encode_map(self, one: TensorMap, address: int, to: int) -> None:
        """A tensor map of device memory, to 128 bytes of the host."""

    @abstractmethod
    def _forget_error(self) -> None:
        """Let nobody else of this thread find a failure that is handled here."""

    @abstractmethod
    def _error_name(self, code: int) -> str: ...

    @abstractmethod
    def _kernel_parameters(self, kernel: KernelLaunch) -> ctypes.Structure:
        """Of a node of a graph."""

    @abstractmethod
    def _copy_arguments(self, copy: Transfer) -> tuple[object, ...]:
        """Of the functions that add a copy to a graph and change it, behind those that all have."""

    def free_bytes(self) -> tuple[int, int]:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("memory_info", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def allocate(self, size_bytes: int) -> int:
        """Device memory, aligned to 256 bytes."""
        return self._made("allocate", max(size_bytes, 1))

    def free(self, address: int) -> None:
        self._call("free", address)

    def allocate_host(self, size_bytes: int) -> int:
        """Pinned memory of the host, from and to which copies run beside everything else."""
        return self._made("allocate_host", max(size_bytes, 1), 0)

    def free_host(self, address: int) -> None:
        self._call("free_host", address)

    def is_device_address(self, address: int) -> bool:
        """Whether an address is of device memory. The driver does not know ordinary memory of the host: that is no error."""
        kind = ctypes.c_uint()
        code = self._functions["pointer_attribute"](ctypes.byref(kind), _MEMORY_TYPE, address)
        if code:
            self._forget_error()
        return code == 0 and kind.value == _ON_DEVICE

    def load(self, binary: bytes) -> Handle:
        return self._made("load", binary)

    def unload(self, module: Handle) -> None:
        self._call("unload", module)

    def function(self, module: Handle, name: str, shared_bytes: int) -> Handle:
        try:
            function = self._made("function", module, name.encode())
        except DriverError as error:
            raise DriverError(f"{error}: no function {name}", error.code) from error
        if shared_bytes:
            self._allow_shared(function, shared_bytes)
        return function

    def new_stream(self) -> Handle:
        """A stream that waits for no other one, the default stream included, unless an event says so."""
        return self._made("new_stream", _NON_BLOCKING)

    def free_stream(self, stream: Handle) -> None:
        self._call("free_stream", stream)

    def new_event(self, has_time: bool = False) -> Handle:
        return self._made("new_event", 0 if has_time else _WITHOUT_TIME)

    def free_event(self, event: Handle) -> None:
        self._call("free_event", event)

    def record(self, event: Handle, stream: Handle) -> None:
        self._call("record", event, stream)

    def wait(self, stream: Handle, event: Handle) -> None:
        self._call("wait", stream, event, 0)

    def wait_here(self, event: Handle) -> None:
        self._call("wait_here", event)

    def milliseconds(self, begin: Handle, end: Handle) -> float:
        """Between two events with times that have been reached."""
        elapsed = ctypes.c_float()
        self._call("elapsed", ctypes.byref(elapsed), begin, end)
        return elapsed.value

    def copy_in(self, device: int, host: int, size_bytes: int, stream: Handle) -> None:
        self._call("copy_in", device, host, size_bytes, stream)

    def copy_out(self, host: int, device: int, size_bytes: int, stream: Handle) -> None:
        self._call("copy_out", host, device, size_bytes, stream)

    def copy(self, destination: int, source: int, size_bytes: int, stream: Handle) -> None:
        self._call("copy", destination, source, size_bytes, stream)

    def launch(self, kernel: KernelLaunch, stream: Handle) -> None:
        kernel.encode_maps(self._encode_map)
        if kernel.is_cooperative:
            self._call("launch_cooperative", kernel.function, *_grid(kernel), stream, kernel.places)
        else:
            self._call("launch", kernel.function, *_grid(kernel), stream, kernel.places, None)

    def synchronize(self, stream: Handle) -> None:
        self._call("synchronize", stream)

    def new_graph(self) -> Handle:
        return self._made("new_graph", 0)

    def add(self, graph: Handle, work: Work, after: Sequence[Handle]) -> Handle:
        before = (handles(after), len(after))
        if isinstance(work, KernelLaunch):
            work.encode_maps(self._encode_map)
            node = self._made("add_kernel", graph, *before, ctypes.byref(self._kernel_parameters(work)))
            if work.is_cooperative:
                value = (ctypes.c_uint64 * _ATTRIBUTE_WORDS)(1)
                self._call("set_attribute", node, _COOPERATIVE, value)
            return node
        return self._made("add_copy", graph, *before, *self._copy_arguments(work))

    def instantiate(self, graph: Handle) -> Handle:
        return self._made("instantiate", graph, 0)

    def update(self, instance: Handle, node: Handle, work: Work) -> None:
        if isinstance(work, KernelLaunch):
            work.encode_maps(self._encode_map)
            self._call("update_kernel", instance, node, ctypes.byref(self._kernel_parameters(work)))
        else:
            self._call("update_copy", instance, node, *self._copy_arguments(work))

    def launch_graph(self, instance: Handle, stream: Handle) -> None:
        self._call("launch_graph", instance, stream)

    def free_graph(self, graph: Handle) -> None:
        self._call("free_graph", graph)

    def free_instance(self, instance: Handle) -> None:
        self._call("free_instance", instance)

    def _made(self, name: str, *arguments: object) -> int:
        """What a function stores through its first argument."""
        result = ctypes.c_void_p()
        self._call(name, ctypes.byref(result), *arguments)
        return result.value or 0

    def _call(self, name: str, *arguments: object) -> None:
        if code := self._functions[name](*arguments):
            self._forget_error()
            raise DriverError(f"{self._symbols[name]}: {self._error_name(code)} ({code})", code)


def _grid(kernel: KernelLaunch) -> tuple[int, ...]:
    return kernel.blocks, 1, 1, kernel.threads, 1, 1, kernel.shared_bytes
