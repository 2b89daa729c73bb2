"""What programs took: measured once, and kept, so that other estimates can be held against it without measuring again."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from prefuse.compiler.bits.mixed.trials import times_of
from prefuse.compiler.cli.profile import measure as measure_limits
from prefuse.compiler.programs.digest import combine
from prefuse.runtime.plan import Plan, Role
from prefuse.runtime.plan_text import print_plan
from prefuse.runtime.profile import profile_in_turns

from ..turns import seconds_of
from .programs import Case

CALLS = 20
_DIGITS = 16


@dataclass(frozen=True, slots=True)
class LaunchTime:
    """Microseconds of one launch of a program, by its label."""

    label: str
    template: str
    time_us: float


@dataclass(frozen=True, slots=True)
class ProgramTime:
    """One program: a call among many, by the lower quartile, and its launches, each by its own, so that they do not add up to the
    call. `flops_per_second` of all threads, the mean of before and after, tell the clock, which differed by `change` between the
    two; `bytes` are of weights and arena; `plan` is a digest, `plain_us` the median of calls from outside."""

    model: str
    precision: str
    threads: int
    call_us: float
    flops_per_second: float
    change: float
    bytes: int
    launches: tuple[LaunchTime, ...]
    plan: str
    median_us: float
    plain_us: float
    calls_us: tuple[float, ...]

    @property
    def key(self) -> tuple[str, str, int]:
        return self.model, self.precision, self.threads


def measured(case: Case) -> ProgramTime:
    """Measure a program as it is called again and again."""
    net, inputs = case.compiled(), case.task().inputs
    before = measure_limits(net)
    (profile,) = profile_in_turns([net], inputs, CALLS)
    after, times, plan = measure_limits(net), times_of(profile), net.plan
    plain = [seconds_of(lambda: net(**inputs)) for _ in range(CALLS)]
    calls_us = (profile.stamps_ns[:, -1] - profile.stamps_ns[:, 0]) / 1e3
    spaces = {buffer.space for buffer in plan.buffers if buffer.role in (Role.ACTIVATION, Role.WORKSPACE)} | {
        "constants",
        "shared",
    }
    return ProgramTime(
        case.model,
        case.precision,
        case.threads,
        times.call_us,
        (before.flops_per_second + after.flops_per_second) / 2,
        before.joined(after).change,
        sum(space.size_bytes for space in plan.spaces if space.name in spaces),
        tuple(LaunchTime(step.label, step.template, step.time_us) for step in times.steps),
        plan_digest(plan),
        profile.time_us,
        1e6 * float(np.median(plain)),
        tuple(calls_us.tolist()),
    )


def plan_digest(plan: Plan) -> str:
    """Equal for equal plans."""
    return combine(print_plan(plan))[:_DIGITS]


def read(path: Path) -> list[ProgramTime]:
    """What earlier runs have measured, nothing where there is no file."""
    rows = json.loads(path.read_text()) if path.exists() else []
    rows = [row for row in rows if "plan" in row]  # those of an older form are measured again
    return [
        ProgramTime(**{**row, "launches": tuple(LaunchTime(*one) for one in row["launches"]), "calls_us": tuple(row["calls_us"])})
        for row in rows
    ]


def write(path: Path, runs: Iterable[ProgramTime]) -> None:
    """All runs, a line each; launches as lists."""
    rows = ({**asdict(one), "launches": [list(asdict(launch).values()) for launch in one.launches]} for one in runs)
    write_lines(path, rows)


def add(path: Path, runs: Iterable[ProgramTime]) -> list[ProgramTime]:
    """Runs in the place of earlier ones of the same programs. Returns all that the file holds then."""
    new = {one.key: one for one in runs}
    every = [one for one in read(path) if one.key not in new] + list(new.values())
    write(path, every)
    return every


def write_lines(path: Path, rows: Iterable[dict[str, object]]) -> None:
    """A JSON list, a line a row, of numbers with five digits."""
    lines = ",\n".join(json.dumps(_rounded(row)) for row in rows)
    path.write_text(f"[\n{lines}\n]\n")


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(np.format_float_positional(value, precision=5, fractional=False))
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, (list, tuple)) else value
