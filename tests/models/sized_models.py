"""Random models of two axes whose sizes a call decides: what moves, cuts, joins, reduces and multiplies along them.

A model takes x of [N, T, C]; operators are drawn one after the other, each on values that are there. ONNX's own shape inference
need not know the shapes in between: targets of Reshape are computed from Shape, as exporters write them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

CHANNELS = 8
_OPSET = 20


@dataclass
class Writer:
    """A graph being written. `values` are those of [N, T, C], with any C: names and channels."""

    random: np.random.Generator
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)
    values: list[tuple[str, int]] = field(default_factory=lambda: [("x", CHANNELS)])

    def node(self, op_type: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        """A node; the name of its first output, others end in .1 and so on."""
        name = f"v{len(self.nodes)}"
        names = [name, *(f"{name}.{i}" for i in range(1, outputs))]
        self.nodes.append(helper.make_node(op_type, list(inputs), names, **attributes))
        return name

    def constant(self, array: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def ints(self, *numbers: int) -> str:
        return self.constant(np.array(numbers, np.int64))

    def weights(self, *shape: int) -> str:
        return self.constant((self.random.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32))

    def dim(self, value: str, axis: int) -> str:
        return self.node("Gather", self.node("Shape", value), self.ints(axis))

    def pick(self) -> tuple[str, int]:
        """One of the values, the later the likelier."""
        count = len(self.values)
        return self.values[min(int(count * self.random.beta(3, 1)), count - 1)]

    def draw(self, *choices: object) -> object:
        return choices[self.random.integers(len(choices))]


def _unary(w: Writer) -> tuple[str, int]:
    x, c = w.pick()
    return w.node(str(w.draw("Relu", "Sigmoid", "Tanh", "Gelu", "Neg", "Abs")), x), c


def _binary(w: Writer) -> tuple[str, int]:
    x, c = w.pick()
    alike = [name for name, channels in w.values if channels in (1, c)]
    other = (
        alike[w.random.integers(len(alike))]
        if w.random.random() < 0.6
        else w.weights(*([c] if w.random.random() < 0.5 else [1, 1, c]))
    )
    return w.node(str(w.draw("Add", "Mul", "Sub", "Max")), x, other), c


def _product(w: Writer) -> tuple[str, int]:
    x, c = w.pick()
    columns = int(w.random.choice([1, 4, 8, 24, 33]))
    y = w.node("MatMul", x, w.weights(c, columns))
    return (w.node("Add", y, w.weights(columns)) if w.random.random() < 0.5 else y), columns


def _norm(w: Writer) -> tuple[str, int]:
    x, c = w.pick()
    return w.node("LayerNormalization", x, w.weights(c), w.weights(c), axis=-1), c


def _softmax(w: Writer) -> tuple[str, int]:
    x, c = w.pick()
    return w.node("Softmax", x, axis=int(w.random.choice([-1, 1, 0]))), c


def _reduced(w: Writer) -> tuple[str, int]:
    """A mean, sum or maximum along an axis, taken from what it is of."""
    x, c = w.pick()
    axis = int(w.random.choice([0, 1, 2]))
    y = w.node(str(w.draw("ReduceMean", "ReduceMax", "ReduceSum")), x, w.ints(axis), keepdims=1)
    return w.node("Sub", x, w.node("Tanh", y)), c


def _turned(w: Writer) -> tuple[str, int]:
    """To [T, N, C] or [N, C, T], something there, and back."""
    x, c = w.pick()
    order = [1, 0, 2] if w.random.random() < 0.5 else [0, 2, 1]
    y = w.node("Softmax", w.node("Transpose", x, perm=order), axis=-1)
    return w.node("Add", x, w.node("Transpose", y, perm=order)), c


def _folded(w: Writer) -> tuple[str, int]:
    """Rows [N * T, C] by way of Reshape to computed shapes, and back."""
    x, c = w.pick()
    rows = w.node("Reshape", x, w.ints(-1, c))
    rows = w.node("LayerNormalization", rows, w.weights(c), axis=-1)
    shape = w.node("Concat", w.dim(x, 0), w.dim(x, 1), w.ints(c), axis=0)
    return w.node("Reshape", rows, shape), c


def _shifted(w: Writer) -> tuple[str, int]:
    """Each place beside the one before it, the first beside the last: parts along T that depend on its size, joined again."""
    x, c = w.pick()
    last = w.node("Slice", x, w.ints(-1), w.ints(2**31 - 1), w.ints(1))
    rest = w.node("Slice", x, w.ints(0), w.ints(-1), w.ints(1))
    return w.node("Add", x, w.node("Concat", last, rest, axis=1)), c


def _joined(w: Writer) -> tuple[str, int]:
    """Twice as many places, of which the mean of each pair remains."""
    x, c = w.pick()
    both = w.node("Concat", x, w.node("Neg", x), axis=1)
    shape = w.node("Concat", w.dim(x, 0), w.ints(2), w.dim(x, 1), w.ints(c), axis=0)
    parts = w.node("Reshape", both, shape)
    return w.node("ReduceMax", parts, w.ints(1), keepdims=0), c


def _positions(w: Writer) -> tuple[str, int]:
    """A row of a table for each place."""
    x, c = w.pick()
    length = w.node("Squeeze", w.dim(x, 1), w.ints(0))
    places = w.node("Range", w.constant(np.int64(0)), length, w.constant(np.int64(1)))
    return w.node("Add", x, w.node("Gather", w.weights(64, c), places, axis=0)), c


def _attention(w: Writer) -> tuple[str, int]:
    """Causal or not, of two heads."""
    x, c = w.pick()
    shape = w.node("Concat", w.dim(x, 0), w.dim(x, 1), w.ints(2), w.ints(4), axis=0)
    heads = [w.node("Reshape", w.node("MatMul", x, w.weights(c, 8)), shape) for _ in range(3)]
    q, v = (w.node("Transpose", heads[i], perm=[0, 2, 1, 3]) for i in (0, 2))
    k = w.node("Transpose", heads[1], perm=[0, 2, 3, 1])
    scores = w.node("Mul", w.node("MatMul", q, k), w.constant(np.float32(0.5)))
    if w.random.random() < 0.5:
        length = w.node("Squeeze", w.dim(x, 1), w.ints(0))
        places = w.node("Range", w.constant(np.int64(0)), length, w.constant(np.int64(1)))
        later = w.node("Less", w.node("Unsqueeze", places, w.ints(1)), places)
        scores = w.node("Where", later, w.constant(np.float32(-1e30)), scores)
    y = w.node("Transpose", w.node("MatMul", w.node("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
    return w.node("Reshape", y, w.node("Concat", w.dim(x, 0), w.dim(x, 1), w.ints(8), axis=0)), 8


def _first(w: Writer) -> tuple[str, int]:
    """Everything less the first place."""
    x, c = w.pick()
    first = w.node("Unsqueeze", w.node("Gather", x, w.constant(np.int64(0)), axis=1), w.ints(1))
    return w.node("Sub", x, first), c


def _expanded(w: Writer) -> tuple[str, int]:
    x, c = w.pick()
    shape = w.node("Concat", w.dim(x, 0), w.dim(x, 1), w.ints(c), axis=0)
    return w.node("Mul", x, w.node("Expand", w.weights(1, 1, c), shape)), c


def _divided(w: Writer) -> tuple[str, int]:
    """By how many places there are, as a number of floats."""
    x, c = w.pick()
    return w.node("Div", x, w.node("Cast", w.dim(x, 1), to=TensorProto.FLOAT)), c


def _summed(w: Writer) -> tuple[str, int]:
    x, c = w.pick()
    return w.node("CumSum", x, w.constant(np.int64(w.random.integers(3)))), c


def _cut(w: Writer) -> tuple[str, int]:
    """Every second place and the others, one after the other, mixed by a product with what was there."""
    x, c = w.pick()
    steps = [w.node("Slice", x, w.ints(i), w.ints(2**31 - 1), w.ints(1), w.ints(2)) for i in range(2)]
    return w.node("Mul", x, w.node("Concat", *steps, axis=1)), c


_WAYS: tuple[Callable[[Writer], tuple[str, int]], ...] = (
    _unary, _binary, _binary, _product, _product, _norm, _softmax, _reduced, _turned, _folded, _shifted, _joined, _positions,
    _attention, _first, _expanded, _divided, _summed, _cut,
)  # fmt: skip


def sized_model(seed: int) -> onnx.ModelProto:
    """The model of a seed: x of [N, T, C] to one or two results."""
    w = Writer(np.random.default_rng(seed))
    for _ in range(int(w.random.integers(2, 9))):
        w.values.append(_WAYS[w.random.integers(len(_WAYS))](w))
    results = [w.values[-1][0]]
    if w.random.random() < 0.4:
        results.append(w.node("ReduceMean", w.values[-1][0], w.ints(1), keepdims=0))
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", "T", CHANNELS])]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in results]
    graph = helper.make_graph(w.nodes, f"sized{seed}", inputs, outputs, w.constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=10)
