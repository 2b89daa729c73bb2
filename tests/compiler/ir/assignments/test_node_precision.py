"""Precisions of single nodes: passes carry them on, assign-formats and kernels go by them."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest
from prefuse.compiler.driver import plan_model
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.ir.assignments.node_precision import PRECISION_KEY, assign_precision, most_exact, precision_in
from prefuse.compiler.ir.assignments.operand_formats import operand_formats
from prefuse.compiler.ir.facts import infer_facts
from prefuse.compiler.ir.rewriter import copy_source
from prefuse.compiler.pipeline import Context, parse_pipeline, run_pipeline
from prefuse.compiler.pipeline.pass_table import PASSES
from prefuse.compiler.programs.options import Options
from prefuse.runtime.precision import Precision
from prefuse.runtime.target import Target

TEXT = """
<ir_version: 10, opset_import: ["": 21]>
main (float[64,64] x) => (float[64,64] y) <float[64,64] v, float[64,64] w> {
  h = MatMul(x, v)
  r = Relu(h)
  y = MatMul(r, w)
}
"""


def two_products() -> ir.Model:
    """Two matrix products, of the nodes h and y."""
    proto = onnx.parser.parse_model(TEXT)
    random = np.random.default_rng(0)
    for name in ("v", "w"):
        array = random.normal(size=(64, 64)).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    model = import_model(proto)
    infer_facts(model)
    return model


def product(model: ir.Model, result: str) -> ir.Node:
    return next(node for node in model.graph if node.outputs[0].name == result)


@pytest.mark.parametrize(
    ("program", "node", "first", "second"),
    [
        ("bfloat16", "float32-fast", {}, {0: "bfloat16", 1: "bfloat16"}),
        ("float32-fast", "bfloat16", {0: "bfloat16", 1: "bfloat16"}, {}),
    ],
)
def test_formats_are_assigned_by_the_node(
    program: Precision, node: Precision, first: dict[int, str], second: dict[int, str]
) -> None:
    model, context = two_products(), Context(Target.parse("cpu:avx512bf16"), precision=program)
    assign_precision(product(model, "h"), node)
    run_pipeline(model, parse_pipeline("assign-formats{min-operations=0,weights-only=false}", PASSES), context)
    assert operand_formats(product(model, "h")) == first
    assert operand_formats(product(model, "y")) == second


@pytest.mark.parametrize(("program", "other"), [("bfloat16", "float32-fast"), ("float32-fast", "bfloat16")])
def test_kernels_are_as_exact_as_their_product(program: Precision, other: Precision) -> None:
    """After all passes: the group of each product has its own precision, whatever was fused with it."""
    model = two_products()
    assign_precision(product(model, "h"), other)
    planned = plan_model(model, Options(Target.parse("cpu:avx512bf16"), program))
    products = [item.group for item in planned.lowered if any(op.op_type == "MatMul" for op in item.group.ops)]
    assert [group.precision for group in products] == [other, program]


def test_of_several_origins_the_most_exact_one_stays() -> None:
    model = two_products()
    first, second = product(model, "h"), product(model, "y")
    assign_precision(first, "bfloat16")
    made = ir.node("Relu", [first.outputs[0]])
    copy_source((first, second), made)
    assert precision_in(made.metadata_props) == "bfloat16"
    assign_precision(second, "float32-fast")
    made = ir.node("Relu", [first.outputs[0]])
    copy_source((first, second), made)
    assert precision_in(made.metadata_props) == "float32-fast"


def test_unknown_metadata_say_nothing() -> None:
    assert precision_in({PRECISION_KEY: "float7"}) is None
    assert precision_in({}) is None
    assert most_exact([None]) is None
    assert most_exact(["bfloat16", None, "float16"]) == "float16"
