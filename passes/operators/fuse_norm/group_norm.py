"""GroupNormalization: a normalization between two reshapes that cut the channels into groups. Y. Wu and K. He, 2018."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ....compiler.ir.constants import constant_array
from ....compiler.ir.facts import dtype_name
from ....compiler.ir.matching import input_at, static_shape
from ....compiler.ir.rewriter import Rejection
from .spelling import Spelling, combined_by_channel, maker, only_reader


def group_norm(node: ir.Node) -> Spelling | Rejection | None:
    """The GroupNormalization around `node`, an InstanceNormalization or LayerNormalization of [N, groups, ...] without scale."""
    if node.domain != "" or node.op_type not in ("InstanceNormalization", "LayerNormalization"):
        return None
    before, after = maker(node.inputs[0], "Reshape"), only_reader(node.outputs[0], "Reshape")
    x = None if before is None else before.inputs[0]
    shape, grouped = static_shape(x), static_shape(node.inputs[0])
    if before is None or after is None or x is None or shape is None or grouped is None:
        return None
    if len(shape) < 3 or len(grouped) < 3 or static_shape(after.outputs[0]) != shape or grouped[0] != shape[0]:
        return None
    groups = grouped[1]
    if not groups or shape[1] % groups:
        return None
    if node.op_type == "LayerNormalization" and node.attributes.get_int("axis", -1) % len(grouped) != 2:
        return None
    if not _is_uniform(input_at(node, 1), 1.0) or not (len(node.inputs) < 3 or _is_uniform(input_at(node, 2), 0.0)):
        return Rejection("no GroupNormalization: the scale or bias is of groups, not channels", (node,))
    last, nodes = after, [before, node, after]
    parameters = []
    for op_type, neutral in (("Mul", 1.0), ("Add", 0.0)):
        found = combined_by_channel(last, op_type, shape)
        if found is not None:
            last = found[0]
            nodes.append(last)
        dtype = dtype_name(x.dtype or ir.DataType.FLOAT)
        parameters.append(np.full(shape[1], neutral, dtype) if found is None else found[1])
    attributes = {"epsilon": node.attributes.get_float("epsilon", 1e-5), "num_groups": groups}
    spelling = Spelling("GroupNormalization", (x, *parameters), attributes, 21, last, frozenset(nodes))
    return spelling.obstacle() or spelling


def _is_uniform(value: ir.Value | None, number: float) -> bool:
    array = constant_array(value)
    return value is None or (array is not None and bool(np.all(array == number)))
