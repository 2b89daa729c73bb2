"""Control flow that is decided already."""

from __future__ import annotations

import onnx_ir as ir

from ....compiler.ir.constants import scalar_constant
from ....compiler.ir.facts import ORIGINS_KEY
from ....compiler.ir.names import fresh_name
from ....compiler.ir.validity import check_node
from .scope import Replacement, Rule, Scope


def take_branch(node: ir.Node, scope: Scope) -> Replacement | None:
    """If with a constant condition becomes the nodes of its branch, under names that no other branch uses.

    The nodes are moved, not copied: the branch is empty afterwards.

    Raises:
        InvalidModelError: a node of the branch breaks a rule, which nobody has looked at before.
    """
    condition = scalar_constant(node.inputs[0])
    if condition is None:
        return None
    graph = node.attributes["then_branch" if condition else "else_branch"].as_graph()
    outputs, nodes, initializers = tuple(graph.outputs), tuple(graph), tuple(graph.initializers.values())
    for inner in nodes:
        check_node(inner)
    graph.outputs.clear()
    graph.remove(nodes)
    graph.initializers.clear()
    for value in initializers:
        value.name = fresh_name(scope.model, str(value.name))
        scope.model.graph.register_initializer(value)
    for inner in nodes:
        if ORIGINS_KEY in inner.metadata_props:
            inner.name = None  # a pass has made it: its name was chosen among those of the branch alone
        for output in inner.outputs:
            if output.name != "":
                output.name = fresh_name(scope.model, str(output.name))
    return Replacement(nodes, outputs)


RULES: dict[str, tuple[Rule, ...]] = {"If": (take_branch,)}
