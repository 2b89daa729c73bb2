"""`prefuse run`: outputs, latency, and the error against ONNX Runtime."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np

from ...runtime.loading.load import Loaded, load
from ..engines.results import Arrays, arrays_by_name
from .common import (
    INPUTS,
    JSON,
    MODEL,
    SEED,
    SHAPES,
    TOLERANCE_TEXT,
    CompileArguments,
    Shapes,
    compile_graph,
    concrete_model,
    input_types,
    is_program,
    random_arrays,
    read_inputs,
    refuse_program,
    show,
    table,
    warn_of_ignored,
    with_compile_arguments,
)
from .output import check_output, write_arrays

Latency = dict[str, float]


@click.command("run")
@MODEL
@INPUTS
@SEED
@click.option("-o", "--output", type=click.Path(path_type=Path), help="An .npz file to write the outputs to.")
@click.option("--repeat", default=20, show_default=True, type=click.IntRange(1), help="Calls to time.")
@click.option("--compare", type=click.Choice(["onnxruntime"]), help="Compare outputs and latency with this engine.")
@click.option("--tolerance", type=float, help=f"Largest relative error that --compare lets pass; if left out, {TOLERANCE_TEXT}.")
@SHAPES
@with_compile_arguments
@JSON
def command(
    model: Path,
    inputs_path: Path | None,
    seed: int,
    output: Path | None,
    repeat: int,
    compare: str | None,
    tolerance: float | None,
    shapes: Shapes,
    arguments: CompileArguments,
    as_json: bool,
) -> None:
    """Run MODEL, an ONNX file or a .prefuse program. Exits with status 1 if --compare finds too large an error."""
    if compare:
        refuse_program(model, f"--compare {compare}")
    if output:
        check_output(output, is_replaced=True)
    if is_program(model):
        warn_of_ignored(model, arguments, shapes)
        graph = None
        net: Loaded = load(model)
    else:
        graph = concrete_model(model, shapes)
        net = compile_graph(graph, model.stem, arguments)
    inputs = read_inputs(inputs_path, input_types(net)) if inputs_path else random_arrays(net, graph, seed)
    results = _call(net, inputs)
    if output:
        write_arrays(output, results)
    latencies = {"prefuse": _latency_us(lambda: net(**inputs), repeat)}
    errors: dict[str, float] = {}
    if compare:
        errors, latencies[compare] = _compare(model, inputs, results, net, arguments.options().target.threads, repeat)
    _show(as_json, results, latencies, errors)
    most = arguments.tolerance if tolerance is None else tolerance
    wrong = {name: error for name, error in errors.items() if not error <= most}
    for name, error in wrong.items():
        click.echo(f"{name} differs by {error:.1e}, more than --tolerance {most:g}", err=True)
    sys.exit(1 if wrong else 0)


def _call(net: Loaded, inputs: Arrays) -> Arrays:
    found = net(**inputs)
    row = found if isinstance(found, tuple) else (found,)
    return arrays_by_name(zip(net.output_names, row, strict=True))


def _compare(
    path: Path, inputs: Arrays, results: Arrays, net: Loaded, threads: int, repeat: int
) -> tuple[dict[str, float], Latency]:
    """Relative error of each output, and ONNX Runtime's latency with as many threads, on the file itself.

    Raises:
        UnsupportedModelError: ONNX Runtime cannot run it.
    """
    import onnxruntime

    from ..debugging.oracle import engine_refused, relative_error

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # errors only
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        expected = session.run(None, inputs)
    except Exception as error:
        raise engine_refused(str(path), "ONNX Runtime", error) from error
    truths = arrays_by_name(zip(net.output_names, expected, strict=True))
    both = results.keys() & truths.keys()  # a sequence may have another length
    errors = {name: relative_error(results[name], truths[name]) if name in both else math.inf for name in results | truths}
    return errors, _latency_us(lambda: session.run(None, inputs), repeat)


def _latency_us(call: Callable[[], object], repeat: int) -> Latency:
    """Median and extremes of `repeat` calls after one that does not count, in microseconds."""
    call()
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    return {"median_us": statistics.median(times), "min_us": min(times), "max_us": max(times)}


def _show(as_json: bool, results: Arrays, latencies: dict[str, Latency], errors: dict[str, float]) -> None:
    outputs = {
        name: {"shape": list(array.shape), "dtype": array.dtype.name, "relative_error": errors.get(name)}
        for name, array in results.items()
    }
    rows = [
        (name, f"{array.dtype.name}[{','.join(map(str, array.shape))}]", *_moments(array), _error(errors.get(name)))
        for name, array in results.items()
    ]
    times = [(name, *(f"{value / 1e3:.3f}" for value in latency.values())) for name, latency in latencies.items()]
    show(
        as_json,
        {"outputs": outputs, "latency": latencies},
        table("Outputs", ("name", "type", "mean", "std", "relative error"), rows),
        table("Latency in ms", ("engine", "median", "min", "max"), times),
    )


def _moments(array: np.ndarray) -> tuple[str, str]:
    if array.dtype.kind == "U":
        return "-", "-"
    values = array.astype(np.float64)
    return (f"{values.mean():.4g}", f"{values.std():.4g}") if values.size else ("-", "-")


def _error(error: float | None) -> str:
    return "-" if error is None else f"{error:.2e}"
