"""Formats of operands as data: they are kept with a model, and differ from node to node."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from prefuse.compiler.debugging.oracle import random_inputs, relative_error, run_model
from prefuse.compiler.ir.assignments.operand_formats import FORMATS_KEY, Formats, assign_operand_formats, operand_formats
from prefuse.compiler.ir.facts import infer_facts
from prefuse.compiler.ir.printer import print_model
from prefuse.compiler.pipeline import Context, parse_pipeline, run_pipeline
from prefuse.compiler.pipeline.pass_table import PASSES
from prefuse.runtime.target import Target

TEXT = """<ir_version: 10, opset_import: ["": 21]>
main (float[9,4] x, float[4,6] v, float[4,6] w) => (float[9,6] y, float[9,6] z, float[9,4] u) {
    r = Relu(x) y = MatMul(r, v) z = MatMul(r, w) u = Neg(r) }"""
CONTEXT = Context(Target.parse("cpu:avx512bf16,threads=1"))


def assigned(text: str = TEXT, **formats: Formats) -> ir.Model:
    """The model with formats of the operands of the nodes that make these values."""
    model = ir.from_onnx_text(text)
    infer_facts(model)
    for node in model.graph:
        assign_operand_formats(node, formats.get(str(node.outputs[0].name), {}))
    return model


def test_formats_differ_from_node_to_node() -> None:
    model = assigned(y={0: "bfloat16", 1: "bfloat16"}, z={0: "float16"})
    original = model.clone()
    run_pipeline(model, parse_pipeline("place-casts", PASSES), CONTEXT)
    text = print_model(model)
    assert "%r_bfloat16 = Cast{to=16}(%r)" in text
    assert "%r_float16 = Cast{to=10}(%r)" in text
    assert "%y = MatMul(%r_bfloat16_wide, %v_bfloat16_wide)" in text
    assert "%z = MatMul(%r_float16_wide, %w)" in text
    assert "%u = Neg(%r)" in text
    inputs = random_inputs(original)
    found, exact = run_model(model, inputs), run_model(original, inputs)
    errors = {name: relative_error(found[name], exact[name]) for name in exact}
    assert 1e-3 < errors["y"] < 2e-2
    assert 1e-5 < errors["z"] < 2e-3
    assert errors["u"] == 0


def test_formats_are_kept_with_the_model() -> None:
    model = assigned(y={1: "float16", 0: "bfloat16"})
    assert "%y = MatMul(%r as bfloat16, %v as float16) : float[9,6]" in print_model(model)
    again = ir.from_proto(onnx.ModelProto.FromString(ir.to_proto(model).SerializeToString()))
    assert print_model(again) == print_model(model)
    assert [operand_formats(node) for node in again.graph] == [{}, {0: "bfloat16", 1: "float16"}, {}, {}]


def test_a_pooling_that_a_product_reads_wide_is_not_rounded() -> None:
    text = """<ir_version: 10, opset_import: ["": 21]>
    main (float[1,2,4,4] x, float[2,2,1,1] v, float[3,2] w) => (float[1,2,3,3] y, float[1,2,3,2] z) {
        h = Relu(x) p = MaxPool<kernel_shape=[2,2]>(h) y = Conv(p, v) z = MatMul(p, w) }"""
    both: Formats = {0: "bfloat16", 1: "bfloat16"}
    for formats, line in (({"y": both}, "MaxPool{kernel_shape=[2,2]}(%h)"), ({"y": both, "z": both}, "(%h_bfloat16_wide)")):
        model = assigned(text, **formats)
        run_pipeline(model, parse_pipeline("place-casts", PASSES), CONTEXT)
        assert line in print_model(model)


def test_an_assignment_is_used_up() -> None:
    model = assigned(y={0: "bfloat16"})
    (first, second) = run_pipeline(model, parse_pipeline("place-casts,place-casts", PASSES), CONTEXT)
    assert (first.changed, second.changed) == (True, False)
    assert not any(operand_formats(node) for node in model.graph)


def test_the_policy_replaces_what_was_assigned() -> None:
    model = assigned(TEXT.replace("9,", "128,").replace("4,", "256,").replace(",4", ",256"), u={0: "float16"})
    run_pipeline(model, parse_pipeline("assign-formats{precision=bfloat16,min-operations=0}", PASSES), CONTEXT)
    assert [operand_formats(node) for node in model.graph] == [{}, *[{0: "bfloat16", 1: "bfloat16"}] * 2, {}]


def test_products_that_rounding_would_slow_down_keep_their_operands() -> None:
    """Asked of the kernels: too little is multiplied for what rounding takes, or neighbours along k are none in memory."""
    transposed = TEXT.replace("9,", "128,").replace("4,", "256,").replace(",4", ",256")
    transposed = transposed.replace("float[128,256] x", "float[256,128] x").replace("MatMul(r", "Gemm <transA = 1> (r")
    for text, reason in ((TEXT, "are no fewer than"), (transposed, "one by one narrow numbers are multiplied no faster")):
        model, context = assigned(text), Context(Target.parse("cpu:avx512bf16,threads=1"))
        run_pipeline(model, parse_pipeline("assign-formats{precision=bfloat16,min-operations=0}", PASSES), context)
        assert not any(operand_formats(node) for node in model.graph)
        assert reason in context.remarks[0].message


@pytest.mark.parametrize("level", ["avx512bf16", "amx"])
def test_odd_depths_are_padded_to_pairs(level: str) -> None:
    model = ir.from_onnx_text(TEXT.replace("9,", "128,").replace("4,", "257,").replace(",4", ",257").replace(",6]", ",64]"))
    for name in ("v", "w"):
        value = next(one for one in model.graph.inputs if one.name == name)
        model.graph.inputs.remove(value)
        value.const_value = ir.tensor(np.ones((257, 64), np.float32), name=name)
        model.graph.register_initializer(value)
    infer_facts(model)
    context = Context(Target.parse(f"cpu:{level},threads=1"))
    run_pipeline(model, parse_pipeline("assign-formats{precision=bfloat16}", PASSES), context)
    assert [operand_formats(node) for node in model.graph] == [{}, *[{0: "bfloat16", 1: "bfloat16"}] * 2, {}]


@pytest.mark.parametrize("text", ["", "bfloat16", "7=bfloat16", "0=int4", "{}"])
def test_other_metadata_is_no_assignment(text: str) -> None:
    model = assigned()
    node = list(model.graph)[1]
    node.metadata_props[FORMATS_KEY] = text
    assert operand_formats(node) == {}
