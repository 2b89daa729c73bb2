"""Where the time of a program goes: the clock before and after each of its steps, and what follows from it.

A step's work is what its kernel must do at least: `flops` and `bytes_moved` of the Plan. A machine that computes F flops and
moves B bytes a second cannot do it in less than max(flops / F, bytes / B) seconds; that bound over the measured time is the
fraction of the roofline (Williams, Waterman, Patterson: Roofline, CACM 52/4, 2009).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Protocol

import numpy as np

from .cpu_device import CLOCK_WORDS, CpuInvocation
from .device import Arena, Executable, Invocation
from .errors import OptionError
from .plan import Launch, Plan, Step, step_reads, step_writes
from .program_file import Program
from .signature import in_order
from .streaming.copier import CopyTime

ASSUMED_RATE = "assumed_flops_per_second"  # in the manifest of a program
_CALLS_A_TURN = 5  # of a program, when several are measured
_LARGE_CHANGE = 0.1  # beyond what two measurements on an idle machine differ by


@dataclass(frozen=True, slots=True)
class Limits:
    """What a machine can do at most: multiply-adds in registers (two flops each), and bytes from and to its memory.

    `change` is how far apart two measurements were, as a part of the larger one: that of flops or of bytes, whichever is more.
    """

    flops_per_second: float
    bytes_per_second: float
    method: str = ""  # how they were measured, for people
    change: float = 0.0
    bfloat16_flops_per_second: float = 0.0  # of products of pairs; 0 where the target has no instruction for them
    tile_flops_per_second: float = 0.0  # of products of tile registers; 0 where the target has none

    def seconds(self, flops: int, bytes_moved: int, multiplies: str = "float32") -> float:
        """The roofline: no program can do it in less. `multiplies` is that of a Kernel."""
        return max(flops / self._rate(multiplies), bytes_moved / self.bytes_per_second)

    def _rate(self, multiplies: str) -> float:
        """Useful flops a second: of a float32 product that is several products of tiles, one is."""
        rate = self.bfloat16_flops_per_second if multiplies == "bfloat16" else 0.0
        if multiplies.startswith("tiles"):
            rate = self.tile_flops_per_second / int(multiplies.removeprefix("tiles"))
        return rate or self.flops_per_second

    def joined(self, later: Limits) -> Limits:
        """The higher of two measurements of one machine, and how far they were apart."""
        flops = sorted((self.flops_per_second, later.flops_per_second))
        moved = sorted((self.bytes_per_second, later.bytes_per_second))
        change = max(1 - low / high for low, high in (flops, moved))
        pairs = max(self.bfloat16_flops_per_second, later.bfloat16_flops_per_second)
        tiles = max(self.tile_flops_per_second, later.tile_flops_per_second)
        return Limits(flops[1], moved[1], self.method, max(self.change, later.change, change), pairs, tiles)

    @property
    def has_changed(self) -> bool:
        """Whether the machine was not the same all the time: other work took its cores, or two of them were one for a while."""
        return self.change > _LARGE_CHANGE


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """What the compiler says of a launch: the imported nodes in it, their sources, and why other templates refused it."""

    nodes: tuple[str, ...] = ()
    source: str = ""
    refused: tuple[tuple[str, str], ...] = ()  # template, reason
    alone: tuple[str, ...] = ()  # why a group of one node is no larger
    computing: tuple[str, ...] = ()  # those of its nodes that it is built around: neither pointwise nor moving elements
    predicted_us: float = 0.0  # by the cost model, on the machine that it was compiled for; 0 where there is no estimate


@dataclass(frozen=True, slots=True)
class StepProfile:
    """One step of a program: what it does, and the median of its times."""

    label: str
    template: str  # "copy" for a step that is no launch
    flops: int
    bytes_moved: int
    time_us: float
    share: float  # of the whole call, from 0 to 1
    group: GroupDescription
    multiplies: str = "float32"  # as of its kernel

    @property
    def flops_per_second(self) -> float:
        return self.flops / self.time_us * 1e6 if self.time_us else 0.0

    @property
    def bytes_per_second(self) -> float:
        return self.bytes_moved / self.time_us * 1e6 if self.time_us else 0.0

    def roofline(self, limits: Limits) -> float:
        """The fraction of the roofline; above 1 where the data lies in a cache, which is faster than memory, or where
        more is read than written: a memory gives a reader more than what copies."""
        return limits.seconds(self.flops, self.bytes_moved, self.multiplies) / self.time_us * 1e6 if self.time_us else 0.0


@dataclass(frozen=True)
class Profile:
    """The times of some calls of a program.

    `stamps_ns` is int64[calls, steps + 1]: the clock at the beginning of a call, then after each step.
    """

    name: str
    plan: Plan
    descriptions: Mapping[str, GroupDescription]  # by the label of a launch
    stamps_ns: np.ndarray
    limits: Limits | None = None
    assumed_flops_per_second: float = 0.0  # multiply-adds of the machine predicted for, on all threads; 0 where it is unknown
    copies: tuple[Sequence[CopyTime], ...] = ()  # of each call, those beside the kernels, by the same clock

    @property
    def time_us(self) -> float:
        """The median time of a call, from before its first step until after its last."""
        return float(np.median(self.stamps_ns[:, -1] - self.stamps_ns[:, 0])) / 1e3

    @cached_property
    def steps(self) -> tuple[StepProfile, ...]:
        """Every step of the program, in order."""
        times = np.median(np.diff(self.stamps_ns, axis=1), axis=0) / 1e3
        total = float(times.sum()) or 1.0
        kernels = {kernel.symbol: kernel for kernel in self.plan.kernels}
        found = []
        for step, time_us in zip(self.plan.steps, times.tolist(), strict=True):
            kernel = kernels[step.kernel] if isinstance(step, Launch) else None
            label = step.label if isinstance(step, Launch) else _copy_label(step)
            moved = sum(region.size_bytes for region in (*step_reads(step), *step_writes(step)))
            template, flops = ("copy", 0) if kernel is None else (kernel.template, kernel.flops)
            moved = moved if kernel is None else kernel.bytes_moved
            description = self.descriptions.get(label, GroupDescription())
            multiplies = "float32" if kernel is None else kernel.multiplies
            found.append(StepProfile(label, template, flops, moved, time_us, time_us / total, description, multiplies))
        return tuple(found)

    @property
    def predicted_us(self) -> float:
        """What the cost model expected of all steps; 0 where a launch has no estimate."""
        launches = [step.group.predicted_us for step in self.steps if step.template != "copy"]
        return sum(launches) if all(launches) else 0.0

    @property
    def speed(self) -> float:
        """Multiply-adds of this run's limits over those that were predicted with: a host may grant another clock than when the
        machine was fitted. 1 where one of the two is unknown."""
        if self.limits is None or not self.assumed_flops_per_second:
            return 1.0
        return self.limits.flops_per_second / self.assumed_flops_per_second

    @property
    def predicted_now_us(self) -> float:
        """`predicted_us` at the clock of this run."""
        return self.predicted_us / self.speed

    @property
    def bytes_moved(self) -> int:
        """Bytes that all steps together read and write, at least."""
        return sum(step.bytes_moved for step in self.steps)

    def as_json(self) -> dict[str, object]:
        """All of it as JSON values; `roofline` is there where limits are."""
        limits = self.limits
        steps = [
            {
                **asdict(step),
                "flops_per_second": step.flops_per_second,
                "bytes_per_second": step.bytes_per_second,
                "roofline": None if limits is None else step.roofline(limits),
            }
            for step in self.steps
        ]
        return {
            "name": self.name,
            "target": self.plan.target,
            "calls": len(self.stamps_ns),
            "time_us": self.time_us,
            "predicted_us": self.predicted_us,
            "predicted_now_us": self.predicted_now_us,
            "speed": self.speed,
            "bytes_moved": self.bytes_moved,
            "limits": None if limits is None else asdict(limits),
            "steps": steps,
        }

    def trace(self) -> dict[str, object]:
        """The calls in the trace format of Chrome, which Perfetto reads: one complete event ("X") a step, in microseconds."""
        begin = int(self.stamps_ns[0, 0])
        events: list[dict[str, object]] = [
            {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": f"{self.name} for {self.plan.target}"}},
            {"ph": "M", "pid": 1, "tid": 1, "name": "thread_name", "args": {"name": "steps"}},
        ]
        for row in self.stamps_ns:
            for step, start, end in zip(self.steps, row[:-1].tolist(), row[1:].tolist(), strict=True):
                arguments = {
                    "source": step.group.source,
                    "nodes": list(step.group.nodes),
                    "template": step.template,
                    "flops": step.flops,
                    "bytes": step.bytes_moved,
                }
                place = {"pid": 1, "tid": 1, "ts": (start - begin) / 1e3, "dur": (end - start) / 1e3}
                events.append({"ph": "X", "name": step.label, "cat": step.template, **place, "args": arguments})
        return {"traceEvents": events, "displayTimeUnit": "ns"}

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Write `trace()` as JSON, for ui.perfetto.dev or chrome://tracing.

        Raises:
            OptionError: the file cannot be written.
        """
        try:
            Path(path).write_text(json.dumps(self.trace()))
        except OSError as error:
            what = f"{os.fspath(path)} cannot be written: {error.strerror or error}"
            raise OptionError("trace", what, "give the path of a file in a folder that is there") from error

    def with_limits(self, limits: Limits) -> Profile:
        """The same profile, held against a machine."""
        return replace(self, limits=limits)


