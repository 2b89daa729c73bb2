"""The cost of compiling grows with the size of the model, not faster."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from prefuse.compiler import driver
from prefuse.compiler.programs.options import Options
from prefuse.runtime.plan import Plan
from prefuse.runtime.target import Target
from prefuse.tests.scaling import assert_scales

_BLOCK = 10  # nodes of one repetition of the chain
_LIMIT = 2.6  # the most that twice the nodes may cost


def chain(nodes: int) -> ir.Model:
    """A chain of blocks of many operators, each with two residual connections, and weights that blocks share."""
    generator = np.random.default_rng(0)
    weights = [_constant(f"w{i}", generator.standard_normal((16, 16)).astype(np.float32) / 4) for i in range(8)]
    bias = _constant("bias", generator.standard_normal(16).astype(np.float32))
    shape = _constant("shape", np.array([8, 16]))
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([8, 16]))
    made: list[ir.Node] = []

    def add(op_type: str, *inputs: ir.Value, **attributes: int | tuple[int, ...]) -> ir.Value:
        made.append(ir.node(op_type, inputs, attributes, name=f"node{len(made)}"))
        made[-1].outputs[0].name = f"v{len(made)}"
        return made[-1].outputs[0]

    value = x
    for block in range(nodes // _BLOCK):
        product = add("MatMul", value, weights[block % len(weights)])
        gated = add("Mul", add("Tanh", add("Add", product, bias)), value)
        turned = add("Sigmoid", add("Transpose", gated, perm=(1, 0)))
        shares = add("Softmax", add("Reshape", turned, shape), axis=-1)
        value = add("Relu", add("Sub", shares, value))
    value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([8, 16])
    graph = ir.Graph([x], [value], nodes=made, initializers=[*weights, bias, shape], opset_imports={"": 21}, name="chain")
    return ir.Model(graph, ir_version=10)


def _constant(name: str, array: np.ndarray) -> ir.Value:
    tensor = ir.Tensor(array, name=name)
    return ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape), const_value=tensor)


def test_twice_the_nodes_take_twice_the_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def library(plan: Plan, functions: object, target: Target, *, profile: bool, objects: object) -> bytes:
        assert plan.steps
        assert not profile
        return b"no native code"

    def prepare(nodes: int) -> Callable[[], object]:
        """Everything but native code."""
        model = chain(nodes)
        return lambda: driver.compile_model(model, Options(Target.parse("cpu")), name="chain", output=tmp_path / "chain.prefuse")

    monkeypatch.setattr(driver, "build_library", library)
    prepare(100)()  # imports
    assert_scales(prepare, 1250, 2500, _LIMIT)


def test_a_long_model_compiles_whole(tmp_path: Path) -> None:
    begin = time.process_time()
    driver.compile_model(chain(2000), Options(Target.parse("cpu")), name="chain", output=tmp_path / "chain.prefuse")
    assert time.process_time() - begin < 20
