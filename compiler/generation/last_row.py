"""Logits of one row a sequence in the place of those of all rows: the row is chosen before the vocabulary's weights are read."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..ir.constants import add_constant
from ..ir.facts import infer_node
from ..ir.matching import is_constant, static_shape
from ..ir.names import fresh_name
from ..ir.rewriter import operation

_POINTWISE = frozenset(["Add", "Cast", "Div", "Identity", "Mul", "Tanh"])  # between the product and the logits: caps, scales


def multiply_last_row(model: ir.Model, logits: ir.Value, index: ir.Value) -> bool:
    """Let the product that makes logits [batch, T, vocabulary] multiply rows `index` [batch, 1, 1] alone, so that they become
    [batch, 1, vocabulary]. False, and nothing is changed, where they come of no product by constants."""
    chain, value = [], logits
    while (node := value.producer()) is not None and node.op_type in _POINTWISE and node.domain == "":
        wide = [one for one in node.inputs if one is not None and not _is_of_columns(one)]
        if len(wide) != 1 or len(value.uses()) + value.is_graph_output() != 1:
            return False
        chain.append(node)
        (value,) = wide
    if node is None or node.op_type != "MatMul" or len(value.uses()) + value.is_graph_output() != 1:
        return False
    rows, weights = node.inputs
    shape = static_shape(rows)
    if rows is None or weights is None or shape is None or len(shape) != 3 or not _is_known(weights):
        return False
    spread = operation("Expand", [index, add_constant(model, np.array([shape[0], 1, shape[2]], np.int64), "shape")])
    chosen = operation("GatherElements", [rows, spread.outputs[0]], axis=1)
    for new in (spread, chosen):
        new.outputs[0].name = fresh_name(model, f"last.{new.op_type.lower()}")
        model.graph.insert_before(node, new)
        infer_node(new, model)
    node.replace_input_with(0, chosen.outputs[0])
    for one in (node, *reversed(chain)):
        one.outputs[0].shape = None
        infer_node(one, model)
    return True


def _is_of_columns(value: ir.Value) -> bool:
    """Whether a value is a constant that does not tell rows apart."""
    shape = static_shape(value)
    return is_constant(value) and shape is not None and all(dim == 1 for dim in shape[:-1])


def _is_known(value: ir.Value, depth: int = 3) -> bool:
    """Whether a matrix is computed of constants alone: transposed, cast, dequantized weights."""
    if is_constant(value):
        return True
    producer = value.producer()
    return depth > 0 and producer is not None and all(_is_known(one, depth - 1) for one in producer.inputs if one is not None)
