"""Concats of channels that lie channels-last: computed by the window that makes one of their pieces.

    t = prefuse.convtranspose_channels_last(x, w);  s = Slice(skip);  y = Concat{axis=3}(s, t)
    y = prefuse.convtranspose_concat_channels_last(x, w, skip)

The window stores its result where it belongs, and what else is joined, or a part of it, is copied once.
"""

from __future__ import annotations

import re

import onnx_ir as ir

from ....compiler.ir.constants import constant_tensor
from ....compiler.ir.facts import tensor_type
from ....compiler.ir.functions import body_of, fuse_into_function, inline_function, is_fused
from ....compiler.ir.matching import static_shape
from .forms import to_last
from .movers import is_stored_apart


def join_channels(model: ir.Model) -> None:
    """Put each Concat of channels into the group of its largest piece that a window makes and nobody else reads.

    Functions may be left without a call.
    """
    for node in tuple(model.graph):
        if node.op_type != "Concat" or node.domain:
            continue
        if node.attributes.get_int("axis") != len(static_shape(node.outputs[0]) or ()) - 1:
            continue
        pieces = [value for value in dict.fromkeys(node.inputs) if value is not None and _is_stored_last(model, value)]
        if pieces:
            _join(model, node, max(pieces, key=lambda value: tensor_type(value).size_bytes))


def _is_stored_last(model: ir.Model, value: ir.Value) -> bool:
    """Whether a group with a window makes a value, which is all that it makes, and turns it channels-last."""
    producer = value.producer()
    if producer is None or not is_fused(producer) or len(producer.outputs) != 1 or not is_stored_apart(model, value):
        return False
    last = body_of(model, producer).outputs[0].producer()
    order = () if last is None or last.op_type != "Transpose" else tuple(last.attributes.get_ints("perm", ()))
    return bool(order) and order == to_last(len(order))


def _join(model: ir.Model, concat: ir.Node, piece: ir.Value) -> None:
    producer = piece.producer()
    assert producer is not None
    name = re.sub(r"_channels_last(_\d+)?$", "", producer.op_type)
    crops = [value.producer() for value in concat.inputs if value is not None and _is_crop(value)]
    members = inline_function(model, producer)
    nodes = [*members, *(crop for crop in dict.fromkeys(crops) if crop is not None), concat]
    graph = concat.graph
    assert graph is not None
    graph.remove(nodes[:-1])
    graph.insert_before(concat, nodes[:-1])
    fuse_into_function(model, nodes, f"{name}_concat_channels_last", adjacent=True)


def _is_crop(value: ir.Value) -> bool:
    """Whether a value is a part of another one, at places that are known, which only a Concat reads."""
    crop = value.producer()
    if crop is None or crop.op_type != "Slice" or crop.domain or len(tuple(value.uses())) != 1 or value.is_graph_output():
        return False
    operands = [operand for operand in crop.inputs[1:] if operand is not None]
    return bool(operands) and all(constant_tensor(operand) is not None for operand in operands)
