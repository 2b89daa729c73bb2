"""Concats along an inner axis whose operands' kernels can store them as rows with the result's pitch: then nothing is copied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from ..ir.aliases import is_outermost, may_be_alias
from ..ir.facts import has_static_type, tensor_type
from ..ir.kinds import is_known


@dataclass(frozen=True, slots=True)
class InnerConcat:
    """The nodes whose results are side by side in that of a Concat, of the shape `shape`."""

    makers: tuple[ir.Node, ...]
    shape: tuple[int, ...]


def inner_concats(graph: ir.Graph) -> Iterator[InnerConcat]:
    """The Concats along an axis that is not the outermost, each of whose operands is all that a node computes, for it alone."""
    for node in graph:
        if node.op_type != "Concat" or not is_known(node) or not has_static_type(node.outputs[0]):
            continue
        kind = tensor_type(node.outputs[0])
        axis = node.attributes.get_int("axis", 1) % max(len(kind.shape), 1)
        if kind.is_symbolic or kind.is_packed or not kind.elements or is_outermost(kind.shape, axis):
            continue
        makers = [_maker(value, graph) for value in node.inputs]
        if all(maker is not None for maker in makers):
            yield InnerConcat(tuple(maker for maker in makers if maker is not None), kind.shape)


def _maker(value: ir.Value | None, graph: ir.Graph) -> ir.Node | None:
    """The node that computes a value and nothing else, where that is read once."""
    maker = None if value is None else value.producer()
    if value is None or maker is None or len(value.uses()) != 1 or value.is_graph_output() or not has_static_type(value):
        return None
    is_alone = [one for one in maker.outputs if one.name] == [value]
    return maker if is_alone and maker.graph is graph and not may_be_alias(maker) and tensor_type(value).elements else None
