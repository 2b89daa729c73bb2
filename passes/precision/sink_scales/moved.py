"""8-bit numbers that are moved before they are dequantized, joined after they are quantized, and scales that cancel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import onnx_ir as ir

from ....compiler.ir.constants import constant_array
from ....compiler.ir.matching import producer_of, static_shape
from ....compiler.ir.rewriter import copy_source, replace_node
from .operands import BYTES

# What gives elements of its first operand other places, whichever scale they have, or chooses the largest.
_MOVES = ("Flatten", "Gather", "MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")
# The scales by which types hold 8-bit numbers well enough; bfloat16 has too few digits.
_SINGLE, _HALF = (float(np.finfo(np.float32).tiny), 2.0**100), (2.0**-14, 2.0**7)
_NORMAL = {ir.DataType.FLOAT: _SINGLE, ir.DataType.DOUBLE: _SINGLE, ir.DataType.FLOAT16: _HALF}
_POOLS_BYTES = 12  # the opset since which MaxPool takes 8-bit numbers


@dataclass(frozen=True, slots=True)
class Moved:
    """Finds nodes that move what DequantizeLinear made by one scale and zero point."""

    name: str
    opset: int

    def match(self, node: ir.Node) -> _Move | None:
        if node.domain != "" or node.op_type not in _MOVES or len(node.outputs) != 1:
            return None
        if node.op_type == "MaxPool" and self.opset < _POOLS_BYTES:
            return None
        source = producer_of(node.inputs[0], "DequantizeLinear")
        if source is None or source.inputs[0] is None or source.inputs[0].dtype not in BYTES or not has_one_scale(source):
            return None
        if node.op_type == "MaxPool" and not _is_positive(source.inputs[1]):
            return None
        is_table = node.op_type == "Gather" and constant_array(source.inputs[0]) is not None
        return _Move(node, source) if is_table or constant_array(source.inputs[0]) is None else None


def _is_positive(scale: ir.Value | None) -> bool:
    """Whether the greatest number is also the greatest after it is scaled."""
    known = constant_array(scale)
    return known is not None and bool((known > 0).all() and np.isfinite(known.astype(np.float64)).all())


def has_one_scale(node: ir.Node) -> bool:
    """Whether a QuantizeLinear or DequantizeLinear has one scale and at most one zero point."""
    shapes = [static_shape(value) for value in node.inputs[1:] if value is not None]
    return all(shape is not None and prod(shape) == 1 for shape in shapes) and not node.attributes.get_int("block_size", 0)


@dataclass(frozen=True, slots=True)
class _Move:
    node: ir.Node
    source: ir.Node

    def rewrite(self, model: ir.Model) -> Sequence[ir.Node]:
        node, source = self.node, self.source
        moved = ir.Node("", node.op_type, [source.inputs[0], *node.inputs[1:]], node.attributes.values(), version=node.version)
        kept = [value for name, value in source.attributes.items() if name == "output_dtype"]
        widened = ir.Node("", "DequantizeLinear", [moved.outputs[0], *source.inputs[1:]], kept, version=source.version)
        copy_source((node,), moved)
        replace_node(model, node, [moved, widened], widened.outputs)
        return [moved, widened]


@dataclass(frozen=True, slots=True)
class Joined:
    """Finds a QuantizeLinear by one scale that is all that reads a Concat: each piece can be quantized where it is made, and
    bytes are joined."""

    name: str

    def match(self, node: ir.Node) -> _Join | None:
        if node.op_type != "QuantizeLinear" or node.domain != "" or not has_one_scale(node):
            return None
        source = producer_of(node.inputs[0], "Concat")
        if source is None or len(source.outputs[0].uses()) != 1 or source.outputs[0].is_graph_output():
            return None
        return _Join(node, source)


@dataclass(frozen=True, slots=True)
class _Join:
    node: ir.Node
    source: ir.Node

    def rewrite(self, model: ir.Model) -> Sequence[ir.Node]:
        node, source = self.node, self.source
        pieces = [
            ir.Node("", "QuantizeLinear", [piece, *node.inputs[1:]], node.attributes.values(), version=node.version)
            for piece in source.inputs
        ]
        joined = ir.Node("", "Concat", [piece.outputs[0] for piece in pieces], source.attributes.values(), version=source.version)
        for piece in pieces:
            copy_source((node,), piece)
        copy_source((source,), joined)
        replace_node(model, node, [*pieces, joined], joined.outputs)
        return [*pieces, joined]


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Finds a QuantizeLinear of what was dequantized by the same scale and zero point: the number that it was."""

    name: str

    def match(self, node: ir.Node) -> _Same | None:
        if node.op_type != "QuantizeLinear" or node.domain != "":
            return None
        source = producer_of(node.inputs[0], "DequantizeLinear")
        x = None if source is None else source.inputs[0]
        if source is None or x is None or x.dtype not in BYTES or x.dtype != node.outputs[0].dtype:
            return None
        if not has_one_scale(source) or not has_one_scale(node) or not _is_normal(node.inputs[1], source.outputs[0].dtype):
            return None
        first, second = ((*one.inputs, None)[1:3] for one in (source, node))
        return _Same(node, x) if all(map(_is_same, first, second)) else None


def _is_normal(scale: ir.Value | None, dtype: ir.DataType | None) -> bool:
    """Whether a scale is a constant that 8-bit numbers are multiplied, as this type, and divided by without loss."""
    known = constant_array(scale)
    if known is None or dtype not in _NORMAL:
        return False
    least, most = _NORMAL[dtype]
    return bool((known >= least).all() and (known < most).all())


def _is_same(first: ir.Value | None, second: ir.Value | None) -> bool:
    if first is second:
        return True
    known = [np.zeros(1) if value is None else constant_array(value) for value in (first, second)]
    return known[0] is not None and known[1] is not None and known[0].reshape(-1)[0] == known[1].reshape(-1)[0]


@dataclass(frozen=True, slots=True)
class _Same:
    node: ir.Node
    x: ir.Value

    def rewrite(self, model: ir.Model) -> Sequence[ir.Node]:
        replace_node(model, self.node, (), [self.x])
        return []
