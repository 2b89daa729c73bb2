"""The two floors of a node's time: the arithmetic it does and the bytes it must move."""

from __future__ import annotations

from math import prod

import onnx_ir as ir

from ...kernels.cost.operations import operations_of
from ..ir.facts import has_static_type, tensor_type
from ..ir.kinds import Kind, kind_of
from ..ir.scopes import read_values

_CHOOSING = ("Gather", "GatherElements", "GatherND", "Slice")  # which read what they take of an operand, and not all of it


def flops_of(node: ir.Node) -> int:
    """Floating-point operations of a node, a multiply-add counted as two; 0 where a shape is unknown.

    Matrix products and convolutions are counted exactly, recurrences by their matrix products; everything else for each element
    of its largest operand, as kernels count it in the Plan, and nothing for what only moves or renames elements.
    """
    values = [*node.outputs, *(value for value in node.inputs if value is not None)]
    if not all(has_static_type(value) for value in values if value.name) or kind_of(node) in (Kind.INJECTIVE, Kind.VIEW):
        return 0
    shapes = [tensor_type(value).hinted.shape if value is not None else () for value in node.inputs]
    output = tensor_type(node.outputs[0]).hinted.elements
    match node.op_type:
        case "MatMul":
            return 2 * output * shapes[0][-1]
        case "Gemm":
            transposed = node.attributes.get_int("transA", 0)
            return 2 * output * shapes[0][0 if transposed else 1]
        case "Conv":
            return 2 * output * prod(shapes[1][1:])
        case "ConvTranspose":
            return 2 * prod(shapes[0]) * prod(shapes[1][1:])
        case "GRU" | "LSTM" | "RNN":
            return 2 * prod(shapes[0][:2]) * (prod(shapes[1]) + prod(shapes[2]))
    return operations_of(node.op_type) * max(tensor_type(value).hinted.elements for value in values if value.name)


def bytes_of(node: ir.Node) -> int:
    """Bytes of a node's operands and results, each once; 0 for a view, and where a shape is unknown. Of what takes a part of its
    first operand those that it takes."""
    values = dict.fromkeys((*read_values(node), *(value for value in node.outputs if value.name)))
    if kind_of(node) is Kind.VIEW or not all(has_static_type(value) for value in values):
        return 0
    if node.op_type in _CHOOSING:
        taken = 2 * sum(tensor_type(value).hinted.size_bytes for value in node.outputs)
        return taken + sum(tensor_type(value).hinted.size_bytes for value in node.inputs[1:] if value is not None)
    return sum(tensor_type(value).hinted.size_bytes for value in values)
