"""sink-reorders: Transposes and changes of shape move below the nodes that read them, which can then be a producer's epilogue."""

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

    So the node can be the epilogue of the value's producer, and choose-layout finds the Transpose alone. A node passes Transposes
    and views in turn, up to a producer that takes an epilogue (`takes_followers`). A Transpose is passed by a pointwise node that
    is its only reader, and whose other operands are single elements. A view is passed where the result has its shape, and every
    other operand spans all or none of the dimensions that the view merges or splits together; such an operand is reshaped to the
    source's shape, at compile time where it is constant. Pointwise nodes that the node alone reads come along. Refused if the
    producer is no product or convolution and another anchor reads it, or if the node can become the epilogue of another operand
    that it alone reads.
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
