"""Images of several sizes by one program: `python -m benchmarks.sized_images timm/resnet18 --precision bfloat16`.

The program for a range of heights and widths in turns with that of each size, and with peers that read the same ONNX file with
dynamic dimensions, in one process: a round gives each engine, in an order that changes, some calls of a size, after a pause in
which the threads of the one before fall asleep. Programs of float32 are compared with ONNX Runtime and OpenVINO in float32, those
of bfloat16 with OpenVINO in either.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import click
import numpy as np
import onnx
import prefuse
import torch
from prefuse.compiler.programs.symbolic import SymbolicModel
from rich.console import Console

from .nets import build, model_names
from .random_lengths import EXACT, Engine, Inputs, exact_engine, ours, peers
from .record import record
from .turns import LEAST_ROUNDS, Spread, block_of, compared, in_milliseconds, take_turns

_CALLS = 3  # of an engine in a row
_LEAST, _MOST, _STEP = 64, 384, 32  # pixels a side of the range
Size = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Row:
    """One size: milliseconds of a call by each engine, how many times as long each takes as the program for the range, round by
    round, and the largest difference of results from those of ONNX Runtime, relative to the largest number."""

    model: str
    precision: str
    size: Size
    milliseconds: dict[str, float]
    ratios: dict[str, Spread]
    differences: dict[str, float]
    compile_seconds: dict[str, float]
    rounds_ms: dict[str, list[list[float]]]


def export(name: str, path: Path) -> None:
    """Write a model of images with dynamic dimensions H and W to an ONNX file."""
    module, (image, *_) = build(name)
    height, width = (torch.export.Dim(side, min=_LEAST, max=_MOST) for side in ("H", "W"))
    program = torch.onnx.export(
        module.eval(), (image,), dynamo=True, optimize=False, verbose=False, dynamic_shapes=({2: height, 3: width},)
    )
    assert program is not None
    program.save(path, external_data=True)


class Ours:
    """The program for a range, and programs for sizes, of an ONNX file."""

    def __init__(self, path: Path, precision: str, threads: int) -> None:
        self._how: dict[str, Any] = {"precision": precision, "threads": threads, "cache": False}
        self._path, self.precision = path, precision
        self.input_name = onnx.load(str(path), load_external_data=False).graph.input[0].name
        begin = time.perf_counter()
        side = (_LEAST, _MOST, _STEP)
        net = prefuse.compile(str(path), dims={"H": side, "W": side}, **self._how)
        assert isinstance(net, SymbolicModel)
        self.call, self.seconds = ours(net), time.perf_counter() - begin

    def own(self, inputs: Inputs) -> Engine:
        """The program for the sizes of these inputs."""
        net = prefuse.compile(str(self._path), tuple(map(torch.from_numpy, inputs.values())), **self._how)

        def call(inputs: Inputs) -> Sequence[np.ndarray]:
            found = net(*inputs.values())
            return found if isinstance(found, tuple) else (found,)

        return call


def measure(model: str, size: Size, mine: Ours, ready: Mapping[str, Engine], exact: Engine, rounds: int) -> Row:
    """One size by the engines for all sizes, and by a program for it."""
    inputs = {mine.input_name: np.random.default_rng(0).standard_normal((1, 3, *size)).astype(np.float32)}
    begin = time.perf_counter()
    every = {"prefuse": mine.call, "own program": mine.own(inputs), **ready}
    compile_seconds = {"range": mine.seconds, "size": time.perf_counter() - begin}
    wanted = exact(inputs)[0]
    differences = {one: float(np.abs(every[one](inputs)[0] - wanted).max() / np.abs(wanted).max()) for one in every}
    times = take_turns({name: block_of(partial(engine, inputs), _CALLS) for name, engine in every.items()}, rounds)
    ratios = {one: compared(times[one], times["prefuse"]) for one in every}
    milliseconds = {one: 1e3 * median(map(median, times[one])) for one in every}
    raw = {one: in_milliseconds(found) for one, found in times.items()}
    return Row(model, mine.precision, size, milliseconds, ratios, differences, compile_seconds, raw)


def _sizes(_context: click.Context, _option: click.Parameter, text: str) -> tuple[Size, ...]:
    """Heights and widths in the range: "224x224,160x256"."""
    found = []
    for one in text.split(","):
        sides = [int(side) for side in one.split("x") if side.isdecimal()]
        if len(sides) != 2 or not all(_LEAST <= side <= _MOST and side % _STEP == 0 for side in sides):
            raise click.BadParameter(f"{one!r} is no HEIGHTxWIDTH of multiples of {_STEP} from {_LEAST} to {_MOST}")
        found.append((sides[0], sides[1]))
    return tuple(found)


@click.command()
@click.argument("models", nargs=-1, required=True, callback=model_names)
@click.option("--precision", default="float32", show_default=True, type=click.Choice(("float32", "float32-fast", "bfloat16")))
@click.option("--sizes", default="224x224,160x256,320x320", show_default=True, callback=_sizes, help="Heights and widths.")
@click.option("--rounds", default=2 * LEAST_ROUNDS + 1, show_default=True, type=click.IntRange(min=1))
@click.option("--threads", default=2, show_default=True, type=click.IntRange(min=1))
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Add the results to this file.")
def main(models: Sequence[str], precision: str, sizes: Sequence[Size], rounds: int, threads: int, json_path: Path | None) -> None:
    """Time one program for images of many sizes beside programs for each, and beside peers."""
    key = ("model", "precision", "size")
    kept = record(json_path, threads, {"rounds": rounds, "calls": _CALLS}, ("onnxruntime", "openvino"), key=key)
    console = Console(width=150)
    for model in models:
        torch.manual_seed(0)
        with TemporaryDirectory(prefix="prefuse-images-") as folder, console.status(f"{model} is compiled"):
            path = Path(folder) / "model.onnx"
            export(model, path)
            mine, exact = Ours(path, precision, threads), exact_engine(path, threads)
            ready = peers(path, threads, precision) | ({} if precision == "bfloat16" else {EXACT: exact})
            for size in sizes:
                row = measure(model, size, mine, ready, exact, rounds)
                kept.add(row)
                listed = ", ".join(f"{name} {row.milliseconds[name]:.2f} ms ({ratio})" for name, ratio in row.ratios.items())
                text = "x".join(map(str, size))
                console.print(f"{model} {precision} {text}: {listed}; differences {max(row.differences.values()):.1e}")


if __name__ == "__main__":
    main()
