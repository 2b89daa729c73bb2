"""How far predictions are from what was measured: by the cost model alone, of each launch and of the program, and from runs of
kernels alone, with corrections that were fitted on the predictor's own two networks; both at the clock of the run. Memory is
compared to the byte."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from prefuse.compiler.estimates.launches import predicted_us
from prefuse.compiler.lowering.planning import launch_label
from prefuse.compiler.predictor.predictor import Predictor, memory_of
from rich.table import Table

from .programs import Case
from .runs import ProgramTime, write_lines

_LEAST_US = 1.0  # launches below it are mostly what a launch takes

# Families by what templates are called, the first that fits.
_FAMILIES = {
    "attention": ("attention",),
    "recurrence": ("recurrent",),
    "convolution": ("convolution", "winograd"),
    "product": ("matmul", "product_rows"),
}
FAMILIES = (*_FAMILIES, "rest")
BARS = {"rest": 0.30, "program": 0.10}  # of median errors; 15% of all other families


@dataclass(frozen=True, slots=True)
class GroupError:
    """A launch: microseconds by the cost model, at the clock of the run, measured, and from runs of its kernel alone, or 0."""

    label: str
    template: str
    family: str
    predicted_us: float
    measured_us: float
    from_runs_us: float = 0.0

    @property
    def error(self) -> float:
        """Relative to what was measured; positive where too much was predicted."""
        return self.predicted_us / self.measured_us - 1


@dataclass(frozen=True, slots=True)
class Found:
    """One program. `from_runs_us` is 0 where kernels were not measured; bytes are of weights and arena."""

    model: str
    precision: str
    threads: int
    measured_us: float
    estimated_us: float
    from_runs_us: float
    predicted_bytes: int
    bytes: int
    groups: tuple[GroupError, ...]

    @property
    def estimate_error(self) -> float:
        return self.estimated_us / self.measured_us - 1

    @property
    def runs_error(self) -> float | None:
        return self.from_runs_us / self.measured_us - 1 if self.from_runs_us else None


def family_of(template: str) -> str:
    """The family of a template."""
    return next((family for family, words in _FAMILIES.items() if any(word in template for word in words)), "rest")


def found(run: ProgramTime, case: Case, predictor: Predictor) -> Found:
    """A program that was measured, beside its predictions of today: launches that have another kernel now are left out."""
    planned, target = case.planned(predictor), case.options.target
    prediction = predictor.predict(planned, case.model, case.options.precision)
    is_measured = any(step.source == "measured" for step in prediction.steps)
    alone = {step.label: step.time_us for step in prediction.steps} if is_measured else {}
    speed = run.flops_per_second / (target.machine.flops_per_second * target.threads)
    estimates = predicted_us(planned.lowered, target)
    templates = {launch_label(item): item.kernel.template for item in planned.lowered}
    groups = tuple(
        GroupError(
            launch.label,
            launch.template,
            family_of(launch.template),
            estimates[launch.label] / speed,
            launch.time_us,
            alone.get(launch.label, 0.0),
        )
        for launch in run.launches
        if templates.get(launch.label) == launch.template and launch.label in estimates and launch.time_us >= _LEAST_US
    )
    return Found(
        *run.key,
        run.call_us,
        sum(estimates.values()) / speed,
        prediction.latency_us if is_measured else 0.0,
        memory_of(planned).total_bytes,
        run.bytes,
        groups,
    )


def summary(results: Sequence[Found]) -> Iterator[tuple[str, str, int, float, float, float | None]]:
    """Precision, what, how many, median and largest error, and the bar: of families' groups, and of programs."""
    for precision in dict.fromkeys(one.precision for one in results):
        rows = [one for one in results if one.precision == precision]
        launches = [group for row in rows for group in row.groups]
        errors: Mapping[str, list[float]] = {
            **{family: [abs(one.error) for one in launches if one.family == family] for family in FAMILIES},
            "program": [abs(one.estimate_error) for one in rows],
            "program, from runs": [abs(one.runs_error) for one in rows if one.runs_error is not None],
        }
        for what, found_errors in errors.items():
            if found_errors:
                bar = 0.05 if "runs" in what else BARS.get(what, 0.15)
                yield precision, what, len(found_errors), median(found_errors), max(found_errors), bar


def tables(results: Sequence[Found]) -> Iterator[Table]:
    """What was found, for people."""
    programs = Table("model", "precision", "ms", "cost model", "from runs", "bytes", "worst launches: template, us (predicted)")
    for one in results:
        worst = sorted(one.groups, key=lambda group: -abs(group.predicted_us - group.measured_us))[:3]
        launches = "; ".join(f"{group.template} {group.measured_us:.0f} ({group.predicted_us:.0f})" for group in worst)
        runs = "-" if one.runs_error is None else f"{one.runs_error:+.1%}"
        memory = "exact" if one.bytes == one.predicted_bytes else f"{one.predicted_bytes - one.bytes:+d}"
        times = f"{one.measured_us / 1e3:.2f}", f"{one.estimate_error:+.1%}"
        programs.add_row(one.model, one.precision, *times, runs, memory, launches)
    yield programs
    families = Table("precision", "what", "count", "median error", "largest", "bar of the median")
    for precision, what, count, middle, largest, bar in summary(results):
        families.add_row(precision, what, str(count), f"{middle:.1%}", f"{largest:.0%}", f"{bar:.0%}")
    yield families


def read(path: Path) -> list[Found]:
    """Results of earlier runs, none where there is no file."""
    rows = json.loads(path.read_text()) if path.exists() else []
    return [Found(**{**row, "groups": tuple(GroupError(**group) for group in row["groups"])}) for row in rows]


def write(path: Path, results: Sequence[Found]) -> None:
    """All results, a line each."""
    write_lines(path, map(asdict, results))
