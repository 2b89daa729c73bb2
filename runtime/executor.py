"""Compiled models that can be called: NumPy arrays or torch tensors in, the same kind out, contiguous ones without a copy."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Final, NoReturn, Self

import numpy as np

from .cpu_device import CpuDevice, CpuExecutable
from .device import Arena, Device, Executable, Invocation
from .errors import ArenaMemoryError, CompileError, InputError, OptionError, ProgramFileError
from .gpu_device import GpuDevice, SimulatedDevice
from .plan import ARENA_ROLES, SCRATCH, Launch, Plan, Port, step_reads, step_writes
from .profile import GroupDescription, Profile, Recorder, assumed_rate_of, descriptions_of
from .program_file import Program, read_program, save_program
from .report import render_report
from .signature import Signature, SizedSignature, in_order
from .states import States
from .target import Target

if TYPE_CHECKING:
    import torch


_QUICK_WORK = 5_000_000  # operations and bytes, of about a tenth of a millisecond
_ndarray = np.ndarray  # looked up once: a call takes about a microsecond


class Shared:
    """A model that never changes, and that any thread may call: a copy is the model itself, and no pickle holds it."""

    __slots__ = ()

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be pickled: raises OptionError."""
        what = "a compiled model is native code and mapped weights, which no pickle holds"
        raise OptionError("pickle", what, "save it to a file, net.save(path), and load that file there: prefuse.load(path)")


