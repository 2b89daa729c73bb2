"""One caller of a program on a GPU: its streams, its graph, and what carries inputs and outputs between host and GPU.

The steps of the Plan become one graph, whose edges are what the bytes that they touch ask for. A caller's memory on the GPU is
used where it is: nodes that read or write it learn its address. Memory of the host goes through pinned memory. Where all that
a caller gives lies on the GPU and torch says on which stream, a call only adds to that stream, as torch's own operators do.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from .constants.shared import SharedConstant
from .device import Arena
from .errors import ArenaMemoryError, DeviceError
from .gpu.driver import LOST, TOO_MANY_BLOCKS, Cells, Driver, DriverError, Handle, KernelLaunch, Transfer, Work, issue
from .gpu.graph import Graph
from .gpu.hazards import Access, Span, dependencies
from .gpu.memory import CallerStream, DeviceMemory, GpuMemoryError, PinnedMemory, shared_weights, uploaded
from .plan import (
    ARENA_ROLES,
    BARRIERS,
    COMPUTE,
    SHARED,
    STORAGE,
    VECTOR_ALIGNMENT,
    Buffer,
    Copy,
    Kernel,
    Launch,
    Plan,
    Record,
    Region,
    Role,
    Step,
    Wait,
    step_reads,
    step_writes,
)
from .streams import slot_copies

CHECK = "PREFUSE_GPU_CHECK"  # of the environment: "1" waits for each step, so that a failing one is named
_MOST_UPDATES = 8  # nodes of a graph that learn the address of one of the caller's buffers; beyond, its bytes are copied
_CLOCK_WORDS = 2  # of an int64 each, before the counters of a profile: seconds and nanoseconds


@dataclass(frozen=True, slots=True)
class _Use:
    """A cell that holds an address in a caller's buffer."""

    work: int
    cells: Cells
    position: int
    offset: int


class LoadedProgram:
    """A program's code and weights on a GPU, for all its contexts. Made and used while the GPU is active."""

    def __init__(self, gpu: Driver, plan: Plan, module: Handle) -> None:
        self.gpu, self.plan = gpu, plan
        self.kernels: dict[str, Kernel] = {kernel.symbol: kernel for kernel in plan.kernels}
        self.stored: dict[str, int] = {}  # where the constants lie on the host that are copied when they are due
        self._module = module
        self._functions: dict[str, Handle] = {}
        self._constants: DeviceMemory | None = None
        self._shared: dict[str, DeviceMemory] = {}
        self._pinned: PinnedMemory | None = None

    def upload(self, constants: np.ndarray, shared: Mapping[str, SharedConstant]) -> None:
        """Bring the constants that stay on the GPU: the program's own, and those that others share, by buffers."""
        self._constants = uploaded(self.gpu, constants)
        self._shared = {name: shared_weights(self.gpu, one.content, one.data) for name, one in shared.items()}

    def keep_stored(self, pinned: PinnedMemory, offsets: Mapping[str, int]) -> None:
        """Constants that stay outside of the GPU, by the names of their buffers."""
        self._pinned = pinned
        self.stored = {name: pinned.address + offset for name, offset in offsets.items()}

    def function(self, name: str, shared_bytes: int) -> Handle:
        """A kernel's function of the module."""
        if name not in self._functions:
            self._functions[name] = self.gpu.function(self._module, name, shared_bytes)
        return self._functions[name]

    def fixed_addresses(self, places: Mapping[Role, int]) -> dict[str, int]:
        """Where buffers lie that are not the caller's: constants, and those of a context at its own addresses."""
        assert self._constants is not None
        starts = {Role.CONSTANT: self._constants.address, **places}
        placed = (buffer for buffer in self.plan.buffers if buffer.role in starts and buffer.space not in (STORAGE, SHARED))
        found = {buffer.name: starts[buffer.role] + (buffer.offset or 0) for buffer in placed}
        return found | {name: memory.address for name, memory in self._shared.items()}

    def __del__(self) -> None:
        with suppress(DriverError), self.gpu.active():  # the driver may be gone before the process
            self.gpu.unload(self._module)


