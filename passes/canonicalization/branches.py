"""Control flow that is decided already."""

from __future__ import annotations

import onnx_ir as ir

from ...compiler.ir.constants import scalar_constant
from ...compiler.ir.names import fresh_name
from .scope import Replacement, Rule, Scope


def take_branch(node: ir.Node, scope: Scope) -> Replacement | None:
    """If with a constant condition becomes the nodes of its branch, under names that no other branch uses.

    The nodes are moved, not copied: the branch is empty afterwards.
    """
    condition = scalar_constant(node.inputs[0])
    if condition is None:
        return None
    graph = node.attributes["then_branch" if condition else "else_branch"].as_graph()
    outputs, nodes, initializers = tuple(graph.outputs), tuple(graph), tuple(graph.initializers.values())
    graph.outputs.clear()
    graph.remove(nodes)
    graph.initializers.clear()
    for value in initializers:
        value.name = fresh_name(scope.model, str(value.name))
        scope.model.graph.register_initializer(value)
    for inner in nodes:
        for output in inner.outputs:
            if output.name != "":
                output.name = fresh_name(scope.model, str(output.name))
    return Replacement(nodes, outputs)


RULES: dict[str, tuple[Rule, ...]] = {"If": (take_branch,)}
