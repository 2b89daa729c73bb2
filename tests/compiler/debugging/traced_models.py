"""Compilations that keep their history, of models as text."""

from __future__ import annotations

import onnx_ir as ir
from prefuse.compiler.debugging.compilation import Compilation, trace_compilation
from prefuse.compiler.frontend.importer import import_model
from prefuse.runtime.target import Target

PIPELINE = "canonicalize,merge-equal,eliminate-dead,decompose,canonicalize,eliminate-dead,fuse-epilogue"
HEAD = '<ir_version: 10, opset_import: ["": 21]>'
TEXT = """<ir_version: 10, opset_import: ["": 21]>
main (float[4,8] x, float[8,8] w, float[8] b) => (float[4,8] y, float[4,8] e, float[4,8] n) {
    product = MatMul(x, w)
    biased = Add(product, b)
    same = Identity(biased)
    r = Relu(same)
    again = Relu(biased)
    y = Softmax(r)
    e = Hardmax(again)
    unused = Neg(x)
    zero = Constant<value_ints = [0]>()
    four = Constant<value_ints = [4]>()
    w_rows = Slice(w, zero, four, zero)
    n = Neg(w_rows)
}"""


def traced(text: str, pipeline: str = PIPELINE) -> Compilation:
    return trace_compilation(import_model(ir.from_onnx_text(text)), Target.parse("cpu"), pipeline)
