"""Times of several configurations of one group, in turns, in one program.

The program calls every kernel once for its results, which must agree with those of the first, and then all of them round after
round. So whatever slows the machine down slows all of them down, and the least time of each counts. Constants have several
copies, taken in turns, where a model has more of them than caches hold: they come from memory then, as in the model.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from time import perf_counter

import numpy as np

from ...kernels.groups.group import Group
from ...kernels.registry import build_kernel
from ...kernels.template.contract import BuiltKernel, Operand
from ...runtime.executor import CompiledModel
from ...runtime.plan import ALIGNMENT, Buffer, Copy, Kernel, Launch, Plan, Port, Region, Role, Space, Step, TensorType
from ...runtime.program_file import Program
from ...runtime.target import Target
from ..lowering.planning import ARENA, CALLER, CONSTANTS
from ..lowering.program import build_library

_MOST_STEPS = 400
_ROUNDS = 8
_MOST_COPIES = 16
_CONSTANT_BYTES = 256 << 20  # of all copies
_BLOCK_ELEMENTS = 1 << 18  # of random numbers, which long constants repeat
_ROUNDING = {"bfloat16": 2**-7, "float16": 2**-10}  # how far apart results that are stored so may be, relative to their norm


@dataclass(frozen=True)
class Trial:
    """What to measure: at least two calls of the program, and more for `seconds`.

    `model_constant_bytes` is what the constants of the whole model take.
    """

    group: Group
    target: Target
    configurations: tuple[Mapping[str, str], ...]
    model_constant_bytes: int
    seconds: float


def measure(trial: Trial) -> tuple[float | None, ...]:
    """Microseconds of each configuration; None for one that is not legal, or whose results are not those of the first."""
    built = [build_kernel(replace(trial.group, configuration=one), trial.target) for one in trial.configurations]
    kernels = {i: one for i, one in enumerate(built) if isinstance(one, BuiltKernel) and not one.ignored}
    times: list[float | None] = [None] * len(built)
    if 0 not in kernels:
        return tuple(times)
    program = _Bench(trial, kernels)
    for number, time_us in program.times_us().items():
        times[number] = time_us
    return tuple(times)


class _Bench:
    """One program with all kernels, and its inputs."""

    def __init__(self, trial: Trial, kernels: Mapping[int, BuiltKernel]) -> None:
        self.trial, self.kernels, self.group = trial, kernels, trial.group
        self.buffers: dict[str, Buffer] = {}
        self.ends = {ARENA: 0, CONSTANTS: 0}
        self.random = np.random.default_rng(0)
        read = {operand.name for kernel in kernels.values() for operand in kernel.operands}
        given = [name for name in self.group.inputs if name in read and name not in self.group.constants]
        self.inputs = {name: self._array(name) for name in given}
        self.packed = dict(self._packed_constants())
        size_bytes = sum(array.nbytes for array in self.packed.values())
        wanted = min(trial.model_constant_bytes, _CONSTANT_BYTES)
        self.copies = min(max(wanted // max(size_bytes, 1), 1), _MOST_COPIES)
        self.rounds = max(min(max(self.copies, _ROUNDS), _MOST_STEPS // len(kernels)), 2)
        plan = self._plan()
        functions = {_symbol(number): kernel.function for number, kernel in kernels.items()}
        library = build_library(plan, functions, trial.target, profile=True)
        self.net = CompiledModel(Program(plan, library, self._constants(), {"name": "trial"}))

    def times_us(self) -> dict[int, float]:
        """The least time of each kernel whose results agree with those of the first."""
        arguments = list(self.inputs.values())
        results = self.net(*arguments)
        results = results if isinstance(results, tuple) else (results,)
        agreeing = self._agreeing([np.asarray(result) for result in results])
        begin, stamps = perf_counter(), list[np.ndarray]()
        while len(stamps) < 2 or perf_counter() - begin < self.trial.seconds:
            stamps.append(self.net.profile(*arguments, runs=2).stamps_ns)
        least = np.diff(np.concatenate(stamps), axis=1).min(axis=0).tolist()
        found: dict[int, float] = {}
        for step, time_ns in zip(self.net.plan.steps, least, strict=True):
            if isinstance(step, Launch) and step.label and (number := int(step.label)) in agreeing:
                found[number] = min(found.get(number, time_ns / 1e3), time_ns / 1e3)
        return found

    def _agreeing(self, results: Sequence[np.ndarray]) -> set[int]:
        """The kernels whose results are those of the first, as exactly as the precision asks and their types tell."""
        count = len(self.group.outputs)
        by_kernel = {number: results[i * count : (i + 1) * count] for i, number in enumerate(self.kernels)}
        limit = self.group.tolerance.error
        return {
            number
            for number, given in by_kernel.items()
            if all(
                _distance(one, other) <= max(limit, _ROUNDING.get(other.dtype.name, 0.0))
                for one, other in zip(given, by_kernel[0], strict=True)
            )
        }

    # Operands ---------------------------------------------------------------------------------------------------------

    def _array(self, name: str) -> np.ndarray:
        """A literal itself; normal floats, integers that are safe as indices."""
        kind, literal = self.group.types[name], self.group.literals.get(name)
        if literal is not None:
            return np.ascontiguousarray(literal)
        if np.dtype(kind.dtype).kind in "biu":
            return np.zeros(kind.shape, kind.dtype)
        block = self.random.normal(size=min(kind.elements, _BLOCK_ELEMENTS)).astype(kind.dtype)
        return np.resize(block, kind.shape)

    def _packed_constants(self) -> Iterator[tuple[str, np.ndarray]]:
        """The constants as kernels read them, by the names that `_constant` gives them; equal ones once."""
        operands = [operand for kernel in self.kernels.values() for operand in kernel.operands]
        for name in dict.fromkeys(operand.name for operand in operands if operand.name in self.group.constants):
            array = self._array(name)
            for operand in {_constant(one): one for one in operands if one.name == name}.values():
                yield _constant(operand), array if operand.pack is None else operand.pack(array)

    def _constants(self) -> np.ndarray:
        """The bytes of all copies, on small pages as those of a program file are."""
        memory = mmap.mmap(-1, max(self.ends[CONSTANTS], 1))
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        content = np.frombuffer(memory, np.uint8)
        for name, array in self.packed.items():
            for copy in range(self.copies):
                offset = self.buffers[f"{name}:{copy}"].offset
                assert offset is not None
                content[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return content

    # The plan ---------------------------------------------------------------------------------------------------------

    def _plan(self) -> Plan:
        group = self.group
        inputs = [self._port(name, Role.INPUT, group.types[name]) for name in self.inputs]
        outputs = [
            self._port(f"{name}:{number}", Role.OUTPUT, group.types[name]) for number in self.kernels for name in group.outputs
        ]
        steps: list[Step] = []
        for name in self.inputs:
            size_bytes = self.buffers[f"{name}/caller"].size_bytes
            steps.append(Copy(Region(f"{name}/caller", 0, size_bytes), self._place(name, ARENA, size_bytes)))
        for name, array in self.packed.items():
            for copy in range(self.copies):
                self._place(f"{name}:{copy}", CONSTANTS, array.nbytes)
        for name in group.outputs:
            self._place(name, ARENA, group.types[name].size_bytes)
        self._place("/workspace", ARENA, max(kernel.workspace_bytes for kernel in self.kernels.values()))
        steps += [self._launch(number, 0, is_checked=True) for number in self.kernels]
        order = list(self.kernels)
        for turn in range(self.rounds):
            first = turn % len(order)
            steps += [self._launch(number, turn % self.copies) for number in (*order[first:], *order[:first])]
        kernels = [
            Kernel(_symbol(number), kernel.template, len(kernel.operands) + len(group.outputs) + bool(kernel.workspace_bytes))
            for number, kernel in self.kernels.items()
        ]
        spaces = (Space(ARENA, self.ends[ARENA]), Space(CONSTANTS, self.ends[CONSTANTS]), Space(CALLER))
        buffers = tuple(self.buffers.values())
        return Plan(str(self.trial.target), tuple(inputs), tuple(outputs), spaces, buffers, tuple(kernels), tuple(steps))

    def _port(self, name: str, role: Role, kind: TensorType) -> Port:
        self.buffers[f"{name}/caller"] = Buffer(f"{name}/caller", role, kind.size_bytes, CALLER)
        return Port(name, kind, f"{name}/caller")

    def _place(self, name: str, space: str, size_bytes: int) -> Region:
        """A buffer behind those that are there."""
        role = Role.CONSTANT if space == CONSTANTS else Role.ACTIVATION
        self.buffers[name] = Buffer(name, role, size_bytes, space, self.ends[space])
        self.ends[space] += ceil(size_bytes / ALIGNMENT) * ALIGNMENT
        return Region(name, 0, size_bytes)

    def _launch(self, number: int, copy: int, *, is_checked: bool = False) -> Launch:
        """A call of a kernel; one whose results are checked gives them to the caller, and has no label."""
        kernel, group = self.kernels[number], self.group
        reads = [f"{_constant(one)}:{copy}" if one.name in group.constants else one.name for one in kernel.operands]
        writes = [f"{name}:{number}/caller" if is_checked else name for name in group.outputs]
        scratch = (Region("/workspace", 0, kernel.workspace_bytes),) if kernel.workspace_bytes else ()
        whole = {name: Region(name, 0, self.buffers[name].size_bytes) for name in (*reads, *writes)}
        return Launch(
            _symbol(number),
            tuple(whole[name] for name in reads),
            tuple(whole[name] for name in writes),
            scratch,
            label="" if is_checked else str(number),
        )


def _symbol(number: int) -> str:
    return f"kernel{number}"


def _constant(operand: Operand) -> str:
    return f"{operand.name}|{operand.pack or ''}"


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    """The norm of the difference over that of the other, where the other is finite."""
    given, wanted = np.asarray(one, np.float64), np.asarray(other, np.float64)
    finite = np.isfinite(wanted)
    norm = float(np.linalg.norm(wanted[finite]))
    return float(np.linalg.norm(given[finite] - wanted[finite])) / (norm or 1.0)
