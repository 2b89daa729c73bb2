"""Write a pass of your own, run it on a graph, and compile the result."""

from __future__ import annotations

from dataclasses import dataclass
from math import frexp
from typing import ClassVar

import numpy as np
import onnx
import onnx_ir as ir
import prefuse
from prefuse.compiler.ir.constants import add_constant, scalar_constant
from prefuse.compiler.ir.printer import print_model
from prefuse.compiler.ir.rewriter import Rejection, replace_node
from prefuse.compiler.pipeline import Context, Pass, run_pipeline
from prefuse.runtime.target import Target


@dataclass(frozen=True)
class MultiplyByReciprocal(Pass):
    """Turn a division by a constant into a multiplication, which is several times faster.

    Before:  y = Div(x, 8.0)
    After:   y = Mul(x, 0.125)

    Legal when the divisor is a power of two, so that its reciprocal and every product are exact, or when `exact` is off.
    """

    name: ClassVar[str] = "multiply-by-reciprocal"
    exact: bool = True

    def run(self, model: ir.Model, context: Context) -> bool:
        changed = False
        for node in [node for node in model.graph if node.op_type == "Div"]:
            divisor = scalar_constant(node.inputs[1])
            if not isinstance(divisor, float) or divisor == 0:
                continue
            if self.exact and abs(frexp(divisor)[0]) != 0.5:
                context.reject(self.name, Rejection(f"{divisor} is no power of two", (node,)))
                continue
            reciprocal = add_constant(model, np.array(1 / divisor, np.float32), "reciprocal")
            product = ir.node("Mul", [node.inputs[0], reciprocal])
            replace_node(model, node, [product], product.outputs)
            changed = True
        return changed


def main() -> None:
    """One division goes, one stays with a reason; the verifier has looked at the graph after the pass."""
    text = """<ir_version: 10, opset_import: ["": 20]> halves (float[4] x) => (float[4] y)
      <float eight = {8.0}, float three = {3.0}> { a = Div(x, eight)  y = Div(a, three) }"""
    model, context = ir.from_proto(onnx.parser.parse_model(text)), Context(Target.parse("cpu"))
    run_pipeline(model, [MultiplyByReciprocal()], context)
    print(print_model(model), *context.remarks, prefuse.compile(model)(np.array([24, 48, 72, 96], np.float32)), sep="\n")


if __name__ == "__main__":
    main()
