"""The time of planned programs from runs of their kernels alone, and their memory from the plan itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import tvm
import tvm_ffi

from ...kernels.cost.estimate import Estimate, floors
from ...kernels.problem import problem_of
from ...runtime.errors import OptionError
from ...runtime.hardware import machine as machines
from ...runtime.hardware.machine import COPY_SECONDS
from ...runtime.plan import ARENA_ROLES, COMPUTE, SCRATCH, STORAGE, Copy, Launch, Role, Step, step_writes
from ...runtime.precision import Precision
from ...runtime.profile import GroupDescription
from ...runtime.target import Target
from ..driver import Kernels, PlannedModel
from ..estimates.launches import Distances, faulting_us, has_parallel_loop, reuse_distances, walking_us
from ..estimates.tile_unit import uses_tiles, waiting_us
from ..ir.facts import source_of
from ..ir.functions import computing_names, original_names
from ..lowering.planning import LoweredGroup, launch_label
from ..lowering.tvm_importer import TEMPLATE
from ..programs.cache import compiler_version
from ..programs.digest import combine
from ..programs.run_database import Measured, Place, Run, add_runs, known_runs
from .coldness import USUAL, Witness, farness
from .isolated import IsolatedRun, Timing
from .prediction import Memory, PredictedStep, Prediction, Source
from .replay import replay

SECONDS = 0.1  # of calls of one kernel's program
TURNS = 2  # in which each kernel is measured
_KEY_DIGITS = 16
Ask = Callable[[IsolatedRun], "Timing | None"]
Progress = Callable[[str, float], None]


@dataclass
class Predictor:
    """Predictions of programs for one target. What is measured is kept in `database` and known to all later predictions.

    `ask` measures a kernel alone on this machine; without it nothing is measured, and what nobody has measured is estimated. With
    `again` it measures also what was measured before this predictor, once, and the shorter times count.
    `kernels` are those of all graphs that were planned for this predictor, by one set of configurations, so that graphs that are
    almost equal cost little more than one.

    Raises:
        OptionError: the target is a GPU; or there is an `ask`, and the target is another machine.
    """

    target: Target
    database: Path
    ask: Ask | None = None
    again: bool = False
    progress: Progress = lambda text, fraction: None
    kernels: Kernels = field(default_factory=dict)
    _known: Measured = field(init=False)
    _codes: dict[int, _Code] = field(init=False, default_factory=dict)
    _asked: set[str] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        if self.target.is_gpu:
            what = f"what a program for {self.target} takes is not estimated"
            raise OptionError("target", what, "predict for a CPU")
        if self.ask is not None and self.is_elsewhere:
            what = f"kernels for {self.target} of a {self.target.machine.name} cannot be measured on this machine"
            raise OptionError("measure", what, "leave it out: times are then estimated")
        self._known = Measured() if self.is_elsewhere else known_runs(self.database, Place.here(self.target))

    @property
    def is_elsewhere(self) -> bool:
        """Whether times are those of another machine: one that is named, or one that has what this one lacks."""
        return not self.target.is_here or bool(self.target.missing_features())

    @property
    def coldness(self) -> float:
        """The share of far operands in a launch: that of this machine, or the usual one."""
        return USUAL if self._known.coldness is None else self._known.coldness

    @cached_property
    def estimator(self) -> str:
        """Equal where estimates of a kernel are: the cost model, and the numbers that it takes of the machine."""
        return combine(compiler_version(), repr(self._machine))[:_KEY_DIGITS]

    @property
    def is_fitted(self) -> bool:
        """Whether `coldness` is that of programs on this machine."""
        return self._known.coldness is not None

    def predict(self, planned: PlannedModel, name: str, precision: Precision) -> Prediction:
        """A program's time, step by step, and its memory.

        Raises:
            OptionError: the database cannot be written.
        """
        self.measure(planned)
        launches = iter(self._steps(planned))
        spaces = {buffer.name: buffer.space for buffer in planned.plan.buffers}
        steps = [next(launches) if isinstance(step, Launch) else self._copy(step, spaces) for step in planned.plan.steps]
        factor = self._slowed(planned.plan.steps, steps)
        steps = [
            replace(step, time_us=factor * step.time_us) if isinstance(given, Launch) else step
            for given, step in zip(planned.plan.steps, steps, strict=True)
        ]
        played = replay(planned.plan, [step.time_us for step in steps])
        critical, stalls = set(played.critical), played.stalls_us(planned.plan)
        placed = (
            replace(step, begin_us=begin, is_critical=number in critical, stream=given.stream, stall_us=stalls[number])
            for number, (given, step, begin) in enumerate(zip(planned.plan.steps, steps, played.begins_us, strict=True))
        )
        return Prediction(
            name=name,
            target=str(self.target),
            machine=self.target.machine.name,
            precision=precision,
            latency_us=played.time_us,
            memory=memory_of(planned),
            steps=tuple(placed),
            is_elsewhere=self.is_elsewhere,
            coldness=self.coldness,
            is_fitted=self.is_fitted,
        )

    def _slowed(self, steps: Sequence[Step], predicted: Sequence[PredictedStep]) -> float:
        """How many times as long launches take beside copies on other streams."""
        if self.target.is_gpu:
            return 1.0
        pairs = list(zip(steps, predicted, strict=True))
        kernels = sum(one.time_us for step, one in pairs if isinstance(step, Launch))
        copies = sum(one.time_us for step, one in pairs if isinstance(step, Copy) and step.stream != COMPUTE)
        return self.target.machine.slowed_by_copies(kernels, copies, self.target.threads)

    # Runs -------------------------------------------------------------------------------------------------------------

    def measure(self, planned: PlannedModel) -> None:
        """If there is an `ask`, run each kernel alone that nobody has measured here before, the longest ones, by their estimates,
        first; then all of them again, as a host may have taken its cores elsewhere for the first seconds.

        Raises:
            OptionError: the database cannot be written.
        """
        if self.ask is None:
            return
        launches = {one.key: one for one in self._launches(planned.lowered)}
        unknown = [one for one in launches.values() if self._is_to_be_measured(one)]
        turns = TURNS * sorted(unknown, key=lambda one: -self._alone_us(one))
        for number, one in enumerate(turns):
            template = one.item.kernel.template
            self.progress(f"{number + 1} of {len(turns)}: {template}", number / len(turns))
            is_serial = self.target.threads > 1 and not one.code.is_parallel
            timing = self.ask(IsolatedRun(one.item.group, planned.kernels.target, is_serial, SECONDS))
            self._asked.add(one.key)
            if timing is not None:
                run = Run(template, timing.near_us, timing.far_us, round(self._alone_us(one), 3), self.estimator)
                before = self._known.runs.get(one.key)
                self._keep({one.key: run if before is None else before.lesser(run)})

    def _is_to_be_measured(self, one: _Launch) -> bool:
        is_known = one.key in self._known.runs and not self.again
        return one.can_be_rebuilt and one.key not in self._asked and not is_known

    def keep_coldness(self, share: float) -> None:
        """The share of this machine, for all later predictions. Raises OptionError if the database cannot be written."""
        self._keep({}, share)

    def witness(self, planned: PlannedModel, time_us: float) -> Witness:
        """A program that took `time_us`, beside its launches as they are known."""
        near = more = 0.0
        launches, times = self._launches(planned.lowered), list[float]()
        for one in launches:
            run = self._run(one)
            times.append(self._estimated_us(one) if run is None else run.near_us)
            near += times[-1]
            if run is not None:
                far = self._farness(one)
                near += (1 - far) * self._walking_us(one)
                more += far * (run.between(1.0) - run.near_us)
        near += sum(faulting_us(one.item, self.target) for one in launches)
        near += sum(waiting_us(((one.item.kernel, time) for one, time in zip(launches, times, strict=True)), self.target))
        return Witness(time_us, near, more)

    def key_of(self, item: LoweredGroup) -> str:
        """Equal for equal kernels of equal problems, on one target: the problem, and a digest of the kernel's code."""
        return f"{problem_of(item.group) or item.group.label} {self._code(item).digest}"

    def _keep(self, runs: Mapping[str, Run], coldness: float | None = None) -> None:
        add_runs(self.database, Place.here(self.target), runs, coldness)
        share = self._known.coldness if coldness is None else coldness
        self._known = Measured({**self._known.runs, **runs}, share)

    def _code(self, item: LoweredGroup) -> _Code:
        """What is asked of a kernel's function again and again."""
        function = item.kernel.function
        known = self._codes.get(id(function))
        if known is None:
            constants = str([operand.name in item.group.constants for operand in item.kernel.operands])
            digest = combine(str(tvm_ffi.structural_hash(function)), tvm.__version__, constants)[:_KEY_DIGITS]
            known = self._codes[id(function)] = _Code(function, digest, has_parallel_loop(function))
        return known

    # Times ------------------------------------------------------------------------------------------------------------

    def _launches(self, lowered: Sequence[LoweredGroup]) -> list[_Launch]:
        return [
            _Launch(item, since, self.key_of(item), self._code(item), item.kernel.estimate or floors(item.group, self._machine))
            for item, since in zip(lowered, reuse_distances(lowered), strict=True)
        ]

    def _steps(self, planned: PlannedModel) -> Iterator[PredictedStep]:
        """The launches of a plan in order; when they begin is not known yet."""
        scales = self._scales()
        steps = [step for step in planned.plan.steps if isinstance(step, Launch)]
        groups = {launch_label(item): item for item in planned.lowered}  # of which a memory limit may launch some twice
        launches = self._launches([groups[step.label] for step in steps])
        times = [self._time(one, scales) for one in launches]
        waits = waiting_us([(one.item.kernel, time_us) for one, (time_us, _) in zip(launches, times, strict=True)], self.target)
        for step, one, (time_us, source), wait_us in zip(steps, launches, times, waits, strict=True):
            item, run = one.item, self._run(one)
            assert step.kernel == item.symbol, f"{step.label} launches {step.kernel} in the place of {item.symbol}"
            yield PredictedStep(
                label=step.label,
                template=item.kernel.template,
                problem=problem_of(item.group),
                group=_description(planned, item),
                bytes_moved=sum(region.size_bytes for region in (*step.reads, *step.writes)),
                begin_us=0.0,
                time_us=time_us + wait_us + faulting_us(item, self.target),
                source=source,
                is_critical=False,
                near_us=run.near_us if run else 0.0,
                far_us=run.far_us if run else 0.0,
            )

    def _time(self, one: _Launch, scales: Mapping[str, float]) -> tuple[float, Source]:
        """Of a launch whose tile unit is on."""
        if (run := self._run(one)) is not None:
            far = self._farness(one)
            return run.between(self.coldness * far) + (1 - far) * self._walking_us(one), "measured"
        time_us, template = self._estimated_us(one), one.item.kernel.template
        return (time_us * scales[template], "scaled") if template in scales else (time_us, "estimate")

    def _run(self, one: _Launch) -> Run | None:
        """What was measured of a kernel alone, without the wait for the tile unit behind what made its operands far."""
        run = self._known.runs.get(one.key)
        if run is None or not uses_tiles(one.item.kernel):
            return run
        return replace(run, far_us=max(run.far_us - self._us(self._machine.tile_wake_cycles), run.near_us))

    def _copy(self, step: Step, spaces: Mapping[str, str]) -> PredictedStep:
        """A step that is no launch; those of events take no time."""
        label = " ".join((type(step).__name__.lower(), *(f"to {region.buffer}" for region in step_writes(step))))
        if isinstance(step, Copy) and {spaces[step.source.buffer], spaces[step.destination.buffer]} & {STORAGE, SCRATCH}:
            moved = step.source.size_bytes
            time_us = 1e6 * COPY_SECONDS + moved / self._machine.storage_gbs / 1e3
            return PredictedStep(label, "copy", "", GroupDescription(), moved, 0.0, time_us, "estimate", False)
        moved = 2 * sum(region.size_bytes for region in step_writes(step)) if isinstance(step, Copy) else 0
        cycles = Estimate(0.0, 0, streamed_bytes=moved, is_parallel=False).wall_cycles(self._machine) if moved else 0.0
        return PredictedStep(label, "copy", "", GroupDescription(), moved, 0.0, self._us(cycles), "estimate", False)

    def _scales(self) -> dict[str, float]:
        """Of each template that was measured here: what its kernels took over what is estimated of them, the median. Estimates of
        another cost model, or by the numbers of another machine, such as a fit changes, count for nothing."""
        ratios: dict[str, list[float]] = defaultdict(list)
        for run in self._known.runs.values():
            if run.estimated_us and run.near_us and run.estimator == self.estimator:
                ratios[run.template].append(run.between(self.coldness) / run.estimated_us)
        return {template: median(found) for template, found in ratios.items()}

    def _farness(self, one: _Launch) -> float:
        return farness(one.estimate, one.since, self._machine, self._threads(one))

    def _walking_us(self, one: _Launch) -> float:
        return walking_us(one.estimate, one.since, self.target, self._threads(one))

    def _estimated_us(self, one: _Launch) -> float:
        since = one.since
        return self._us(one.estimate.wall_cycles(self._machine, self._threads(one), since.constants, since.activations))

    def _alone_us(self, one: _Launch) -> float:
        """The estimate with constants far and activations near."""
        return self._us(one.estimate.wall_cycles(self._machine, self._threads(one)))

    def _threads(self, one: _Launch) -> int:
        return self.target.threads if one.code.is_parallel else 1

    def _us(self, cycles: float) -> float:
        return cycles / self._machine.ghz / 1e3

    @property
    def _machine(self) -> machines.Machine:
        return self.target.machine


