"""`prefuse bisect`: where a model's numbers go wrong."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict, replace
from pathlib import Path

import click
import numpy as np
import onnx_ir as ir

from ...runtime.errors import CompileError
from ...runtime.target import Target
from ..debugging.oracle import BisectResult, Engine, bisect_pipeline, random_inputs, relative_error, run_model
from ..engines.results import arrays_by_name
from ..pipeline import Context, Pass, PassError, format_pipeline, parse_pipeline
from ..pipeline.pass_table import DEFAULT_PIPELINE, PASSES, named_pipeline
from ..programs.options import parse_precision
from .common import (
    INPUTS,
    JSON,
    MODEL,
    PRECISION,
    SEED,
    SHAPES,
    TARGET,
    TOLERANCE_TEXT,
    CompileArguments,
    Shapes,
    compile_graph,
    concrete_model,
    read_inputs,
    refuse_program,
    show,
)

_LOWERING = "lowering"  # what comes after the last graph pass: plan passes, kernels and native code


@click.command("bisect")
@MODEL
@click.option(
    "--pipeline", default=DEFAULT_PIPELINE, show_default="those of prefuse compile", help="The passes to try, in order."
)
@click.option("--engine", type=click.Choice(["onnxruntime", "reference"]), default="onnxruntime", show_default=True)
@click.option("--tolerance", type=float, help=f"Largest relative error that counts as equal; if left out, {TOLERANCE_TEXT}.")
@INPUTS
@SEED
@TARGET
@PRECISION
@SHAPES
@JSON
def command(
    model: Path,
    pipeline: str,
    engine: Engine,
    tolerance: float | None,
    inputs_path: Path | None,
    seed: int,
    target: str,
    precision: str,
    shapes: Shapes,
    as_json: bool,
) -> None:
    """Find the first pass after which MODEL computes something else, and the first tensor that differs.

    After the graph passes the native program itself is tried, as the stage "lowering". Exits with status 1 if anything is wrong.
    """
    refuse_program(model, "bisect")
    arguments = CompileArguments(target, precision, random=True, pipeline=pipeline, no_cache=True)
    most = arguments.tolerance if tolerance is None else tolerance
    graph = concrete_model(model, shapes)
    types = {str(value.name): "" if value.dtype is None else value.dtype.numpy().name for value in graph.graph.inputs}
    inputs = read_inputs(inputs_path, types) if inputs_path else random_inputs(graph, seed)
    passes = [one for one in parse_pipeline(named_pipeline(pipeline), PASSES) if isinstance(one, Pass)]
    found = bisect_pipeline(
        graph, passes, Context(Target.parse(target), precision=parse_precision(precision)), inputs, most, engine
    )
    if found.pass_name is None:
        found = _try_program(graph, inputs, engine, most, arguments)
    show(as_json, {**asdict(found), "pipeline": format_pipeline(passes)}, _describe(found, most))
    sys.exit(0 if found.pass_name is None else 1)


def _try_program(
    graph: ir.Model, inputs: dict[str, np.ndarray], engine: Engine, tolerance: float, arguments: CompileArguments
) -> BisectResult:
    """Compare the outputs of the native program with the engine's."""
    broken = BisectResult(_LOWERING)
    try:
        net = compile_graph(graph, "bisect", arguments)
        found = net(**inputs)
    except (CompileError, PassError) as error:
        return replace(broken, failure=str(error))
    row = found if isinstance(found, tuple) else (found,)
    actual = arrays_by_name(zip(net.output_names, row, strict=True))
    for name, expected in run_model(graph, inputs, engine).items():
        error_there = relative_error(actual[name], expected) if name in actual else math.inf
        if not error_there <= tolerance:
            return replace(broken, tensor=name, error=error_there)
    return BisectResult()


def _describe(found: BisectResult, tolerance: float) -> str:
    if found.pass_name is None:
        return f"no pass changes the outputs by more than {tolerance:g}, and neither does the native program"
    place = found.pass_name if found.position is None else f"pass {found.pass_name} (number {found.position})"
    if found.failure is not None:
        return f"{place} fails: {found.failure}"
    return f"{place} is the first to change the numbers: %{found.tensor} differs by {found.error:.3g}"
