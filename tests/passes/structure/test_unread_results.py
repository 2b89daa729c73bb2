"""canonicalize on operators with results that few ask for."""

from __future__ import annotations

import onnx_ir as ir
import pytest
from prefuse.compiler.ir.facts import infer_facts
from prefuse.compiler.ir.verifier import verify_model
from prefuse.compiler.pipeline import Context
from prefuse.passes.structure.canonicalize import Canonicalize
from prefuse.runtime.target import Target


@pytest.mark.parametrize(
    ("results", "left"), [("(float[2,2,1,1] y)", "GlobalMaxPool"), ("(float[2,2,1,1] y, int64[2,2,1,1] i)", "MaxPool")]
)
def test_indices_of_a_pool_over_everything(results: str, left: str) -> None:
    """They crashed the pass where nobody read them; where somebody does, the pool stays."""
    signature = f"main (float[2,2,3,3] x) => {results}"
    text = f'<ir_version: 8, opset_import: ["": 11]> {signature} {{ y, i = MaxPool<kernel_shape=[3,3]>(x) }}'
    model = ir.from_onnx_text(text)
    infer_facts(model)
    Canonicalize().run(model, Context(Target.parse("cpu:avx2", threads=1)))
    verify_model(model)
    assert [node.op_type for node in model.graph] == [left]
