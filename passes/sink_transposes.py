"""sink-transposes: Transposes move behind the pointwise nodes that follow them, which then stand beside what they work on."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

import onnx_ir as ir

from ..compiler.ir.aliases import view_root
from ..compiler.ir.kinds import Kind, is_pointwise, kind_of
from ..compiler.ir.rewriter import Rejection, remove_nodes, replace_node
from ..compiler.pipeline import Context, Pass
from .canonicalization.scope import static_shape


@dataclass(frozen=True)
class SinkTransposes(Pass):
    """Compute pointwise nodes of one tensor before the Transpose of it that they read.

    Before:  h = Conv(x, w);  t = Transpose(h);  y = Gelu(t)
    After:   h = Conv(x, w);  g = Gelu(h);  y = Transpose(g)

    So the node can be in one group with what makes the tensor, and choose-layout finds the Transpose alone. Legal where all other
    operands are single elements, and nothing else reads the Transpose. Not where what makes the tensor takes nothing into its
    group.
    """

    name: ClassVar[str] = "sink-transposes"

    def run(self, model: ir.Model, context: Context) -> bool:
        changed = False
        for node in list(model.graph):
            turn = _transpose_before(node)
            if turn is None:
                continue
            if turn.outputs[0].consumers() != (node,) or turn.outputs[0].is_graph_output():
                why = f"{node.op_type} not computed before the Transpose: others read %{turn.outputs[0].name}, too"
                context.reject(self.name, Rejection(why, (turn, node)))
                continue
            _sink(model, turn, node)
            changed = True
        return changed


def _transpose_before(node: ir.Node) -> ir.Node | None:
    """The Transpose that makes the one tensor of a pointwise node, of what takes pointwise nodes into its group."""
    if not is_pointwise(node):
        return None
    tensors = {value for value in node.inputs if value is not None and not _is_one_element(value)}
    turn = next(iter(tensors)).producer() if len(tensors) == 1 else None
    if turn is None or turn.op_type != "Transpose" or turn.domain or turn.graph is not node.graph or turn.inputs[0] is None:
        return None
    ranks = [None if value.shape is None else len(value.shape) for value in (turn.outputs[0], node.outputs[0])]
    if None in ranks or ranks[0] != ranks[1]:  # a single element may have more dimensions than the tensor
        return None
    maker = view_root(turn.inputs[0]).producer()
    return turn if maker is not None and kind_of(maker) not in (Kind.OPERAND, Kind.VIEW, Kind.OPAQUE) else None


def _is_one_element(value: ir.Value) -> bool:
    shape = static_shape(value)
    return shape is not None and prod(shape) == 1


def _sink(model: ir.Model, turn: ir.Node, node: ir.Node) -> None:
    """Put the node before the Transpose that it reads."""
    inputs = [turn.inputs[0] if value is turn.outputs[0] else value for value in node.inputs]
    computed = ir.Node(node.domain, node.op_type, inputs, node.attributes.values(), name=node.name, version=node.version)
    moved = ir.Node("", "Transpose", [computed.outputs[0]], turn.attributes.values(), version=turn.version)
    replace_node(model, node, [computed, moved], [moved.outputs[0]])
    remove_nodes([turn])