class Recorder:
    """An executable whose calls record the time, each in a row of its own: the clock at the beginning, then counters.

    The rate of the counters is that between the first call and the last.
    """

    def __init__(self, executable: Executable, calls: int, steps: int) -> None:
        self._executable = executable
        self._rows = np.zeros((calls, CLOCK_WORDS + steps + 1), np.int64)
        self._next = int(self._rows.ctypes.data)
        self.copies: list[Sequence[CopyTime]] = []  # of each call

    def bind(self, arena: Arena, states: Arena | None = None) -> Invocation:
        """As the executable's own; a call is one of those that are recorded."""
        profiled = self._executable.bind_profile(arena, states)
        row_bytes = self._rows.strides[0]

        def call(*addresses: int) -> None:
            profiled(*addresses, self._next)
            self._next += row_bytes
            self.copies.append(profiled.copies if isinstance(profiled, CpuInvocation) else ())

        return call

    def stamps_ns(self) -> np.ndarray:
        """int64[calls, steps + 1]: the clock at the beginning of each call and after each step. All calls have been made."""
        clock, counters = self._rows[:, 0] * 10**9 + self._rows[:, 1], self._rows[:, CLOCK_WORDS:]
        rate = float(clock[-1] - clock[0]) / float(counters[-1, 0] - counters[0, 0])
        stamps: np.ndarray = clock[:, None] + np.rint((counters - counters[:, :1]) * rate).astype(np.int64)
        return stamps


