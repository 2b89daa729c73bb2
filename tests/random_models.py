"""Small random models for property tests: directed acyclic graphs of common operators, executable and numerically tame."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from hypothesis import strategies as st
from prefuse.compiler.ir.facts import infer_facts

SIZE = 4  # every value is a SIZE x SIZE matrix, so that any two fit each other
_UNARY = ("Relu", "Tanh", "Sigmoid", "Neg", "Abs", "Identity", "Transpose", "Softmax", "Erf")
_BINARY = ("Add", "Sub", "Mul", "MatMul", "Max")
_CONSTANTS = {"zero": (), "half": (), "one": (1,), "bias": (SIZE,), "weight": (SIZE, SIZE)}


@st.composite
def random_models(draw: st.DrawFn, max_nodes: int = 10) -> ir.Model:
    """A model with one or two inputs, constants of several ranks, shared values, dead nodes and one to three outputs."""
    inputs = [_matrix(name) for name in ("x0", "x1")[: draw(st.integers(1, 2))]]
    constants = [_constant(name, shape) for name, shape in _CONSTANTS.items()]
    matrices, nodes = list(inputs), []
    for number in range(draw(st.integers(1, max_nodes))):
        first = draw(st.sampled_from(matrices))
        if draw(st.booleans()):
            node = ir.node(draw(st.sampled_from(_UNARY)), [first], outputs=[_matrix(f"v{number}")])
        else:
            operator = draw(st.sampled_from(_BINARY))
            others = [*matrices, constants[-1]] if operator == "MatMul" else [*matrices, *constants]
            pair = [first, draw(st.sampled_from(others))]
            node = ir.node(operator, pair, outputs=[_matrix(f"v{number}")])
        node.name = f"node{number}"
        nodes.append(node)
        matrices.append(node.outputs[0])
    produced = [node.outputs[0] for node in nodes]
    outputs = draw(st.lists(st.sampled_from(produced), min_size=1, max_size=3, unique=True))
    graph = ir.Graph(inputs, outputs, nodes=nodes, initializers=constants, opset_imports={"": 21}, name="main")
    model = ir.Model(graph, ir_version=10)
    infer_facts(model)
    return model


def _matrix(name: str) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([SIZE, SIZE]))


def _constant(name: str, shape: tuple[int, ...]) -> ir.Value:
    fixed = {"zero": 0.0, "half": 0.5, "one": 1.0}
    array = np.full(shape, fixed[name]) if name in fixed else np.random.default_rng(len(name)).standard_normal(shape) / 2
    tensor = ir.Tensor(array.astype(np.float32), name=name)
    return ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(shape), const_value=tensor)
