"""What is predicted of a program: data, for people and programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias

from ...runtime.plan import COMPUTE
from ...runtime.profile import GroupDescription

# measured: this kernel alone, on this machine. estimate: the cost model alone. scaled: the estimate, times what measured kernels
# of its template took over theirs.
Source: TypeAlias = Literal["measured", "scaled", "estimate"]
SOURCES: tuple[Source, ...] = ("measured", "scaled", "estimate")


@dataclass(frozen=True, slots=True)
class PredictedStep:
    """One step of a program: when it begins, how long it takes, in microseconds, and where that is known from.

    `near_us` and `far_us` are the two times that were measured, 0 where none were.
    """

    label: str
    template: str  # "copy" for a step that is no launch
    problem: str
    group: GroupDescription
    bytes_moved: int
    begin_us: float
    time_us: float
    source: Source
    is_critical: bool
    near_us: float = 0.0
    far_us: float = 0.0
    stream: int = 0
    stall_us: float = 0.0  # how long it waits for copies while its stream has nothing else to do


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that a program takes: exactly those of the compiled program.

    Weights are there once, however many contexts share them; each context has an arena, of which the largest workspace of a step
    takes `workspace_bytes`. `stored_bytes` of weights stay in the file: within a memory limit, the arena holds those of them that
    are being read.
    """

    weights_bytes: int
    arena_bytes: int
    workspace_bytes: int
    stored_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Of one context."""
        return self.weights_bytes + self.arena_bytes


@dataclass(frozen=True, slots=True)
class Prediction:
    """A program as it would be compiled: the time of a call among many, one after the other, and its memory.

    `machine` names the core that costs are of. `is_elsewhere`: it is not this machine, so that everything is an estimate.
    `coldness` is the share of the times of far operands in those that were measured; `is_fitted` says that it is this machine's.
    """

    name: str
    target: str
    machine: str
    precision: str
    latency_us: float
    memory: Memory
    steps: tuple[PredictedStep, ...]
    is_elsewhere: bool
    coldness: float
    is_fitted: bool

    @property
    def critical_path(self) -> tuple[PredictedStep, ...]:
        """The steps that the latency is the sum of, in order."""
        return tuple(step for step in self.steps if step.is_critical)

    @property
    def copies_us(self) -> float:
        """What copies from the program's file take, one after the other."""
        return sum(step.time_us for step in self.steps if step.stream != COMPUTE)

    @property
    def compute_us(self) -> float:
        """What the steps of the kernels' stream take, one after the other."""
        return sum(step.time_us for step in self.steps if step.stream == COMPUTE)

    @property
    def tail_us(self) -> float:
        """How long copies go on behind the last kernel: a call ends when what the next one reads first is there."""
        return self.latency_us - max((step.begin_us + step.time_us for step in self.steps if step.stream == COMPUTE), default=0.0)

    @property
    def repeated(self) -> tuple[PredictedStep, ...]:
        """The launches that run once more, as a memory limit leaves what they made no room until it is read."""
        launches = [step for step in self.steps if step.template != "copy"]
        firsts = {step.label: step for step in reversed(launches)}
        return tuple(step for step in launches if step is not firsts[step.label])

    @property
    def stalls(self) -> tuple[PredictedStep, ...]:
        """The steps that wait for copies, the longest waits first."""
        waiting = (step for step in self.steps if step.stall_us > 0)
        return tuple(sorted(waiting, key=lambda step: -step.stall_us))

    @property
    def shares(self) -> dict[Source, float]:
        """By source, the part of the latency that is known from it."""
        times: dict[Source, float] = dict.fromkeys(SOURCES, 0.0)
        for step in self.critical_path:
            times[step.source] += step.time_us
        total = sum(times.values())
        return {source: times[source] / total if total else 0.0 for source in SOURCES}

    def as_json(self) -> dict[str, object]:
        """All of it as JSON values."""
        return {**asdict(self), "total_bytes": self.memory.total_bytes, "shares": self.shares}
