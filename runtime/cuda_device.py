"""Programs on an NVIDIA GPU: a module of kernels, launched one after the other as the Plan says.

The driver is asked for when a program first runs: reading, showing and writing programs needs no GPU. Constants are uploaded
once a program. Inputs and outputs in the host's memory are copied; those that lie on the GPU are used where they are.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import NoReturn, TypeAlias

from .device import Arena
from .errors import ArenaMemoryError, DeviceError, OptionError, ProgramFileError
from .hardware.cuda_driver import OUT_OF_MEMORY, WRONG_BINARY, Driver, DriverError, Handle, driver
from .plan import ARENA_ROLES, COMPUTE, STORAGE, Copy, Kernel, Launch, Plan, Record, Region, Role, Step, Wait
from .program_file import Program
from .streaming.storage import Storage, StorageError
from .streams import slot_copies

_Cells = ctypes.Array[ctypes.c_uint64]


class DeviceMemory:
    """Bytes on the GPU, freed when the last reference goes."""

    def __init__(self, gpu: Driver, size_bytes: int, what: str) -> None:
        self._gpu = gpu
        self.address = 0
        try:
            with gpu.active():
                self.address = gpu.allocate(size_bytes)
        except DriverError as error:
            if error.code != OUT_OF_MEMORY:
                raise DeviceError("GPU", str(error), "see the message of the driver") from error
            text = f"no memory for {size_bytes} bytes of {what} on the GPU"
            raise ArenaMemoryError("arena", text, "free memory, use fewer contexts at once or a smaller batch") from error

    def __del__(self) -> None:
        if self.address:
            with suppress(DriverError), self._gpu.active():  # the driver may be gone before the process
                self._gpu.free(self.address)


class PinnedMemory:
    """Memory of the host from which the GPU copies beside its kernels: the weights that stay outside of it."""

    def __init__(self, gpu: Driver, storage: Storage) -> None:
        self._gpu = gpu
        self.address = 0
        try:
            self.address = gpu.allocate_host(storage.size_bytes)
        except DriverError as error:
            what = f"no pinned memory for {storage.size_bytes} bytes of weights on the host"
            raise ArenaMemoryError("weights", what, "free memory, or raise the memory limit of the program") from error
        memory = memoryview((ctypes.c_ubyte * storage.size_bytes).from_address(self.address)).cast("B")
        try:
            for offset, stored in storage.constants.items():
                storage.read(offset, memory[offset : offset + stored.size_bytes])
        except StorageError as error:
            raise ProgramFileError(error.where, error.what, error.fix) from error

    def __del__(self) -> None:
        if self.address:
            with suppress(DriverError), self._gpu.active():
                self._gpu.free_host(self.address)


class _Events:
    """The events of one caller by their numbers in the Plan."""

    def __init__(self, gpu: Driver, plan: Plan) -> None:
        self._gpu = gpu
        self.handles = {step.event: gpu.new_event() for step in plan.steps if isinstance(step, Record)}

    def __del__(self) -> None:
        with suppress(DriverError), self._gpu.active():
            for event in self.handles.values():
                self._gpu.free_event(event)


@dataclass(frozen=True, slots=True)
class _Call:
    """One launch, its argument block filled in but for the caller's addresses."""

    stream: Handle
    function: Handle
    blocks: int
    threads: int
    arguments: ctypes.Array[ctypes.c_void_p]
    cells: _Cells


@dataclass(frozen=True, slots=True)
class _Move:
    """A copy between two addresses, each of a cell that holds it when the call runs."""

    stream: Handle
    destination: _Cells
    source: _Cells
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _Upload:
    """A copy from pinned memory of the host."""

    stream: Handle
    destination: _Cells
    host: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _Mark:
    """An event is recorded, or waited for."""

    stream: Handle
    event: Handle
    is_wait: bool


_Action: TypeAlias = _Call | _Move | _Upload | _Mark


