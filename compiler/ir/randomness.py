"""Operators that draw random numbers."""

from __future__ import annotations

import onnx_ir as ir

from ...runtime.errors import UnsupportedModelError
from .constants import scalar_constant
from .facts import source_of

RANDOM_OPERATORS = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)


def draws_random_numbers(node: ir.Node, opset: int) -> bool:
    """Whether an ONNX operator draws random numbers, as far as is known: a Dropout does where an input may say that it trains."""
    if node.domain != "":
        return False
    return node.op_type in RANDOM_OPERATORS or (node.op_type == "Dropout" and _may_drop(node, opset))


def check_repeatable(model: ir.Model) -> None:
    """Refuse a model that draws random numbers.

    Raises:
        UnsupportedModelError: some node does; all of them are named.
    """
    opset = model.graph.opset_imports.get("", 1)
    if nodes := [node for node in model.graph.all_nodes() if draws_random_numbers(node, opset)]:
        named = ", ".join(dict.fromkeys(f"{node.op_type} at {source_of(node)}" for node in nodes))
        what = f"{named}: draws random numbers, so that calls differ from each other, and from every other engine"
        fix = "compile with random=True if that is meant; a Dropout that trains comes from an export without model.eval()"
        raise UnsupportedModelError("model", what, fix)


def _may_drop(dropout: ir.Node, opset: int) -> bool:
    """From opset 12 on, an input says whether a Dropout trains, and one how much it drops."""
    if opset < 12 or len(dropout.inputs) < 3 or dropout.inputs[2] is None:
        return False
    ratio = dropout.inputs[1]
    return scalar_constant(dropout.inputs[2]) is not False and (ratio is None or scalar_constant(ratio) != 0)
