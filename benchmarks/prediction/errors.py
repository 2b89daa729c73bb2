"""How far predictions are from what was measured: by the cost model alone, of each launch and of the program, at the clock of
the run; and from runs of kernels alone, as these took, with corrections that were fitted on the predictor's own two networks.
Memory is compared to the byte.

What was measured is the lower quartile of calls, by counters inside the program; beside it are the median, and plain calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from prefuse.compiler.estimates.launches import predicted_us
from prefuse.compiler.lowering.planning import launch_label
from prefuse.compiler.predictor.prediction import Prediction
from prefuse.compiler.predictor.predictor import Predictor, memory_of
from rich.table import Table

from .programs import Case
from .runs import ProgramTime, plan_digest

_LEAST_US = 1.0  # launches below it are mostly what a launch takes
_FROM_RUNS = 0.9  # of the time by kernels that were measured: then a prediction is one from runs
_CHANGED = 0.1  # of the clock between before and after a run: what such a run says of predictions is not counted

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
    """One program. `from_runs_us` is 0 where kernels that make nine tenths of it were not measured; bytes: of weights and arena.

    Where today's plan is not that of the program that was measured, only launches that have the same kernel are compared.
    """

    model: str
    precision: str
    threads: int
    measured_us: float
    estimated_us: float
    from_runs_us: float
    predicted_bytes: int
    bytes: int
    groups: tuple[GroupError, ...]
    is_same_plan: bool = True
    uncorrected_us: float = 0.0  # by the cost model, at the clock that it assumes
    speed: float = 1.0  # of the run's clock, in units of that one
    change: float = 0.0  # of the clock, from before the run to after it
    measured_share: float = 0.0  # of the prediction from runs, by kernels that were measured alone
    median_us: float = 0.0
    plain_us: float = 0.0  # of calls as a user makes them

    @property
    def counts(self) -> bool:
        """Whether the program says something of predictions."""
        return self.is_same_plan and self.change <= _CHANGED

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
    share = measured_share(prediction)
    alone = {step.label: step.time_us for step in prediction.steps if step.source == "measured"}
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
        prediction.latency_us if share >= _FROM_RUNS else 0.0,
        memory_of(planned).total_bytes,
        run.bytes,
        groups,
        run.plan == plan_digest(planned.plan),
        sum(estimates.values()),
        speed,
        run.change,
        share,
        run.median_us,
        run.plain_us,
    )


def measured_share(prediction: Prediction) -> float:
    """How much of a prediction is by kernels that were measured alone."""
    every = sum(step.time_us for step in prediction.steps)
    return sum(step.time_us for step in prediction.steps if step.source == "measured") / every if every else 0.0


def summary(results: Sequence[Found]) -> Iterator[tuple[str, str, int, float, float, float | None]]:
    """Precision, what, how many, median and largest error, and the bar: of families' groups, and of programs. Runs on whose way
    the clock changed are left out, and programs whose plan is another one today."""
    for precision in dict.fromkeys(one.precision for one in results):
        rows = [one for one in results if one.precision == precision and one.change <= _CHANGED]
        programs = [one for one in rows if one.counts]
        launches = [group for row in rows for group in row.groups]
        errors: Mapping[str, list[float]] = {
            **{family: [abs(one.error) for one in launches if one.family == family] for family in FAMILIES},
            "program": [abs(one.estimate_error) for one in programs],
            "program, from runs": [abs(one.runs_error) for one in programs if one.runs_error is not None],
        }
        for what, found_errors in errors.items():
            if found_errors:
                bar = 0.05 if "runs" in what else BARS.get(what, 0.15)
                yield precision, what, len(found_errors), median(found_errors), max(found_errors), bar


def tables(results: Sequence[Found]) -> Iterator[Table]:
    """What was found, for people."""
    worst_of = "worst launches: template, us (predicted)"
    quartile = "ms, lower quartile inside (median; plain calls)"
    programs = Table("model", "precision", quartile, "cost model", "from runs", "bytes", worst_of)
    for one in results:
        worst = sorted(one.groups, key=lambda group: -abs(group.predicted_us - group.measured_us))[:3]
        launches = "; ".join(f"{group.template} {group.measured_us:.0f} ({group.predicted_us:.0f})" for group in worst)
        runs = "-" if one.runs_error is None else f"{one.runs_error:+.1%}"
        memory = "exact" if one.bytes == one.predicted_bytes else f"{one.predicted_bytes - one.bytes:+d}"
        inside = f"{one.measured_us / 1e3:.2f} ({one.median_us / 1e3:.2f}; {one.plain_us / 1e3:.2f})"
        if not one.is_same_plan:
            programs.add_row(one.model, one.precision, inside, "other plan", "-", "-", launches)
            continue
        times = inside, f"{one.estimate_error:+.1%}" + f", clock changed by {one.change:.0%}" * (one.change > _CHANGED)
        programs.add_row(one.model, one.precision, *times, runs, memory, launches)
    yield programs
    families = Table("precision", "what", "count", "median error", "largest", "bar of the median")
    for precision, what, count, middle, largest, bar in summary(results):
        families.add_row(precision, what, str(count), f"{middle:.1%}", f"{largest:.0%}", f"{bar:.0%}")
    yield families
