"""`make demo`: a ResNet-50 from PyTorch through prefuse, checked against ONNX Runtime and PyTorch, and timed beside them."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import onnxruntime
import prefuse
import torch
from prefuse.examples.models import MODELS, export_onnx
from prefuse.runtime.executor import arena_bytes
from rich.console import Console
from rich.table import Table

_MAX_ERROR = 1e-5
Run = Callable[[], np.ndarray]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; the result is 1 where prefuse and ONNX Runtime disagree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="resnet50", choices=MODELS)
    parser.add_argument("--small", action="store_true", help="the small variant of the model")
    parser.add_argument("--rounds", type=int, default=5, help="blocks of half a second for each engine")
    options = parser.parse_args(arguments)
    console = Console()
    with TemporaryDirectory() as folder:
        path = Path(folder, f"{options.model}.onnx")
        with console.status("export to ONNX"):
            module, inputs = MODELS[options.model].build(options.small)
            export_onnx(module, inputs, path)
        begin = time.perf_counter()
        net = prefuse.compile(path, cache=False, progress=True)
        compile_seconds = time.perf_counter() - begin
        session = onnxruntime.InferenceSession(path, _session_options(), providers=["CPUExecutionProvider"])
        arrays = [tensor.numpy() for tensor in inputs]
        feeds = {port.name: array for port, array in zip(session.get_inputs(), arrays, strict=True)}
        engines: dict[str, Run] = {
            "prefuse": lambda: _first(net(*arrays)),
            "ONNX Runtime": lambda: _first(session.run(None, feeds)),
            "PyTorch eager": lambda: _first(module(*inputs)),
        }
        with console.status("run"):
            results = {name: np.array(run()) for name, run in engines.items()}
            times = _latencies_ms(engines, options.rounds)
    console.print(_table(options.model, results, times))
    console.print(f"compiled in {compile_seconds:.1f} s; arena {arena_bytes(net.plan):,} bytes")
    error = _relative_error(results["prefuse"], results["ONNX Runtime"])
    if error > _MAX_ERROR:
        console.print(f"prefuse and ONNX Runtime disagree: relative error {error:.1e}", style="red")
    return int(error > _MAX_ERROR)


def _session_options() -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    return options


def _first(outputs: object) -> np.ndarray:
    """The first output of a model, as an array."""
    return np.asarray(outputs[0] if isinstance(outputs, tuple | list) else outputs)


def _latencies_ms(engines: dict[str, Run], rounds: int) -> dict[str, float]:
    """Median times of a call. Engines take turns, with pauses, so that one's spinning threads do not slow the next."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(rounds):
        for name, run in engines.items():
            time.sleep(0.2)
            run()
            end = time.perf_counter() + 0.5
            while time.perf_counter() < end:
                begin = time.perf_counter()
                run()
                times[name].append(1e3 * (time.perf_counter() - begin))
    return {name: median(measured) for name, measured in times.items()}


def _table(model: str, results: dict[str, np.ndarray], times: dict[str, float]) -> Table:
    table = Table(title=f"{model}, float32, {torch.get_num_threads()} threads", title_justify="left")
    table.add_column("engine")
    for heading in ("latency ms", "error against PyTorch", "against ONNX Runtime"):
        table.add_column(heading, justify="right")
    for name, output in results.items():
        errors = [f"{_relative_error(output, results[other]):.1e}" for other in ("PyTorch eager", "ONNX Runtime")]
        table.add_row(name, f"{times[name]:.2f}", *errors)
    return table


def _relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


if __name__ == "__main__":
    raise SystemExit(main())
