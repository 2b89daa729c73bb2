"""Add a fusion pattern: match, refuse with a reason, rewrite, and test it as the repository's own patterns are tested."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx
import onnx_ir as ir
from prefuse.compiler.debugging.oracle import run_model
from prefuse.compiler.ir.printer import print_model
from prefuse.compiler.ir.rewriter import Rejection, replace_node
from prefuse.compiler.pipeline import Context, Pass, run_pipeline
from prefuse.runtime.target import Target


def match(node: ir.Node) -> ir.Value | Rejection | None:
    """The x of x * tanh(softplus(x)), which is Mish(x); refused where tanh's value is needed elsewhere too."""
    for x, gate in (node.inputs, reversed(node.inputs)) if node.op_type == "Mul" else ():
        tanh = gate.producer() if gate else None
        inner = tanh.inputs[0].producer() if tanh and tanh.op_type == "Tanh" and tanh.inputs[0] else None
        if tanh and inner and inner.op_type == "Softplus" and inner.inputs[0] is x:
            alone = len(tanh.outputs[0].uses()) == 1 and not tanh.outputs[0].is_graph_output()
            return x if alone else Rejection("Tanh has another reader", (node, tanh))
    return None


@dataclass(frozen=True)
class FuseMish(Pass):
    name: ClassVar[str] = "fuse-mish"

    def run(self, model: ir.Model, context: Context) -> bool:
        found = [(node, match(node)) for node in model.graph]
        for node, x in found:
            if isinstance(x, Rejection):
                context.reject(self.name, x)
            elif x is not None:
                mish = ir.node("Mish", [x])
                replace_node(model, node, [mish], mish.outputs)  # names and the torch line stay
        return any(isinstance(x, ir.Value) for _, x in found)


def main() -> None:
    """The fused model gives the same numbers, a second run finds nothing, and the near miss says why."""
    head, values = '<ir_version: 10, opset_import: ["": 20]> main (float[3] x) => (float[3] y', {"x": np.array([-2, 0, 3], "f")}
    for outputs in (")", ", float[3] t)"):
        text = head + outputs + "{ s = Softplus(x)  t = Tanh(s)  y = Mul(x, t) }"
        model, context = ir.from_proto(onnx.parser.parse_model(text)), Context(Target.parse("cpu"))
        before = run_model(model, values)["y"]
        run_pipeline(model, [FuseMish()], context)
        np.testing.assert_allclose(run_model(model, values)["y"], before, 1e-6)
        assert not FuseMish().run(model, context)
        print(print_model(model), *context.remarks[:1], sep="\n")


if __name__ == "__main__":
    main()
