"""fuse-norm on edge values, and on what today's exporter writes for torch's modules."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from prefuse.compiler.debugging.oracle import run_model
from prefuse.compiler.frontend.dimensions import bind_domain
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.ir.facts import infer_facts
from prefuse.compiler.pipeline import Context, parse_pipeline, run_pipeline
from prefuse.compiler.pipeline.pass_table import PASSES
from prefuse.passes.operators.polynomial import polynomial_of
from prefuse.runtime.symbolic.sizes import Dim, Domain
from prefuse.runtime.target import Target
from torch import nn

CONSTANTS = "int64[1] last = {-1}, float eps = {1e-5}, float half = {0.5}, float one = {1}, float root = {1.4142135}"
SPELLED = {
    "LayerNormalization": """m = ReduceMean(x, last)  d = Sub(x, m)  s = Mul(d, d)  v = ReduceMean(s, last)  e = Add(v, eps)
                             r = Sqrt(e)  y = Div(d, r)""",
    "RMSNormalization": "s = Mul(x, x)  v = ReduceMean(s, last)  e = Add(v, eps)  r = Sqrt(e)  i = Reciprocal(r)  y = Mul(x, i)",
    "Softmax": "m = ReduceMax(x, last)  d = Sub(x, m)  e = Exp(d)  t = ReduceSum(e, last)  y = Div(e, t)",
    "LogSoftmax": "m = ReduceMax(x, last)  d = Sub(x, m)  e = Exp(d)  t = ReduceSum(e, last)  l = Log(t)  y = Sub(d, l)",
    "Gelu": "d = Div(x, root)  e = Erf(d)  p = Add(e, one)  a = Mul(x, half)  y = Mul(a, p)",
    "Swish": "s = Sigmoid(x)  y = Mul(x, s)",
}


def run(model: ir.Model, pipeline: str) -> None:
    infer_facts(model)
    run_pipeline(model, parse_pipeline(pipeline, PASSES), Context(Target.parse("cpu")))


@pytest.mark.parametrize("operator", SPELLED)
def test_edge_values(operator: str) -> None:
    """Rows of NaN, of infinities, of one value and of zeros give what they gave."""
    text = (
        f'<ir_version: 10, opset_import: ["": 20]> main (float[7,4] x) => (float[7,4] y) <{CONSTANTS}> {{ {SPELLED[operator]} }}'
    )
    model = ir.from_onnx_text(text)
    inf, nan = np.inf, np.nan
    x = np.array(
        [[1, nan, 2, 3], [1, inf, 2, 3], [1, -inf, 2, 3], [-inf] * 4, [3] * 4, [0] * 4, [1e4, -1e4, 80, -80]], np.float32
    )
    before = run_model(model, {"x": x}, "onnxruntime")["y"]
    run(model, "fuse-norm")
    assert [node.op_type for node in model.graph] == [operator]
    after = run_model(model, {"x": x}, "onnxruntime")["y"]
    np.testing.assert_allclose(after, before, rtol=2e-6, atol=1e-6)


class Standardize(nn.Module):
    """By torch's `var`, which is spelled out otherwise than its LayerNorm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean(-1, True)) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5)


class HardSwish(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * nn.functional.relu6(x + 3) / 6


@pytest.mark.parametrize(
    ("module", "operator"),
    [(nn.GroupNorm(2, 6), "GroupNormalization"), (Standardize(), "LayerNormalization"), (HardSwish(), "HardSwish"),
     (nn.SiLU(), "Swish"), (nn.RMSNorm(5), "RMSNormalization")],
    ids=["group", "var", "hard-swish", "silu", "rms"],
)  # fmt: skip
def test_exported_modules(module: nn.Module, operator: str) -> None:
    program = torch.onnx.export(module.eval(), (torch.randn(2, 6, 4, 5),), dynamo=True, opset_version=18, verbose=False)
    assert program is not None
    model = import_model(program.model)
    run(model, "canonicalize,merge-equal,eliminate-dead,fuse-norm")
    assert [node.op_type for node in model.graph] == [operator]


def test_polynomials() -> None:
    """(2x - y) * (x + 3) / 2 = x^2 + 3x - xy/2 - 3y/2; a function or a quotient of variables is none."""
    model = ir.from_onnx_text("""<ir_version: 10, opset_import: ["": 20]>
    main (float[2] x, float[2] y) => (float[2] p, float[2] q, float[2] r) <float two = {2}, float three = {3}> {
      a = Mul(x, two)  n = Neg(y)  b = Add(a, n)  c = Add(three, x)  d = Mul(b, c)  p = Div(d, two)
      q = Div(x, y)  e = Exp(x)  r = Mul(e, x)
    }""")
    x, y = model.graph.inputs
    p, q, r = model.graph.outputs
    found = polynomial_of(p, (x, y))
    assert found is not None
    assert found.terms == {(2, 0): 1.0, (1, 0): 3.0, (1, 1): -0.5, (0, 1): -1.5}
    assert len(found.nodes) == 6
    assert polynomial_of(q, (x, y)) is None
    assert polynomial_of(r, (x,)) is None


@pytest.mark.parametrize("scaled", ["", "h = Mul(s, half) ", "h = Mul(m, half) ", "h = Div(s, half) "])
def test_sums_over_as_many_elements_as_a_call_has_are_no_means(scaled: str) -> None:
    body = (
        f"q = Mul(x, x) s = ReduceSum(q, last) m = ReduceMean(q, last) {scaled}r = Sqrt({'h' if scaled else 's'}) y = Div(x, r)"
    )
    text = f'<ir_version: 10, opset_import: ["": 23]> main (float[T,N] x) => (float[T,N] y) <{CONSTANTS}> {{ {body} }}'
    domain = Domain((Dim("T", 1, 64), Dim("N", 1, 64)), {"T": 8, "N": 8})
    model = bind_domain(import_model(onnx.parser.parse_model(text)), domain, {})
    run_pipeline(model, parse_pipeline("fuse-norm", PASSES), Context(Target.parse("cpu")))
    assert [node.op_type for node in model.graph][-2:] == ["Sqrt", "Div"]
    assert not domain.cuts
