"""Names for new values: unique in the whole graph, and derived from what they replace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from .scopes import subgraphs_of

_TAKEN = "prefuse.taken_names"  # key of a graph's `meta`: its _TakenNames


def fresh_name(owner: ir.Model | ir.Graph, hint: str) -> str:
    """A value name that `owner` has never used: `hint` itself, or `hint_1`, `hint_2`, ...

    ONNX shares one scope of names between a graph and its subgraphs. Give the model where there is one: a subgraph alone does
    not see the names around it. Constant time after the first call on a graph.
    """
    graph = owner.graph if isinstance(owner, ir.Model) else owner
    taken = _taken_names(graph)
    name, count = hint, taken.get(hint, 0)
    while name in taken or name in graph.initializers:
        count += 1
        name = f"{hint}_{count}"
    if hint in taken:
        taken[hint] = count
    taken[name] = 0
    return name


def release_name(owner: ir.Model | ir.Graph, name: str) -> None:
    """Let `fresh_name` give out a name again whose value has left the graph."""
    _taken_names(owner.graph if isinstance(owner, ir.Model) else owner).pop(name, None)


@dataclass(frozen=True, slots=True)
class _TakenNames:
    """Names that have been used in `graph`, each with the last number appended to it."""

    graph: ir.Graph
    numbers: dict[str, int]


def _taken_names(graph: ir.Graph) -> dict[str, int]:
    taken: _TakenNames | None = graph.meta.get(_TAKEN)
    if taken is None or taken.graph is not graph:  # a clone shares the `meta` entries of its original
        taken = graph.meta[_TAKEN] = _TakenNames(graph, dict.fromkeys(_value_names(graph), 0))
    return taken.numbers


def _value_names(graph: ir.Graph) -> Iterator[str]:
    """Names of all values of a graph and its subgraphs."""
    for value in (*graph.inputs, *graph.initializers.values()):
        yield str(value.name)
    for node in graph:
        yield from (str(value.name) for value in node.inputs if value is not None)  # those of outer scopes among them
        yield from (str(output.name) for output in node.outputs)
        for subgraph in subgraphs_of(node):
            yield from _value_names(subgraph)


def operator_name(node: ir.Node) -> str:
    """The operator as people write it: "MatMul", "prefuse.matmul_add"."""
    return f"{node.domain}.{node.op_type}" if node.domain else node.op_type


def name_nodes(model: ir.Model) -> None:
    """Give each node a name that no other has: its own if it is the first with it, else one after its first output."""
    nodes = list(model.graph.all_nodes())
    first: dict[str, ir.Node] = {}
    for node in nodes:
        first.setdefault(node.name or "", node)
    for node in nodes:
        if node.name and first[node.name] is node:
            continue
        hint = next((value.name for value in node.outputs if value.name), node.op_type)
        name, count = hint, 0
        while name in first:
            count += 1
            name = f"{hint}_{count}"
        node.name = name
        first[name] = node
