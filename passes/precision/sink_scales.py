"""sink-scales: products of dequantized operands become products of integers, with the scales behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from ...compiler.ir.constants import add_constant, constant_array, scalar_constant
from ...compiler.ir.matching import producer_of, static_shape
from ...compiler.ir.rewriter import Rejection, apply_rules, operation, replace_node
from ...compiler.pipeline import Context, Pass

_BYTES = (ir.DataType.UINT8, ir.DataType.INT8)
_PRODUCTS = ("Conv", "Gemm", "MatMul")
_LARGEST_SUM, _LARGEST_PRODUCT = 2**31, 255 * 128  # of a 32-bit accumulator; of an unsigned and a signed byte


@dataclass(frozen=True)
class SinkScales(Pass):
    """Multiply the integers of quantized operands, and scale what comes out.

    Before:  a = DequantizeLinear(x, s, z);  b = DequantizeLinear(w, t);  y = Conv(a, b, bias)
    After:   n = DequantizeLinear(x, 1, z);  v = Cast<to=float>(w);  p = Conv(n, v);  m = Mul(p, s * t);  y = Add(m, bias)

    p is a sum of integers: kernels read x and w as they lie, 8 bits each, and subtract the zero point from the sums. Where none
    does, it is computed in floating point, exactly while sums stay below 2^24. Legal for activations with one scale and one zero
    point, and constant weights with one scale, or one for each column or output channel, whose zero points are 0, or 128 for
    unsigned ones, which become signed. The scales' product is rounded once more than before.
    """

    name: ClassVar[str] = "sink-scales"

    def run(self, model: ir.Model, context: Context) -> bool:
        return apply_rules(model, [_Rule(self.name)], context)


@dataclass(frozen=True, slots=True)
class _Rule:
    name: str

    def match(self, node: ir.Node) -> _Quantized | Rejection | None:
        if node.domain != "" or node.op_type not in _PRODUCTS or node.inputs[1] is None:
            return None
        a, b = (producer_of(node.inputs[position], "DequantizeLinear") for position in (0, 1))
        if a is None or b is None or scalar_constant(a.inputs[1]) == 1.0:
            return None
        reason = _fault(node, a, b)
        return (
            Rejection(f"{node.op_type} of dequantized operands stays in floats: {reason}", (node,))
            if reason
            else _Quantized(node, a, b)
        )


@dataclass(frozen=True, slots=True)
class _Quantized:
    """A product of what `a` and `b` dequantize."""

    node: ir.Node
    a: ir.Node
    b: ir.Node

    def rewrite(self, model: ir.Model) -> Sequence[ir.Node]:
        node = self.node
        integers = self._integers(model)
        weights = operation("Cast", [_signed_weights(model, self.b)], to=int(ir.DataType.FLOAT))
        attributes = [value for name, value in node.attributes.items() if name not in ("alpha", "beta")]
        product = ir.Node("", node.op_type, [integers.outputs[0], weights.outputs[0]], attributes)
        scales, made = self._scales(model)
        scaled = operation("Mul", [product.outputs[0], scales])
        nodes = [integers, weights, product, *made, scaled]
        if (bias := self._bias(model, nodes)) is not None:
            nodes.append(operation("Add", [nodes[-1].outputs[0], bias]))
        replace_node(model, node, nodes, nodes[-1].outputs)
        return nodes

    def _integers(self, model: ir.Model) -> ir.Node:
        """The activations less their zero point."""
        x, zero = self.a.inputs[0], self.a.inputs[2] if len(self.a.inputs) > 2 else None
        known = constant_array(zero)
        if zero is None or (known is not None and not known.any()):
            return operation("Cast", [x], to=int(ir.DataType.FLOAT))
        if known is not None and known.ndim:
            zero = add_constant(model, known.reshape(()), str(zero.name))
        one = add_constant(model, np.array(1, np.float32), f"{x.name if x is not None else ''}_one")
        return operation("DequantizeLinear", [x, one, zero])

    def _scales(self, model: ir.Model) -> tuple[ir.Value, list[ir.Node]]:
        """The product of the scales, shaped to broadcast over the result, and the nodes that make it where one is computed."""
        t = constant_array(self.b.inputs[1])
        assert t is not None
        placed = t.astype(np.float32).reshape(_channel_shape(self.node, t.size)) * np.float32(
            self.node.attributes.get_float("alpha", 1.0)
        )
        s = constant_array(self.a.inputs[1])
        if s is not None:
            return add_constant(model, placed * s.astype(np.float32).reshape(()), f"{self.a.inputs[1].name}_product"), []
        factor = operation("Mul", [self.a.inputs[1], add_constant(model, placed, f"{self.b.inputs[1].name}_placed")])
        return factor.outputs[0], [factor]

    def _bias(self, model: ir.Model, nodes: list[ir.Node]) -> ir.Value | None:
        """What is added to the scaled product; the nodes that shape it for that come behind `nodes`."""
        bias = self.node.inputs[2] if len(self.node.inputs) > 2 else None
        beta = self.node.attributes.get_float("beta", 1.0) if self.node.op_type == "Gemm" else 1.0
        if bias is None or beta == 0.0:
            return None
        if self.node.op_type == "Conv":
            shape = add_constant(model, np.array(_channel_shape(self.node, -1), np.int64), f"{bias.name}_shape")
            nodes.append(operation("Reshape", [bias, shape]))
            bias = nodes[-1].outputs[0]
        if beta != 1.0:
            nodes.append(operation("Mul", [bias, add_constant(model, np.array(beta, np.float32), f"{bias.name}_beta")]))
            bias = nodes[-1].outputs[0]
        return bias


def _channel_shape(node: ir.Node, channels: int) -> tuple[int, ...]:
    """The shape of numbers for each column or output channel of a product's result."""
    if channels == 1:
        return ()
    rank = len(static_shape(node.outputs[0]) or ())
    return (channels, *[1] * (rank - 2)) if node.op_type == "Conv" else (channels,)


