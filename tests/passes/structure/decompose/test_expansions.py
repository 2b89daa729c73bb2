"""Bodies that we write for operators of ONNX without one: the same function before and after `decompose`."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator
from prefuse.compiler.ir.facts import infer_facts
from prefuse.compiler.pipeline import Context, run_pipeline
from prefuse.passes.structure.decompose import Decompose
from prefuse.runtime.target import Target

_HEAD = '<ir_version: 10, opset_import: ["": 23]> main '
MODELS = {
    "l1": "(float[2,3,4] x) => (float[2,3,4] y) { a = Abs(x) y = LpNormalization<p=1, axis=1>(a) }",
    "l2": "(float[2,3,4] x) => (float[2,3,4] y) { y = LpNormalization<p=2>(x) }",
    "hardmax": "(float[2,3,4] x) => (float[2,3,4] y) { r = Round(x) y = Hardmax<axis=-2>(r) }",
    "hardmax of a row": "(float[7] x) => (float[7] y) { y = Hardmax(x) }",
    "hardmax of nothing": "(float[3,0] x) => (float[3,0] y) { y = Hardmax(x) }",
    "tensor": "(float[3,4] x, float s, uint8 z) => (uint8[3,4] y) { y = QuantizeLinear(x, s, z) }",
    "channel": "(float[2,3,4] x, float[3] s, int8[3] z) => (int8[2,3,4] y) { y = QuantizeLinear<axis=1>(x, s, z) }",
    "block": "(float[2,4] x, float[2,2] s) => (int8[2,4] y) { y = QuantizeLinear<axis=1, block_size=2, output_dtype=3>(x, s) }",
    "from channel": "(int8[2,3,4] x, float[3] s, int8[3] z) => (float[2,3,4] y) { y = DequantizeLinear<axis=1>(x, s, z) }",
    "from scalar": "(uint8 x, float s, uint8 z) => (float y) { y = DequantizeLinear(x, s, z) }",
    "from block": "(int8[4,2] x, float[2,2] s) => (float[4,2] y) { y = DequantizeLinear<axis=0, block_size=2>(x, s) }",
}


@pytest.mark.parametrize("body", MODELS.values(), ids=MODELS)
def test_the_body_is_the_operator(body: str) -> None:
    before = onnx.parser.parse_model(_HEAD + body)
    model = ir.from_proto(before)
    infer_facts(model)
    run_pipeline(model, [Decompose()], Context(Target("cpu", "avx2", 1)))
    assert before.graph.node[-1].op_type not in {node.op_type for node in model.graph}
    generator = np.random.default_rng(0)
    inputs = {}
    for value in before.graph.input:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        scaled = generator.random(shape) + 0.1 if value.name == "s" else generator.standard_normal(shape) * 20
        inputs[value.name] = np.asarray(np.abs(scaled) if dtype == np.uint8 else scaled).astype(dtype)
    (expected,), (found,) = (ReferenceEvaluator(m).run(None, inputs) for m in (before, ir.to_proto(model)))
    np.testing.assert_allclose(np.asarray(found, np.float64), np.asarray(expected, np.float64), rtol=1e-6)
