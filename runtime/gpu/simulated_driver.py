"""The simulators as GPUs: what a program needs of a driver, on the CPU, for programs of "cuda-sim" and "rocm-sim".

Its memory is the host's. What a stream is given is done at once, so that all runs in the order in which the Plan says it. A
kernel that does what no kernel may, such as a race on shared memory, is an error that says so.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from .driver import WRONG_BINARY, DriverError, Handle, KernelLaunch, Transfer, Work, issue
from .tensor_maps import MAP_BYTES, TensorMap

_POISON = 0xAB  # of memory that nobody wrote yet
_LAUNCH_FAILED = 719  # CUresult
_ALIGNMENT = 256  # of device memory
_MOST_DIMENSIONS = 5  # of a tensor map
_TENSOR_MAP = struct.Struct(f"=Q{2 * _MOST_DIMENSIONS}Q3I{_MOST_DIMENSIONS}I")


class SimulatedDriver:
    """A `Driver` whose modules are libraries with a function sim_NAME(blocks, threads, shared bytes, arguments) a kernel."""

    def __init__(self) -> None:
        self._memory: dict[int, ctypes.Array[ctypes.c_char]] = {}  # by address
        self._modules: dict[Handle, ctypes.CDLL] = {}
        self._functions: list[tuple[ctypes.CDLL, ctypes._NamedFuncPointer, str]] = []
        self._graphs: dict[Handle, list[Work]] = {}
        self._times: dict[Handle, float] = {}
        self._handles = 0
        self._lock = threading.RLock()  # a library's threads and shared memory are its own variables

    name = "the simulator"
    graphs_cooperate = True

    @contextmanager
    def active(self) -> Iterator[None]:
        yield

    def architecture(self) -> str:
        return "simulated"

    def version(self) -> str:
        return "simulated"

    def free_bytes(self) -> tuple[int, int]:
        """Unknown, and as much as the host has: it says so itself."""
        return (0, 0)

    def allocate(self, size_bytes: int) -> int:
        memory = ctypes.create_string_buffer(size_bytes + _ALIGNMENT)
        address = -(-ctypes.addressof(memory) // _ALIGNMENT) * _ALIGNMENT
        ctypes.memset(address, _POISON, size_bytes)
        with self._lock:
            self._memory[address] = memory
        return address

    def free(self, address: int) -> None:
        with self._lock:
            del self._memory[address]

    def allocate_host(self, size_bytes: int) -> int:
        return self.allocate(size_bytes)

    def free_host(self, address: int) -> None:
        self.free(address)

    def is_device_address(self, address: int) -> bool:
        """Nobody but programs has addresses of this memory."""
        return False

    def load(self, binary: bytes) -> Handle:
        with TemporaryDirectory(prefix="prefuse-") as folder:
            path = Path(folder, "kernels.so")
            path.write_bytes(binary)
            try:
                library = ctypes.CDLL(str(path))
            except OSError as error:
                raise DriverError(f"no library of the simulator ({error})", WRONG_BINARY[0]) from error
        library.sim_fault.restype = ctypes.c_char_p
        return self._handle(library)

    def _handle(self, library: ctypes.CDLL) -> Handle:
        with self._lock:
            self._handles += 1
            self._modules[self._handles] = library
            return self._handles

    def unload(self, module: Handle) -> None:
        """The library stays: Python gives none back."""
        del self._modules[module]

    def function(self, module: Handle, name: str, shared_bytes: int) -> Handle:
        library = self._modules[module]
        try:
            found = getattr(library, f"sim_{name}")
        except AttributeError as error:
            raise DriverError(f"no function {name}") from error
        with self._lock:
            self._functions.append((library, found, name))
            return len(self._functions) - 1

    def new_stream(self) -> Handle:
        return 0

    def free_stream(self, stream: Handle) -> None:
        """There is nothing of it."""

    def new_event(self, has_time: bool = False) -> Handle:
        with self._lock:
            self._handles += 1
            return self._handles

    def free_event(self, event: Handle) -> None:
        self._times.pop(event, None)

    def record(self, event: Handle, stream: Handle) -> None:
        """All that came before is done."""
        self._times[event] = perf_counter()

    def wait_here(self, event: Handle) -> None:
        """What it waits for is done."""

    def milliseconds(self, begin: Handle, end: Handle) -> float:
        return 1e3 * (self._times[end] - self._times[begin])

    def wait(self, stream: Handle, event: Handle) -> None:
        """What it waits for is done."""

    def copy_in(self, device: int, host: int, size_bytes: int, stream: Handle) -> None:
        ctypes.memmove(device, host, size_bytes)

    def copy_out(self, host: int, device: int, size_bytes: int, stream: Handle) -> None:
        ctypes.memmove(host, device, size_bytes)

    def copy(self, destination: int, source: int, size_bytes: int, stream: Handle) -> None:
        ctypes.memmove(destination, source, size_bytes)

    def launch(self, kernel: KernelLaunch, stream: Handle) -> None:
        library, run, name = self._functions[kernel.function]
        with self._lock:
            kernel.encode_maps(encode_simulated)
            if ctypes.c_int.in_dll(library, f"cooperates_{name}").value and not kernel.is_cooperative:
                raise DriverError(f"{name}: blocks wait for each other in a launch that is not cooperative", _LAUNCH_FAILED)
            if run(kernel.blocks, kernel.threads, kernel.shared_bytes, kernel.places):
                raise DriverError(f"{name}: {bytes(library.sim_fault()).decode()}", _LAUNCH_FAILED)

    def synchronize(self, stream: Handle) -> None:
        """Nothing is under way."""

    def new_graph(self) -> Handle:
        return self._kept_graph([])

    def _kept_graph(self, works: list[Work]) -> Handle:
        with self._lock:
            self._handles += 1
            self._graphs[self._handles] = works
            return self._handles

    def add(self, graph: Handle, work: Work, after: Sequence[Handle]) -> Handle:
        """Nodes run in the order in which they are added, each behind those of `after`."""
        self._graphs[graph].append(_copied(work))
        return len(self._graphs[graph]) - 1

    def instantiate(self, graph: Handle) -> Handle:
        return self._kept_graph(list(self._graphs[graph]))

    def update(self, instance: Handle, node: Handle, work: Work) -> None:
        self._graphs[instance][node] = _copied(work)

    def launch_graph(self, instance: Handle, stream: Handle) -> None:
        for work in self._graphs[instance]:
            issue(self, work, stream)

    def free_graph(self, graph: Handle) -> None:
        del self._graphs[graph]

    def free_instance(self, instance: Handle) -> None:
        del self._graphs[instance]


def _copied(work: Work) -> Work:
    """The work with cells of its own: later changes do not count."""
    if isinstance(work, Transfer):
        return replace(work, places=type(work.places)(*work.places))
    size = work.blocks, work.threads, work.shared_bytes
    return KernelLaunch.of(work.function, size, type(work.cells)(*work.cells), work.label, work.maps.maps, work.is_cooperative)


def encode_simulated(one: TensorMap, address: int, to: int) -> None:
    """A tensor map as the simulator has it (asynchronous.h)."""
    unused = (0,) * (_MOST_DIMENSIONS - len(one.extents))
    content = _TENSOR_MAP.pack(
        address,
        *(*one.extents, *unused),
        *(*one.strides, 0, *unused),
        len(one.extents),
        one.item_bytes,
        one.swizzle_bytes,
        *(*one.box, *unused),
    )
    ctypes.memmove(to, content.ljust(MAP_BYTES, b"\0"), MAP_BYTES)


@cache
def simulated_driver() -> SimulatedDriver:
    """The one of this process."""
    return SimulatedDriver()