class CompiledModel(Shared):
    """A program, ready to run. Threads may call it at the same time; they share its weights and nothing else.

    One with states keeps them from call to call, those of the model itself in a session that one thread at a time may call;
    each `context()` is a session of its own.

    Inputs are given in the order of `inputs` or by name, as NumPy arrays or CPU torch tensors of exactly the compiled shape and
    element type; an array that is not contiguous is copied. The result is one array, or a tuple of them in the order of
    `outputs`: torch tensors if any input is one, else NumPy arrays.
    """

    def __init__(self, program: Program, device: Device | None = None) -> None:
        """Load the program's native code.

        Raises:
            ProgramFileError: it cannot be loaded on this device.
        """
        self._program = program
        self._device: Final = device or device_for(program.plan)
        self._executable: Final = self._device.load(program)
        signature = SizedSignature if program.plan.dims else Signature
        self._signature: Final = signature(program.plan, self._device.torch_devices)
        self._arena_bytes: Final = arena_bytes(program.plan)
        self._idle: Final[deque[Context]] = deque()
        self._session: Final = self.context() if program.plan.states else None
        # What a first call would wait for; a GPU is not touched before it, nor is memory taken of states that nobody may use.
        if isinstance(self._executable, CpuExecutable) and self._session is None:
            with suppress(ArenaMemoryError):  # which the first call will tell
                self._warm_up(needs_threads=self._executable.pool_user.needs_threads)

    def _warm_up(self, *, needs_threads: bool) -> None:
        """Prepare a first caller, which makes a call if that is short: one that needs no threads of a pool."""
        first = self.context()
        first.prepare()
        if is_quick(self._program.plan) and not needs_threads:
            first.run([np.zeros(port.type.shape, port.type.dtype) for port in self.inputs], {})
        self._idle.append(first)

    def __call__(self, /, *inputs: object, **named: object) -> object:
        """Run the model.

        `out`, a keyword where no input has this name, gives memory for the results, which are written there: an array (a tuple
        of them, by name or in order, where there are several outputs; None for new ones), contiguous, of exactly their types.

        Raises:
            InputError: the inputs or `out` are not those of the model, or it has states and another thread is calling it.
            ArenaMemoryError: there is no memory for the activations.
        """
        if self._session is not None:
            return self._session(*inputs, **named)
        try:
            context = self._idle.pop()
        except IndexError:
            context = self.context()
        try:
            return context.run(inputs, named)
        finally:
            self._idle.append(context)

    def context(self) -> Context:
        """A caller of its own, with an arena that no other call uses, and states, if the model has any, as at the beginning.

        Its memory is taken at its first call.
        """
        return self._context(self._executable)

    def context_of(self, states: States | None) -> Context:
        """As `context`, with the states of another, of this program or one whose states are laid out as here, if it has any.

        Raises:
            InputError: they are laid out otherwise.
        """
        if states is not None and States(self._program, self._device).layout != states.layout:
            what = f"{states} is not what the program for these inputs keeps"
            raise InputError("states", what, "give a session inputs of one kind, or take another: model.context()")
        return self._context(self._executable, states)

    def _context(self, executable: Executable | Recorder, states: States | None = None) -> Context:
        if states is None and self._program.plan.states:
            states = States(self._program, self._device)
        return Context(self._device, executable, self._signature, self._arena_bytes, states)

    @property
    def states(self) -> States:
        """The states of the model's own session, in which calls of the model itself run, one thread at a time.

        Raises:
            OptionError: the model has none.
        """
        return session_states(None if self._session is None else self._session.kept)

    @property
    def program(self) -> Program:
        """The program: its plan, native code and weights."""
        return self._program

    @property
    def plan(self) -> Plan:
        """Every kernel, buffer and step of the program."""
        return self._program.plan

    @property
    def inputs(self) -> tuple[Port, ...]:
        """Names and types of the inputs, in order."""
        return self.plan.inputs

    @property
    def outputs(self) -> tuple[Port, ...]:
        """Names and types of the outputs, in order."""
        return self.plan.outputs

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the inputs, in order."""
        return tuple(port.name for port in self.plan.inputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the outputs, in order."""
        return tuple(port.name for port in self.plan.outputs)

    def report(self) -> str:
        """What was fused, which kernels run, how much memory they take, and where the slow paths are."""
        return render_report(self._program)

    @property
    def remarks(self) -> tuple[str, ...]:
        """All that the passes said while compiling: what they did not do, and why."""
        report = self._program.manifest.get("report")
        found = report.get("remarks") if isinstance(report, Mapping) else None
        return tuple(map(str, found)) if isinstance(found, list) else ()

    def profile(self, /, *inputs: object, runs: int = 20, **named: object) -> Profile:
        """The times of each step in `runs` calls, after one that does not count.

        Raises:
            OptionError: the program has no counters: it is for a CPU and was not compiled with profile=True.
            InputError: the inputs are not those of the model.
        """
        if runs < 1:
            raise OptionError("runs", f"{runs} calls", "give a number from 1 on")
        recorder = Recorder(self._executable, runs + 1, len(self.plan.steps))
        context = self._context(recorder)
        for _ in range(runs + 1):
            context(*inputs, **named)
        name = str(self._program.manifest.get("name", "model"))
        rate = assumed_rate_of(self._program)
        return Profile(name, self.plan, self._descriptions, recorder.stamps_ns()[1:], None, rate, tuple(recorder.copies[1:]))

    @cached_property
    def _descriptions(self) -> Mapping[str, GroupDescription]:
        """What the manifest says of the launches: read once, as programs timed in turns are profiled hundreds of times."""
        return descriptions_of(self._program)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the program to a `.prefuse` file, whole or not at all: for its target, threads and version of apache-tvm.

        Raises:
            ProgramFileError: the file cannot be written.
        """
        save_program(path, self._program)


class Context:
    """One caller of a compiled model, a session: an arena, and states, kept from call to call.

    One thread at a time may call it.
    """

    def __init__(
        self,
        device: Device,
        executable: Executable | Recorder,
        signature: Signature,
        size_bytes: int,
        states: States | None = None,
    ) -> None:
        self._device = device
        self._executable = executable
        self._signature = signature
        self._size_bytes = size_bytes
        self._invocation: Invocation | None = None
        self.kept = states
        self._lock = threading.Lock() if states is None else states.lock

    @property
    def states(self) -> States:
        """The states by name: to look at, set, reset, save and load. Raises OptionError where the model has none."""
        return session_states(self.kept)

    def __call__(self, /, *inputs: object, **named: object) -> object:
        """Run the model, as `CompiledModel` does.

        Raises:
            InputError: the inputs are not those of the model, or another thread is calling this context.
        """
        if not self._lock.acquire(blocking=False):
            raise InputError("context", "another thread is calling it", "give each thread its own: model.context()")
        try:
            return self.run(inputs, named)
        finally:
            self._lock.release()

    def run(self, inputs: Sequence[object], named: Mapping[str, object]) -> object:
        """As a call, by one who knows that no other thread has this context. Raises InputError."""
        signature, out = self._signature, None
        if "out" in named and "out" not in signature.names:
            named = dict(named)
            out = named.pop("out")
        if named or len(inputs) != signature.arity:
            inputs = in_order(signature.names, inputs, named)
        if signature.is_sized:
            assert isinstance(signature, SizedSignature)
            signature = signature.at(inputs)
        invocation = self._invocation or self.prepare()
        addresses: list[int] = []
        kept: list[object] = []  # copies, alive until the program has run
        is_torch = False
        place: torch.device | None = None  # of the results, where an input is on a device of its own
        for position, value in enumerate(inputs):
            expected = signature.inputs[position]
            if type(value) is _ndarray:
                addresses.append(expected.array_address(value, kept))
            elif (torch := sys.modules.get("torch")) is not None and isinstance(value, torch.Tensor):
                addresses.append(expected.tensor_address(value, kept))
                is_torch = True
                place = place if value.is_cpu else value.device
            else:
                kept.append(array := expected.as_array(value))
                addresses.append(expected.array_address(array, kept))
        if out is not None:
            results = self._results(signature, signature.given(out, addresses), addresses, is_torch, place)
        else:
            results = [
                expected.new_tensor(addresses, place) if is_torch else expected.new_array(addresses)
                for expected in signature.outputs
            ]
        if signature.counts:
            counts = np.empty(signature.counts, np.int64)
            addresses.extend(counts.ctypes.data + counts.itemsize * position for position in range(counts.size))
        if signature.dimensions is not None:
            addresses.append(signature.dimensions.ctypes.data)
        if self.kept is None:
            invocation(*addresses)
        else:
            self._renew(invocation, addresses)
        if signature.counts:
            results = [expected.cut(result, counts) for expected, result in zip(signature.outputs, results, strict=True)]
        return results[0] if len(results) == 1 else tuple(results)

    def _renew(self, invocation: Invocation, addresses: Sequence[int]) -> None:
        """A call of a program with states, which are lost if it fails once it has begun."""
        assert self.kept is not None
        self.kept.require()
        try:
            invocation(*addresses)
        except BaseException as error:
            if not (isinstance(error, CompileError) and error.is_before_run):
                self.kept.lose()
            raise

    def _results(
        self,
        signature: Signature,
        given: Sequence[np.ndarray | torch.Tensor | None],
        addresses: list[int],
        is_torch: bool,
        place: torch.device | None,
    ) -> list[np.ndarray | torch.Tensor]:
        """What the caller gives for the outputs, and new ones for the rest; their addresses are added to `addresses`."""
        results: list[np.ndarray | torch.Tensor] = []
        for value, expected in zip(given, signature.outputs, strict=True):
            if value is None:
                results.append(expected.new_tensor(addresses, place) if is_torch else expected.new_array(addresses))
            else:
                addresses.append(expected.given_address(value))
                results.append(value)
        return results

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena that its calls need."""
        return self._size_bytes

    def new_arena(self, size_bytes: int) -> Arena:
        """Memory of so many bytes where the program runs. Raises ArenaMemoryError."""
        return self._device.allocate(size_bytes)

    def prepare(self, arena: Arena | None = None) -> Invocation:
        """Take the arena, which else the first call does; or one of at least its size that contexts share which never run at the
        same time: no call finds in it what another has left there. Raises ArenaMemoryError.
        """
        if arena is None:
            arena = self.new_arena(self._size_bytes)
        self._invocation = self._executable.bind(arena, None if self.kept is None else self.kept.memory())
        return self._invocation


