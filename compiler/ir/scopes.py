"""Nodes with subgraphs (If, Loop, Scan): their graphs, and the values of outer scopes that these read."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir


def subgraphs_of(node: ir.Node) -> Iterator[ir.Graph]:
    """The graphs among a node's attributes (If, Loop, Scan)."""
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH and not attribute.is_ref():
            yield attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS and not attribute.is_ref():
            yield from attribute.as_graphs()


def captured_values(node: ir.Node) -> list[ir.Value]:
    """Values of outer scopes that the node's subgraphs read, each once, in order of first use."""
    return list(dict.fromkeys(value for graph in subgraphs_of(node) for value in captured_by(graph)))


def captured_by(graph: ir.Graph) -> list[ir.Value]:
    """Values of outer scopes that one subgraph reads, each once, in order of first use."""
    captured: dict[ir.Value, None] = {}
    inner = {*graph.inputs, *graph.initializers.values()}
    for child in graph:
        captured.update(dict.fromkeys(value for value in read_values(child) if value not in inner))
        inner.update(child.outputs)
    captured.update(dict.fromkeys(value for value in graph.outputs if value not in inner))
    return list(captured)


def read_values(node: ir.Node) -> list[ir.Value]:
    """Every value a node needs: its inputs (absent optional ones left out), then what its subgraphs capture."""
    return [value for value in node.inputs if value is not None] + captured_values(node)


def release_subgraphs(node: ir.Node) -> None:
    """Empty the subgraphs of a node that is out of its graph, so that they no longer read values around them."""
    for graph in subgraphs_of(node):
        graph.outputs.clear()
        inner = tuple(graph)
        for child in inner:
            release_subgraphs(child)
        graph.remove(inner, safe=True)
