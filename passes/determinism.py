"""Which nodes may be computed once, early or not at all: those that give equal outputs for equal inputs."""

from __future__ import annotations

import onnx_ir as ir

from ..compiler.ir.constants import scalar_constant

RANDOM_OPERATORS = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)


def is_deterministic(node: ir.Node, model: ir.Model) -> bool:
    """Whether a node computes the same outputs from the same inputs, as far as ONNX or the model says what it computes.

    Nothing is known of an operator of another domain that the model does not define.
    """
    if function := model.functions.get(node.op_identifier()):
        return all(is_deterministic(child, model) for child in function.all_nodes())
    if node.domain != "" or node.op_type in RANDOM_OPERATORS:
        return False
    return node.op_type != "Dropout" or not _may_train(node, model.graph.opset_imports.get("", 1))


def _may_train(dropout: ir.Node, opset: int) -> bool:
    """Whether a Dropout may draw random numbers: from opset 12 on, an input says so."""
    training = dropout.inputs[2] if opset >= 12 and len(dropout.inputs) > 2 else None
    return training is not None and scalar_constant(training) is not False
