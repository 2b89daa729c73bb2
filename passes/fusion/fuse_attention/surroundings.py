"""What the kernel of attention may read its operands through, and where it may put its result."""

from __future__ import annotations

import onnx_ir as ir

from ....compiler.ir.constants import constant_array, scalar_constant
from ....compiler.ir.kinds import Kind, is_pointwise, kind_of
from ....compiler.ir.matching import static_shape
from .membership import absorb

_PERMUTED = frozenset({"Flatten", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})  # the same elements, elsewhere
_CHEAP = frozenset({"Add", "Cast", "Div", "Mul", "Neg", "Sub"})  # to compute again for each block of queries
_MAX_CLIMB = 16  # pointwise nodes above an operand that are looked at


def absorb_prologues(members: set[ir.Node], operands: tuple[ir.Value, ...]) -> dict[ir.Node, str]:
    """Let what only moves or scales the elements of `operands` join.

    Returns:
        The nodes that stay outside because others read their result too, and who that is.
    """
    refused = absorb(members, operands, lambda node: _is_view(node) or _is_scaling(node))
    return {node: why for node, why in refused.items() if kind_of(node) is not Kind.VIEW}  # a view costs nothing anywhere


def absorb_epilogue(members: set[ir.Node], result: ir.Node) -> None:
    """Let what only puts the elements of the result elsewhere join, such as the merging of heads."""
    while True:
        value = result.outputs[0]
        readers = value.consumers()
        if len(readers) != 1 or value.is_graph_output():
            return
        (reader,) = readers
        if reader.op_type not in _PERMUTED or reader.domain or reader.inputs[0] is not value or reader.graph is not result.graph:
            return
        members.add(reader)
        result = reader


def _is_view(node: ir.Node) -> bool:
    """Whether every element of a node's outputs is one of its input's, at a place known while compiling."""
    if node.domain != "" or any(static_shape(value) is None for value in (node.inputs[0], *node.outputs)):
        return False
    if node.op_type == "Gather":
        return scalar_constant(node.inputs[1]) is not None
    if node.op_type == "Slice":
        return all(value is None or constant_array(value) is not None for value in node.inputs[1:])
    return node.op_type in _PERMUTED or node.op_type in ("Expand", "Split")


def _is_scaling(node: ir.Node) -> bool:
    """Whether a pointwise node reads one operand of its result's size, cheaply, and is not another kernel's epilogue."""
    if node.op_type not in _CHEAP or not is_pointwise(node) or (value := _main_operand(node)) is None:
        return False
    for _ in range(_MAX_CLIMB):
        above = value.producer()
        if above is None or len(value.uses()) > 1 or value.is_graph_output() or _is_view(above):
            return True
        if not is_pointwise(above):
            return kind_of(above) is Kind.OPAQUE
        operand = _main_operand(above)
        if operand is None:
            return False  # of a kernel of pointwise nodes, such as those of a rotary embedding
        value = operand
    return False


def _main_operand(node: ir.Node) -> ir.Value | None:
    """The one operand of a pointwise node that is as large as its result; None where several are, or none is."""
    shape = static_shape(node.outputs[0])
    large = [value for value in node.inputs if value is not None and static_shape(value) == shape]
    return large[0] if len(large) == 1 and shape is not None else None
