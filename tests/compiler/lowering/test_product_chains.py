"""Chains of products in float32-fast on the tile unit: no more of them in two terms than keep the promised error."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from prefuse.compiler.ir.facts import infer_facts
from prefuse.compiler.lowering.product_chains import MOST_FAST, precise_products
from prefuse.runtime.target import Target

AMX = Target("cpu", "amx", 2)


def chain(length: int) -> ir.Model:
    """So many products, one after the other, each followed by Relu; and one beside them."""
    weights = ir.tensor(np.eye(4, dtype=np.float32), name="w")
    w = ir.Value(name="w", const_value=weights, shape=ir.Shape([4, 4]), type=ir.TensorType(ir.DataType.FLOAT))
    x = ir.Value(name="x", shape=ir.Shape([2, 4]), type=ir.TensorType(ir.DataType.FLOAT))
    nodes = [ir.node("MatMul", [x, w])]
    for i in range(length):
        nodes.append(ir.node("MatMul" if i % 2 else "Gemm", [nodes[-1].outputs[0] if i else x, w]))
        nodes.append(ir.node("Relu", [nodes[-1].outputs[0]]))
    for number, node in enumerate(nodes):
        node.outputs[0].name = f"v{number}"
    outputs = [nodes[0].outputs[0], nodes[-1].outputs[0]]
    graph = ir.Graph([x], outputs, nodes=nodes, initializers=[w], opset_imports={"": 20}, name="chain")
    model = ir.Model(graph, ir_version=10)
    infer_facts(model)
    return model


@pytest.mark.parametrize(("length", "expected"), [(1, 0), (MOST_FAST, 0), (MOST_FAST + 1, 1), (3 * MOST_FAST, 2 * MOST_FAST)])
def test_as_many_as_needed_keep_float32(length: int, expected: int) -> None:
    model = chain(length)
    precise = precise_products(model, AMX, "float32-fast")
    assert set(precise.values()) <= {"float32"}
    assert {node.op_type for node in precise} <= {"MatMul", "Gemm"}
    on_chain = [node for node in model.graph if node in precise][-expected:] if expected else []
    assert len(on_chain) == expected
    assert length - sum(node in precise for node in list(model.graph)[1:]) <= MOST_FAST


def test_they_are_spread_evenly() -> None:
    model = chain(3 * MOST_FAST)
    precise = precise_products(model, AMX, "float32-fast")
    products = [node for node in list(model.graph)[1:] if node.op_type != "Relu"]
    assert [node in precise for node in products] == [True, True, False] * MOST_FAST


def test_only_two_terms_are_counted() -> None:
    model = chain(3 * MOST_FAST)
    assert precise_products(model, AMX, "float32") == precise_products(model, AMX, "bfloat16") == {}
    assert precise_products(model, Target("cpu", "avx512", 2), "float32-fast") == {}
