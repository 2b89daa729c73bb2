"""`prefuse quantize`: an ONNX model to an ONNX model of 8-bit products, by calibration data."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...runtime.errors import OptionError
from ...runtime.target import Target
from ..bits.error_budget import Outcome, meet_budget
from ..bits.indicators.sections import has_real_outputs
from ..pipeline.progress import ConsoleProgress
from ..quantization.batches import Batches
from ..quantization.held_out import HELD_OUT_EVERY, Split
from ..quantization.quantizer import ASSUMED, Calibrated, Settings, assumed_batches, calibrate, uncalibrated
from ..quantization.ranges import RANGE_METHODS, RangeMethod
from .common import JSON, MODEL, SHAPES, Shapes, concrete_model, refuse_program, show, size_text, table
from .output import check_output, write_model

if TYPE_CHECKING:
    import onnx_ir as ir
    from rich.table import Table


ACTIVATIONS = ("static", "rows")


@click.command("quantize")
@MODEL
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Where to write it; ./STEM.int8.onnx if left out.")
@click.option(
    "--calibration",
    type=click.Path(path_type=Path),
    help="Inputs like those that the model will see: an .npz file with an array for each input, of its shape or with one "
    "dimension more in front, which counts batches; or a folder of such files.",
)
@click.option("--max-error", type=click.FloatRange(0, min_open=True), help="Greatest relative error of an output.")
@click.option("--ranges", type=click.Choice(RANGE_METHODS), default="minmax", show_default=True, help="How ranges are chosen.")
@click.option(
    "--activations",
    type=click.Choice(ACTIVATIONS),
    default="static",
    show_default=True,
    help="static: one range a tensor, from --calibration; rows: matrix products take one for each row, found while the program "
    "runs. Recurrences do so in any case, and convolutions never.",
)
@click.option("--no-smooth", is_flag=True, help="Leave the scales of activations where they are.")
@click.option(
    "--target",
    default="cpu",
    show_default="cpu, this machine",
    help="What will run it, as for prefuse compile: where that has no dot products of bytes (cpu:avx2, cpu:avx512), weights are "
    "made smaller, so that pairs of products fit 16 bits.",
)
@SHAPES
@JSON
def command(
    model: Path,
    output: Path | None,
    calibration: Path | None,
    max_error: float | None,
    ranges: RangeMethod,
    activations: str,
    no_smooth: bool,
    target: str,
    shapes: Shapes,
    as_json: bool,
) -> None:
    """Quantize the products of the ONNX file MODEL that have constant weights, and write it as ONNX.

    Of four or more batches every fourth is held out, and the error measured on these. Where it is greater than --max-error, the
    units that damage most stay float.
    """
    refuse_program(model, "quantize")
    path = output or Path(f"{model.stem}.int8.onnx")
    check_output(path)
    if path.suffix != ".onnx":
        raise OptionError("--output", f"unknown form {path.suffix!r}", "write .onnx")
    begin, progress, runs_on = time.perf_counter(), ConsoleProgress(), Target.parse(target)
    from ..frontend.importer import import_model

    graph = concrete_model(model, shapes) if shapes else import_model(model)
    split = _split(graph, calibration, needs_ranges=activations == "static")
    try:
        if calibration is None and activations == "rows":
            calibrated = uncalibrated(graph, runs_on)
            assignment = calibrated.uniform("int8-rows")
        else:
            calibrated = calibrate(graph, split, runs_on, Settings(ranges, not no_smooth), progress)
            assignment = {**calibrated.uniform(), **(calibrated.uniform("int8-rows") if activations == "rows" else {})}
        outcome = meet_budget(calibrated, assignment, split.held_out(), max_error, progress)
    finally:
        progress("done", 1.0)
    write_model(outcome.model, path)
    seconds = time.perf_counter() - begin
    show(as_json, _data(calibrated, outcome, split, path), *_parts(calibrated, outcome, split, max_error, path, seconds))


def _split(graph: ir.Model, path: Path | None, *, needs_ranges: bool) -> Split:
    """The batches of a file or folder; without one random ones, of which the user is told."""
    if path is not None:
        return Split(Batches(path, graph.graph.inputs))
    measured = "no calibration data: the error is measured on random inputs, and convolutions stay float"
    click.echo(f"warning: {ASSUMED if needs_ranges else measured}: give --calibration", err=True)
    return Split(assumed_batches(graph))


def _data(calibrated: Calibrated, outcome: Outcome, split: Split, path: Path) -> dict[str, object]:
    return {
        "output": str(path),
        "error": outcome.error,
        "uniform_error": outcome.uniform_error,
        "batches": split.count,
        "is_held_out": split.is_split,
        "units": _units(calibrated, outcome),
    }


def _units(calibrated: Calibrated, outcome: Outcome) -> list[dict[str, object]]:
    """What became of products and recurrences, in the order of the model."""
    quantizable = {unit.node for unit in calibrated.units} | set(calibrated.recurrences)
    return [_unit(calibrated, outcome, node) for node in calibrated.model.graph if node in quantizable]


def _unit(calibrated: Calibrated, outcome: Outcome, node: ir.Node) -> dict[str, object]:
    name = str(node.name)
    return {
        "name": name,
        "operator": node.op_type,
        "format": outcome.assignment.get(name, "float32"),
        "damage": outcome.damage.get(name),
        "reason": calibrated.left.get(name, "too much damage" if name in outcome.returned else ""),
    }


def _parts(
    calibrated: Calibrated, outcome: Outcome, split: Split, max_error: float | None, path: Path, seconds: float
) -> Iterator[str | Table]:
    """What people are told."""
    units = _units(calibrated, outcome)
    rows = [(one["name"], one["operator"], one["format"], _damage(one["damage"]), one["reason"]) for one in units]
    yield table("Products by constant weights", ("name", "operator", "format", "error alone", "why"), rows)
    where = "held-out batches" if split.is_split else f"the batches it was calibrated with (give {HELD_OUT_EVERY} or more)"
    if has_real_outputs(calibrated.model):
        yield f"\nerror {outcome.error:.2e}, relative to the norm of the worst output, on {where}"
    else:
        yield "\nno output is of real numbers: no error was measured"
    if outcome.returned:
        yield f"with all of them quantized it is {outcome.uniform_error:.2e}; {len(outcome.returned)} stay float"
    if not outcome.assignment:
        bound = "" if max_error is None else f" within an error of {max_error:g}"
        yield f"nothing could be quantized{bound}"
    yield f"{path}: {size_text(path.stat().st_size)}, quantized in {seconds:.1f} s"


def _damage(squared: object) -> str:
    return f"{squared**0.5:.1e}" if isinstance(squared, float) else ""
