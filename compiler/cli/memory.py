"""`prefuse memory`: what of a program lies where and when."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...runtime.executor import CompiledModel
from ...runtime.plan import limit_of
from ...runtime.profile import profile_in_turns
from ..pipeline.pages import check_installed
from ..pipeline.progress import ConsoleProgress
from ..predictor.memory_drawing import draw_html, draw_png
from ..predictor.memory_view import MemoryView
from .common import (
    JSON,
    MODEL,
    SHAPES,
    CompileArguments,
    Shapes,
    compile_graph,
    concrete_model,
    quantized,
    random_arrays,
    refuse_program,
    show,
    size_text,
    table,
    with_compile_arguments,
)
from .output import check_output

if TYPE_CHECKING:
    from rich.table import Table

_ROWS = 12  # buffers shown at the peak
_PATHS = click.Path(path_type=Path)


@click.command("memory")
@MODEL
@click.option("--measure", is_flag=True, help="Compile the model, and show a call of it below what is predicted.")
@click.option("--runs", default=5, show_default=True, type=click.IntRange(1), help="Calls to measure.")
@click.option("--html", "html_path", type=_PATHS, help="Write a page with drawings and all buffers.")
@click.option("--png", "png_path", type=_PATHS, help="Draw the arena over time, and kernels beside copies.")
@SHAPES
@with_compile_arguments
@JSON
def command(
    model: Path,
    measure: bool,
    runs: int,
    html_path: Path | None,
    png_path: Path | None,
    shapes: Shapes,
    arguments: CompileArguments,
    as_json: bool,
) -> None:
    """Show what of the ONNX file MODEL lies where and when, within --memory-limit if that is given: the arena over time, its
    peak and lower bound, and which copies of weights run beside which kernels.
    """
    from ..predictor.call import planned_and_predicted, predictor_for

    refuse_program(model, "memory")
    for option, path in (("--html", html_path), ("--png", png_path)):
        if path is not None:
            check_output(path, option)
            check_installed()
    options, progress, graph = arguments.options(), ConsoleProgress(), concrete_model(model, shapes)
    profile = None
    if measure:
        net = compile_graph(graph.clone(), model.stem, arguments, profile=True)
        if isinstance(net, CompiledModel):
            profile = profile_in_turns([net], random_arrays(net, graph, 0), runs)[0]
    graph = quantized(graph, model.stem, arguments)
    try:
        with predictor_for(options, measure=False, progress=progress) as predictor:
            planned, prediction = planned_and_predicted(graph, options, predictor, model.stem)
    finally:
        progress("done", 1.0)
    view = MemoryView(planned.plan, prediction, limit_of(planned.plan), profile)
    for path, write in ((html_path, draw_html), (png_path, draw_png)):
        if path is not None:
            write(view, path)
    show(as_json, _data(view), *view.sentences(), "", _table(view))


def _data(view: MemoryView) -> dict[str, object]:
    step, _ = view.peak
    return {
        "arena_bytes": view.arena_bytes,
        "bound_bytes": view.bound_bytes,
        "limit_bytes": view.limit_bytes,
        "memory": asdict(view.prediction.memory),
        "predicted_us": view.prediction.latency_us,
        "measured_us": None if view.profile is None else view.profile.time_us,
        "peak_step": step,
        "buffers": [asdict(one) for one in view.rectangles],
        "predicted": [asdict(bar) for bar in view.predicted],
        "measured": [asdict(bar) for bar in view.measured],
    }


def _table(view: MemoryView) -> Table:
    _, there = view.peak
    rows = [(one.name, one.kind, size_text(one.size_bytes), f"{one.first} to {one.last}") for one in there[:_ROWS]]
    title = "What lives at the peak" if len(there) <= _ROWS else f"The {_ROWS} largest of {len(there)} buffers at the peak"
    return table(title, ("buffer", "kind", "size", "steps"), rows)
