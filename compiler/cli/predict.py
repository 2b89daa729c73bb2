"""`prefuse predict`: what a program will take, without compiling it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...runtime.plan import COMPUTE
from ..pipeline.progress import ConsoleProgress
from .common import (
    JSON,
    MODEL,
    SHAPES,
    CompileArguments,
    Shapes,
    concrete_model,
    quantized,
    refuse_program,
    show,
    size_text,
    table,
    with_compile_arguments,
)

if TYPE_CHECKING:
    from rich.table import Table

    from ..predictor.prediction import PredictedStep, Prediction

_ROWS = 20  # groups shown, those that take longest
_STALLS = 5  # shown, the longest
_LABEL = 64  # characters shown of one
_SOURCES = {"measured": "of kernels measured alone", "scaled": "of estimates scaled by their templates", "estimate": "estimated"}


@click.command("predict")
@MODEL
@click.option(
    "--measure/--no-measure",
    default=False,
    help="Measure the kernels that nobody has measured on this machine before, each alone, for about a second.",
)
@click.option("--again", is_flag=True, help="Measure also what has been measured before; the shorter times count.")
@click.option(
    "--runs-file", type=click.Path(path_type=Path), help="File of measured kernels; one in the cache's folder if not given."
)
@SHAPES
@with_compile_arguments
@JSON
def command(
    model: Path, measure: bool, again: bool, runs_file: Path | None, shapes: Shapes, arguments: CompileArguments, as_json: bool
) -> None:
    """Say how long a call of the ONNX file MODEL will take, and what memory, without compiling it.

    Times are of kernels measured alone, where they were, else of the cost model; memory is exact. With a target of another
    machine (cpu:avx512,machine=zen4) all times are estimates. "near to far" are the times of a kernel whose operands lie in the
    nearest cache and in memory, as measured; "known" says where its time comes from.
    """
    from ..predictor.call import predict_graph, predictor_for

    refuse_program(model, "predict")
    options, progress = arguments.options(), ConsoleProgress()
    graph = quantized(concrete_model(model, shapes), model.stem, arguments)
    try:
        with predictor_for(options, runs_file, measure=measure, again=again, progress=progress) as predictor:
            found = predict_graph(graph, options, predictor, model.stem)
    finally:
        progress("done", 1.0)
    show(as_json, found.as_json(), _head(found), _table(found))


def _head(found: Prediction) -> str:
    memory = found.memory
    lines = [
        f"{found.name} for {found.target}, {found.precision}: {found.latency_us / 1e3:.3f} ms a call predicted",
        f"memory: {size_text(memory.weights_bytes)} of weights, {size_text(memory.arena_bytes)} of activations a context, "
        f"of which {size_text(memory.workspace_bytes)} for the largest workspace",
    ]
    late = "where its result is read late"
    lines += [f"  {_short(step)} is computed again, {step.time_us / 1e3:.3f} ms, {late}" for step in found.repeated]
    lines += _limited(found)
    if found.is_elsewhere:
        lines.append(f"an estimate for a {found.machine} core: nothing of it was measured, as this machine is another one")
    else:
        lines.append(", ".join(f"{part:.0%} {_SOURCES[source]}" for source, part in found.shares.items() if part))
        if found.shares["measured"] < 1:
            lines.append(
                "--measure measures what is estimated; without prefuse doctor --fit estimates are for any processor of its kind"
            )
    return "\n".join(lines) + "\n"


def _limited(found: Prediction) -> list[str]:
    """What a memory limit makes of the time; nothing without one."""
    if not found.memory.stored_bytes:
        return []
    compute, copies, latency = found.compute_us, found.copies_us, found.latency_us
    total = size_text(found.memory.total_bytes)
    lines = [
        f"{total} together; {size_text(found.memory.stored_bytes)} of weights stay in the file, of which a call copies "
        f"{size_text(sum(step.bytes_moved for step in found.steps if step.stream != COMPUTE))}",
        f"{compute / 1e3:.3f} ms of kernels and {copies / 1e3:.3f} ms of copies run side by side; predicted "
        f"{latency / max(compute, copies):.2f} times the longer of them",
    ]
    stalls = [step for step in found.stalls if step.stream == COMPUTE]
    lines += [f"  {_short(step)} waits {step.stall_us / 1e3:.3f} ms for a copy" for step in stalls[:_STALLS]]
    if len(stalls) > _STALLS:
        rest = sum(step.stall_us for step in stalls[_STALLS:])
        lines.append(f"  and {len(stalls) - _STALLS} more wait {rest / 1e3:.3f} ms")
    if found.tail_us > 0:
        lines.append(f"  copies for the next call go on for {found.tail_us / 1e3:.3f} ms when all kernels have run")
    return lines


def _table(found: Prediction) -> Table:
    path = found.critical_path
    slowest = sorted(path, key=lambda step: -step.time_us)
    rows = [
        (
            _short(step),
            step.template,
            f"{step.time_us:.1f}",
            f"{step.time_us / found.latency_us:.1%}" if found.latency_us else "-",
            step.source,
            f"{step.near_us:.1f} to {step.far_us:.1f}" if step.source == "measured" else "",
        )
        for step in slowest[:_ROWS]
    ]
    title = "Critical path" if len(path) <= _ROWS else f"The {_ROWS} slowest of {len(path)} steps on the critical path"
    return table(title, ("group", "template", "us", "share", "known", "near to far"), rows)


def _short(step: PredictedStep) -> str:
    """The anchor of a group, or the end of its name where that is long."""
    nodes = step.label.partition(" at ")[0]
    anchor, *others = nodes.split("+")
    text = f"{anchor} and {len(others)} more" if others else anchor
    return text if len(text) <= _LABEL else f"...{text[3 - _LABEL :]}"