class CudaInvocation:
    """The launches of one caller."""

    def __init__(self, executable: CudaExecutable, arena: Arena) -> None:
        self._executable, self._arena = executable, arena
        plan = executable.plan
        self._sizes = {buffer.name: buffer.size_bytes for buffer in plan.buffers}
        self._written = frozenset(buffer.name for buffer in plan.buffers if buffer.role is Role.OUTPUT)
        self._staged: dict[str, DeviceMemory] = {}  # device memory for what the caller has on the host
        self._open: dict[str, list[tuple[_Cells, int, int]]] = {name: [] for name in plan.parameters}
        self._fixed = executable.fixed_addresses(arena.address)
        self._events = _Events(executable.gpu, plan)
        self._steps = [step for one in plan.steps for step in self._prepare(one)]
        first = (replace(copy, stream=COMPUTE) for copy in slot_copies(plan))
        self._first = [step for one in first for step in self._prepare(one)]
        self._is_primed = False  # whether the slots hold what the last call has left for this one

    def __call__(self, *addresses: int) -> None:
        gpu, stream = self._executable.gpu, self._executable.stream
        names = self._executable.plan.parameters
        with self._executable.running():
            back = []
            for name, address in zip(names, addresses, strict=True):
                if not gpu.is_device_address(address) and self._sizes[name]:
                    host, address = address, self._stage(name).address
                    if name in self._written:
                        back.append((host, address, self._sizes[name]))
                    else:
                        gpu.copy_in(address, host, self._sizes[name], stream)
                for cells, position, offset in self._open[name]:
                    cells[position] = address + offset
            steps = self._steps if self._is_primed else [*self._first, *self._steps]
            self._is_primed = False
            for step in steps:
                _issue(gpu, step)
            for host, device, size_bytes in back:
                gpu.copy_out(host, device, size_bytes, stream)
            self._executable.synchronize()
            self._is_primed = True

    def _stage(self, name: str) -> DeviceMemory:
        if name not in self._staged:
            self._staged[name] = DeviceMemory(self._executable.gpu, self._sizes[name], f"{name}")
        return self._staged[name]

    def _prepare(self, step: Step) -> Iterator[_Action]:
        stream = self._executable.streams[step.stream]
        if isinstance(step, (Record, Wait)):
            yield _Mark(stream, self._events.handles[step.event], isinstance(step, Wait))
            return
        if isinstance(step, Copy):
            size_bytes, place = step.source.size_bytes, self._cells((step.destination,))
            if step.source.buffer in self._executable.stored:
                host = self._executable.stored[step.source.buffer] + step.source.offset
                yield _Upload(stream, place, host, size_bytes)
            elif size_bytes:
                yield _Move(stream, place, self._cells((step.source,)), size_bytes)
            return
        assert isinstance(step, Launch), f"a program for a GPU has no step {type(step).__name__}"
        regions = (*step.reads, *step.writes, *step.scratch)
        for grid in self._executable.kernels[step.kernel].grids:
            cells = self._cells(regions, grid.scalars)
            size = ctypes.sizeof(ctypes.c_uint64)
            places = [ctypes.addressof(cells) + size * position for position in range(len(cells))]
            function = self._executable.function(grid.function)
            yield _Call(stream, function, grid.blocks, grid.threads, (ctypes.c_void_p * len(places))(*places), cells)

    def _cells(self, regions: tuple[Region, ...], scalars: tuple[int, ...] = ()) -> _Cells:
        """Addresses of regions and then numbers, eight bytes each (the driver reads the first four of an int32)."""
        cells = (ctypes.c_uint64 * (len(regions) + len(scalars)))()
        for position, region in enumerate(regions):
            if region.buffer in self._open:
                self._open[region.buffer].append((cells, position, region.offset))
            else:
                cells[position] = self._fixed[region.buffer] + region.offset
        cells[len(regions) :] = list(scalars)
        return cells


def _issue(gpu: Driver, action: _Action) -> None:
    """Give something to its stream."""
    match action:
        case _Call():
            gpu.launch(action.function, action.blocks, action.threads, action.arguments, action.stream)
        case _Move():
            gpu.copy(action.destination[0], action.source[0], action.size_bytes, action.stream)
        case _Upload():
            gpu.copy_in(action.destination[0], action.host, action.size_bytes, action.stream)
        case _Mark(is_wait=True):
            gpu.wait(action.stream, action.event)
        case _Mark():
            gpu.record(action.event, action.stream)


