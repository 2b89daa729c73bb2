"""Convolutions whose result is added to what was there before them, alone and in groups."""

from __future__ import annotations

import onnx_ir as ir
import pytest
from prefuse.compiler.ir.facts import infer_facts
from prefuse.compiler.lowering.residual_branches import convolutions_on_branches
from prefuse.compiler.pipeline import Context, parse_pipeline, run_pipeline
from prefuse.compiler.pipeline.pass_table import PASSES
from prefuse.runtime.target import Target

NETWORK = """
<ir_version: 10, opset_import: ["": 21]>
main (float[1,8,9,9] x, float[8,8,3,3] w, float[8,8,1,1] p) => (float[1,8,9,9] y)
<float[8,8,3,3] w = {WEIGHTS}, float[8,8,1,1] p = {POINTS}> {
  a = Conv <pads = [1, 1, 1, 1]> (x, w)
  b = Conv <pads = [1, 1, 1, 1]> (a, w)
  c = Relu(b)
  d = Conv <pads = [1, 1, 1, 1]> (c, w)
  n = Cast <to = 16> (a)
  k = Cast <to = 1> (n)
  s = Add(d, k)
  r = Relu(s)
  e = Conv <pads = [1, 1, 1, 1]> (r, w)
  f = Conv (r, p)
  g = Conv <pads = [1, 1, 1, 1]> (e, w)
  t = Add(f, g)
  h = Conv <pads = [1, 1, 1, 1]> (t, w)
  j = Conv (t, p)
  y = Mul(h, j)
}
"""


@pytest.mark.parametrize(("pipeline", "expected"), [("", ["b", "d", "g"]), ("fuse-epilogue", ["c", "r", "t"])])
def test_convolutions_on_branches(pipeline: str, expected: list[str]) -> None:
    """Not those that all else follows, and not those beside a value that is multiplied."""
    text = NETWORK.replace("{WEIGHTS}", "{" + ",".join(["1"] * 576) + "}").replace("{POINTS}", "{" + ",".join(["1"] * 64) + "}")
    model = ir.from_onnx_text(text)
    infer_facts(model)
    if pipeline:
        run_pipeline(model, parse_pipeline(pipeline, PASSES), Context(Target.parse("cpu:avx512")))
    found = convolutions_on_branches(model)
    assert [node.outputs[0].name for node in model.graph if node in found] == expected
