"""fuse-attention: softmax(queries @ keys) @ values is one function, so that one kernel computes it without storing the scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from ....compiler.ir.functions import fuse_into_function
from ....compiler.ir.rewriter import Rejection
from ....compiler.pipeline import Context, Pass
from .core import find_core
from .surroundings import absorb_epilogue, absorb_prologues
from .turning import turn_product


@dataclass(frozen=True)
class FuseAttention(Pass):
    """Put the two matrix products of attention, what lies between them and what feeds them elements into one function.

    Before:  k = Transpose(h);  s = MatMul(q, k);  d = Div(s, c);  m = Add(d, mask);  p = Softmax(m);  y = MatMul(p, v)
    After:   y = prefuse.attention(q, h, c, mask, v)

    Legal when the scores are the output of one MatMul, all between the products is pointwise on values of their size (or
    regroups batches), Softmax is over the keys, and nothing but the result is read elsewhere: then no path leaves the group and
    returns. What moves or scales elements of queries, keys or values joins where the group alone reads it, and so do the
    transposition and the Reshape of the result. Rotary embeddings and concatenations of a cache stay beside the group. What
    multiplies Transpose(p) from the left is turned first.
    """

    name: ClassVar[str] = "fuse-attention"

    def run(self, model: ir.Model, context: Context) -> bool:
        softmaxes = [node for node in model.graph if node.op_type == "Softmax" and node.domain == ""]
        turned = [softmax for softmax in softmaxes if turn_product(model, softmax)]
        order = {node: index for index, node in enumerate(model.graph)}
        opset, changed = model.opset_imports.get("", 1), bool(turned)
        for softmax in softmaxes:
            core = find_core(softmax, opset)
            if core is None:
                continue
            if isinstance(core, Rejection):
                context.reject(self.name, core)
                continue
            members = core.nodes
            for node, why in absorb_prologues(members, core.operands).items():
                context.reject(self.name, Rejection(f"{node.op_type} stays outside attention: {why}", (node, core.scores)))
            absorb_epilogue(members, core.weighted)
            fuse_into_function(model, sorted(members, key=order.__getitem__), "attention")
            changed = True
        return changed
