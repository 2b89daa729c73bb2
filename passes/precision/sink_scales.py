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
_OF_INTEGERS = {"ConvInteger": "Conv", "MatMulInteger": "MatMul"}
_K_PACK = 4  # channels of a group that a dot product takes
_LARGEST_SUM, _LARGEST_PRODUCT = 2**31, 255 * 128  # of a 32-bit accumulator; of an unsigned and a signed byte


@dataclass(frozen=True)
class SinkScales(Pass):
    """Multiply the integers of quantized operands, and scale what comes out.

    Before:  a = DequantizeLinear(x, s, z);  b = DequantizeLinear(w, t);  y = Conv(a, b, bias)
    After:   n = DequantizeLinear(x, 1, z);  v = Cast<to=float>(w);  p = Conv(n, v);  m = Mul(p, s * t);  y = Add(m, bias)

    p is a sum of integers: kernels read x and w as they lie, 8 bits each, and subtract the zero point from the sums. Where none
    does, it is computed in floating point, exactly while sums stay below 2^24. So are MatMulInteger and ConvInteger whose result
    is made float32. Legal for activations with one scale and one zero point, and constant weights with one scale, or one for each
    column or output channel, whose zero points are 0, or 128 for unsigned ones, which become signed. The scales' product is
    rounded once more than before.
    """

    name: ClassVar[str] = "sink-scales"

    def run(self, model: ir.Model, context: Context) -> bool:
        return apply_rules(model, [_Dequantized(self.name), _Integers(self.name)], context)


@dataclass(frozen=True, slots=True)
class Operands:
    """A product of 8-bit numbers `x`, less their zero point, and `w`, less theirs, where there are any."""

    op_type: str
    product: ir.Node
    x: ir.Value
    w: ir.Value
    x_zero: ir.Value | None
    w_zero: ir.Value | None

    @property
    def channel_axis(self) -> int:
        """The dimension of weights that are columns, or output channels, of the result."""
        is_first = self.op_type == "Conv" or (self.op_type == "Gemm" and self.product.attributes.get_int("transB", 0) != 0)
        return 0 if is_first else len(static_shape(self.w) or (0,)) - 1

    def fault(self) -> str:
        """Why no kernel multiplies them as they lie; empty if one does."""
        shape = static_shape(self.w)
        if shape is None or self.product.outputs[0].shape is None or not static_shape(self.product.outputs[0]):
            return "shapes are not static"
        if self.x_zero is not None and constant_array(self.x_zero) is None and static_shape(self.x_zero) != ():
            return "the zero point of activations is no scalar"
        known = constant_array(self.x_zero)
        if known is not None and known.size != 1:
            return "activations have more than one zero point"
        return self._weight_fault() or self._size_fault(shape)

    def _weight_fault(self) -> str:
        if constant_array(self.w) is None or self.w.dtype not in _BYTES:
            return "weights are no constants of 8 bits"
        zeros = np.zeros(1) if self.w_zero is None else constant_array(self.w_zero)
        wanted = 128 if self.w.dtype == ir.DataType.UINT8 else 0
        return "" if zeros is not None and (zeros == wanted).all() else f"zero points of weights are not {wanted}"

    def _size_fault(self, shape: tuple[int, ...]) -> str:
        if self.op_type == "Conv" and shape[1] % _K_PACK:
            return f"{shape[1]} channels of a group fill no words of {_K_PACK}"
        depth = prod(shape[1:]) if self.op_type == "Conv" else prod(shape[-2:]) // max(shape[self.channel_axis], 1)
        if depth * _LARGEST_PRODUCT >= _LARGEST_SUM:
            return f"sums of {depth} products could pass 2^31"
        return ""

    def multiplied(self, model: ir.Model) -> list[ir.Node]:
        """New nodes, the last of which makes the sums of integers as float32."""
        widened = operation("Cast", [self._signed_weights(model)], to=int(ir.DataType.FLOAT))
        less = self._less_zero(model)
        kept = [value for name, value in self.product.attributes.items() if name not in ("alpha", "beta")]
        product = ir.Node("", self.op_type, [less.outputs[0], widened.outputs[0]], kept)
        return [less, widened, product]

    def _less_zero(self, model: ir.Model) -> ir.Node:
        """The activations less their zero point."""
        zero, known = self.x_zero, constant_array(self.x_zero)
        if zero is None or (known is not None and not known.any()):
            return operation("Cast", [self.x], to=int(ir.DataType.FLOAT))
        if known is not None and known.ndim:
            zero = add_constant(model, known.reshape(()), str(zero.name))
        return operation("DequantizeLinear", [self.x, add_constant(model, np.array(1, np.float32), f"{self.x.name}_one"), zero])

    def _signed_weights(self, model: ir.Model) -> ir.Value:
        """The weights as int8: unsigned ones less 128, in a new constant."""
        if self.w.dtype == ir.DataType.INT8:
            return self.w
        numbers = constant_array(self.w)
        assert numbers is not None
        return add_constant(model, (numbers ^ np.uint8(128)).view(np.int8), f"{self.w.name}_signed")


