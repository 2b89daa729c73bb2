"""Parts of tensors, at places known at compile time, that kernels of pointwise operators read where they lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import onnx_ir as ir

from ...compiler.ir.aliases import part_offsets
from ...compiler.ir.facts import has_static_type, tensor_type
from ...compiler.ir.functions import body_of, is_fused
from ...compiler.ir.kinds import is_known, is_pointwise
from ...compiler.ir.matching import int_constants

_PARTS = ("Gather", "Slice", "Split")
_SMALLEST_BITS = 8  # of numbers that lie apart in memory
_STEPS = 4  # position of those of a Slice

Outside = Mapping[ir.Value, ir.Value]  # parameters of a function to the operands of its call


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts that a group of pointwise operators, or an operator that is one itself, reads: the nodes that take them."""

    nodes: tuple[ir.Node, ...]
    outside: Outside

    def neighbours(self) -> int:
        """Elements of a result that lie at one distance from each other, at least: what a loop over vectors goes along."""
        return min((_neighbours(node, self.outside) for node in self.nodes), default=0)

    def read_bytes(self, call: ir.Node) -> int:
        """What is read of the operands of a call or node: of those that parts alone are read of, these."""
        taken = {self.outside.get(source, source) for node in self.nodes if (source := node.inputs[0]) is not None}
        whole = [value for value in dict.fromkeys(call.inputs) if value is not None and value not in taken]
        sizes = [tensor_type(value).hinted.size_bytes for value in whole if has_static_type(value)]
        return sum(sizes) + sum(tensor_type(one).hinted.size_bytes for node in self.nodes for one in node.outputs if one.uses())


def parts_of(model: ir.Model, node: ir.Node) -> Parts | None:
    """The parts that a node or group reads, if the kernel of pointwise operators computes it: that has no others, and takes parts
    of its operands alone. None where it does not."""
    if not is_fused(node):
        return Parts((node,), {}) if is_part(node, {}) else Parts((), {}) if is_pointwise(node) else None
    function = body_of(model, node)
    outside = {inner: outer for inner, outer in zip(function.inputs, node.inputs, strict=False) if outer is not None}
    found = []
    for child in function:
        if child.op_type == "Constant" or is_pointwise(child):
            continue
        if child.inputs[0] not in outside or not is_part(child, outside):
            return None
        found.append(child)
    return Parts(tuple(found), outside)


def is_part(node: ir.Node, outside: Outside) -> bool:
    """Whether a node takes a part of its operand that is known at compile time."""
    if not is_known(node) or node.op_type not in _PARTS:
        return False
    values = [node.inputs[0], *node.outputs]
    if not all(value is not None and value.name and has_static_type(value) for value in values):
        return False
    kind = tensor_type(node.outputs[0])
    if kind.bits < _SMALLEST_BITS or "complex" in kind.dtype:  # which kernels only choose, as bits
        return False
    operands = [int_constants(outside.get(value, value)) for value in node.inputs[1:] if value is not None]
    if node.op_type == "Gather":
        return operands[0] is not None and len(operands[0]) == 1 and _is_inside(node, operands[0][0])
    return all(one is not None for one in operands)


def _is_inside(gather: ir.Node, index: int) -> bool:
    source = gather.inputs[0]
    assert source is not None, "asked before"
    extent = tensor_type(source).shape[gather.attributes.get_int("axis", 0)]
    return isinstance(extent, int) and -extent <= index < extent


def is_free(node: ir.Node) -> bool:
    """Whether a part, alone in the graph, lies within its operand without a kernel."""
    return part_offsets(node) is not None


def _neighbours(node: ir.Node, outside: Outside) -> int:
    """Along the last dimensions of the result, as long as each continues where the one behind it ends."""
    source, result = node.inputs[0], node.outputs[0]
    assert source is not None, "asked before"
    shape, under = tensor_type(result).hinted.shape, tensor_type(source).hinted.shape
    strides = [prod(under[axis + 1 :]) for axis in range(len(under))]
    if node.op_type == "Gather":
        axis = node.attributes.get_int("axis", 0) % len(under)
        rank = len(shape) - len(under) + 1
        strides[axis : axis + 1] = [0] * rank
    for axis, step in _steps(node, outside, len(under)).items():
        strides[axis] *= step
    run, end = 1, None
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1:
            if end is not None and stride != end:
                break
            run, end = run * extent, stride * extent
    return run


def _steps(node: ir.Node, outside: Outside, rank: int) -> dict[int, int]:
    """Those of a Slice, by axis."""
    if node.op_type != "Slice" or len(node.inputs) <= _STEPS:
        return {}
    axes, steps = (None if value is None else int_constants(outside.get(value, value)) for value in node.inputs[3:5])
    if steps is None:
        return {}
    return {axis % rank: step for axis, step in zip(axes or range(len(steps)), steps, strict=True)}
