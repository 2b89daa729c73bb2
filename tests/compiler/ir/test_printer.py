"""The text of a model: what it shows, and that it is stable."""

import onnx_ir as ir
from hypothesis import given, settings
from prefuse.compiler.ir.facts import infer_facts
from prefuse.compiler.ir.functions import fuse_into_function
from prefuse.compiler.ir.printer import print_model
from prefuse.tests.models.random_models import random_models

TEXT = """<ir_version: 10, opset_import: ["": 21]>
main (float[N,4] x, bool c) => (float[N,4] y, float[N,4] z, float[K] k)
<float[4,4] w = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, float[4] b = {0.5, -1, 1e-8, 3},
 float two = {2}> {
  h = Gemm<transB = 1>(x, w)
  a = Add(h, b)
  y = Mul(a, two)
  l = Clip(x, , two)
  k, , i = Unique(x)
  z = If(c) <then_branch = then () => (float[N,4] t) { t = Softmax<axis = 1>(x) },
             else_branch = other () => (float[N,4] e) { e = Neg(y) }>
}"""

GOLDEN = """\
graph @main (%x : float[N,4], %c : bool[]) -> (%y : float[N,4], %z : float[N,4], %k : float[K]) {
    const %w : float[4,4]
    const %b : float[4] = [0.5,-1,1e-08,3]
    const %two : float[] = 2
    %y = prefuse.gemm_add_mul(%x, %w, %b) : float[N,4]
    %l = Clip(%x, _, %two) : float[N,4]
    %k, _, %i = Unique(%x) : float[K], int64[?]
    %z = If(%c) : float[N,4]
        else_branch = () -> (%e : float[N,4]) {
            %e = Neg(%y) : float[N,4]
        }
        then_branch = () -> (%t : float[N,4]) {
            %t = Softmax{axis=1}(%x) : float[N,4]
        }
}

function @prefuse.gemm_add_mul (%x : float[N,4], %w : float[4,4], %b : float[4]) -> (%y : float[N,4]) {
    %two = Constant{value=float[] 2}() : float[]
    %h = Gemm{transB=1}(%x, %w) : float[N,4]
    %a = Add(%h, %b) : float[N,4]
    %y = Mul(%a, %two) : float[N,4]
}
"""


def fused_model() -> ir.Model:
    model = ir.from_onnx_text(TEXT)
    infer_facts(model)
    fuse_into_function(model, list(model.graph)[:3], "gemm_add_mul")
    return model


def test_golden() -> None:
    assert print_model(fused_model()) == GOLDEN


def test_a_file_keeps_the_text() -> None:
    loaded = ir.from_proto(ir.to_proto(fused_model()))
    infer_facts(loaded)
    assert print_model(loaded) == GOLDEN


@given(random_models())
@settings(max_examples=20, deadline=None)
def test_a_clone_has_the_same_text(model: ir.Model) -> None:
    assert print_model(model.clone()) == print_model(model)