def _fault(node: ir.Node, a: ir.Node, b: ir.Node) -> str:
    """Why a product stays as it is; empty if it need not."""
    return _activation_fault(a) or _weight_fault(node, b) or _depth_fault(node)


def _activation_fault(a: ir.Node) -> str:
    x, scale, zero = (*a.inputs, None)[:3]
    if x is None or scale is None or x.dtype not in _BYTES:
        return "activations are not of 8 bits"
    shape = static_shape(scale)
    if shape is None or prod(shape) != 1 or scale.dtype != ir.DataType.FLOAT:
        return "activations have more than one scale"
    return "the zero point of activations is no scalar" if zero is not None and constant_array(zero) is None and shape else ""


def _weight_fault(node: ir.Node, b: ir.Node) -> str:
    w, scale = b.inputs[:2]
    numbers, scales = constant_array(w), constant_array(scale)
    if w is None or numbers is None or scales is None or w.dtype not in _BYTES:
        return "weights are no constants of 8 bits"
    if b.attributes.get_int("block_size", 0):
        return "weights have scales for blocks"
    zeros = constant_array(b.inputs[2]) if len(b.inputs) > 2 and b.inputs[2] is not None else np.zeros(1)
    expected = 128 if w.dtype == ir.DataType.UINT8 else 0
    if zeros is None or (len(b.inputs) > 2 and b.inputs[2] is not None and np.any(zeros != expected)):
        return "weights have zero points"
    if w.dtype == ir.DataType.UINT8 and (len(b.inputs) < 3 or b.inputs[2] is None):
        return "unsigned weights have no zero point of 128"
    if scales.size == 1:
        return ""
    axis = b.attributes.get_int("axis", 1) % numbers.ndim
    return "" if axis == _channel_axis(node, numbers.ndim) else "scales of weights do not belong to columns"


def _channel_axis(node: ir.Node, rank: int) -> int:
    """The dimension of weights that are columns, or output channels, of the result."""
    if node.op_type == "Conv" or (node.op_type == "Gemm" and node.attributes.get_int("transB", 0)):
        return 0
    return rank - 1


def _depth_fault(node: ir.Node) -> str:
    weights = static_shape(node.inputs[1])
    if weights is None or static_shape(node.outputs[0]) is None:
        return "shapes are not static"
    axis = _channel_axis(node, len(weights))
    depth = prod(weights[1:]) if node.op_type == "Conv" else weights[-2 if axis else -1] if len(weights) > 1 else weights[0]
    if depth * _LARGEST_PRODUCT >= _LARGEST_SUM:
        return f"sums of {depth} products could pass 2^31"
    return ""


def _signed_weights(model: ir.Model, b: ir.Node) -> ir.Value:
    """The weights as int8: unsigned ones less 128, in a new constant."""
    w = b.inputs[0]
    assert w is not None
    if w.dtype == ir.DataType.INT8:
        return w
    numbers = constant_array(w)
    assert numbers is not None
    return add_constant(model, (numbers ^ np.uint8(128)).view(np.int8), f"{w.name}_signed")