class GpuInvocation:
    """The calls of one context. They run to completion but where torch says in which stream the caller is.

    Those of a program with states always do: who reads or sets states finds them whole, and knows of a call that failed.
    """

    def __init__(self, program: LoadedProgram, arena: Arena, states: Arena | None) -> None:
        self._program, self._arena, self._states = program, arena, states
        self._gpu: Driver = program.gpu
        plan = program.plan
        self._buffers: Mapping[str, Buffer] = {buffer.name: buffer for buffer in plan.buffers}
        self._own = CallerStream(self._gpu)
        self._stream = self._own.stream  # of the call that runs, or ran last
        self._barrier_bytes = sum(space.size_bytes for space in plan.spaces if space.name == BARRIERS)
        self._barriers = DeviceMemory(self._gpu, self._barrier_bytes, "barriers")
        self._is_clear = False  # whether no block waits at a barrier: zeros at first, and as each call leaves them
        places = {Role.STATE: 0 if states is None else states.address, Role.BARRIER: self._barriers.address}
        self._fixed = program.fixed_addresses(places | dict.fromkeys(ARENA_ROLES, arena.address))
        self._uses: dict[str, list[_Use]] = {name: [] for name in plan.parameters}
        self._places: dict[str, int] = {}  # where the works have the caller's buffers now
        self._given: dict[str, int] = {}  # where the caller had them in the last call
        self._staged: dict[str, tuple[DeviceMemory, PinnedMemory]] = {}
        self._works: list[Work] = []
        self._of_step: list[Sequence[Work]] = []
        self._accesses: list[Access] = []
        self._prepare(plan.steps)
        self._first = [work for copy in slot_copies(plan) for work in self._works_of(plan.steps.index(copy), copy)]
        self._is_primed = False  # whether the slots hold what the last call has left for this one
        self._is_checked = os.environ.get(CHECK) == "1"
        cooperates = any(isinstance(work, KernelLaunch) and work.is_cooperative for work in self._works)
        self._is_stepwise = cooperates and not self._gpu.graphs_cooperate
        self._graph: Graph | None = None  # made at the first call, which has addresses for all copies
        self._pending: Handle | None = None  # the stream in which the last call may still run

    def __call__(self, *addresses: int) -> None:
        with self._gpu.active():
            try:
                if not self._is_clear:
                    self._clear_barriers()
                self._run(addresses)
            except (DriverError, GpuMemoryError) as error:
                self._is_primed = self._is_clear = False
                with suppress(DriverError):  # nothing of a failed call runs when the next one begins
                    self._gpu.synchronize(self._stream)
                raise self._explained(error) from error

    def _run(self, addresses: Sequence[int]) -> None:
        gpu, plan = self._gpu, self._program.plan
        on_gpu = [gpu.is_device_address(address) for address in addresses]
        stream = stream_of_torch() if any(on_gpu) else None
        is_left = stream is not None and all(on_gpu) and not self._is_checked and self._states is None
        self._stream = stream = self._own.stream if stream is None else stream
        if self._pending is not None and self._pending != stream:
            gpu.wait(stream, self._own.done)
        back = []
        places = {}
        for name, address, is_there in zip(plan.parameters, addresses, on_gpu, strict=True):
            buffer = self._buffers[name]
            is_dear = len(self._uses[name]) > _MOST_UPDATES and address not in (self._places.get(name), self._given.get(name))
            self._given[name] = address
            is_copied = is_there and (is_dear or address % VECTOR_ALIGNMENT > 0)
            if (is_there and not is_copied) or not buffer.size_bytes:
                places[name] = address
                continue
            places[name] = (memory := self._stage(name))[0].address
            self._bring(buffer, address, memory, stream, is_there)
            if buffer.role is not Role.INPUT:
                back.append((buffer, address, memory, is_there))
        self._place(places)
        for work in () if self._is_primed else self._first:
            issue(gpu, work, stream)
        self._is_primed = False
        self._issue(stream)
        self._is_primed = True
        for buffer, address, (device, pinned), is_there in back:
            if is_there:
                gpu.copy(address, device.address, buffer.size_bytes, stream)
            else:
                gpu.copy_out(pinned.address, device.address, buffer.size_bytes, stream)
        if is_left:
            gpu.record(self._own.done, stream)
            self._pending = stream
            return
        gpu.synchronize(stream)
        self._pending = None
        for buffer, address, (_, pinned), is_there in back:
            if not is_there:
                ctypes.memmove(address, pinned.address, buffer.size_bytes)

    def _clear_barriers(self) -> None:
        """Let all counters of blocks be 0, whatever a call that failed has left."""
        if self._barrier_bytes:
            zeros = np.zeros(self._barrier_bytes, np.uint8)
            self._gpu.copy_in(self._barriers.address, zeros.ctypes.data, zeros.size, self._own.stream)
            self._gpu.synchronize(self._own.stream)
        self._is_clear = True

    def _stage(self, name: str) -> tuple[DeviceMemory, PinnedMemory]:
        """Memory of ours for a caller's buffer."""
        if name not in self._staged:
            size_bytes = self._buffers[name].size_bytes
            self._staged[name] = (DeviceMemory(self._gpu, size_bytes, name), PinnedMemory(self._gpu, size_bytes, name))
        return self._staged[name]

    def _bring(
        self, buffer: Buffer, address: int, memory: tuple[DeviceMemory, PinnedMemory], stream: Handle, is_there: bool
    ) -> None:
        """The content of an input to memory of ours."""
        if buffer.role is not Role.INPUT:
            return
        device, pinned = memory
        if is_there:
            self._gpu.copy(device.address, address, buffer.size_bytes, stream)
            return
        ctypes.memmove(pinned.address, address, buffer.size_bytes)
        self._gpu.copy_in(device.address, pinned.address, buffer.size_bytes, stream)

    def _place(self, places: Mapping[str, int]) -> None:
        """Let the works have the caller's buffers at these addresses."""
        changed: set[int] = set()
        for name, address in places.items():
            if self._places.get(name) != address:
                self._places.pop(name, None)  # unknown until the graph has it, which may fail
                for use in self._uses[name]:
                    use.cells[use.position] = address + use.offset
                    changed.add(use.work)
        if changed and self._graph is not None:
            self._settle()
            self._graph.update(sorted(changed))
        self._places.update(places)

    def _settle(self) -> None:
        """Wait until the call before, which may have been left to torch's stream, is over."""
        if self._pending is not None:
            self._gpu.wait_here(self._own.done)
            self._pending = None

    def _issue(self, stream: Handle) -> None:
        if self._is_checked:
            for work in self._works:
                self._issue_checked(work, stream)
            return
        if self._is_stepwise:
            for work in self._works:
                issue(self._gpu, work, stream)
            return
        if self._graph is None:
            self._graph = Graph(self._gpu, self._works, dependencies(self._accesses))
        self._graph.launch(stream)

    def _issue_checked(self, work: Work, stream: Handle) -> None:
        try:
            issue(self._gpu, work, stream)
            self._gpu.synchronize(stream)
        except DriverError as error:
            raise DriverError(f"{work.label}: {error}", error.code) from error

    def _explained(self, error: DriverError | GpuMemoryError) -> Exception:
        if isinstance(error, GpuMemoryError):
            return memory_error("arena", error)
        fix = "see the message of the driver"
        if error.code == TOO_MANY_BLOCKS:
            fix = "it has fewer multiprocessors than the GPU of its architecture that programs are made for: use a larger one"
        elif error.code in LOST:
            named = "" if self._is_checked else f"set {CHECK}=1 to learn which kernel it is; "
            fix = f"{named}no call of this process can use the GPU any more: start it again"
        return DeviceError("GPU", str(error), fix)

    def _prepare(self, steps: Sequence[Step]) -> None:
        """Works of all steps, and what they touch."""
        last: dict[int, int] = {}  # of the streams that copy, which stay in order
        together: tuple[int, ...] = ()  # the last cooperative grid: two at once might each wait for the other's room
        for number, step in enumerate(steps):
            if isinstance(step, (Record, Wait)):
                self._of_step.append(())
                continue
            works = []
            for work in self._works_of(number, step):
                works.append(work)
                self._works.append(work)
                reads, writes = (tuple(self._spans(regions)) for regions in (step_reads(step), step_writes(step)))
                after = (last[step.stream],) if step.stream != COMPUTE and step.stream in last else ()
                if isinstance(work, KernelLaunch) and work.is_cooperative:
                    after, together = (*after, *together), (len(self._works) - 1,)
                self._accesses.append(Access(reads, writes, after))
                last[step.stream] = len(self._works) - 1
            self._of_step.append(works)

    def _works_of(self, number: int, step: Step) -> Iterator[Work]:
        if isinstance(step, Copy):
            label = f"step {number}, a copy to {step.destination.buffer}"
            host = self._program.stored.get(step.source.buffer)
            if step.source.size_bytes:
                cells = self._cells((step.destination,) if host is not None else (step.destination, step.source), (0,))
                if host is not None:
                    cells[1] = host + step.source.offset
                yield Transfer(cells, step.source.size_bytes, host is not None, label)
            return
        assert isinstance(step, Launch), f"a program for a GPU has no step {type(step).__name__}"
        regions = (*step.reads, *step.writes, *step.scratch)
        for grid in self._program.kernels[step.kernel].grids:
            label = f"step {number}, {step.label or step.kernel}: {grid.function}, {grid.blocks} blocks of {grid.threads} threads"
            cells = self._cells(regions, grid.scalars)
            function = self._program.function(grid.function, grid.shared_bytes)
            size = grid.blocks, grid.threads, grid.shared_bytes
            yield KernelLaunch.of(function, size, cells, label, grid.maps, grid.is_cooperative)

    def _cells(self, regions: tuple[Region, ...], scalars: tuple[int, ...]) -> Cells:
        """Addresses of regions and then numbers, eight bytes each (the driver reads the first four of an int32)."""
        cells: Cells = (ctypes.c_uint64 * (len(regions) + len(scalars)))()
        for position, region in enumerate(regions):
            if region.buffer in self._uses:
                self._uses[region.buffer].append(_Use(len(self._works), cells, position, region.offset))
            else:
                cells[position] = self._fixed[region.buffer] + region.offset
        cells[len(regions) :] = list(scalars)
        return cells

    def _spans(self, regions: Sequence[Region]) -> Iterator[Span]:
        """Bytes that a step touches; those of constants never change."""
        for region in regions:
            buffer = self._buffers[region.buffer]
            if buffer.role is Role.CONSTANT or not region.size_bytes:
                continue
            is_ours = region.buffer in self._fixed
            begin = region.offset + (self._fixed[region.buffer] if is_ours else 0)
            yield Span("gpu" if is_ours else region.buffer, begin, begin + region.size_bytes)


