"""What is asked of products when the formats of their operands are chosen or placed."""

from __future__ import annotations

from math import prod

import onnx_ir as ir

from ...compiler.ir.constants import constant_tensor
from ...compiler.ir.kinds import Kind, kind_of
from ...compiler.ir.matching import static_shape

CONVOLUTIONS = ("Conv", "ConvTranspose")


def is_narrow(value: ir.Value | None) -> bool:
    """Whether a product reads a value that lies in a narrow type."""
    producer = None if value is None else value.producer()
    return producer is not None and kind_of(producer) is Kind.OPERAND


def is_constant(value: ir.Value | None) -> bool:
    """Whether a value is a constant, perhaps one that lies in a narrow type."""
    return value is not None and (constant_tensor(value) is not None or is_narrow(value))


def is_depthwise(node: ir.Node) -> bool:
    """Whether each output channel of a convolution is made of one input channel of its own."""
    source, weights = (static_shape(value) if value is not None else None for value in node.inputs[:2])
    groups = node.attributes.get_int("group", 1)
    return bool(node.op_type == "Conv" and source and weights and groups == source[1] == weights[0] and weights[1] == 1)


def depth_of(node: ir.Node) -> int | None:
    """Multiply-adds for each element of a product's result; None where that is not known."""
    found = [static_shape(value) for value in (*node.inputs[:2], *node.outputs) if value is not None]
    shapes = [shape for shape in found if shape is not None]
    if len(shapes) < len(found) or not shapes[0] or not shapes[1]:
        return None
    if node.op_type == "Conv":
        return prod(shapes[1][1:])
    if node.op_type == "ConvTranspose":
        return prod(shapes[0]) * prod(shapes[1][1:]) // max(prod(shapes[2]), 1)
    return shapes[0][-2 if node.attributes.get_int("transA", 0) else -1]


def multiply_adds(node: ir.Node) -> int:
    """Of a product; 0 where its shapes are not known."""
    return prod(static_shape(node.outputs[0]) or ()) * (depth_of(node) or 0)


def result_rows(node: ir.Node) -> int:
    """Rows of the result, of all matrices together."""
    return prod((static_shape(node.outputs[0]) or ())[:-1])
