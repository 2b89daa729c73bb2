"""The 8-bit operands of a product, and the nodes that multiply them as integers."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import onnx_ir as ir

from ....compiler.ir.constants import add_constant, constant_array
from ....compiler.ir.matching import producer_of, static_shape
from ....compiler.ir.rewriter import operation
from ....runtime.precision import LONGEST_SUM
from ..products import CONVOLUTIONS

BYTES = (ir.DataType.UINT8, ir.DataType.INT8)
_FLOAT = int(ir.DataType.FLOAT)
_K_PACK = 4  # neighbours along k that a dot product takes
LARGEST_FLOAT = 2**24  # up to which float32 holds all integers


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
        if self.op_type == "ConvTranspose":
            return 1
        is_first = self.op_type == "Conv" or (self.op_type == "Gemm" and self.product.attributes.get_int("transB", 0) != 0)
        return 0 if is_first else len(static_shape(self.w) or (0,)) - 1

    def fault(self) -> str:
        """Why no kernel multiplies them as they lie; empty if one does."""
        shape = static_shape(self.w)
        if shape is None or self.product.outputs[0].shape is None or not static_shape(self.product.outputs[0]):
            return "shapes are not static"
        if self.x_zero is not None and prod(static_shape(self.x_zero) or (0,) * (self.x_zero.shape is None)) != 1:
            return "activations have more than one zero point"
        return self._weight_fault() or self._size_fault(shape)

    def _weight_fault(self) -> str:
        if constant_array(self.w) is None or self.w.dtype not in BYTES:
            return "weights are no constants of 8 bits"
        if len(static_shape(self.w) or ()) < 2:
            return "weights are a vector"
        zeros = self._weight_zeros()
        if zeros is None:
            return "zero points of weights are no constants"
        if zeros.size not in (1, (static_shape(self.w) or (1,))[self.channel_axis]):
            return "zero points of weights do not belong to columns"
        if self.op_type == "ConvTranspose" and self._has("group", 1):
            return "a transposed convolution has groups, which share the scales of their channels"
        if self._differences().any() and self.op_type == "ConvTranspose":
            return "zero points of weights need sums of activations, which a transposed convolution has none of"
        if self._differences().any() and (self._has("group", 1) or self._has("transA", 0)):
            return "zero points of weights need sums of activations, which groups and transposed activations have none of"
        return ""

    def _has(self, attribute: str, default: int) -> bool:
        return self.product.attributes.get_int(attribute, default) != default

    def _size_fault(self, shape: tuple[int, ...]) -> str:
        if self.op_type in CONVOLUTIONS and (reason := self._word_fault(shape)):
            return reason
        if self.depth > LONGEST_SUM:
            return f"sums of {self.depth} products could pass 2^31"
        return ""

    def _word_fault(self, shape: tuple[int, ...]) -> str:
        """Why neither channels nor neighbouring taps of a row fill words."""
        channels, groups = shape[1], self.product.attributes.get_int("group", 1)
        if self.op_type == "ConvTranspose":
            return f"{shape[0]} channels fill no words of {_K_PACK}" if shape[0] % _K_PACK else ""
        if channels % _K_PACK == 0 or (channels == 1 and groups > 1):  # those of depthwise windows are multiplied one by one
            return ""
        dilations = self.product.attributes.get_ints("dilations", (1,))
        has_taps = len(shape) > 2 and shape[-1] > 1 and dilations[-1] == 1
        return "" if has_taps else f"{channels} channels of a group fill no words of {_K_PACK}"

    @property
    def depth(self) -> int:
        """Products that are summed for each element of the result."""
        shape = static_shape(self.w) or ()
        if self.op_type in CONVOLUTIONS:
            return prod(shape) // max(shape[self.channel_axis], 1)
        return prod(shape[-2:]) // max(shape[self.channel_axis], 1)

    def largest_sum(self) -> int:
        """The largest magnitude that a sum, and each part of one, can have with these weights."""
        weights, zeros, known = constant_array(self.w), self._weight_zeros(), constant_array(self.x_zero)
        assert weights is not None
        assert zeros is not None
        axis, info = self.channel_axis, np.iinfo(self.x.dtype.numpy() if self.x.dtype else np.uint8)
        shape = [-1 if place == axis else 1 for place in range(weights.ndim)] if zeros.size > 1 else ()
        others = tuple(place for place in range(weights.ndim) if place != axis)
        summed = others if self.op_type in CONVOLUTIONS else (1 if axis == 0 else weights.ndim - 2,)
        parts, differences = [weights.astype(np.int32) - zeros.reshape(shape)], self._differences()
        if differences.any():  # multiplied without them, for which sums of activations stand in
            parts.append(parts[0] - differences.reshape(shape))
        totals = [int(np.abs(part).sum(axis=summed, dtype=np.int64).max(initial=0)) for part in parts]
        total = max(*totals, int(np.abs(differences).max(initial=0)) * self.depth)
        if self.x_zero is None:
            return total * max(-int(info.min), int(info.max))
        zero = None if known is None else int(known.reshape(()))
        return total * (255 if zero is None else max(int(info.max) - zero, zero - int(info.min)))

    def multiplied(self, model: ir.Model) -> list[ir.Node]:
        """New nodes, the last of which makes the sums of integers as float32."""
        widened = operation("Cast", [self._signed_weights(model)], to=_FLOAT)
        nodes, zero = list[ir.Node](), self._scalar_zero(model)
        reshape = None if zero is None or zero is self.x_zero else zero.producer()
        if reshape is not None:
            nodes.append(reshape)
        less = self._less_zero(model, zero)
        kept = [value for name, value in self.product.attributes.items() if name not in ("alpha", "beta")]
        product = ir.Node("", self.op_type, [less.outputs[0], widened.outputs[0]], kept)
        nodes += [less, widened, product]
        return nodes + self._corrected(model, zero, product, kept) if self._differences().any() else nodes

    def _scalar_zero(self, model: ir.Model) -> ir.Value | None:
        """The zero point of activations without dimensions; None where it is zero."""
        zero, known = self.x_zero, constant_array(self.x_zero)
        if zero is None or (known is not None and not known.any()):
            return None
        if static_shape(zero) == ():
            return zero
        if known is not None:
            return add_constant(model, known.reshape(()), str(zero.name))
        return operation("Reshape", [zero, add_constant(model, np.array([], np.int64), f"{zero.name}_shape")]).outputs[0]

    def _less_zero(self, model: ir.Model, zero: ir.Value | None) -> ir.Node:
        """The activations less their zero point."""
        if zero is None:
            return operation("Cast", [self.x], to=_FLOAT)
        return operation("DequantizeLinear", [self.x, add_constant(model, np.array(1, np.float32), f"{self.x.name}_one"), zero])

    def _weight_zeros(self) -> np.ndarray | None:
        """The zero points of weights, one, or one for each channel."""
        zeros = np.zeros(1, np.int32) if self.w_zero is None else constant_array(self.w_zero)
        if zeros is None:
            return None
        flat = zeros.astype(np.int32).reshape(-1)
        return flat[:1] if flat.size and (flat == flat[0]).all() else flat

    def _differences(self) -> np.ndarray:
        """How much more the weights are, less their zero points, than those that are multiplied: one, or one for each channel."""
        zeros = self._weight_zeros()
        assert zeros is not None
        difference: np.ndarray = (128 if self.w.dtype == ir.DataType.UINT8 else 0) - zeros
        return difference

    def _signed_weights(self, model: ir.Model) -> ir.Value:
        """The weights as int8: unsigned ones less 128, in a new constant."""
        if self.w.dtype == ir.DataType.INT8:
            return self.w
        numbers = constant_array(self.w)
        assert numbers is not None
        return add_constant(model, (numbers ^ np.uint8(128)).view(np.int8), f"{self.w.name}_signed")

    def _corrected(self, model: ir.Model, zero: ir.Value | None, product: ir.Node, kept: list[ir.Attr]) -> list[ir.Node]:
        """Sums of activations over k, times what the weights lack, added to the product."""
        less = self._less_zero(model, zero)  # its own: kernels read what they alone widen
        if self.op_type == "Conv":  # one more output channel, whose weights are 1
            ones = np.ones((1, *(static_shape(self.w) or ())[1:]), np.int8)
            widened = operation("Cast", [add_constant(model, ones, f"{self.w.name}_ones")], to=_FLOAT)
            nodes = [less, widened, ir.Node("", "Conv", [less.outputs[0], widened.outputs[0]], kept)]
        else:
            axes = add_constant(model, np.array([-1], np.int64), f"{self.x.name}_axes")
            nodes = [less, operation("ReduceSum", [less.outputs[0], axes], keepdims=1)]
        differences = self._differences().astype(np.float32)
        placed = add_constant(model, differences.reshape(channel_shape(self, differences.size)), f"{self.w.name}_lacks")
        scaled = operation("Mul", [nodes[-1].outputs[0], placed])
        return [*nodes, scaled, operation("Add", [product.outputs[0], scaled.outputs[0]])]


def channel_shape(found: Operands, channels: int) -> tuple[int, ...]:
    """The shape of numbers for each column or output channel of a product's result; -1: all of them."""
    if channels == 1:
        return ()
    rank = len(static_shape(found.product.outputs[0]) or ())
    return (channels, *[1] * (rank - 2)) if found.op_type in CONVOLUTIONS else (channels,)


def placed_constant(model: ir.Model, found: Operands, array: np.ndarray, name: str) -> ir.Value:
    """A constant of numbers for the result's columns or output channels, shaped to broadcast over it."""
    return add_constant(model, array.reshape(channel_shape(found, array.size)), name)


def known_floats(value: ir.Value | None) -> np.ndarray | None:
    """A constant of float32, which may be dequantized from a bias or scalar of integers; None if it is not."""
    array = constant_array(value)
    if array is not None:
        return array if array.dtype == np.float32 else None
    bias = producer_of(value, "DequantizeLinear")
    if bias is None or bias.inputs[0] is None or bias.inputs[0].dtype not in (ir.DataType.INT32, *BYTES):
        return None
    numbers, scales, zeros = (constant_array(one) for one in (*bias.inputs, None)[:3])
    if (
        numbers is None
        or scales is None
        or numbers.ndim > 1
        or scales.size not in (1, numbers.size)
        or scales.dtype != np.float32
    ):
        return None
    centred = (numbers.astype(np.int32) - (0 if zeros is None else zeros.astype(np.int32))).astype(np.float32)
    result: np.ndarray = centred * scales
    return result.reshape(numbers.shape)
