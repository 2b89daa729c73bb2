"""Nodes that only move elements, which Casts pass: what is moved narrow is what is rounded after it was moved."""

from __future__ import annotations

import onnx_ir as ir

from ...compiler.ir.kinds import Kind, kind_of
from ...compiler.ir.matching import static_shape
from ...compiler.ir.rewriter import remove_nodes
from .products import CONVOLUTIONS

IMAGE_RANKS = (3, 4, 5)  # of signals, images and volumes
_MOVES = frozenset(["Flatten", "Reshape", "Squeeze", "Transpose", "Unsqueeze"])  # of elements, whatever their type
_IMAGE_MOVES = frozenset(["Concat", "Slice"])  # the same, of which kernels for images take narrow ones
_POOLS = ("AveragePool", "MaxPool")
_MOVED_RANKS = (4, 5)  # of images and volumes: what has three dimensions may be rows


def is_move(node: ir.Node) -> bool:
    """Whether a node moves elements of any type."""
    return node.domain == "" and (node.op_type in _MOVES or is_image_move(node))


def is_image_move(node: ir.Node) -> bool:
    """Whether a node moves elements of images, which their kernels take narrow."""
    return node.domain == "" and node.op_type in _IMAGE_MOVES and len(static_shape(node.outputs[0]) or ()) in _MOVED_RANKS


def is_pool(node: ir.Node) -> bool:
    """Whether a node is a pooling of images without indices."""
    has_one_output = sum(output.name != "" for output in node.outputs) == 1
    rank = len(static_shape(node.outputs[0]) or ())
    return node.domain == "" and node.op_type in _POOLS and has_one_output and rank in IMAGE_RANKS


def is_image_reader(node: ir.Node) -> bool:
    """Whether a reader of a narrow value moves elements of images, or is the Cast of a convolution's or a pooling's operand."""
    if is_image_move(node):
        return True
    readers = node.outputs[0].consumers() if kind_of(node) is Kind.OPERAND else ()
    return any(reader.op_type in CONVOLUTIONS or is_pool(reader) for reader in readers)


def moved_values(move: ir.Node) -> list[ir.Value]:
    """The values whose elements a node moves, its first inputs."""
    return [value for value in (move.inputs if move.op_type == "Concat" else move.inputs[:1]) if value is not None]


def remove_unread_moves(value: ir.Value) -> None:
    """Take what only moved elements to nobody out of the graph."""
    pending = [value]
    while pending:
        value = pending.pop()
        node = value.producer()
        if node is not None and node.graph is not None and is_move(node) and not value.uses() and not value.is_graph_output():
            pending += moved_values(node)
            remove_nodes([node])
