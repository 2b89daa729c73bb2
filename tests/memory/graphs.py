"""Random graphs to run within memory limits: weights of 16 KiB to 30 MiB, activations from next to nothing to most of it.

A graph is made again from its seed and number alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir
from prefuse.compiler.pipeline.pass_table import DEFAULT_PIPELINE

T = TypeVar("T")
Shape = tuple[int, ...]

_MOST_WEIGHTS = 30 << 20  # bytes of a graph
_MOST_CHANNELS = 600
_SMALL = 1 << 20  # a graph of less has copies of any size


@dataclass(frozen=True)
class RandomGraph:
    """A model, what it is called with, in turns, and how it is compiled; `share` of what it takes is its limit."""

    model: ir.Model
    calls: list[dict[str, np.ndarray]]
    options: dict[str, Any]
    share: float
    operators: tuple[str, ...]


def random_graph(seed: int, number: int) -> RandomGraph:
    """The graph of a number: rows (texts, tables, recurrences), or images."""
    rng = np.random.default_rng([seed, number])
    draft = _Draft(rng)
    (_images if rng.random() < 0.3 else _rows)(draft)
    return draft.finished()


@dataclass
class _Draft:
    """A graph under construction: the lines of its nodes, its constants, and the shape of each value, in order."""

    rng: np.random.Generator
    lines: list[str] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)  # their types
    makers: dict[str, Callable[[], np.ndarray]] = field(default_factory=dict)  # what makes the inputs of a call
    values: dict[str, Shape] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    operators: set[str] = field(default_factory=set)

    # Choices

    def pick(self, choices: Sequence[T]) -> T:
        return choices[int(self.rng.integers(len(choices)))]

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    # Parts

    def weight(self, *shape: int, scale: float | None = None) -> str:
        """A new constant, or one of its shape that others read already."""
        there = [name for name, array in self.constants.items() if array.shape == shape and name.startswith("w")]
        if there and self.chance(0.2):
            return self.pick(there)
        size = scale or float(np.prod(shape[1:] if len(shape) > 2 else shape[:1])) ** -0.5
        return self.constant("w", self.rng.standard_normal(shape, np.float32) * np.float32(size))

    def bias(self, *shape: int) -> str:
        return self.constant("b", self.rng.standard_normal(shape, np.float32))

    def ints(self, *numbers: int) -> str:
        return self.constant("i", np.array(numbers, np.int64))

    def constant(self, prefix: str, array: np.ndarray) -> str:
        name = f"{prefix}{len(self.constants)}"
        self.constants[name] = array
        return name

    def add(self, shape: Shape, operator: str, *inputs: str, **attributes: object) -> str:
        """A node of one result, which later ones may read."""
        name = self.hidden(operator, *inputs, **attributes)
        self.values[name] = shape
        return name

    def hidden(self, operator: str, *inputs: str, **attributes: object) -> str:
        """A node of one result, which the caller alone reads on."""
        name = f"v{len(self.lines)}"
        text = ", ".join(f"{key}={_text(value)}" for key, value in attributes.items())
        self.lines.append(f"{name} = {operator}{f'<{text}>' if text else ''}({', '.join(inputs)})")
        self.operators.add(operator)
        return name

    def recent(self, rank: int) -> str:
        """One of the last values of a rank."""
        return self.pick([name for name, shape in self.values.items() if len(shape) == rank][-3:])

    def twin(self, name: str) -> str:
        """A value of the same shape, of any age."""
        return self.pick([other for other, shape in self.values.items() if shape == self.values[name]])

    def input(self, name: str, kind: str, shape: Shape, make: Callable[[], np.ndarray]) -> str:
        self.inputs[name] = f"{kind}[{','.join(map(str, shape))}] {name}"
        self.makers[name] = make
        return name

    # The whole

    def finished(self) -> RandomGraph:
        last = list(self.values)[-1]
        others = self.rng.permutation([name for name in self.values if name not in self.inputs and name != last])
        outputs = [last, *map(str, others[: int(self.rng.integers(0, 2))])]
        outputs += [name for name in self.states if name not in outputs]
        body = "\n".join(self.lines)
        shapes = ", ".join(f"float[{','.join(map(str, self.values[name]))}] {name}" for name in outputs)
        text = f'<ir_version: 8, opset_import: ["": 18]> random ({", ".join(self.inputs.values())}) => ({shapes}) {{\n{body}\n}}'
        used = set(body.replace(",", " ").replace("(", " ").replace(")", " ").split())
        constants = [ir.tensor(array, name=name) for name, array in self.constants.items() if name in used]
        model = ir.from_onnx_text(text, initializers=constants)
        assert isinstance(model, ir.Model)
        makers = {name: make for name, make in self.makers.items() if name not in self.states.values()}
        calls = [{name: make() for name, make in makers.items()} for _ in range(3)]
        share = float(self.rng.uniform(0.2, 0.95))
        size = sum(tensor.nbytes for tensor in constants)
        return RandomGraph(model, calls, self._options(size), share, tuple(sorted(self.operators)))

    def _options(self, size: int) -> dict[str, Any]:
        passes = {"min-bytes": "1"} if size < _SMALL else {}
        passes |= {"on-demand": "true"} if self.chance(0.1) else {}
        passes |= {"repeats": "false"} if self.chance(0.1) else {}
        options: dict[str, Any] = {"threads": self.pick([1, 2])}
        if passes:
            text = ",".join(f"{key}={value}" for key, value in passes.items())
            options["pipeline"] = DEFAULT_PIPELINE.replace("schedule-prefetch", f"schedule-prefetch{{{text}}}")
        if self.chance(0.35):
            options["precision"] = self.pick(["bfloat16", "float16", "float32-fast"])
        if self.chance(0.15):
            options["weights"] = self.pick(["int8", "int4"])
        return options | ({"states": self.states} if self.states else {})


def _text(value: object) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value)


# Rows


def _rows(d: _Draft) -> None:
    width = d.pick([64, 96, 160, 257, 384, 640, 1024])
    rows = int(d.rng.integers(100, 700)) if d.chance(0.4) else int(d.rng.integers(1, 10))
    if d.chance(0.5):
        entries = int(d.rng.integers(50, 20_000))
        d.input("x", "int64", (rows,), lambda: d.rng.integers(0, entries, rows))
        d.add((rows, width), "Gather", d.weight(entries, width, scale=1.0), "x")
    else:
        d.input("x", "float", (rows, width), lambda: d.rng.standard_normal((rows, width), np.float32))
        d.values["x"] = (rows, width)
    if d.chance(0.15):
        d.input("s", "float", (rows, width), lambda: np.zeros((rows, width), np.float32))
        kept = d.add((rows, width), "Add", d.hidden("Mul", "s", d.bias(width)), next(iter(d.values)))
        d.states[kept] = "s"
        d.values[kept] = (rows, width)
    blocks = (_product, _product, _product, _perceptron, _pointwise, _sum, _halves, _attention, _norm, _recurrence, _table)
    for _ in range(int(d.rng.integers(3, 14))):
        if sum(array.nbytes for array in d.constants.values()) < _MOST_WEIGHTS:
            d.pick(blocks)(d)
    for _ in range(int(d.rng.integers(0, 4))):  # what was idle until then
        _sum(d)


def _product(d: _Draft) -> None:
    x = d.recent(2)
    rows, k = d.values[x]
    columns = k if d.chance(0.6) else d.pick([64, 160, 257, 640, 1536, 3072])
    match d.pick(["plain", "plain", "bias", "gemm", "transposed"]):
        case "plain":
            d.add((rows, columns), "MatMul", x, d.weight(k, columns))
        case "bias":
            d.add((rows, columns), "Add", d.hidden("MatMul", x, d.weight(k, columns)), d.bias(columns))
        case "gemm":
            d.add((rows, columns), "Gemm", x, d.weight(k, columns), d.bias(columns))
        case _:
            d.add((rows, columns), "Gemm", x, d.weight(columns, k, scale=k**-0.5), d.bias(columns), transB=1)


def _perceptron(d: _Draft) -> None:
    x = d.recent(2)
    rows, k = d.values[x]
    wide = d.hidden("Add", d.hidden("MatMul", x, d.weight(k, 4 * k)), d.bias(4 * k))
    wide = d.hidden(d.pick(["Relu", "Tanh", "Sigmoid"]), wide)
    result = d.hidden("MatMul", wide, d.weight(4 * k, k))
    d.add((rows, k), "Add", result, x)


def _pointwise(d: _Draft) -> None:
    x = d.recent(2)
    if d.chance(0.2):
        d.add(d.values[x], "Softmax", x, axis=-1)
    else:
        d.add(d.values[x], d.pick(["Relu", "Tanh", "Sigmoid", "Abs", "Erf"]), x)


def _sum(d: _Draft) -> None:
    x = list(d.values)[-1] if d.chance(0.5) else d.pick(list(d.values))
    d.add(d.values[x], d.pick(["Add", "Mul", "Sub"]), x, d.twin(x))


def _halves(d: _Draft) -> None:
    """The upper half of one value above the lower one of another."""
    x = d.recent(2)
    rows, columns = d.values[x]
    if rows < 2:
        return
    cut = int(d.rng.integers(1, rows))
    upper = d.hidden("Slice", x, d.ints(0), d.ints(cut), d.ints(0))
    lower = d.hidden("Slice", d.twin(x), d.ints(cut), d.ints(rows), d.ints(0))
    d.add((rows, columns), "Concat", upper, lower, axis=0)


def _attention(d: _Draft) -> None:
    """Self attention of four heads, a projection, and the sum with what it reads."""
    x = d.recent(2)
    rows, k = d.values[x]
    heads, size = 4, 16
    orders = ((1, 0, 2), (1, 2, 0), (1, 0, 2))
    split = [d.hidden("Reshape", d.hidden("MatMul", x, d.weight(k, heads * size)), d.ints(rows, heads, size)) for _ in orders]
    query, key, content = (d.hidden("Transpose", one, perm=order) for one, order in zip(split, orders, strict=True))
    scores = d.hidden("Softmax", d.hidden("MatMul", query, key), axis=-1)
    mixed = d.hidden("Transpose", d.hidden("MatMul", scores, content), perm=(1, 0, 2))
    joined = d.hidden("Reshape", mixed, d.ints(rows, heads * size))
    d.add((rows, k), "Add", d.hidden("MatMul", joined, d.weight(heads * size, k)), x)


def _norm(d: _Draft) -> None:
    x = d.recent(2)
    columns = d.values[x][1]
    d.add(d.values[x], "LayerNormalization", x, d.bias(columns), d.bias(columns), axis=-1)


def _recurrence(d: _Draft) -> None:
    """Rows as the steps of a GRU or an LSTM, of one direction or both."""
    x = d.recent(2)
    rows, k = d.values[x]
    if rows > 200:
        return
    operator, direction, hidden = d.pick(["GRU", "LSTM"]), d.pick(["forward", "bidirectional"]), d.pick([32, 96, 200])
    count, gates = 1 + (direction == "bidirectional"), {"GRU": 3, "LSTM": 4}[operator]
    weights = [d.weight(count, gates * hidden, size, scale=size**-0.5) for size in (k, hidden)]
    sequence = d.hidden("Reshape", x, d.ints(rows, 1, k))
    made = d.hidden(operator, sequence, *weights, d.bias(count, 2 * gates * hidden), hidden_size=hidden, direction=direction)
    d.add((rows, count * hidden), "Reshape", made, d.ints(rows, count * hidden))


def _table(d: _Draft) -> None:
    """Rows of a table, chosen by what is computed."""
    x = d.recent(2)
    rows, k = d.values[x]
    chosen = d.hidden("ArgMax", x, axis=-1, keepdims=0)
    columns = d.pick([64, 257, 640])
    d.add((rows, columns), "Gather", d.weight(k, columns, scale=1.0), chosen)


# Images


def _images(d: _Draft) -> None:
    channels, size = d.pick([3, 8, 16, 32, 64]), d.pick([7, 14, 28, 56])
    shape = (1, channels, size, size)
    d.input("x", "float", shape, lambda: d.rng.standard_normal(shape, np.float32))
    d.values["x"] = shape
    blocks = (_convolution, _convolution, _convolution, _depthwise, _activation, _skip, _join, _pool, _grow)
    for _ in range(int(d.rng.integers(3, 12))):
        if sum(array.nbytes for array in d.constants.values()) < _MOST_WEIGHTS:
            d.pick(blocks)(d)
    if d.chance(0.5):  # a classifier
        x = d.recent(4)
        channels = d.values[x][1]
        flat = d.hidden("Flatten", d.hidden("GlobalAveragePool", x))
        d.add((1, 640), "Gemm", flat, d.weight(channels, 640), d.bias(640))


def _convolution(d: _Draft) -> None:
    x = d.recent(4)
    _, channels, height, width = d.values[x]
    made, kernel = d.pick([channels, 16, 48, 128, 256]), d.pick([1, 3, 3, 5])
    stride = 2 if d.chance(0.2) and min(height, width) > 4 else 1
    pad = kernel // 2
    shape = (1, made, *((size + 2 * pad - kernel) // stride + 1 for size in (height, width)))
    bias = (d.bias(made),) if d.chance(0.7) else ()
    d.add(shape, "Conv", x, d.weight(made, channels, kernel, kernel), *bias, pads=(pad,) * 4, strides=(stride,) * 2)


def _depthwise(d: _Draft) -> None:
    x = d.recent(4)
    channels = d.values[x][1]
    d.add(d.values[x], "Conv", x, d.weight(channels, 1, 3, 3), pads=(1,) * 4, group=channels)


def _activation(d: _Draft) -> None:
    x = d.recent(4)
    shape = d.values[x]
    if d.chance(0.5):
        variance = d.constant("b", d.rng.uniform(0.5, 2, shape[1]).astype(np.float32))
        x = d.hidden("BatchNormalization", x, *(d.bias(shape[1]) for _ in range(3)), variance)
    d.add(shape, d.pick(["Relu", "Sigmoid"]), x)


def _skip(d: _Draft) -> None:
    x = d.recent(4)
    d.add(d.values[x], "Add", x, d.twin(x))


def _join(d: _Draft) -> None:
    """Channels of two images of a size, of any age, as a U-net's."""
    x = d.recent(4)
    _, channels, *size = d.values[x]
    other = d.pick([name for name, shape in d.values.items() if list(shape[2:]) == size])
    if channels + d.values[other][1] <= _MOST_CHANNELS:
        d.add((1, channels + d.values[other][1], *size), "Concat", x, other, axis=1)


def _pool(d: _Draft) -> None:
    x = d.recent(4)
    _, channels, height, width = d.values[x]
    if min(height, width) >= 4:
        d.add((1, channels, height // 2, width // 2), "MaxPool", x, kernel_shape=(2, 2), strides=(2, 2))


def _grow(d: _Draft) -> None:
    x = d.recent(4)
    _, channels, height, width = d.values[x]
    if max(height, width) > 30:
        return
    made = d.pick([16, 48, 128])
    d.add((1, made, 2 * height, 2 * width), "ConvTranspose", x, d.weight(channels, made, 2, 2), d.bias(made), strides=(2, 2))
