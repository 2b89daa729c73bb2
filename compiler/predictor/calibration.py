"""Programs that a machine's share of coldness is fitted on: an encoder of a transformer and a residual network of convolutions,
of random weights, in sizes that no known model has."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from time import perf_counter

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir

from ...runtime.executor import CompiledModel
from ...runtime.precision import Precision
from ...runtime.program_file import read_program
from ..driver import compile_model, plan_model
from ..frontend.importer import import_model
from ..programs.options import Options
from .coldness import fitted_coldness
from .predictor import Predictor

_PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")
_SECONDS = 1.0  # of calls of a program
_RUNS = 5  # in a batch of them
_LIMIT_SECONDS = 60.0
_ROWS, _HEADS, _HEAD, _LAYERS = 96, 10, 64, 4  # of the encoder
_SIZE = 104  # rows of the residual network's image
_STAGES = ((48, 2), (96, 2), (192, 2))  # of it: channels inside, blocks
_OPSET = 21


@dataclass(frozen=True)
class ProgramRun:
    """A program file with counters, to be called for some seconds."""

    path: Path
    seconds: float

    @property
    def limit_seconds(self) -> float:
        return _LIMIT_SECONDS + 2 * self.seconds

    def answer(self) -> float:
        """Microseconds from before the first step until after the last, in a call among many: the median of the fastest batch of
        calls, which other work disturbed least."""
        net = CompiledModel(read_program(self.path))
        random = np.random.default_rng(0)
        inputs = [random.normal(size=port.type.shape).astype(port.type.dtype) for port in net.inputs]
        begin, times = perf_counter(), list[float]()
        while not times or perf_counter() - begin < self.seconds:
            stamps = net.profile(*inputs, runs=_RUNS).stamps_ns
            times.append(float(np.median(stamps[:, -1] - stamps[:, 0])) / 1e3)
        return min(times)


AskProgram = Callable[[ProgramRun], "float | None"]


def fit_coldness(predictor: Predictor, ask: AskProgram) -> float | None:
    """Measure the programs of this file, whole and kernel by kernel, and keep the share that fits best; None where none could be
    told.

    Raises:
        OptionError: the predictor's database cannot be written.
    """
    witnesses = []
    with tempfile.TemporaryDirectory() as folder:
        makers: tuple[tuple[str, Callable[[], ir.Model]], ...] = (("encoder", encoder), ("residual", residual))
        for (name, make), precision in product(makers, _PRECISIONS):
            predictor.progress(f"fitting: {name} in {precision}", 0.0)
            options, path = Options(predictor.target, precision, profile=True), Path(folder) / f"{name}.{precision}.prefuse"
            model = make()
            compile_model(model.clone(), options, name=name, output=path)
            planned = plan_model(model, options)
            times = [ask(ProgramRun(path, _SECONDS))]  # before and after its kernels, which takes some seconds
            predictor.measure(planned)
            times.append(ask(ProgramRun(path, _SECONDS)))
            if known := [time_us for time_us in times if time_us is not None]:
                witnesses.append(predictor.witness(planned, min(known)))
    share = fitted_coldness(witnesses)
    if share is not None:
        predictor.keep_coldness(share)
    return share


def encoder(rows: int = _ROWS, heads: int = _HEADS, layers: int = _LAYERS) -> ir.Model:
    """`layers` of a transformer on float32[1, rows, 64 heads]: attention, then two products four times as wide."""
    width = heads * _HEAD
    writer = _Writer()
    writer.constant("split", np.array([1, rows, heads, _HEAD], np.int64))
    writer.constant("joined", np.array([1, rows, width], np.int64))
    writer.constant("scale", np.float32(_HEAD**-0.5))
    value = "x"
    for layer in range(layers):
        value = writer.attention(value, f"l{layer}", width)
        value = writer.wide(value, f"l{layer}", width)
    return writer.model(f"float[1,{rows},{width}] x", f"float[1,{rows},{width}] {value}")


def residual(size: int = _SIZE, stages: tuple[tuple[int, int], ...] = _STAGES) -> ir.Model:
    """Blocks of three convolutions (1x1, 3x3, 1x1 to four times the channels) and a sum, on float32[1, 3, size, size]; each stage
    has half the rows of the one before."""
    writer = _Writer()
    value, channels = writer.convolution("x", "stem", 3, stages[0][0], 7, 2), stages[0][0]
    for number, (inside, blocks) in enumerate(stages):
        for block in range(blocks):
            name, stride = f"s{number}b{block}", 2 if number and not block else 1
            inner = writer.convolution(value, f"{name}a", channels, inside, 1, 1)
            inner = writer.convolution(inner, f"{name}b", inside, inside, 3, stride)
            inner = writer.convolution(inner, f"{name}c", inside, 4 * inside, 1, 1, is_last=True)
            beside = value
            if not block:
                beside = writer.convolution(value, f"{name}d", channels, 4 * inside, 1, stride, is_last=True)
            value, channels = writer.line(f"{name}y", f"Relu({writer.line(f'{name}z', f'Add({inner}, {beside})')})"), 4 * inside
    rows = size >> len(stages)
    return writer.model(f"float[1,3,{size},{size}] x", f"float[1,{channels},{rows},{rows}] {value}")


class _Writer:
    """Lines of ONNX text, and weights."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.weights: dict[str, np.ndarray] = {}
        self.random = np.random.default_rng(0)

    def line(self, name: str, text: str) -> str:
        self.lines.append(f"{name} = {text}")
        return name

    def constant(self, name: str, array: np.ndarray | np.generic) -> str:
        self.weights[name] = np.asarray(array)
        return name

    def weight(self, name: str, *shape: int) -> str:
        """Of products over all but the last dimension, or the first of a convolution: results are as large as operands."""
        depth = np.prod(shape[1:]) if len(shape) == 4 else shape[0]
        return self.constant(name, (self.random.normal(size=shape) / np.sqrt(depth)).astype(np.float32))

    def attention(self, x: str, name: str, width: int) -> str:
        n = self._normalized(x, f"{name}n", width)
        q, k, v = (
            self.line(f"{name}{kind}", f"Reshape({self._product(n, f'{name}{kind}p', width, width)}, split)") for kind in "qkv"
        )
        qt, vt = (self.line(f"{one}t", f"Transpose<perm = [0,2,1,3]>({one})") for one in (q, v))
        kt = self.line(f"{k}t", f"Transpose<perm = [0,2,3,1]>({k})")
        scores = self.line(f"{name}s", f"MatMul({qt}, {kt})")
        chosen = self.line(f"{name}c", f"Softmax<axis = -1>({self.line(f'{name}m', f'Mul({scores}, scale)')})")
        turned = self.line(f"{name}o", f"Transpose<perm = [0,2,1,3]>({self.line(f'{name}e', f'MatMul({chosen}, {vt})')})")
        joined = self.line(f"{name}j", f"Reshape({turned}, joined)")
        return self.line(f"{name}a", f"Add({x}, {self._product(joined, f'{name}w', width, width)})")

    def wide(self, x: str, name: str, width: int) -> str:
        n = self._normalized(x, f"{name}h", width)
        inner = self.line(f"{name}g", f"Gelu({self._product(n, f'{name}u', width, 4 * width)})")
        return self.line(f"{name}y", f"Add({x}, {self._product(inner, f'{name}d', 4 * width, width)})")

    def convolution(self, x: str, name: str, inputs: int, outputs: int, size: int, stride: int, *, is_last: bool = False) -> str:
        weight = self.weight(f"{name}_w", outputs, inputs, size, size)
        bias = self.constant(f"{name}_b", np.zeros(outputs, np.float32))
        pad = size // 2
        how = f"kernel_shape = [{size},{size}], strides = [{stride},{stride}], pads = [{pad},{pad},{pad},{pad}]"
        found = self.line(name, f"Conv<{how}>({x}, {weight}, {bias})")
        return found if is_last else self.line(f"{name}r", f"Relu({found})")

    def _normalized(self, x: str, name: str, width: int) -> str:
        scale, bias = (self.constant(f"{name}_{one}", np.ones(width, np.float32)) for one in "gb")
        return self.line(name, f"LayerNormalization({x}, {scale}, {bias})")

    def _product(self, x: str, name: str, depth: int, width: int) -> str:
        product = self.line(f"{name}p", f"MatMul({x}, {self.weight(f'{name}_w', depth, width)})")
        return self.line(name, f"Add({product}, {self.constant(f'{name}_b', np.zeros(width, np.float32))})")

    def model(self, given: str, result: str) -> ir.Model:
        """The model of all lines, with its weights as initializers."""
        types = {"float32": "float", "int64": "int64"}
        declared = ", ".join(
            f"{types[str(array.dtype)]}[{','.join(map(str, array.shape))}] {name}" for name, array in self.weights.items()
        )
        body = "\n".join(self.lines)
        text = f'<ir_version: 10, opset_import: ["": {_OPSET}]> main ({given}) => ({result}) <{declared}> {{ {body} }}'
        model = onnx.parser.parse_model(text)
        model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in self.weights.items())
        return import_model(model)
