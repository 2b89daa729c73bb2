"""The time of one kernel alone, with its operands near and with its operands far: in a process of its own, of a program that
launches nothing else.

Near: launched again and again. Far: after each thread has read more than its L2 holds, and by another copy of the constants than
last time. A program lies between the two (`coldness.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from ...kernels.groups.group import Group
from ...kernels.registry import build_kernel
from ...kernels.template.contract import BuiltKernel
from ...runtime.executor import CompiledModel
from ...runtime.plan import ARENA, CALLER, CONSTANTS, Kernel, Launch, Plan, Region, Role, Space, TensorType
from ...runtime.program_file import Program
from ...runtime.target import Target
from ..lowering.machine_kernels import sweep_kernel
from ..lowering.program import build_library
from ..lowering.short_programs import on_one_thread
from ..tuning.bench import Bench, argument_count, symbol_of
from ..tuning.measuring import CONFIGURATION_SECONDS

QUANTILE = 0.25  # of the times of a launch: other work makes them only longer
_NEAR_LAUNCHES, _WARMING = 6, 2  # of which the first do not count
_FAR_LAUNCHES = 6
_FAR_BYTES = 256 << 20  # of constants that are read in turn
_SWEPT_CACHES = 4  # times what the cores' own caches hold: what is left there is nothing of the kernel's
_LEAST_SWEEP_BYTES = 4 << 20
_SWEEP, _SWEPT = "sweep", "/swept"


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of a launch: with all operands in the nearest caches that hold them, and with none of them in a core's own."""

    near_us: float
    far_us: float


@dataclass(frozen=True)
class IsolatedRun:
    """What to measure: the kernel that `build_kernel` writes for a group, for `seconds` at least.

    `is_serial`: without parallel loops, as those of short programs.
    """

    group: Group
    target: Target
    is_serial: bool
    seconds: float

    @property
    def limit_seconds(self) -> float:
        """After which a process that measures it counts as lost."""
        return CONFIGURATION_SECONDS + 20 * self.seconds

    def answer(self) -> Timing | None:
        """The times on this machine; None where no template computes the group."""
        kernel = build_kernel(replace(self.group, enclosing={}), self.target)
        if not isinstance(kernel, BuiltKernel):
            return None
        function = on_one_thread(kernel.function) if self.is_serial else kernel.function
        return _Isolation(self, kernel, function).timing()


class _Isolation(Bench):
    """The program of one kernel."""

    def __init__(self, run: IsolatedRun, kernel: BuiltKernel, function: object) -> None:
        super().__init__(run.group, {0: kernel}, _FAR_BYTES)
        self.run, self.kernel = run, kernel
        machine, threads = run.target.machine, run.target.threads
        self.sweep_bytes = max(_SWEPT_CACHES * machine.l2.size_bytes * threads, _LEAST_SWEEP_BYTES)
        sweep, self.swept = sweep_kernel(run.target, self.sweep_bytes)
        plan = self._plan()
        library = build_library(plan, {symbol_of(0): function, _SWEEP: sweep}, run.target, profile=True)
        self.net = CompiledModel(Program(plan, library, self.constants(), {"name": "isolated"}))

    def constants(self) -> np.ndarray:
        """With something in the memory that is swept: pages that nobody has written are all one page."""
        content, swept = super().constants(), self.buffers[_SWEPT]
        assert swept.offset is not None
        content[swept.offset : swept.offset + swept.size_bytes] = 1
        return content

    def timing(self) -> Timing:
        arguments = list(self.inputs.values())
        begin, stamps = perf_counter(), list[np.ndarray]()
        while not stamps or perf_counter() - begin < self.run.seconds:
            stamps.append(self.net.profile(*arguments, runs=2).stamps_ns)
        times_us = np.diff(np.concatenate(stamps), axis=1) / 1e3
        labels = [step.label if isinstance(step, Launch) else "" for step in self.net.plan.steps]
        near, far = (
            float(np.quantile(times_us[:, [at for at, one in enumerate(labels) if one == label]], QUANTILE))
            for label in ("near", "far")
        )
        return Timing(near, far)

    def _plan(self) -> Plan:
        group = self.group
        inputs = [self.port(name, Role.INPUT, group.types[name]) for name in self.inputs]
        swept = self.port("swept", Role.OUTPUT, TensorType((self.swept,), "int32"))
        steps = self.place_all()
        sweep = Launch(_SWEEP, (self.place(_SWEPT, CONSTANTS, self.sweep_bytes),), (Region(swept.buffer, 0, 4 * self.swept),))
        steps += [self.launch(0, 0, "near" * (turn >= _WARMING)) for turn in range(_NEAR_LAUNCHES)]
        for turn in range(max(_FAR_LAUNCHES, self.copies)):
            steps += [sweep, self.launch(0, (turn + 1) % self.copies, "far")]
        kernels = (
            Kernel(symbol_of(0), self.kernel.template, argument_count(self.kernel, group)),
            Kernel(_SWEEP, _SWEEP, 2),
        )
        spaces = (Space(ARENA, self.ends[ARENA]), Space(CONSTANTS, self.ends[CONSTANTS]), Space(CALLER))
        return Plan(str(self.run.target), tuple(inputs), (swept,), spaces, tuple(self.buffers.values()), kernels, tuple(steps))
