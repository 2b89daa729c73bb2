"""How near products of 8-bit integers come to the peak of a core: `python -m benchmarks.int8_kernels --target cpu:avx512vnni`.

Each problem is one kernel: bytes in, the product, scales, bias and rounding to bytes. The peak is that of the target's
multiply-adds of the same format in registers, of tiles where it has these, right before and after each problem. Shares are
medians over the quiet turns, in which the peak was within a tenth of the best: so a clock that changes from second to second is
in both, and work on a core's other hyperthread, which takes more than half of a tile unit, in neither. `--precision float32`
measures the same products of floats. `--rows` measures one row by stored weights instead: the bytes of weights that are read in a
second, in units of those of float32 weights.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeAlias

import click
import numpy as np
import onnx
from onnx import helper, numpy_helper
from prefuse.compiler.driver import compile_model, plan_model
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.lowering.roofline import multiply_add_program, multiply_tiles_program
from prefuse.compiler.programs.options import Options
from prefuse.kernels.formats.format import BF16_DOT, F32, U8_DOT, U8_MADD
from prefuse.kernels.microkernels.amx_unit import BF16_TILES, U8_TILES
from prefuse.runtime.executor import CompiledModel, load
from prefuse.runtime.hardware.machine import LINE_BYTES, host_machine
from prefuse.runtime.precision import Weights
from prefuse.runtime.target import Target, host_cpu_model
from rich.console import Console
from rich.table import Table

from .record import plain, record

Precision: TypeAlias = Literal["int8", "float32", "bfloat16"]
Times: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
_WIDTH = 110
_CALLS = 6  # of a problem in a turn; the first one does not count
_ZERO = 117  # zero point of what is multiplied
_QUIET, _BEST = 0.9, 0.1  # of the best tenth of the peaks of all turns: below it the core was not ours alone


@dataclass(frozen=True, slots=True)
class Problem:
    """A product of `rows` x `depth` by `depth` x `columns`; or, where there is a `window`, a convolution of an image of
    `rows` x `rows` positions and `depth` channels, channels-last, to as large a one of `columns` channels."""

    rows: int
    depth: int
    columns: int
    window: int = 0

    @property
    def macs(self) -> int:
        """Multiply-adds that must be done: none with padding."""
        reach = self.window // 2
        taps = self.rows * self.window - reach * (reach + 1)  # along a side, inside the image
        return self.depth * self.columns * (taps**2 if self.window else self.rows)

    @property
    def padded_macs(self) -> int:
        """Those that a kernel makes that multiplies padding, too."""
        return self.depth * self.columns * ((self.rows * self.window) ** 2 if self.window else self.rows)

    def __str__(self) -> str:
        if not self.window:
            return f"{self.rows}x{self.depth}x{self.columns}"
        return f"{self.window}x{self.window} of {self.rows}x{self.rows}x{self.depth} to {self.columns}"


PROBLEMS = (
    Problem(128, 768, 3072),
    Problem(128, 3072, 768),
    Problem(128, 768, 768),
    Problem(56, 64, 64, 3),
    Problem(28, 128, 128, 3),
    Problem(14, 256, 256, 3),
    Problem(14, 1024, 256, 1),
    Problem(56, 64, 256, 1),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """A problem's kernel: its template, what was chosen, and medians of its time, as it was in quiet turns and as it was
    predicted."""

    problem: Problem
    template: str
    choices: str
    time_us: float
    predicted_us: float
    share: float  # of the peak measured beside, by the multiply-adds that must be done
    padded_share: float  # and by those of padding with them
    quiet: float  # the share of the turns that count
    times_us: tuple[float, ...] = ()  # of these

    @property
    def gmacs(self) -> float:
        """Multiply-adds a nanosecond."""
        return self.problem.macs / self.time_us / 1e3


def model_of(problem: Problem, precision: Precision) -> onnx.ModelProto:
    """The problem between bytes: y = Q(op(DQ(x), DQ(w)) + bias), weights with a scale for each column; or between floats."""
    rng, has_image = np.random.default_rng(0), problem.window > 0
    columns, extent = problem.columns, problem.window
    size = (columns, problem.depth, extent, extent) if has_image else (problem.depth, columns)
    shape = (1, problem.rows, problem.rows, problem.depth) if has_image else (problem.rows, problem.depth)
    spread = 1 / np.sqrt(prod(size) // columns) / 64
    arrays: dict[str, Any] = {"bias": rng.random((columns, 1, 1) if has_image else columns).astype(np.float32)}
    nodes, source = [], "x"
    if precision == "int8":
        kinds = onnx.TensorProto.UINT8, onnx.TensorProto.UINT8
        scales = spread * (0.5 + rng.random(columns))
        arrays |= {"w": rng.integers(-127, 128, size, np.int8), "t": scales.astype(np.float32), "s": np.float32(0.02)}
        arrays |= {"z": np.uint8(_ZERO), "r": np.float32(0.02), "q": np.uint8(128)}
        nodes.append(helper.make_node("DequantizeLinear", ["x", "s", "z"], ["a"]))
        nodes.append(helper.make_node("DequantizeLinear", ["w", "t"], ["b"], axis=0 if has_image else 1))
        source, weights = "a", "b"
    else:
        kinds = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT
        arrays["w"], weights = (spread * rng.standard_normal(size)).astype(np.float32), "w"
    if has_image:
        nodes.append(helper.make_node("Transpose", [source], ["image"], perm=[0, 3, 1, 2]))
        nodes.append(helper.make_node("Conv", ["image", weights], ["p"], pads=[extent // 2] * 4))
    else:
        nodes.append(helper.make_node("MatMul", [source, weights], ["p"]))
    nodes.append(helper.make_node("Add", ["p", "bias"], ["c"]))
    last = "c"
    if precision == "int8":
        nodes.append(helper.make_node("QuantizeLinear", ["c", "r", "q"], ["bytes"]))
        last = "bytes"
    nodes.append(helper.make_node("Transpose", [last], ["y"], perm=[0, 2, 3, 1]) if has_image else _same(last))
    given = helper.make_tensor_value_info("x", kinds[0], shape)
    result = helper.make_tensor_value_info("y", kinds[1], (*shape[:-1], columns))
    constants = [numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "main", [given], [result], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def _same(name: str) -> onnx.NodeProto:
    return helper.make_node("Identity", [name], ["y"])


@dataclass(frozen=True, slots=True)
class Row:
    """One row by stored weights: medians over the turns; `share`: of the bytes a second of float32 weights in the same turn."""

    shape: tuple[int, int]
    weights: str
    template: str
    time_us: float
    size_bytes: int
    share: float

    @property
    def gigabytes(self) -> float:
        """Bytes of weights a nanosecond."""
        return self.size_bytes / self.time_us / 1e3


ROW_SHAPES = ((768, 50304), (4096, 16384))
_ROW_WEIGHTS: tuple[Weights | None, ...] = (None, "int8", "int4")


class Bench:
    """The compiled program of a problem, its input, and the times of its launches so far."""

    def __init__(self, proto: onnx.ModelProto, options: Options) -> None:
        planned = plan_model(import_model(proto), options)
        anchored = [item for item in planned.lowered if item.kernel.flops] or planned.lowered
        self.template = "+".join(item.kernel.template for item in planned.lowered)
        self.choices = ", ".join(f"{one.name} {one.taken}" for item in anchored for one in item.kernel.choices)
        with TemporaryDirectory() as folder:
            path = Path(folder, "kernel.prefuse")
            compile_model(import_model(proto), options, name="kernel", output=path)
            self.net = load(path)
        port = self.net.plan.inputs[0]
        rng = np.random.default_rng(1)
        is_bytes = port.type.dtype == "uint8"
        given = rng.integers(0, 256, port.type.shape, np.uint8) if is_bytes else rng.random(port.type.shape, np.float32)
        self.x = _aligned(given)
        self.predicted_us = 0.0

    def time_us(self) -> float:
        """The median of a call's launches together, now."""
        profile = self.net.profile(self.x, runs=_CALLS)
        self.predicted_us = profile.predicted_us
        return float(np.median(np.diff(profile.stamps_ns[1:], axis=1).sum(axis=1))) / 1e3