def session_states(states: States | None) -> States:
    """The states of a session. Raises OptionError where there are none."""
    if states is None:
        raise OptionError("states", "the model has no states", 'compile it with states={"output": "input"}')
    return states


def device_for(plan: Plan) -> Device:
    """The device of this machine that a plan's target names. Whether it is there shows at the first call."""
    target = Target.parse(plan.target)
    if target.kind == "cpu":
        return CpuDevice()
    return SimulatedDevice() if target.is_simulated else GpuDevice(target.kind)


def is_quick(plan: Plan) -> bool:
    """Whether a call is so short that one more is made when a program is loaded.

    That warm-up call brings code, weights and their pages into caches and page tables, which takes longer than a small program's
    own work.
    """
    kernels = {kernel.symbol: kernel.flops + kernel.bytes_moved for kernel in plan.kernels}
    work = 0
    for step in plan.steps:
        regions = (*step_reads(step), *step_writes(step))
        work += kernels[step.kernel] if isinstance(step, Launch) else sum(region.size_bytes for region in regions)
    return work <= _QUICK_WORK


def arena_bytes(plan: Plan) -> int:
    """Bytes of the one space that holds a context's activations and workspaces.

    Raises:
        ProgramFileError: they are in several spaces, which a device with one memory has not.
    """
    names = {buffer.space for buffer in plan.buffers if buffer.role in ARENA_ROLES} - {SCRATCH}
    if len(names) > 1:
        raise ProgramFileError(
            "plan", f"activations in {len(names)} memories: {', '.join(sorted(names))}", "compile for this device"
        )
    return sum(plan.space(name).size_bytes for name in names)


def load(path: str | os.PathLike[str]) -> CompiledModel:
    """Load a `.prefuse` file. It holds native code that runs with your rights: load only files that you trust.

    Weights stay in the file and are read from there: put another file in its place by a rename, as `save` does, never write
    into it while a process has it.

    Raises:
        ProgramFileError: no such file, a corrupt one, or one for another CPU or version.
    """
    return CompiledModel(read_program(path))
