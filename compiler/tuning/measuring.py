"""Times of several configurations of one group, in turns, in one program.

The program calls every kernel once for its results, which must agree with those of the first, and then all of them round after
round. So whatever slows the machine down slows all of them down, and the least time of each counts. Constants have several
copies, taken in turns, where a model has more of them than caches hold: they come from memory then, as in the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from ...kernels.groups.group import Group
from ...kernels.registry import build_kernel
from ...kernels.template.contract import BuiltKernel
from ...runtime.executor import CompiledModel
from ...runtime.plan import ARENA, CALLER, CONSTANTS, Kernel, Launch, Plan, Role, Space
from ...runtime.program_file import Program
from ...runtime.target import Target
from ..lowering.program import build_library
from .bench import Bench, argument_count, symbol_of

CONFIGURATION_SECONDS = 30.0  # to compile a kernel and run it for the first time
_MOST_STEPS = 400
_ROUNDS = 8
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

    @property
    def limit_seconds(self) -> float:
        """After which a process that measures it counts as lost."""
        return len(self.configurations) * CONFIGURATION_SECONDS + 2 * self.seconds

    def answer(self) -> tuple[float | None, ...]:
        """As `measure`."""
        return measure(self)


def measure(trial: Trial) -> tuple[float | None, ...]:
    """Microseconds of each configuration; None for one that is not legal, or whose results are not those of the first."""
    built = [build_kernel(replace(trial.group, configuration=one), trial.target) for one in trial.configurations]
    kernels = {i: one for i, one in enumerate(built) if isinstance(one, BuiltKernel) and not one.ignored}
    times: list[float | None] = [None] * len(built)
    if 0 not in kernels:
        return tuple(times)
    program = _Comparison(trial, kernels)
    for number, time_us in program.times_us().items():
        times[number] = time_us
    return tuple(times)


class _Comparison(Bench):
    """One program with all kernels, and its inputs."""

    def __init__(self, trial: Trial, kernels: Mapping[int, BuiltKernel]) -> None:
        super().__init__(trial.group, kernels, trial.model_constant_bytes)
        self.trial = trial
        self.rounds = max(min(max(self.copies, _ROUNDS), _MOST_STEPS // len(kernels)), 2)
        plan = self._plan()
        functions = {symbol_of(number): kernel.function for number, kernel in kernels.items()}
        library = build_library(plan, functions, trial.target, profile=True)
        self.net = CompiledModel(Program(plan, library, self.constants(), {"name": "trial"}))

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

    def _plan(self) -> Plan:
        group = self.group
        inputs = [self.port(name, Role.INPUT, group.types[name]) for name in self.inputs]
        outputs = [
            self.port(f"{name}:{number}", Role.OUTPUT, group.types[name]) for number in self.kernels for name in group.outputs
        ]
        steps = self.place_all()
        steps += [self.launch(number, 0, is_checked=True) for number in self.kernels]
        order = list(self.kernels)
        for turn in range(self.rounds):
            first = turn % len(order)
            turned = (*order[first:], *order[:first])
            # Another copy for each launch: kernels that pack alike would find what the one before them has read in the caches.
            begin = turn * len(order)
            steps += [self.launch(number, (begin + place) % self.copies, str(number)) for place, number in enumerate(turned)]
        kernels = [
            Kernel(symbol_of(number), kernel.template, argument_count(kernel, group)) for number, kernel in self.kernels.items()
        ]
        spaces = (Space(ARENA, self.ends[ARENA]), Space(CONSTANTS, self.ends[CONSTANTS]), Space(CALLER))
        buffers = tuple(self.buffers.values())
        return Plan(str(self.trial.target), tuple(inputs), tuple(outputs), spaces, buffers, tuple(kernels), tuple(steps))


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    """The norm of the difference over that of the other, where the other is finite."""
    given, wanted = np.asarray(one, np.float64), np.asarray(other, np.float64)
    finite = np.isfinite(wanted)
    norm = float(np.linalg.norm(wanted[finite]))
    return float(np.linalg.norm(given[finite] - wanted[finite])) / (norm or 1.0)
