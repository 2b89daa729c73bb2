"""Small random models for property tests: directed acyclic graphs of common operators, executable and numerically tame."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
from hypothesis import strategies as st
from prefuse.compiler.ir.facts import infer_facts

SIZE = 4  # most values are SIZE x SIZE matrices, so that any two fit each other
_UNARY = ("Relu", "Tanh", "Sigmoid", "Neg", "Abs", "Identity", "Transpose", "Softmax", "Erf", "Gelu", "Dropout", "Clip", "Mish")
_BINARY = ("Add", "Sub", "Mul", "MatMul", "Max")
_CONSTANTS: dict[str, object] = {
    "zero": np.float32(0),
    "half": np.float32(0.5),
    "one": np.ones(1, np.float32),
    "bias": np.linspace(-1, 1, SIZE, dtype=np.float32),
    "weight": np.random.default_rng(0).standard_normal((SIZE, SIZE), np.float32) / 2,
    "axis": np.array([-1]),
    "flat": np.array([1, -1]),
    "square": np.array([SIZE, SIZE]),
}


@dataclass
class _Builder:
    """What has been built: nodes, and the values that later nodes may read, of shape SIZE x SIZE and SIZE x 1."""

    constants: dict[str, ir.Value]
    matrices: list[ir.Value]
    columns: list[ir.Value] = field(default_factory=list)
    nodes: list[ir.Node] = field(default_factory=list)

    def add(self, op_type: str, *inputs: ir.Value, outputs: int = 1, **attributes: int) -> tuple[ir.Value, ...]:
        node = ir.node(op_type, inputs, attributes, num_outputs=outputs, name=f"node{len(self.nodes)}")
        for index, value in enumerate(node.outputs):
            value.name = f"v{len(self.nodes)}_{index}"
        self.nodes.append(node)
        return tuple(node.outputs)


def _unary(draw: st.DrawFn, builder: _Builder) -> None:
    builder.matrices += builder.add(draw(st.sampled_from(_UNARY)), draw(st.sampled_from(builder.matrices)))


def _binary(draw: st.DrawFn, builder: _Builder) -> None:
    operator = draw(st.sampled_from(_BINARY))
    constants = builder.constants
    others = (
        [constants["weight"]] if operator == "MatMul" else [constants[name] for name in ("zero", "half", "one", "bias", "weight")]
    )
    broadcast = [] if operator == "MatMul" else builder.columns
    operands = [draw(st.sampled_from(builder.matrices)), draw(st.sampled_from([*builder.matrices, *broadcast, *others]))]
    if operator != "MatMul" and draw(st.booleans()):
        operands.reverse()
    builder.matrices += builder.add(operator, *operands)


def _reduction(draw: st.DrawFn, builder: _Builder) -> None:
    value = draw(st.sampled_from(builder.matrices))
    builder.columns += builder.add(draw(st.sampled_from(["ReduceMean", "ReduceMax"])), value, builder.constants["axis"])


def _split(draw: st.DrawFn, builder: _Builder) -> None:
    halves = builder.add("Split", draw(st.sampled_from(builder.matrices)), outputs=2, num_outputs=2)
    builder.matrices += builder.add("Concat", *halves[:: draw(st.sampled_from([1, -1]))], axis=0)


def _reshape(draw: st.DrawFn, builder: _Builder) -> None:
    (flat,) = builder.add("Reshape", draw(st.sampled_from(builder.matrices)), builder.constants["flat"])
    (active,) = builder.add(draw(st.sampled_from(["Relu", "Identity"])), flat)
    builder.matrices += builder.add("Reshape", active, builder.constants["square"])


_STEPS: list[Callable[[st.DrawFn, _Builder], None]] = [_unary, _unary, _binary, _binary, _reduction, _split, _reshape]


@st.composite
def random_models(draw: st.DrawFn, max_steps: int = 8) -> ir.Model:
    """A model with one or two inputs, constants of several ranks, shared values, dead nodes and one to three outputs."""
    inputs = [ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([SIZE, SIZE])) for name in ("x0", "x1")]
    builder = _Builder({name: _constant(name, array) for name, array in _CONSTANTS.items()}, inputs[: draw(st.integers(1, 2))])
    inputs = list(builder.matrices)
    _unary(draw, builder)
    for step in draw(st.lists(st.sampled_from(_STEPS), max_size=max_steps)):
        step(draw, builder)
    produced = [value for node in builder.nodes for value in node.outputs]
    outputs = draw(st.lists(st.sampled_from(produced), min_size=1, max_size=3, unique=True))
    graph = ir.Graph(
        inputs, outputs, nodes=builder.nodes, initializers=list(builder.constants.values()), opset_imports={"": 21}, name="main"
    )
    model = ir.Model(graph, ir_version=10)
    infer_facts(model)
    return model


def _constant(name: str, array: object) -> ir.Value:
    tensor = ir.Tensor(np.asarray(array), name=name)
    return ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()), const_value=tensor)