class GpuProfile:
    """As an invocation of a context, whose steps run one after the other, with a time after each; one address more takes them."""

    def __init__(self, program: LoadedProgram, arena: Arena, states: Arena | None) -> None:
        self._invocation = _TimedInvocation(program, arena, states)

    def __call__(self, *addresses: int) -> None:
        self._invocation(*addresses[:-1])
        row = (ctypes.c_int64 * (_CLOCK_WORDS + len(self._invocation.times_ns))).from_address(addresses[-1])
        seconds, nanoseconds = divmod(self._invocation.begin_ns, 10**9)
        row[:] = [seconds, nanoseconds, *(self._invocation.begin_ns + one for one in self._invocation.times_ns)]


class _TimedInvocation(GpuInvocation):
    """Step by step in one stream, an event with a time before the first and after each."""

    def __init__(self, program: LoadedProgram, arena: Arena, states: Arena | None) -> None:
        super().__init__(program, arena, states)
        self.begin_ns = 0
        self.times_ns: Sequence[int] = ()
        self._marks: list[Handle] = []

    def _run(self, addresses: Sequence[int]) -> None:
        gpu = self._gpu
        if not self._marks:
            self._marks = [gpu.new_event(has_time=True) for _ in range(len(self._of_step) + 1)]
        self.begin_ns = time.time_ns()
        super()._run(addresses)
        gpu.wait_here(self._marks[-1])  # the call may have been left to torch's stream
        self.times_ns = [round(gpu.milliseconds(self._marks[0], mark) * 1e6) for mark in self._marks]

    def _issue(self, stream: Handle) -> None:
        self._gpu.record(self._marks[0], stream)
        for works, mark in zip(self._of_step, self._marks[1:], strict=True):
            for work in works:
                issue(self._gpu, work, stream)
            self._gpu.record(mark, stream)

    def __del__(self) -> None:
        with suppress(DriverError, AttributeError), self._gpu.active():
            for mark in self._marks:
                self._gpu.free_event(mark)


def memory_error(where: str, error: GpuMemoryError) -> ArenaMemoryError:
    """For people: what they can do."""
    fix = 'free memory, use fewer contexts at once or a smaller batch, or compile with memory_limit="..."'
    return ArenaMemoryError(where, str(error), fix)


def stream_of_torch() -> Handle | None:
    """The stream on which torch works in this thread; None where torch is not loaded or has not touched the GPU."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.current_stream(0).cuda_stream)