def describe_groups(groups: Mapping[str, GroupDescription]) -> dict[str, object]:
    """Descriptions by label as JSON values, for the manifest of a program."""
    return {label: asdict(group) for label, group in groups.items()}


def descriptions_of(program: Program) -> dict[str, GroupDescription]:
    """What `describe_groups` wrote into a program's manifest; nothing where there is none."""
    groups = program.manifest.get("groups")
    return {str(label): _read_group(group) for label, group in groups.items()} if isinstance(groups, Mapping) else {}


def assumed_rate_of(program: Program) -> float:
    """Multiply-adds, two flops each, a second of the machine that a program's launches were predicted for; 0 if it says none."""
    return _number(program.manifest.get(ASSUMED_RATE))


def _read_group(group: object) -> GroupDescription:
    """Of a file that anybody may have written: what is not as it should be is left out."""
    if not isinstance(group, Mapping):
        return GroupDescription()
    nodes, refused, alone, computing = (_items(group.get(key)) for key in ("nodes", "refused", "alone", "computing"))
    pairs = (tuple(map(str, _items(item))) for item in refused)
    return GroupDescription(
        tuple(map(str, nodes)),
        str(group.get("source", "")),
        tuple((pair[0], pair[1]) for pair in pairs if len(pair) == 2),
        tuple(map(str, alone)),
        tuple(map(str, computing)),
        _number(group.get("predicted_us")),
    )


def _number(value: object) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < inf:
        return float(value)
    return 0.0


def _items(value: object) -> Sequence[object]:
    return value if isinstance(value, (list, tuple)) else ()


def _copy_label(step: Step) -> str:
    return " ".join(_words(step))


def _words(step: Step) -> Iterator[str]:
    yield type(step).__name__.lower()
    yield from (f"to {region.buffer}" for region in step_writes(step))


class Profiled(Protocol):
    """A program with counters."""

    @property
    def input_names(self) -> tuple[str, ...]: ...

    def profile(self, /, *inputs: object, runs: int = 20, **named: object) -> Profile: ...


def profile_in_turns(nets: Sequence[Profiled], inputs: Mapping[str, object], runs: int) -> tuple[Profile, ...]:
    """The profile of each program over `runs` calls, a few of each in turn, so that the machine is as busy for all of them.

    Raises:
        OptionError: a program has no counters.
        InputError: the inputs are not those of the model.
    """
    turns = [min(_CALLS_A_TURN, runs - begin) for begin in range(0, runs, _CALLS_A_TURN)]
    rows = [in_order(net.input_names, (), inputs) for net in nets]  # not by name: an input may be called "runs"
    found = [[net.profile(*row, runs=turn) for net, row in zip(nets, rows, strict=True)] for turn in turns]
    return tuple(
        replace(
            profiles[0],
            stamps_ns=np.concatenate([one.stamps_ns for one in profiles]),
            copies=tuple(copies for one in profiles for copies in one.copies),
        )
        for profiles in zip(*found, strict=True)
    )
