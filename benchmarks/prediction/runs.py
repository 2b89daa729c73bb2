"""What programs took: measured once, and kept, so that other estimates can be held against it without measuring again."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from prefuse.compiler.bits.mixed.trials import times_of
from prefuse.compiler.cli.profile import measure as measure_limits
from prefuse.runtime.plan import Role
from prefuse.runtime.profile import profile_in_turns

from .programs import Case

CALLS = 20


@dataclass(frozen=True, slots=True)
class LaunchTime:
    """Microseconds of one launch of a program, by its label."""

    label: str
    template: str
    time_us: float


@dataclass(frozen=True, slots=True)
class ProgramTime:
    """One program: a call among many, and its launches. `flops_per_second` of all threads tell the clock of that moment, before
    and after which it may differ by `change`; `bytes` are of weights and arena."""

    model: str
    precision: str
    threads: int
    call_us: float
    flops_per_second: float
    change: float
    bytes: int
    launches: tuple[LaunchTime, ...]

    @property
    def key(self) -> tuple[str, str, int]:
        return self.model, self.precision, self.threads


def measured(case: Case) -> ProgramTime:
    """Measure a program as it is called again and again."""
    net, inputs = case.compiled(), case.task().inputs
    before = measure_limits(net)
    (profile,) = profile_in_turns([net], inputs, CALLS)
    limits, times = before.joined(measure_limits(net)), times_of(profile)
    plan = net.plan
    spaces = {buffer.space for buffer in plan.buffers if buffer.role in (Role.ACTIVATION, Role.WORKSPACE)} | {
        "constants",
        "shared",
    }
    return ProgramTime(
        case.model,
        case.precision,
        case.threads,
        times.call_us,
        limits.flops_per_second,
        limits.change,
        sum(space.size_bytes for space in plan.spaces if space.name in spaces),
        tuple(LaunchTime(step.label, step.template, step.time_us) for step in times.steps),
    )


def read(path: Path) -> list[ProgramTime]:
    """What earlier runs have measured, nothing where there is no file."""
    rows = json.loads(path.read_text()) if path.exists() else []
    return [ProgramTime(**{**row, "launches": tuple(LaunchTime(*one) for one in row["launches"])}) for row in rows]


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
