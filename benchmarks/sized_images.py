"""Images of several sizes by one program: `python -m prefuse.benchmarks.sized_images timm/resnet18 --precision bfloat16`.

The program for a range of heights and widths in turns with that of each size, with ONNX Runtime and with OpenVINO, which read the
same ONNX file with dynamic dimensions, in one process: a round gives each engine, in an order that changes, some calls of a size,
after a pause in which the threads of the one before fall asleep. Ratios are medians of those of rounds.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
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

from .nets import build
from .random_lengths import Engine, Inputs, engines

_PAUSE_SECONDS = 0.1
_CALLS = 3  # of an engine in a row
_LEAST, _MOST, _STEP = 64, 384, 32  # pixels a side of the range


@dataclass(frozen=True, slots=True)
class Row:
    """One size: milliseconds of a call by each engine, how many times as long each takes as the program for the range, and the
    largest difference of results from those of ONNX Runtime, relative to the largest number."""

    model: str
    precision: str
    size: tuple[int, int]
    milliseconds: dict[str, float]
    ratios: dict[str, float]
    differences: dict[str, float]
    compile_seconds: dict[str, float]


def export(name: str, path: Path) -> None:
    """Write a model of images with dynamic dimensions H and W to an ONNX file."""
    module, (image, *_) = build(name)
    height, width = (torch.export.Dim(side, min=_LEAST, max=_MOST) for side in ("H", "W"))
    program = torch.onnx.export(
        module.eval(), (image,), dynamo=True, optimize=False, verbose=False, dynamic_shapes=({2: height, 3: width},)
    )
    assert program is not None
    program.save(path, external_data=True)


def take_turns(ready: Mapping[str, Engine], inputs: Inputs, rounds: int) -> dict[str, list[float]]:
    """Seconds of a call by each engine, round by round."""
    shuffle, seconds = random.Random(0), {name: list[float]() for name in ready}
    for _ in range(rounds):
        for name in shuffle.sample(list(ready), len(ready)):
            time.sleep(_PAUSE_SECONDS)
            ready[name](inputs)
            begin = time.perf_counter()
            for _ in range(_CALLS):
                ready[name](inputs)
            seconds[name].append((time.perf_counter() - begin) / _CALLS)
    return seconds


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
        self.net, self.seconds = net, time.perf_counter() - begin

    def __call__(self, inputs: Inputs) -> Sequence[np.ndarray]:
        found = self.net(**inputs)
        return found if isinstance(found, tuple) else (found,)

    def own(self, inputs: Inputs) -> Engine:
        """The program for the sizes of these inputs."""
        net = prefuse.compile(str(self._path), tuple(map(torch.from_numpy, inputs.values())), **self._how)

        def call(inputs: Inputs) -> Sequence[np.ndarray]:
            found = net(*inputs.values())
            return found if isinstance(found, tuple) else (found,)

        return call


def measure(model: str, size: tuple[int, int], ours: Ours, ready: Mapping[str, Engine], rounds: int) -> Row:
    """One size by the engines for all sizes, and by a program for it."""
    inputs = {ours.input_name: np.random.default_rng(0).standard_normal((1, 3, *size)).astype(np.float32)}
    begin = time.perf_counter()
    every = {**ready, "own program": ours.own(inputs)}
    compile_seconds = {"range": ours.seconds, "size": time.perf_counter() - begin}
    wanted = ready["onnxruntime"](inputs)[0]
    differences = {one: float(np.abs(every[one](inputs)[0] - wanted).max() / np.abs(wanted).max()) for one in every}
    seconds = take_turns(every, inputs, rounds)
    ratios = {one: median(theirs / mine for theirs, mine in zip(seconds[one], seconds["prefuse"], strict=True)) for one in every}
    milliseconds = {one: 1e3 * median(seconds[one]) for one in every}
    return Row(model, ours.precision, size, milliseconds, ratios, differences, compile_seconds)


@click.command(help=__doc__)
@click.argument("models", nargs=-1, required=True)
@click.option("--precision", default="float32")
@click.option("--sizes", default="224x224,160x256,320x320")
@click.option("--rounds", default=11)
@click.option("--threads", default=2)
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(models: Sequence[str], precision: str, sizes: str, rounds: int, threads: int, json_path: Path | None) -> None:
    console, rows = Console(width=130), list[Row]()
    for model in models:
        torch.manual_seed(0)
        with TemporaryDirectory(prefix="prefuse-images-") as folder:
            path = Path(folder) / "model.onnx"
            export(model, path)
            ours = Ours(path, precision, threads)
            ready: dict[str, Engine] = {**engines(ours.net, path, threads), "prefuse": ours}
            for text in sizes.split(","):
                height, width = map(int, text.split("x"))
                row = measure(model, (height, width), ours, ready, rounds)
                rows.append(row)
                listed = ", ".join(f"{name} {row.milliseconds[name]:.2f} ms ({ratio:.2f})" for name, ratio in row.ratios.items())
                console.print(f"{model} {precision} {text}: {listed}; differences {max(row.differences.values()):.1e}")
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
