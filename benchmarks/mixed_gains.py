"""What mixed formats gain over the fastest program of one format within the same error, and if unseen inputs keep that error.

Budgets are numbers, or shares of the error that our own program of int8 has on the held-out batches. When a search is over, the
program that it took and the fastest of one format are timed anew, in turns: those times that it chose by flatter what was chosen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import click
import numpy as np
import onnx_ir as ir
import prefuse
from prefuse.compiler.api import drive
from prefuse.compiler.bits.mixed.choice import Measured
from prefuse.compiler.bits.mixed.findings import Findings
from prefuse.compiler.bits.mixed.formats import candidates, placed, uniform
from prefuse.compiler.bits.mixed.request import request_of
from prefuse.compiler.bits.mixed.search import search
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.programs.options import MIXED, Options, parse_options
from prefuse.runtime.executor import CompiledModel
from rich.console import Console
from rich.table import Table

from .engines.calibration import BATCHES, calibration_batches
from .engines.engine import Task
from .int8_peers import MODELS
from .nets import model_names
from .record import record
from .reference import make_task, worst_error
from .turns import LEAST_ROUNDS, Spread, block_of, compared, in_milliseconds, take_turns

_SHARES = (0.5, 0.7, 1.0)
_NUMBER = 1e-2
_UNSEEN = 6
_CALLS = 5  # of a turn


@dataclass(frozen=True, slots=True)
class Gain:
    """One model at one budget. `gain`: times as fast as `over`, the fastest program of one format within the budget, round by
    round after the search; 1 where that is what was taken."""

    model: str
    budget: float
    share: float  # of int8's error; 0 where the budget is a number
    taken: str
    gain: Spread
    over: str
    time_ms: float
    predicted_ms: float
    error: float
    unseen: tuple[float, ...]
    formats: dict[str, int]
    seconds: float
    gain_in_search: float  # by the times that it chose by
    rounds_ms: Mapping[str, list[list[float]]]


def gains(model: str, threads: int, small: bool, shares: Sequence[float], rounds: int, folder: Path) -> list[Gain]:
    """A model at a budget of 1e-2 and at these shares of int8's error."""
    task, _ = make_task(model, small, 1, threads, folder)
    found = _found(task, _NUMBER)
    int8 = next(one.error for one in found.programs if one.name == "int8")
    results = [_gain(task, found, 0.0, rounds)]
    return results + [_gain(task, _found(task, share * int8), share, rounds) for share in shares]


def _found(task: Task, max_error: float) -> Findings:
    request = request_of(max_error, "relative", "latency", None)
    return search(import_model(task.onnx_path), calibration_batches(task), _options(task), request, drive)


def _options(task: Task) -> Options:
    return parse_options("cpu", MIXED, {"threads": task.threads}, quantizes=True)


def _gain(task: Task, found: Findings, share: float, rounds: int) -> Gain:
    precision = _options(task).precision
    net = _compiled(found.model(precision), task)
    exact = prefuse.compile(task.onnx_path, threads=task.threads)
    assert isinstance(exact, CompiledModel)
    unseen = tuple(worst_error(_outputs(net, one), _outputs(exact, one)) for one in _unseen(task))
    over = rival(found)
    nets = {found.name: net}
    if over.name != found.name:
        formats = uniform(candidates(found.calibrated), over.name, precision)
        nets[over.name] = _compiled(placed(found.calibrated, formats, precision), task)
    times = take_turns({name: block_of(partial(one, **task.inputs), _CALLS) for name, one in nets.items()}, rounds)
    return Gain(
        task.model,
        found.max_error,
        share,
        found.name,
        compared(times[over.name], times[found.name]),
        over.name,
        1e3 * median(map(median, times[found.name])),
        found.predicted_us / 1e3,
        found.error,
        unseen,
        dict(Counter(found.formats.values()).most_common()),
        found.seconds,
        over.time_us / found.chosen.time_us,
        {name: in_milliseconds(one) for name, one in times.items()},
    )


def rival(found: Findings) -> Measured:
    """The fastest program of one format within the budget, or what was taken where there is none."""
    kept = [one for one in found.programs if one.is_uniform and one.error <= found.max_error]
    return min(kept, key=lambda one: one.time_us, default=found.chosen)


def _compiled(model: ir.Model, task: Task) -> CompiledModel:
    net = prefuse.compile(model, precision=_options(task).precision, threads=task.threads, cache=False)
    assert isinstance(net, CompiledModel)
    return net


def _unseen(task: Task) -> list[dict[str, np.ndarray]]:
    """Inputs that neither calibrated nor measured anything: made as calibration data are, of other inputs."""
    shuffled = {name: np.flip(array) for name, array in task.inputs.items()}
    return calibration_batches(replace(task, inputs=shuffled))[: min(_UNSEEN, BATCHES)]


def _outputs(net: CompiledModel, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    found = net(**inputs)
    return [np.asarray(one) for one in (found if isinstance(found, tuple) else (found,))]


@click.command()
@click.argument("models", nargs=-1, metavar="[MODEL...]", callback=model_names)
@click.option("--threads", default=2, show_default=True, type=click.IntRange(min=1), help="Threads of each program.")
@click.option("--rounds", default=3 * LEAST_ROUNDS, show_default=True, type=click.IntRange(min=1), help="Of calls, for the gain.")
@click.option("--small", is_flag=True, help="Small variants of the models: checks the benchmark, not the formats.")
@click.option("--share", "shares", multiple=True, type=float, default=_SHARES, show_default=True, help="Of int8's error.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Add the results to this file.")
def main(
    models: tuple[str, ...], threads: int, rounds: int, small: bool, shares: tuple[float, ...], json_path: Path | None
) -> None:
    """Search for the formats of MODELs (all seven if none is named) at several budgets."""
    kept = record(json_path, threads, {"rounds": rounds, "small": small}, key=("model", "share"))
    console = Console(width=160)
    for model in models or MODELS:
        with TemporaryDirectory(prefix="prefuse-benchmark-") as folder, console.status(f"{model}: formats are searched for"):
            rows = gains(model, threads, small, shares, rounds, Path(folder))
        console.print(_table(model, rows))
        kept.add(*rows)


def _table(model: str, rows: Sequence[Gain]) -> Table:
    table = Table(title=model, title_justify="left")
    for heading in ("budget", "share", "taken", "gain", "over", "ms (predicted)", "error", "unseen, worst", "formats", "s"):
        table.add_column(heading, no_wrap=heading != "formats")
    for row in rows:
        times = f"{row.time_ms:.3f} ({row.predicted_ms:.3f})"
        formats = ", ".join(f"{count} {name}" for name, count in row.formats.items())
        errors = f"{row.error:.2e}", f"{max(row.unseen):.2e}"
        share = f"{row.share:g}" if row.share else "-"
        table.add_row(
            f"{row.budget:.2e}", share, row.taken, str(row.gain), row.over, times, *errors, formats, f"{row.seconds:.0f}"
        )
    return table


if __name__ == "__main__":
    main()
