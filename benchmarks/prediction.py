"""How far predictions of programs are from the programs: each is planned, predicted, compiled, and measured step by step.

Two predictions, at the clock of the run: by the cost model alone, on the machine that `prefuse doctor --fit` measured, of each
group and of the program; and, with --measure, of the program from runs of its kernels alone, with corrections that were fitted on
the predictor's own two networks and on none of these models. Memory is compared to the byte.

"mixed" is no search: units have their formats in rotation, so that neighbours differ as often as they can.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import click
import numpy as np
import onnx_ir as ir
from prefuse.compiler.api import drive
from prefuse.compiler.bits.mixed.formats import REST, candidates, placed, uniform
from prefuse.compiler.bits.mixed.trials import times_of
from prefuse.compiler.cli.profile import measure as measure_limits
from prefuse.compiler.driver import PlannedModel, plan_model
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.predictor.call import predictor_for
from prefuse.compiler.predictor.predictor import Predictor, memory_of
from prefuse.compiler.programs.cache import build_uncached
from prefuse.compiler.programs.options import MIXED, Options, parse_options
from prefuse.compiler.quantization.quantizer import calibrate
from prefuse.examples.models import MODELS
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.plan import Role
from prefuse.runtime.profile import profile_in_turns
from rich.console import Console
from rich.table import Table

from .engines.calibration import calibration_batches
from .engines.engine import Task
from .reference import make_task

PRECISIONS = ("float32", "float32-fast", "bfloat16", "int8", "mixed")
_CALLS = 20
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


@dataclass(frozen=True)
class Subject:
    """A program that is compiled and can be measured, and its plan, which was made without compiling."""

    task: Task
    precision: str
    net: CompiledModel
    planned: PlannedModel


def family_of(template: str) -> str:
    """The family of a template."""
    return next((family for family, words in _FAMILIES.items() if any(word in template for word in words)), "rest")


def subject(task: Task, precision: str, options: Options, predictor: Predictor) -> Subject:
    """Plan and compile one program."""
    graph = formatted(task, precision, options)
    planned = plan_model(graph.clone(), options, predictor.progress, predictor.kernels)
    net = CompiledModel(build_uncached(lambda path: drive(graph.clone(), options, name=task.model, output=path)))
    return Subject(task, precision, net, planned)


def options_of(precision: str, threads: int) -> Options:
    """What a program is compiled with; those of integers have the float precision that a search would give them."""
    is_quantized = precision in ("int8", "mixed")
    given = MIXED if is_quantized else precision
    options = parse_options("cpu", given, {"threads": threads, "profile": True}, quantizes=is_quantized)
    return replace(options, quantization="")  # which `formatted` sees to


def formatted(task: Task, precision: str, options: Options) -> ir.Model:
    """The model, quantized where the precision says so."""
    model = import_model(task.onnx_path)
    if precision not in ("int8", "mixed"):
        return model
    calibrated = calibrate(model, calibration_batches(task), options.target)
    choices = candidates(calibrated)
    formats = uniform(choices, "int8", options.precision)
    if precision == "mixed":
        turns = cycle(range(4))
        formats = {name: legal[next(turns) % len(legal)] for name, legal in choices.items()} | {REST: options.precision}
    return placed(calibrated, formats, options.precision)


def found(one: Subject, predictor: Predictor) -> Found:
    """Measure a program, and its kernels if the predictor does that."""
    runs_us, alone = 0.0, dict[str, float]()
    if predictor.ask is not None:
        prediction = predictor.predict(one.planned, one.task.model, "float32")
        runs_us, alone = prediction.latency_us, {step.label: step.time_us for step in prediction.steps}
    before = measure_limits(one.net)
    (profile,) = profile_in_turns([one.net], one.task.inputs, _CALLS)
    profile = profile.with_limits(before.joined(measure_limits(one.net)))
    times = times_of(profile)
    groups = tuple(
        GroupError(
            step.label,
            step.template,
            family_of(step.template),
            step.group.predicted_us / profile.speed,
            step.time_us,
            alone.get(step.label, 0.0),
        )
        for step in times.steps
        if step.group.predicted_us and step.time_us >= _LEAST_US
    )
    plan = one.net.plan
    spaces = {buffer.space for buffer in plan.buffers if buffer.role in (Role.ACTIVATION, Role.WORKSPACE)} | {
        "constants",
        "shared",
    }
    return Found(
        one.task.model,
        one.precision,
        one.task.threads,
        times.call_us,
        profile.predicted_now_us,
        runs_us,
        memory_of(one.planned).total_bytes,
        sum(space.size_bytes for space in plan.spaces if space.name in spaces),
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
    lines = ",\n".join(json.dumps(_rounded(asdict(one))) for one in results)
    path.write_text(f"[\n{lines}\n]\n")


def _rounded(row: dict[str, object]) -> dict[str, object]:
    def shorter(value: object) -> object:
        if isinstance(value, float):
            return float(np.format_float_positional(value, precision=5, fractional=False))
        if isinstance(value, dict):
            return {name: shorter(one) for name, one in value.items()}
        return [shorter(one) for one in value] if isinstance(value, (list, tuple)) else value

    return {name: shorter(value) for name, value in row.items()}


@click.command()
@click.argument("models", nargs=-1, metavar="[MODEL...]")
@click.option("--precision", "precisions", multiple=True, default=PRECISIONS, type=click.Choice(PRECISIONS))
@click.option("--threads", default=1, show_default=True, type=click.IntRange(min=1))
@click.option("--measure", is_flag=True, help="Measure kernels alone, and predict programs from that.")
@click.option("--small", is_flag=True, help="Small variants of the models: checks the benchmark, not the predictions.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Add the results to this file.")
def main(
    models: tuple[str, ...], precisions: tuple[str, ...], threads: int, measure: bool, small: bool, json_path: Path | None
) -> None:
    """Predict programs of MODELs (all examples if none is named), and compare."""
    console, results = Console(width=170), []
    for model in models or tuple(MODELS):
        with TemporaryDirectory(prefix="prefuse-benchmark-") as folder:
            task, _ = make_task(model, small, 1, threads, Path(folder))
            for precision in precisions:
                options = options_of(precision, threads)
                with predictor_for(options, measure=measure) as predictor:
                    results.append(found(subject(task, precision, options, predictor), predictor))
    for one in tables(results):
        console.print(one)
    if json_path is not None:
        taken = {(one.model, one.precision, one.threads) for one in results}
        kept = [one for one in read(json_path) if (one.model, one.precision, one.threads) not in taken]
        write(json_path, [*kept, *results])


if __name__ == "__main__":
    main()
