"""Recurrent operators in 8 bits: weights as int8 with a scale for each line, rows of inputs and states by their own ranges.

What their states are like no calibration shows, as these lie in no tensor; so rows are rounded by the ranges that they have.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ...runtime.precision import LONGEST_SUM
from ..ir.constants import add_constant, constant_array, constant_tensor
from ..ir.facts import infer_node
from ..ir.matching import static_shape
from ..ir.names import fresh_name
from ..ir.opset_raise import raise_obstacle, raise_opset
from ..ir.rewriter import copy_source, drop_unused_constants, graph_of, operation
from ..ir.stored_weights import RECURRENT, ROW_BITS
from .formats import quantize_channels, quantize_pairs

_BLOCKS_SINCE = 21  # the opset of DequantizeLinear that has scales of blocks
_WEIGHTS = (1, 2)  # positions of W and R


def find_recurrences(model: ir.Model) -> tuple[ir.Node, ...]:
    """The GRUs, LSTMs and RNNs of float32 rows and constant float32 weights in the main graph, in its order."""
    return tuple(node for node in model.graph if _is_recurrence(node))


def recurrence_fault(model: ir.Model, node: ir.Node) -> str:
    """Why a recurrence stays float, whatever the target; empty if it need not."""
    if obstacle := raise_obstacle(model, _BLOCKS_SINCE):
        return str(obstacle.reason)
    for position in _WEIGHTS:
        shape, weights = static_shape(node.inputs[position]) or (), constant_array(node.inputs[position])
        if weights is None or 0 in shape:
            return "its weights have no elements"
        if shape[2] > LONGEST_SUM:
            return f"sums of {shape[2]} products could pass 2^31"
        if not np.isfinite(weights).all():
            return "its weights are not finite"
    return ""


def place_recurrences(model: ir.Model, nodes: Sequence[ir.Node], keeps_pairs: bool = False) -> None:
    """Let recurrences without a fault multiply 8-bit numbers; with `keeps_pairs` weights are as `pairs` asks.

    Before:  y = GRU(x, w, r, b)
    After:   v = DequantizeLinear<axis=2, block_size=depth>(w8, scales);  ...;  y = GRU(x, v, u, b), in whose metadata is that
             the kernel may round rows to 8 bits

    Other runtimes, which do not know that, compute the same weights with float rows.
    """
    if not nodes:
        return
    raise_opset(model, _BLOCKS_SINCE)
    made: dict[ir.Value, tuple[ir.Value, ir.Value, int]] = {}
    for node in nodes:
        for position in _WEIGHTS:
            old = node.inputs[position]
            assert old is not None
            if old not in made:
                made[old] = _quantized(model, old, keeps_pairs)
            numbers, scales, depth = made[old]
            scaling = operation("DequantizeLinear", [numbers, scales], axis=2, block_size=depth)
            scaling.name = scaling.outputs[0].name = fresh_name(model, f"{node.name}_weights")
            copy_source((node,), scaling)
            graph_of(node).insert_before(node, scaling)
            infer_node(scaling, model)
            node.replace_input_with(position, scaling.outputs[0])
        node.metadata_props[ROW_BITS] = "8"
    drop_unused_constants(model, list(made))


def _quantized(model: ir.Model, weights: ir.Value, keeps_pairs: bool) -> tuple[ir.Value, ir.Value, int]:
    """Weights [directions, lines, depth] as int8, the scale of each line [directions, lines, 1], and the depth."""
    array = constant_array(weights)
    assert array is not None
    found = (quantize_pairs if keeps_pairs else quantize_channels)(array.reshape(-1, array.shape[2]), 0)
    scales = found.affine.scale.reshape(*array.shape[:2], 1)
    numbers = add_constant(model, found.numbers.reshape(array.shape), f"{weights.name}_int8")
    return numbers, add_constant(model, scales, f"{weights.name}_scale"), array.shape[2]


def _is_recurrence(node: ir.Node) -> bool:
    if node.domain != "" or node.op_type not in RECURRENT:
        return False
    floats = [value for value in node.inputs[:3] if value is not None and value.dtype == ir.DataType.FLOAT]
    return len(floats) == 3 and all(constant_tensor(value) is not None and static_shape(value) for value in floats[1:])
