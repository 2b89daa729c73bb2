"""MatMulInteger, ConvInteger, QLinearMatMul and QLinearConv: sums of integers that come out exact.

Products of 8-bit numbers less their zero points stay below 2^16. Where all that can be summed stays within 2^24, float32 holds
every partial sum exactly and is the fastest; a matrix product beyond that is computed in int32, a convolution in float64.
"""

from __future__ import annotations

from math import prod

import ml_dtypes
import numpy as np
import onnx_ir as ir

from ....compiler.ir.constants import constant_array
from ....runtime.symbolic.shapes import equal
from ....runtime.symbolic.sizes import greatest_of
from .body import Body
from .common import dims, dtype_of

_EXACT = 2**24  # integers up to this are float32 numbers
_CONV_ATTRIBUTES = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")


def matmul_integer(node: ir.Node) -> ir.Function:
    """(a - its zero points) @ (b - its zero points) in int32."""
    return _Product(node, (0, 2), (1, 3)).integer()


def conv_integer(node: ir.Node) -> ir.Function:
    """The convolution of (x - zero point), padded with zeros, and (w - zero points) in int32."""
    return _Convolution(node, (0, 2), (1, 3)).integer()


def qlinear_matmul(node: ir.Node) -> ir.Function:
    """saturate(round(sums * (a_scale * b_scale / y_scale)) + y_zero_point), the factor in float32 and halves to even."""
    return _Product(node, (0, 2), (3, 5)).quantized((1, 4, 6, 7))


def qlinear_conv(node: ir.Node) -> ir.Function:
    """As QLinearMatMul, with a bias in int32 that is added to the sums."""
    return _Convolution(node, (0, 2), (3, 5)).quantized((1, 4, 6, 7), bias=8)


class _Product:
    """Writes one matrix product; `a` and `b` are the positions of an operand and of its zero points."""

    wide = "int32"

    def __init__(self, node: ir.Node, a: tuple[int, int], b: tuple[int, int]) -> None:
        self.node, self.body, self.a, self.b = node, Body(node), a, b
        self.shapes = tuple(dims(node.inputs[position]) for position in (a[0], b[0]))

    def integer(self) -> ir.Function:
        return self.body.function(self.body.cast(self._sums(), "int32"))

    def quantized(self, factors: tuple[int, int, int, int], bias: int | None = None) -> ir.Function:
        """Sums scaled to the result's quanta. `factors` are the positions of a's, b's and y's scale and y's zero point."""
        body = self.body
        sums = self._sums()
        if bias is not None and self.body.has_input(bias):
            sums = body.op("Add", body.cast(sums, "int32"), self._placed(bias, self.b))
        a, b, y = (
            body.cast(self._placed(at, side), "float32") for at, side in zip(factors, (self.a, self.b, self.a), strict=False)
        )
        scaled = body.op("Mul", body.cast(sums, "float32"), body.op("Div", body.op("Mul", a, b), y))
        offset = body.cast(self._placed(factors[3], self.a), "float32")
        return body.function(saturated(body, scaled, offset, dtype_of(self.node.inputs[factors[3]])))

    def _sums(self) -> ir.Value:
        a, b = (self._centred(side, self._working_type()) for side in (self.a, self.b))
        return self.body.op("MatMul", a, b)

    def _working_type(self) -> str:
        """The cheapest type in which no sum is rounded; float32 for 8-bit floats, whose sums have no exact type."""
        if any(dtype_of(self.node.inputs[side[0]]).is_floating_point() for side in (self.a, self.b)):
            return "float32"
        return "float32" if self._bound(self.a) * self._total(self.b) <= _EXACT else self.wide

    def _centred(self, side: tuple[int, int], working: str) -> ir.Value:
        """An operand less its zero points."""
        whole = self.body.cast(self.body.input(side[0]), working)
        if not self.body.has_input(side[1]):
            return whole
        return self.body.op("Sub", whole, self.body.cast(self._placed(side[1], side), working))

    def _bound(self, side: tuple[int, int]) -> int:
        """The largest magnitude that an operand less its zero points can have."""
        zero = self.node.inputs[side[1]] if self.body.has_input(side[1]) else None
        info = ml_dtypes.iinfo(dtype_of(self.node.inputs[side[0]]).numpy())
        if zero is None:
            return max(-int(info.min), int(info.max))
        known = constant_array(zero)
        if known is None:
            return int(info.max) - int(info.min)
        return max((max(int(info.max) - int(z), int(z) - int(info.min)) for z in known.flat), default=0)

    def _total(self, side: tuple[int, int]) -> int:
        """The largest sum of magnitudes over the products' depth that the second operand can have."""
        zero = self.node.inputs[side[1]] if self.body.has_input(side[1]) else None
        known, offset = constant_array(self.node.inputs[side[0]]), constant_array(zero)
        if known is None or (zero is not None and offset is None):
            return self._bound(side) * greatest_of(prod(self.shapes[1][axis] for axis in self._depth_axes()))
        centred = known.astype(np.int32) - (0 if offset is None else self._along_weights(offset.astype(np.int32)))
        return int(np.abs(centred).sum(axis=self._depth_axes(), dtype=np.int64).max(initial=0))

    def _along_weights(self, zeros: np.ndarray) -> np.ndarray:
        """The zero points of the second operand, shaped to broadcast over it."""
        return zeros

    def _depth_axes(self) -> tuple[int, ...]:
        return (-2 if len(self.shapes[1]) > 1 else -1,)

    def _placed(self, position: int, side: tuple[int, int]) -> ir.Value:
        """A scale or zero point for every element or every row (of b: column), shaped to broadcast over the product."""
        value, shape = self.body.input(position), dims(self.node.inputs[position])
        if equal(prod(shape), 1):
            return self.body.reshape(value, []) if shape else value
        return self.body.reshape(value, [*shape, 1]) if len(shape) == 1 and side is self.a else value


