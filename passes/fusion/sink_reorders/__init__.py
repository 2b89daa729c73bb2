"""sink-reorders: Transposes and changes of shape move behind what follows them, which then stands beside what it works on."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from ....compiler.ir.rewriter import Rejection
from ....compiler.pipeline import Context, Pass
from .transposes import sink_transpose, transpose_before
from .views import ViewSinking, view_before


@dataclass(frozen=True)
class SinkReorders(Pass):
    """Compute pointwise nodes and normalizations of rows before the Transposes and views that they read a value through.

    Before:  h = Conv(x, w);  r = Reshape(h, s);  t = Transpose(r);  y = Gelu(t)
    After:   h = Conv(x, w);  g = Gelu(h);  r = Reshape(g, s);  y = Transpose(r)

    So the node can be in one group with what makes the value, and choose-layout finds the Transpose alone. A node passes one
    Transpose or view after the other, up to what takes followers into its group (`takes_followers`); what takes none is not
    reached. A Transpose is passed by a pointwise node that alone reads it, and whose other operands are single elements. A view
    is passed where the result has its shape, and every other operand spans all or none of the dimensions that the view joins or
    splits together; it is shown in the source's shape, at compile time where it is constant. Pointwise nodes that the node alone
    reads come along. Not where the view's source is no product and read by other anchors, nor where the node can join what makes
    an operand that it alone reads.
    """

    name: ClassVar[str] = "sink-reorders"

    def run(self, model: ir.Model, context: Context) -> bool:
        views, changed = ViewSinking(model), False
        waiting = deque(model.graph)
        while waiting:
            node = waiting.popleft()
            if node.graph is None:  # a view that has been passed since
                continue
            views.read_sources(node)
            computed = _computed_earlier(model, node, views)
            if isinstance(computed, Rejection):
                context.reject(self.name, computed)
            elif computed:
                waiting.extendleft(reversed(computed))
                changed = True
        return views.clean_up() or changed


def _computed_earlier(model: ir.Model, node: ir.Node, views: ViewSinking) -> Sequence[ir.Node] | Rejection:
    """Let a node pass the Transpose or view that it reads: what is computed before it now; or why not, or nothing."""
    if (turn := transpose_before(node)) is not None:
        return turn if isinstance(turn, Rejection) else [sink_transpose(model, turn, node)]
    return () if (view := view_before(node)) is None else views.pass_view(node, view)
