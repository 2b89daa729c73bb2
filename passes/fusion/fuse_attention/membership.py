"""Groups that grow from a value back towards the inputs, and who reads their values besides."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

import onnx_ir as ir


def outside_reader(value: ir.Value, members: Container[ir.Node]) -> str:
    """Who besides `members` needs a value; empty if nobody does."""
    if value.is_graph_output():
        return "is also an output of the graph"
    reader = next((node for node, _ in value.uses() if node not in members), None)
    return "" if reader is None else f"is also read by {reader.op_type}"


def absorb(members: set[ir.Node], values: Iterable[ir.Value | None], may_join: Callable[[ir.Node], bool]) -> dict[ir.Node, str]:
    """Let the producers of `values` join, and those of what they read, where `may_join` says so and only members read them.

    Returns:
        The nodes that could not join for another reader alone, and who that is.
    """
    refused: dict[ir.Node, str] = {}
    pending = list(values)
    while pending:
        value = pending.pop()
        node = None if value is None else value.producer()
        if node is None or node in members or not may_join(node):
            continue
        if why := next((f"%{one.name} {text}" for one in node.outputs if (text := outside_reader(one, members))), ""):
            refused[node] = why  # until its last reader joins
            continue
        refused.pop(node, None)
        members.add(node)
        pending += node.inputs
    return refused