class _Convolution(_Product):
    """Writes one convolution. What belongs to an output channel of the weights lies along the second dimension of the sums."""

    wide = "float64"

    def _sums(self) -> ir.Value:
        working = self._working_type()
        attributes = {name: self.node.attributes[name].value for name in _CONV_ATTRIBUTES if name in self.node.attributes}
        return self.body.op("Conv", self._centred(self.a, working), self._weights(working), **attributes)

    def _weights(self, working: str) -> ir.Value:
        whole = self.body.cast(self.body.input(self.b[0]), working)
        if not self.body.has_input(self.b[1]):
            return whole
        zeros = self.body.cast(self.body.input(self.b[1]), working)
        return self.body.op("Sub", whole, self.body.reshape(zeros, [-1, *[1] * (len(self.shapes[1]) - 1)]))

    def _depth_axes(self) -> tuple[int, ...]:
        return tuple(range(1, len(self.shapes[1])))

    def _along_weights(self, zeros: np.ndarray) -> np.ndarray:
        return zeros.reshape(-1, *[1] * (len(self.shapes[1]) - 1))

    def _placed(self, position: int, side: tuple[int, int]) -> ir.Value:
        value, shape = self.body.input(position), dims(self.node.inputs[position])
        if equal(prod(shape), 1):
            return self.body.reshape(value, []) if shape else value
        return self.body.reshape(value, [*shape, *[1] * (len(self.shapes[0]) - 2)])


def saturated(body: Body, scaled: ir.Value, offset: ir.Value | None, dtype: ir.DataType, saturate: int = 1) -> ir.Value:
    """round(scaled) + offset within the bounds of `dtype`, an integer of at most 24 bits; a small float is not rounded first."""
    if dtype.is_floating_point():
        number = body.cast(scaled, "float32")
        return body.op("Cast", number if offset is None else body.op("Add", number, offset), to=int(dtype), saturate=saturate)
    info = ml_dtypes.iinfo(dtype.numpy())
    low, high = (np.array(limit, np.float32) for limit in (info.min, info.max))
    whole = body.cast(body.op("Round", scaled), "float32")
    return body.cast(body.op("Clip", whole if offset is None else body.op("Add", whole, offset), low, high), dtype)