@dataclass(frozen=True, slots=True)
class _Dequantized:
    """Products of what DequantizeLinear makes."""

    name: str

    def match(self, node: ir.Node) -> _Scaled | Rejection | None:
        if node.domain != "" or node.op_type not in _PRODUCTS:
            return None
        a, b = (producer_of(node.inputs[position], "DequantizeLinear") for position in (0, 1))
        if a is None or b is None or scalar_constant(a.inputs[1]) == 1.0:
            return None
        (x, s, x_zero), (w, t, w_zero) = ((*one.inputs, None)[:3] for one in (a, b))
        if x is None or s is None or w is None or t is None or x.dtype not in _BYTES:
            return None
        found = Operands(node.op_type, node, x, w, x_zero, w_zero)
        reason = found.fault() or _scale_fault(found, b, s, t)
        if reason:
            return Rejection(f"{node.op_type} of dequantized operands stays in floating point: {reason}", (node,))
        return _Scaled(found, s, t)


def _scale_fault(found: Operands, b: ir.Node, s: ir.Value, t: ir.Value) -> str:
    shape, scales = static_shape(s), constant_array(t)
    if shape is None or prod(shape) != 1 or s.dtype != ir.DataType.FLOAT:
        return "activations have more than one scale"
    if scales is None or b.attributes.get_int("block_size", 0) != 0:
        return "weights have no constant scales, or scales for blocks"
    rank = len(static_shape(found.w) or ())
    is_by_channel = rank > 0 and b.attributes.get_int("axis", 1) % rank == found.channel_axis
    return "" if scales.size == 1 or is_by_channel else "scales of weights do not belong to columns"


@dataclass(frozen=True, slots=True)
class _Scaled:
    """A product with the scale `s` of its activations and `t` of its weights."""

    found: Operands
    s: ir.Value
    t: ir.Value

    def rewrite(self, model: ir.Model) -> Sequence[ir.Node]:
        node = self.found.product
        nodes = self.found.multiplied(model)
        scales, made = self._scales(model)
        scaled = operation("Mul", [nodes[-1].outputs[0], scales])
        nodes += [*made, scaled]
        bias, made = self._bias(model)
        nodes += made
        if bias is not None:
            nodes.append(operation("Add", [scaled.outputs[0], bias]))
        replace_node(model, node, nodes, nodes[-1].outputs)
        return nodes

    def _scales(self, model: ir.Model) -> tuple[ir.Value, list[ir.Node]]:
        """The product of the scales, shaped to broadcast over the result, and what computes it where a run does."""
        node, t, s = self.found.product, constant_array(self.t), constant_array(self.s)
        assert t is not None
        alpha = np.float32(node.attributes.get_float("alpha", 1.0) if node.op_type == "Gemm" else 1.0)
        placed = t.astype(np.float32).reshape(_channel_shape(node, t.size)) * alpha
        if s is not None:
            return add_constant(model, placed * s.astype(np.float32).reshape(()), f"{self.s.name}_product"), []
        factor = operation("Mul", [self.s, add_constant(model, placed, f"{self.t.name}_placed")])
        return factor.outputs[0], [factor]

    def _bias(self, model: ir.Model) -> tuple[ir.Value | None, list[ir.Node]]:
        """What is added to the scaled product, and the nodes that shape it for that."""
        node, made = self.found.product, list[ir.Node]()
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        beta = node.attributes.get_float("beta", 1.0) if node.op_type == "Gemm" else 1.0
        if bias is None or beta == 0.0:
            return None, made
        if node.op_type == "Conv":
            shape = add_constant(model, np.array(_channel_shape(node, -1), np.int64), f"{bias.name}_shape")
            made.append(operation("Reshape", [bias, shape]))
        if beta != 1.0:
            made.append(operation("Mul", [bias, add_constant(model, np.array(beta, np.float32), f"{bias.name}_beta")]))
        return (made[-1].outputs[0] if made else bias), made


def _channel_shape(node: ir.Node, channels: int) -> tuple[int, ...]:
    """The shape of numbers for each column or output channel of a product's result."""
    if channels == 1:
        return ()
    rank = len(static_shape(node.outputs[0]) or ())
    return (channels, *[1] * (rank - 2)) if node.op_type == "Conv" else (channels,)


@dataclass(frozen=True, slots=True)
class _Integers:
    """MatMulInteger and ConvInteger whose results are made float32, and read by nobody else."""

    name: str

    def match(self, node: ir.Node) -> _Summed | Rejection | None:
        source = node.inputs[0] if node.op_type == "Cast" and node.domain == "" else None
        product = None if source is None else source.producer()
        if product is None or product.domain != "" or product.op_type not in _OF_INTEGERS:
            return None
        if node.outputs[0].dtype != ir.DataType.FLOAT or source is None or source.consumers() != (node,):
            return None
        x, w, x_zero, w_zero = (*product.inputs, None, None)[:4]
        if x is None or w is None or source.is_graph_output():
            return None
        found = Operands(_OF_INTEGERS[product.op_type], product, x, w, x_zero, w_zero)
        if reason := found.fault():
            return Rejection(f"{product.op_type} is expanded: {reason}", (product,))
        return _Summed(node, found)


@dataclass(frozen=True, slots=True)
class _Summed:
    """The Cast of a product of integers."""

    cast: ir.Node
    found: Operands

    def rewrite(self, model: ir.Model) -> Sequence[ir.Node]:
        nodes = self.found.multiplied(model)
        replace_node(model, self.cast, nodes, nodes[-1].outputs)
        replace_node(model, self.found.product, (), [None])
        return nodes
