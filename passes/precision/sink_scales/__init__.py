"""sink-scales: products of dequantized operands become products of integers, with the scales behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from ....compiler.ir.rewriter import Rule, apply_rules
from ....compiler.pipeline import Context, Pass
from .dequantized import Dequantized
from .integers import Integers, QLinear
from .moved import Cancelled, Joined, Moved
from .requantized import Requantized


@dataclass(frozen=True)
class SinkScales(Pass):
    """Multiply the integers of quantized operands, and scale what comes out.

    Before:  a = DequantizeLinear(x, s, z);  b = DequantizeLinear(w, t);  y = Conv(a, b, bias)
    After:   n = DequantizeLinear(x, 1, z);  v = Cast<to=float>(w);  p = Conv(n, v);  m = Mul(p, s * t);  y = Add(m, bias)

    p is a sum of integers: kernels read x and w as they lie, 8 bits each, and subtract the zero point from the sums. Where none
    does, it is computed in floating point, exactly while sums stay below 2^24. So are MatMulInteger and ConvInteger whose result
    is made float32 or stays below 2^24, and QLinearMatMul and QLinearConv, whose factor a_scale * b_scale / y_scale is the one of
    ONNX Runtime. Legal for activations with one scale and one zero point, and constant weights with one scale, or one for each
    column or output channel. Unsigned weights become signed; zero points of weights other than 0 (128 of unsigned ones) need the
    sums of activations over k, which are added. The scales' product is rounded once more than before.

    Nodes that move elements, and MaxPool, move 8-bit numbers, which are dequantized behind them; what a Concat joins is quantized
    before. Where a constant scale divides
    what other constants multiply, these are divided at compile time:

    Before:  m = Mul(p, f);  c = Add(m, b);  y = QuantizeLinear(c, r, z)
    After:   m = Mul(p, f / r);  c = Add(m, b / r);  y = QuantizeLinear(c, 1, z)
    """

    name: ClassVar[str] = "sink-scales"

    def run(self, model: ir.Model, context: Context) -> bool:
        moves: list[Rule] = [Moved(self.name, model.graph.opset_imports[""]), Joined(self.name), Cancelled(self.name)]
        changed = apply_rules(model, moves, context)
        products: list[Rule] = [
            Dequantized(self.name),
            Integers(self.name, context.target.is_gpu),
            QLinear(self.name, context.target.is_gpu),
        ]
        changed |= apply_rules(model, products, context)
        return apply_rules(model, [Requantized(self.name)], context) or changed