class CudaExecutable:
    """A program's kernels and constants on the GPU, loaded when it is first bound to an arena."""

    def __init__(self, program: Program, find_driver: Callable[[], Driver]) -> None:
        self.plan: Plan = program.plan
        self.kernels: dict[str, Kernel] = {kernel.symbol: kernel for kernel in program.plan.kernels}
        self.streams: dict[int, Handle] = {}  # by their numbers in the Plan
        self.stored: dict[str, int] = {}  # where the constants lie on the host that are copied when they are due
        self._pinned: PinnedMemory | None = None
        self._program = program
        self._find_driver = find_driver
        self._gpu: Driver | None = None
        self._module: Handle = 0
        self._functions: dict[str, Handle] = {}
        self._constants: DeviceMemory | None = None
        self._lock = threading.Lock()

    @property
    def gpu(self) -> Driver:
        assert self._gpu is not None, "the program is not loaded yet"
        return self._gpu

    def bind(self, arena: Arena, states: Arena | None = None) -> CudaInvocation:
        """Raises DeviceError without a GPU, ProgramFileError where it cannot run this code."""
        assert states is None, "a program for a GPU has no states"
        with self._lock:
            if self._gpu is None:
                self._load()
        with self.running():
            return CudaInvocation(self, arena)

    def bind_profile(self, arena: Arena, states: Arena | None = None) -> NoReturn:
        raise OptionError("profile", "programs for GPUs have no counters", "time them with NVIDIA's tools: nsys profile")

    @property
    def stream(self) -> Handle:
        """That of the kernels."""
        return self.streams[COMPUTE]

    def synchronize(self) -> None:
        """Wait for all that was given to the program's streams."""
        for stream in self.streams.values():
            self.gpu.synchronize(stream)

    def running(self) -> _Running:
        return _Running(self.gpu)

    def function(self, name: str) -> Handle:
        if name not in self._functions:
            self._functions[name] = self.gpu.function(self._module, name)
        return self._functions[name]

    def fixed_addresses(self, arena: int) -> dict[str, int]:
        """Where buffers lie that are not the caller's."""
        assert self._constants is not None
        starts = {Role.CONSTANT: self._constants.address, **dict.fromkeys(ARENA_ROLES, arena)}
        placed = (buffer for buffer in self.plan.buffers if buffer.role in starts and buffer.space != STORAGE)
        return {buffer.name: starts[buffer.role] + (buffer.offset or 0) for buffer in placed}

    def _load(self) -> None:
        gpu = _found(self._find_driver)
        data = self._program.constants
        with _Running(gpu):
            try:
                self._module = gpu.load(self._program.library)
            except DriverError as error:
                if error.code not in WRONG_BINARY:
                    raise
                what = f"compiled for {self.plan.target}, which this GPU ({gpu.architecture()}) cannot run ({error})"
                raise ProgramFileError("target", what, "compile the model again for this GPU") from error
            numbers = sorted({COMPUTE, *(step.stream for step in self.plan.steps)})
            self.streams = {number: gpu.new_stream() for number in numbers}
            self._load_stored(gpu)
            self._constants = DeviceMemory(gpu, data.size, "weights")
            if data.size:
                gpu.copy_in(self._constants.address, data.ctypes.data, data.size, self.stream)
                gpu.synchronize(self.stream)
        self._gpu = gpu

    def _load_stored(self, gpu: Driver) -> None:
        """Take the weights that stay outside of the GPU into pinned memory of the host."""
        if (storage := self._program.storage) is None:
            return
        self._pinned = PinnedMemory(gpu, storage)
        start = self._pinned.address
        self.stored = {b.name: start + (b.offset or 0) for b in self.plan.buffers if b.space == STORAGE}

    def __del__(self) -> None:
        if self._gpu is not None and self._module:
            with suppress(DriverError), self._gpu.active():
                self._gpu.unload(self._module)


class _Running:
    """The GPU for the calling thread; its failures become errors of ours."""

    def __init__(self, gpu: Driver) -> None:
        self._active = gpu.active()

    def __enter__(self) -> None:
        self._active.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._active.__exit__(kind, error, trace)
        if isinstance(error, DriverError):
            raise DeviceError("GPU", str(error), "see the message of the driver") from error


class CudaDevice:
    """The machine's first NVIDIA GPU."""

    torch_devices = frozenset(["cpu", "cuda:0"])

    def __init__(self, find_driver: Callable[[], Driver] = driver) -> None:
        self._find_driver = find_driver

    def load(self, program: Program) -> CudaExecutable:
        return CudaExecutable(program, self._find_driver)

    def allocate(self, size_bytes: int) -> DeviceMemory:
        return DeviceMemory(_found(self._find_driver), size_bytes, "activations")


class NoDevice:
    """Programs for devices that prefuse compiles for and cannot run on yet."""

    torch_devices = frozenset(["cpu"])

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def load(self, program: Program) -> NoDevice:
        return self

    def allocate(self, size_bytes: int) -> NoReturn:
        raise DeviceError(self._kind, "prefuse compiles for this device and cannot run programs on it yet", "")

    def bind(self, arena: Arena, states: Arena | None = None) -> NoReturn:
        self.allocate(0)

    def bind_profile(self, arena: Arena, states: Arena | None = None) -> NoReturn:
        self.allocate(0)


def _found(find_driver: Callable[[], Driver]) -> Driver:
    try:
        return find_driver()
    except DriverError as error:
        raise DeviceError("GPU", str(error), "run the program on a machine with an NVIDIA GPU") from error