def peak_program(precision: Precision, target: Target) -> tuple[CompiledModel, int]:
    """The multiply-adds that a precision's products are made of on a target, in registers, and how many they are."""
    if target.has_tiles and precision != "float32":
        return multiply_tiles_program(target, U8_TILES if precision == "int8" else BF16_TILES)
    if precision == "int8":
        return multiply_add_program(target, U8_DOT if U8_DOT.runs_on(target) else U8_MADD)
    return multiply_add_program(target, BF16_DOT if precision == "bfloat16" and BF16_DOT.runs_on(target) else F32)


def measure(problems: Sequence[Problem], target: Target, precision: Precision, turns: int) -> list[Measured]:
    """All problems, in turns with the peak."""
    peak, macs = peak_program(precision, target)
    options = Options(target, "bfloat16" if precision == "bfloat16" else "float32", profile=True)
    benches = [Bench(model_of(problem, precision), options) for problem in problems]
    times = np.empty((len(benches), turns))
    peaks = np.empty_like(times)  # the slower one of those before and after
    for turn in range(turns):
        for at, bench in enumerate(benches):
            before = _peak_us(peak)
            times[at, turn] = bench.time_us()
            peaks[at, turn] = max(before, _peak_us(peak))
    quiet = peaks * _QUIET <= np.quantile(peaks, _BEST)  # not the least: one lucky turn would leave none of the others
    return [
        _measured(problem, bench, times[at, quiet[at]], macs / peaks[at, quiet[at]], turns)
        for at, (problem, bench) in enumerate(zip(problems, benches, strict=True))
    ]


