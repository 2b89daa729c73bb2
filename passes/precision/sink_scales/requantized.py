"""Scales of results that divide other constants, at compile time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ....compiler.ir.constants import add_constant, constant_array, scalar_constant
from ....compiler.ir.rewriter import replace_node
from ..products import CONVOLUTIONS
from .operands import BYTES, known_floats

_LARGEST_CONSTANT = 1 << 16  # elements of constants that are divided
_LONGEST_CHAIN = 16  # of nodes between a division and the constants
_MOST = 2.0**64  # of a quotient: times the largest sum of 8-bit products it is far from what float32 holds
_LINEAR = ("Add", "Relu", "Sub")  # whose result is divided where all operands are
_OF_FIRST = (*CONVOLUTIONS, "MatMul")  # without bias: where the first operand is


@dataclass(frozen=True, slots=True)
class Requantized:
    """Finds a QuantizeLinear by a constant scale of what is made by sums of products with constants."""

    name: str

    def match(self, node: ir.Node) -> _Divided | None:
        if node.op_type != "QuantizeLinear" or node.domain != "" or node.inputs[0] is None:
            return None
        scale, quotient = constant_array(node.inputs[1]), scalar_constant(node.inputs[1])
        if scale is None or scale.dtype != np.float32 or scale.ndim or quotient is None or quotient == 1.0 or not quotient > 0:
            return None
        if node.attributes.get_int("precision", 0) not in (0, int(ir.DataType.FLOAT)):
            return None
        is_divided = _is_divisible(node.inputs[0], quotient, _LONGEST_CHAIN) and _has_product(node.inputs[0])
        return _Divided(node, scale) if is_divided else None


def _has_product(value: ir.Value | None) -> bool:
    """Whether a value that is divisible is made by a product. What only rescales 8-bit numbers has few results, of which many lie
    halfway between two steps: divided, these would be rounded otherwise."""
    node = None if value is None or _known(value) is not None else value.producer()
    if node is None or node.op_type == "DequantizeLinear":
        return False
    return node.op_type == "Mul" or node.op_type in _OF_FIRST or any(map(_has_product, node.inputs))


def _is_divisible(value: ir.Value | None, scale: float, steps: int) -> bool:
    """Whether constants make all of a value that a division by a scale reaches, and their quotients are in range."""
    if value is None or value.dtype != ir.DataType.FLOAT:
        return False
    if (known := _known(value)) is not None:
        return _is_in_range(known, scale)
    node = value.producer()
    if node is None or node.domain != "" or steps == 0:
        return False
    if node.op_type == "DequantizeLinear":
        return _is_scaled(node, scale)
    if value.is_graph_output() or len(value.uses()) > 1:  # twice by one node, too: each would be divided
        return False
    if node.op_type == "Mul":
        factor = next((known for one in node.inputs if (known := _known(one)) is not None), None)
        return factor is not None and _is_in_range(factor, scale)
    if node.op_type in _OF_FIRST and len(node.inputs) == 2:
        return not _is_whole(node.inputs[0]) and _is_divisible(node.inputs[0], scale, steps - 1)
    return node.op_type in _LINEAR and all(_is_divisible(operand, scale, steps - 1) for operand in node.inputs)


def _is_in_range(known: np.ndarray, scale: float) -> bool:
    """Whether no quotient is too large. One that is too small makes less than half a step, whatever it is multiplied by."""
    return bool((np.abs(known.astype(np.float64)) <= _MOST * scale).all())


def _is_whole(operand: ir.Value | None) -> bool:
    """Whether a product has integers for an operand, 8-bit numbers less their zero point: kernels multiply them as they lie."""
    node = None if operand is None else operand.producer()
    return node is not None and node.op_type == "DequantizeLinear" and scalar_constant(node.inputs[1]) == 1.0


def _is_scaled(node: ir.Node, quotient: float) -> bool:
    """Whether a DequantizeLinear multiplies 8-bit numbers by constants in range."""
    x, scale = node.inputs[0], constant_array(node.inputs[1])
    if x is None or x.dtype not in BYTES or scale is None or scale.dtype != np.float32:
        return False
    return scale.size <= _LARGEST_CONSTANT and _is_in_range(scale, quotient)


def _known(value: ir.Value | None) -> np.ndarray | None:
    array = known_floats(value)
    return array if array is not None and array.size <= _LARGEST_CONSTANT else None


@dataclass(frozen=True, slots=True)
class _Divided:
    node: ir.Node
    scale: np.ndarray
    made: list[ir.Node] = field(default_factory=list)

    def rewrite(self, model: ir.Model) -> Sequence[ir.Node]:
        scale = self.node.inputs[1]
        assert scale is not None
        one = add_constant(model, np.array(1, np.float32), f"{scale.name}_one")
        divided = self._divided(model, self.node.inputs[0])
        inputs = [divided, one, *self.node.inputs[2:]]
        self.made.append(ir.Node("", "QuantizeLinear", inputs, self.node.attributes.values(), version=self.node.version))
        replace_node(model, self.node, self.made, self.made[-1].outputs)
        return self.made

    def _divided(self, model: ir.Model, value: ir.Value | None) -> ir.Value:
        """A value, for which `_is_divisible`, divided by the scale."""
        assert value is not None
        if (known := _known(value)) is not None:
            return add_constant(model, known / self.scale, f"{value.name}_scaled")
        node = value.producer()
        assert node is not None
        inputs = list(node.inputs)
        if node.op_type == "DequantizeLinear":
            inputs[1] = self._divided(model, inputs[1])
        elif node.op_type == "Mul":
            at = next(place for place, factor in enumerate(inputs) if _known(factor) is not None)
            inputs[at] = self._divided(model, inputs[at])
        elif node.op_type in _OF_FIRST:
            inputs[0] = self._divided(model, inputs[0])
        else:
            inputs = [self._divided(model, operand) for operand in inputs]
        new = ir.Node("", node.op_type, inputs, node.attributes.values(), version=node.version)
        self.made.append(new)
        return new.outputs[0]
