"""The text of a model: what it shows, and that it is stable."""

import onnx_ir as ir
from prefuse.compiler.ir.facts import infer_facts
from prefuse.compiler.ir.functions import fuse_into_function
from prefuse.compiler.ir.printer import print_model

TEXT = """<ir_version: 10, opset_import: ["": 21]>
main (float[N,4] x, bool c) => (float[N,4] y, z, int64[K] k)
<float[4,4] w = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, float[4] b = {0.5, -1, 1e-8, 3}> {
  h = Gemm<transB = 1>(x, w)
  two = Constant<value = float {2.0}>()
  a = Add(h, b)
  y = Mul(a, two)
  l = Clip(x, , two)
  k, _1 = Unique(x)
  z = If(c) <then_branch = then () => (t) { t = Neg(h) }, else_branch = other () => (e) { e = Pad<mode = "edge">(y, p) }>
}"""

EXPECTED = """\
graph @main (%x : float[N,4], %c : bool[]) -> (%y : float[N,4], %z : float[N,4], %k : float[?]) {
    const %w : float[4,4]
    const %b : float[4] = [0.5,-1,1e-08,3]
    %l = Clip(%x, _, %b) : float[N,4]
    %y = prefuse.gemm_add_mul(%x, %w, %b) : float[N,4]
    %k, _ = Unique(%x) : float[?]
    %z = If(%c) : float[N,4]
        then_branch = () -> (%t : float[N,4]) {
            %t = Softmax{axis=1}(%x) : float[N,4]
        }
        else_branch = () -> (%e : float[N,4]) {
            %e = Neg(%y) : float[N,4]
        }
}

function @prefuse.gemm_add_mul (%x : float[N,4], %w : float[4,4], %b : float[4]) -> (%y : float[N,4]) {
    %two = Constant{value=float[] 2}() : float[]
    %h = Gemm{transB=1}(%x, %w) : float[N,4]
    %a = Add(%h, %b) : float[N,4]
    %y = Mul(%a, %two) : float[N,4]
}
"""
