"""Pointwise nodes of one tensor, computed before the Transpose of it that they read."""

from __future__ import annotations

from math import prod

import onnx_ir as ir

from ....compiler.ir.aliases import view_root
from ....compiler.ir.kinds import is_pointwise, takes_followers
from ....compiler.ir.matching import rank_of, static_shape
from ....compiler.ir.rewriter import Rejection, remove_nodes, replace_node


def transpose_before(node: ir.Node) -> ir.Node | Rejection | None:
    """The Transpose that makes the one tensor of a pointwise node, of what takes pointwise nodes into its group; or why the node
    does not pass it."""
    if not is_pointwise(node):
        return None
    tensors = {value for value in node.inputs if value is not None and not _is_one_element(value)}
    turn = next(iter(tensors)).producer() if len(tensors) == 1 else None
    if turn is None or turn.op_type != "Transpose" or turn.domain or turn.graph is not node.graph or turn.inputs[0] is None:
        return None
    turned, result = turn.outputs[0], node.outputs[0]
    if turned.shape is None or rank_of(turned) != rank_of(result):  # a single element may have more dimensions than the tensor
        return None
    if not takes_followers(view_root(turn.inputs[0]).producer()):
        return None
    if turned.consumers() != (node,) or turned.is_graph_output():
        return Rejection(f"{node.op_type} not computed before the Transpose: others read %{turned.name}, too", (turn, node))
    return turn


def sink_transpose(model: ir.Model, turn: ir.Node, node: ir.Node) -> ir.Node:
    """Put the node before the Transpose that it reads, and return it as it stands there."""
    inputs = [turn.inputs[0] if value is turn.outputs[0] else value for value in node.inputs]
    computed = ir.Node(node.domain, node.op_type, inputs, node.attributes.values(), name=node.name, version=node.version)
    moved = ir.Node("", "Transpose", [computed.outputs[0]], turn.attributes.values(), version=turn.version)
    replace_node(model, node, [computed, moved], [moved.outputs[0]])
    remove_nodes([turn])
    return computed


def _is_one_element(value: ir.Value) -> bool:
    shape = static_shape(value)
    return shape is not None and prod(shape) == 1
