"""`prefuse bits`: the formats of a model's products that make it best within an error, measured here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..api import drive
from ..bits.mixed.choice import OBJECTIVES
from ..bits.mixed.drawing import draw_html, draw_png
from ..bits.mixed.formats import FORMATS
from ..bits.mixed.metrics import METRICS
from ..bits.mixed.plan import BitsPlan, plan_of
from ..bits.mixed.request import MAX_ERROR, request_of
from ..bits.mixed.search import search
from ..pipeline.pages import check_installed
from ..pipeline.progress import ConsoleProgress
from ..programs.options import MIXED, parse_options
from .common import JSON, MODEL, SHAPES, TARGET, THREADS, Shapes, concrete_model, refuse_program, show, table
from .output import check_output

if TYPE_CHECKING:
    from rich.table import Table

    from ..bits.mixed.findings import Findings, Row

_LABEL = 48  # characters shown of a name
_PATHS = click.Path(path_type=Path)


def _parse_overrides(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for text in texts:
        pattern, _, form = text.rpartition("=")
        if not pattern or form not in FORMATS:
            raise click.BadParameter(f"{text!r} is not PATTERN=FORMAT, with a format of {', '.join(FORMATS)}")
        found[pattern] = form
    return found


@click.command("bits")
@MODEL
@click.option(
    "--calibration",
    type=_PATHS,
    help="Inputs like those that the model will see: an .npz file with an array for each input, of its shape or with one "
    "dimension more in front, which counts batches; or a folder of such files.",
)
@click.option("--max-error", default=MAX_ERROR, show_default=True, help="Greatest error of the outputs on held-out batches.")
@click.option("--metric", type=click.Choice(METRICS), default=METRICS[0], show_default=True, help="What the error is.")
@click.option("--objective", type=click.Choice(OBJECTIVES), default=OBJECTIVES[0], show_default=True, help="What shall be least.")
@click.option("--bits", "given", type=_PATHS, help="A plan whose formats stay; the others are searched for.")
@click.option(
    "--set", "overrides", multiple=True, callback=_parse_overrides, metavar="PATTERN=FORMAT",
    help="The format of all units whose names match, such as *attention*=bfloat16. May be repeated.",
)  # fmt: skip
@click.option("-o", "--output", type=_PATHS, help="Write the plan here, for --bits of this and other verbs.")
@click.option("--html", "html_path", type=_PATHS, help="Write a page with drawings and all numbers.")
@click.option("--png", "png_path", type=_PATHS, help="Draw the Pareto front and sensitivity by depth.")
@TARGET
@THREADS
@SHAPES
@JSON
def command(
    model: Path,
    calibration: Path | None,
    max_error: float,
    metric: str,
    objective: str,
    given: Path | None,
    overrides: dict[str, str],
    output: Path | None,
    html_path: Path | None,
    png_path: Path | None,
    target: str,
    threads: int | None,
    shapes: Shapes,
    as_json: bool,
) -> None:
    """Find the format of each product of the ONNX file MODEL that makes it fastest, or smallest, within an error.

    Programs of one format are compiled and measured, and mixtures of them; of four or more batches every fourth is held out, and
    errors are measured on these. A mixture is taken only if no program of one format within the error is better in the same run.
    prefuse compile MODEL --bits PLAN compiles what -o has written.

    A unit is a product with constant weights, or "(all else)". Its damage in a format is the squared error that this makes of the
    outputs; "ruin" says that they are no numbers any more.
    """
    refuse_program(model, "bits")
    paths = {"--output": output, "--html": html_path, "--png": png_path}
    _check_paths(paths)
    plan = plan_of(given)
    plan = BitsPlan(plan.units, {**plan.overrides, **overrides})
    request = request_of(max_error, metric, objective, plan)
    options = parse_options(target, MIXED, {} if threads is None else {"threads": threads}, quantizes=True)
    progress = ConsoleProgress()
    try:
        found = search(concrete_model(model, shapes), calibration, options, request, drive, progress)
    finally:
        progress("done", 1.0)
    show(as_json, _data(found), _table(found), "", *found.sentences(), _front(found), f"found in {found.seconds:.1f} s")
    for option, write in (("--output", _save), ("--html", draw_html), ("--png", draw_png)):
        if (path := paths[option]) is not None:
            write(found, path)


def _check_paths(paths: Mapping[str, Path | None]) -> None:
    """Raise OptionError early if what is asked for could not be written after minutes of work."""
    for option, path in paths.items():
        if path is not None:
            check_output(path, option)
            if option != "--output":
                check_installed()


def _save(found: Findings, path: Path) -> None:
    found.plan().save(path)


def _data(found: Findings) -> dict[str, object]:
    return {
        "program": found.name,
        "reason": found.reason,
        "error": found.error,
        "max_error": found.max_error,
        "is_kept": found.is_kept,
        "metric": found.metric.name,
        "objective": found.objective,
        "predicted_us": found.predicted_us,
        "batches": found.batches,
        "held_out": found.held_out,
        "programs": [asdict(one) for one in found.programs],
        "front": [{"error": found.metric.error(one.totals["damage"]), **one.totals} for one in found.front],
        "units": [asdict(row) for row in found.rows()],
        "plan": dict(found.formats),
        "seconds": round(found.seconds, 2),
    }


def _table(found: Findings) -> Table:
    rows = found.rows()
    forms = [form for form in FORMATS if any(form in row.time_us for row in rows)]
    columns = ("unit", "operator", *forms, "choice", "why")
    title = "Microseconds and damage (squared error of the outputs) of each format, predicted"
    return table(
        title, columns, [(_short(row), row.operator, *(_cell(row, form) for form in forms), row.choice, row.why) for row in rows]
    )


def _cell(row: Row, form: str) -> str:
    if form not in row.time_us:
        return ""
    damage = row.damage[form]
    return f"{row.time_us[form]:.1f} {f'{damage:.0e}' if isfinite(damage) else 'ruin'}"


def _short(row: Row) -> str:
    return row.name if len(row.name) <= _LABEL else f"...{row.name[3 - _LABEL :]}"


def _front(found: Findings) -> str:
    unit, divisor = ("ms", 1e3) if found.objective == "latency" else ("MiB", 2**20)
    points = (f"{found.metric.error(one.totals['damage']):.1e} {one.objective / divisor:.3g} {unit}" for one in found.front)
    return f"predicted at other errors: {', '.join(points)}"
