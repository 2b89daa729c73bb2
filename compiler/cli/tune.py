"""`prefuse tune`: measure how the kernels of a model are computed fastest on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.table import Table

from ..pipeline.progress import ConsoleProgress
from ..programs.options import parse_options
from ..programs.tuning_database import default_database
from .common import (
    DATABASE,
    JSON,
    MODEL,
    SHAPES,
    STORED_WEIGHTS,
    THREADS,
    Shapes,
    concrete_model,
    refuse_program,
    show,
    table,
    with_trace_arguments,
)

if TYPE_CHECKING:
    from ..tuning.tuner import Tuned

_LABEL = 80  # characters shown of a problem


@click.command("tune")
@MODEL
@click.option("--seconds", default=60.0, show_default=True, type=click.FloatRange(0, min_open=True), help="How long to measure.")
@click.option("--again", is_flag=True, help="Measure also what has been measured before.")
@DATABASE
@SHAPES
@THREADS
@STORED_WEIGHTS
@with_trace_arguments
@JSON
def command(
    model: Path,
    seconds: float,
    again: bool,
    database: Path | None,
    shapes: Shapes,
    threads: int | None,
    weights: str | None,
    target: str,
    precision: str,
    pipeline: str | None,
    as_json: bool,
) -> None:
    """Measure alternatives for the kernels of the ONNX file MODEL, and remember those that are faster.

    Later compilations use them. What is found is kept as soon as it is there: after an interruption, or with more seconds,
    the same command goes on where it was.
    """
    from ..tuning.tuner import tune_model

    refuse_program(model, "tune")
    extra = {"threads": threads, "pipeline": pipeline, "tuning": False, "weights": weights}
    options = parse_options(target, precision, {name: value for name, value in extra.items() if value is not None})
    path, progress = database or default_database(), ConsoleProgress()
    graph = concrete_model(model, shapes)
    try:
        tuned = tune_model(graph, options, seconds=seconds, database=path, again=again, progress=progress)
    finally:
        progress("done", 1.0)
    data = {
        "database": str(path),
        "target": str(options.target),
        "problems": [{**_description(one), **asdict(one.finding)} for one in tuned],
    }
    show(as_json, data, _head(tuned, path), _table(tuned))


def _description(one: Tuned) -> dict[str, object]:
    problem = one.problem
    return {"problem": problem.text, "launches": problem.launches, "template": problem.template, "is_new": one.is_new}


def _head(tuned: Sequence[Tuned], path: Path) -> str:
    own = sum(one.problem.launches * one.finding.own_time_us for one in tuned)
    best = sum(one.problem.launches * one.finding.time_us for one in tuned)
    gain = f"; {own / 1e3:.2f} ms of kernels become {best / 1e3:.2f} ms" if own else ""
    better = sum(bool(one.finding.configuration) for one in tuned)
    unfinished = sum(not one.finding.is_complete for one in tuned)
    more = f"\n{unfinished} have alternatives left to measure: run it again, or with more --seconds" if unfinished else ""
    return f"{path}: of {len(tuned)} kinds of kernels {better} are better than prefuse's own choice{gain}{more}\n"


def _table(tuned: Sequence[Tuned]) -> Table:
    ranked = sorted(tuned, key=lambda one: -one.problem.launches * one.finding.own_time_us)
    rows = [
        (
            one.problem.text if len(one.problem.text) <= _LABEL else f"{one.problem.text[: _LABEL - 3]}...",
            one.problem.launches,
            f"{one.finding.own_time_us:.1f}",
            f"{one.finding.time_us:.1f}",
            " ".join(f"{name}={option}" for name, option in one.finding.configuration.items()) or "own choice",
        )
        for one in ranked
    ]
    return table("Kernels", ("problem", "launches", "own us", "best us", "best"), rows)
