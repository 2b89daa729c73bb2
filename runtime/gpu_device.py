"""Programs on an NVIDIA or AMD GPU: a module of kernels, and constants, uploaded once.

The driver is asked for when a program first runs: reading, showing and writing programs needs no GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

from .device import Arena
from .errors import DeviceError, ProgramFileError
from .gpu.driver import WRONG_BINARY, Driver, DriverError
from .gpu.installed import driver
from .gpu.memory import CallerStream, DeviceMemory, GpuMemoryError, PinnedMemory
from .gpu.simulated_driver import simulated_driver
from .gpu_invocation import GpuInvocation, GpuProfile, LoadedProgram, memory_error
from .plan import STORAGE
from .program_file import Program
from .streaming.storage import StorageError
from .target import Target

_MAKERS = {"cuda": "NVIDIA", "rocm": "AMD"}


class GpuExecutable:
    """A program's kernels and constants on the GPU, loaded when it is first bound to an arena."""

    def __init__(self, program: Program, find_driver: Callable[[], Driver]) -> None:
        self._program = program
        self._find_driver = find_driver
        self._loaded: LoadedProgram | None = None
        self._lock = threading.Lock()

    def bind(self, arena: Arena, states: Arena | None = None) -> GpuInvocation:
        """Raises DeviceError without a GPU, ProgramFileError where it cannot run this code."""
        loaded = self._load()
        with _named_errors("arena"), loaded.gpu.active():
            return GpuInvocation(loaded, arena, states)

    def bind_profile(self, arena: Arena, states: Arena | None = None) -> GpuProfile:
        loaded = self._load()
        with _named_errors("arena"), loaded.gpu.active():
            return GpuProfile(loaded, arena, states)

    def _load(self) -> LoadedProgram:
        with self._lock:
            if self._loaded is None:
                gpu = _found(self._find_driver)
                with _named_errors("weights"), gpu.active():
                    self._loaded = _loaded(gpu, self._program)
            return self._loaded


class GpuArena(DeviceMemory):
    """Memory of one context, or of the states of a session."""

    def __init__(self, gpu: Driver, size_bytes: int) -> None:
        super().__init__(gpu, size_bytes, "activations")
        self._gpu = gpu

    def read(self, offset: int, size_bytes: int) -> np.ndarray:
        content = np.empty(size_bytes, np.uint8)
        if size_bytes:
            with _named_errors("states"), self._gpu.active():
                own = CallerStream(self._gpu)
                self._gpu.copy_out(content.ctypes.data, self.address + offset, size_bytes, own.stream)
                self._gpu.synchronize(own.stream)
        return content

    def write(self, offset: int, content: np.ndarray) -> None:
        if content.size:
            with _named_errors("states"), self._gpu.active():
                own = CallerStream(self._gpu)
                self._gpu.copy_in(self.address + offset, content.ctypes.data, content.size, own.stream)
                self._gpu.synchronize(own.stream)


class GpuDevice:
    """The machine's first GPU of a kind of target, "cuda" or "rocm". torch calls both "cuda"."""

    torch_devices = frozenset(["cpu", "cuda:0"])
    gives_zeros = False

    def __init__(self, kind: str, find_driver: Callable[[], Driver] | None = None) -> None:
        self._find_driver = find_driver or partial(_installed, kind)

    def load(self, program: Program) -> GpuExecutable:
        return GpuExecutable(program, self._find_driver)

    def allocate(self, size_bytes: int, part_bytes: int = 0) -> GpuArena:
        gpu = _found(self._find_driver)
        with _named_errors("arena"):
            return GpuArena(gpu, size_bytes)


class SimulatedDevice(GpuDevice):
    """The simulator of NVIDIA's GPUs."""

    torch_devices = frozenset(["cpu"])

    def __init__(self) -> None:
        super().__init__("cuda", simulated_driver)


def _installed(kind: str) -> Driver:
    try:
        return driver(kind)
    except DriverError as error:
        raise DeviceError("GPU", str(error), f"run the program on a machine with an {_MAKERS[kind]} GPU") from error


def _found(find_driver: Callable[[], Driver]) -> Driver:
    with _named_errors("GPU"):
        return find_driver()


@contextmanager
def _named_errors(where: str) -> Iterator[None]:
    """What goes wrong inside becomes an error of ours."""
    try:
        yield
    except DriverError as error:
        raise DeviceError("GPU", str(error), "see the message of the driver") from error
    except GpuMemoryError as error:
        raise memory_error(where, error) from error


def _loaded(gpu: Driver, program: Program) -> LoadedProgram:
    """Code and weights of a program on the GPU that is active."""
    try:
        module = gpu.load(program.library)
    except DriverError as error:
        if error.code not in WRONG_BINARY:
            raise
        kind = Target.parse(program.plan.target).kind
        what = f"compiled for {program.plan.target}, which this GPU ({kind}:{gpu.architecture()}) cannot run ({error})"
        raise ProgramFileError("target", what, "compile the model again for this GPU") from error
    loaded = LoadedProgram(gpu, program.plan, module)
    loaded.upload(program.constants, program.shared)
    if (storage := program.storage) is not None:
        pinned = PinnedMemory(gpu, storage.size_bytes, "weights")
        try:
            for offset, stored in storage.constants.items():
                storage.read(offset, pinned.bytes[offset : offset + stored.size_bytes])
        except StorageError as error:
            raise ProgramFileError(error.where, error.what, error.fix) from error
        places = {one.name: one.offset or 0 for one in program.plan.buffers if one.space == STORAGE}
        loaded.keep_stored(pinned, places)
    return loaded