@dataclass(frozen=True, slots=True)
class _Code:
    """A kernel's function, kept so that no other one takes its place in memory."""

    function: Any  # tirx.PrimFunc
    digest: str
    is_parallel: bool


@dataclass(frozen=True, slots=True)
class _Launch:
    """A group of a program and what is known of it before any time is."""

    item: LoweredGroup
    since: Distances
    key: str
    code: _Code
    estimate: Estimate

    @property
    def can_be_rebuilt(self) -> bool:
        """By `build_kernel`, in another process; TVM's own kernels need the whole graph."""
        return self.item.kernel.template != TEMPLATE


def memory_of(planned: PlannedModel) -> Memory:
    """What the planner has placed: the compiled program's own numbers."""
    plan = planned.plan
    arena = {buffer.space for buffer in plan.buffers if buffer.role in ARENA_ROLES} - {SCRATCH}
    workspaces = [buffer.size_bytes for buffer in plan.buffers if buffer.role is Role.WORKSPACE]
    arena_bytes = sum(plan.space(name).size_bytes for name in arena)
    stored = sum(space.size_bytes for space in plan.spaces if space.name == STORAGE)
    return Memory(plan.weights_bytes, arena_bytes, max(workspaces, default=0), stored)


def _description(planned: PlannedModel, item: LoweredGroup) -> GroupDescription:
    names, computing = original_names(item.node), computing_names(planned.model, item.node)
    return GroupDescription(names, source_of(item.node), computing=computing)
