"""Which nodes may be computed once, early or not at all: those that give equal outputs for equal inputs."""

from __future__ import annotations

import onnx_ir as ir

from ...compiler.ir.randomness import draws_random_numbers


def is_deterministic(node: ir.Node, model: ir.Model) -> bool:
    """Whether a node computes the same outputs from the same inputs, as far as ONNX or the model says what it computes.

    Nothing is known of an operator of another domain that the model does not define.
    """
    if function := model.functions.get(node.op_identifier()):
        return all(is_deterministic(child, model) for child in function.all_nodes())
    return node.domain == "" and not draws_random_numbers(node, model.graph.opset_imports.get("", 1))