def _aligned(array: np.ndarray) -> np.ndarray:
    """A copy that begins where a cache line does, as what a program computes; elsewhere each row of a tile would be two lines."""
    memory = np.empty(array.nbytes + LINE_BYTES, np.uint8)
    begin = -memory.ctypes.data % LINE_BYTES
    copy = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _measured(problem: Problem, bench: Bench, times_us: Times, peaks: Times, turns: int) -> Measured:
    """What the quiet turns say; nothing is known where there were none."""
    time_us = float(np.median(times_us)) if times_us.size else float("nan")
    share = float(np.median(problem.macs / times_us / peaks)) if times_us.size else float("nan")
    padded, quiet = share * problem.padded_macs / problem.macs, times_us.size / turns
    return Measured(
        problem, bench.template, bench.choices, time_us, bench.predicted_us, share, padded, quiet, tuple(times_us.tolist())
    )


def measure_rows(shape: tuple[int, int], target: Target, turns: int) -> list[Row]:
    """One row by weights of this shape as float32, int8 and int4, in turns."""
    model = _row_model(shape)
    benches = [Bench(model, Options(target, profile=True, weights=weights)) for weights in _ROW_WEIGHTS]
    sizes = [bench.net.plan.weights_bytes for bench in benches]
    times = np.array([[bench.time_us() for bench in benches] for _ in range(turns)])
    rates = np.array(sizes) / times
    shares = np.median(rates / rates[:, :1], axis=0)
    medians = np.median(times, axis=0)
    return [
        Row(shape, weights or "float32", bench.template, float(time), size, float(part))
        for weights, bench, time, size, part in zip(_ROW_WEIGHTS, benches, medians, sizes, shares, strict=True)
    ]


def _row_model(shape: tuple[int, int]) -> onnx.ModelProto:
    depth, columns = shape
    weights = np.random.default_rng(0).standard_normal(shape, np.float32) / np.float32(np.sqrt(depth))
    given = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, (1, depth))
    result = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, (1, columns))
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    graph = helper.make_graph(nodes, "main", [given], [result], [numpy_helper.from_array(weights, "w")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def _peak_us(peak: CompiledModel) -> float:
    x = np.full(peak.plan.inputs[0].type.shape, 1, np.int32)
    return float(np.median(np.diff(peak.profile(x, runs=4).stamps_ns[1:], axis=1))) / 1e3


@click.command()
@click.option("--target", "text", default="cpu", show_default=True, help="Whose kernels: cpu:avx512vnni takes no tiles.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1), help="Of one call.")
@click.option("--precision", default="int8", show_default=True, type=click.Choice(["int8", "float32", "bfloat16"]))
@click.option("--turns", default=15, show_default=True, type=click.IntRange(1), help="Of all problems.")
@click.option("--rows", "is_rows", is_flag=True, help="One row by stored weights, instead of the problems.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Add the results to this file.")
def main(text: str, threads: int, precision: Precision, turns: int, is_rows: bool, json_path: Path | None) -> None:
    """Measure all problems, costs being those of this machine."""
    kept = record(json_path, threads, {"turns": turns}, key=("target", "precision", "problem", "shape", "weights"))
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    target = Target.parse(text, threads)
    if "machine=" not in text and text != "cpu":
        target = replace(target, machine=host_machine(host_cpu_model(), target.vector_lanes))
    if missing := target.missing_features():
        raise click.ClickException(f"this CPU lacks {', '.join(missing)}, which {target} needs")
    if is_rows:
        found = [row for shape in ROW_SHAPES for row in measure_rows(shape, target, turns)]
        console.print(_rows_table(found, target))
        kept.add(*({"target": str(target), **plain(row)} for row in found))
        return
    shares = ("share", "with padding", "quiet")
    table = Table("problem", "template", "choices", "us", "predicted", "Gmac/s", *shares, title=f"{target}, {precision}")
    for one in measure(PROBLEMS, target, precision, turns):
        times = f"{one.time_us:.1f}", f"{one.predicted_us / one.time_us:.2f}", f"{one.gmacs:.1f}"
        numbers = (*times, f"{one.share:.3f}", f"{one.padded_share:.3f}", f"{one.quiet:.0%}" if one.quiet else "no quiet turn")
        table.add_row(str(one.problem), one.template, one.choices, *numbers)
        kept.add({"target": str(target), "precision": precision, **plain(one)})
    console.print(table)


def _rows_table(rows: Sequence[Row], target: Target) -> Table:
    table = Table("weights", "shape", "template", "us", "GB/s", "of float32's", title=f"{target}, one row")
    for row in rows:
        numbers = f"{row.time_us:.0f}", f"{row.gigabytes:.1f}", f"{row.share:.3f}"
        table.add_row(row.weights, "x".join(map(str, row.shape)), row.template, *numbers)
    return table


if __name__ == "__main__":
    main()
