"""QuantizeLinear and DequantizeLinear, by tensor, by axis and by blocks; DynamicQuantizeLinear."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import onnx_ir as ir

from ....compiler.ir.constants import constant_tensor, scalar_constant
from ....runtime.symbolic.shapes import equal, same_shape
from ....runtime.symbolic.sizes import hint_of
from .body import Body, ints
from .common import dims, dtype_of
from .integer_products import saturated

_ROW_RANKS, _LEAST_ROW = 3, 32  # of tensors whose last dimension is that of rows, and its extent


@dataclass(frozen=True)
class Placement:
    """How a scale or zero point gets the place of the elements that it belongs to: itself reshaped to `shape`, so that it
    broadcasts, and, in blocks, each of its elements repeated `repeats` times along `axis`, of which the first `extent` count.
    """

    shape: tuple[int, ...]
    axis: int = 0
    repeats: int = 1
    extent: int = 0

    def write(self, body: Body, value: ir.Value) -> ir.Value:
        """The value in its place, in a body."""
        apart = body.reshape(value, self.shape)
        if self.repeats == 1:
            return apart
        before, after = self.shape[: self.axis + 1], self.shape[self.axis + 1 :]
        copies = body.op("Expand", body.reshape(value, (*before, 1, *after)), body.shape((*before, self.repeats, *after)))
        whole = body.reshape(copies, (*before[:-1], before[-1] * self.repeats, *after))
        if equal(before[-1] * self.repeats, self.extent):
            return whole
        return body.op("Slice", whole, ints([0]), body.shape([self.extent]), ints([self.axis]))

    def apply(self, array: np.ndarray) -> np.ndarray:
        """The same of an array."""
        repeated = np.repeat(array.reshape(self.shape), self.repeats, axis=self.axis) if self.repeats > 1 else array
        return repeated[(slice(None),) * self.axis + (slice(self.extent),)] if self.repeats > 1 else array.reshape(self.shape)


def placement_of(node: ir.Node) -> Placement | None:
    """Where the scale of a QuantizeLinear or DequantizeLinear belongs; None where its shape is none of ONNX's."""
    shape, parts = dims(node.inputs[0]), dims(node.inputs[1])
    axis, block = node.attributes.get_int("axis", 1), node.attributes.get_int("block_size", 0)
    if equal(prod(parts), 1) and not block and len(parts) <= max(len(shape), 1):
        return Placement(())
    axis = axis % len(shape) if len(shape) > 1 and -len(shape) <= axis < len(shape) else 0
    if not block and len(parts) == 1 and shape and equal(shape[axis], parts[0]):
        return Placement((*[1] * axis, parts[0], *[1] * (len(shape) - axis - 1)))
    if not block or len(parts) != len(shape):
        return None
    if not same_shape(parts, (*shape[:axis], -(-shape[axis] // block), *shape[axis + 1 :])):
        return None
    return Placement(parts, axis, block, shape[axis])


def dequantize_linear(node: ir.Node) -> ir.Function | None:
    """(x - zero point) * scale, the product in float32. Of constants it is a constant, computed when it is read."""
    x, place = node.inputs[0], placement_of(node)
    if place is None:
        return None
    result = ir.DataType(node.attributes.get_int("output_dtype", 0) or int(dtype_of(node.inputs[1])))
    if result == ir.DataType.FLOAT8E8M0:
        return None
    body = Body(node)
    if tensors := _constants(node):
        tensor = ir.LazyTensor(lambda: ir.tensor(_dequantized(tensors, place, result)), dtype=result, shape=ir.Shape(dims(x)))
        return body.function(body.constant(tensor))
    is_wide = dtype_of(x) in (ir.DataType.INT32, ir.DataType.INT16, ir.DataType.UINT16)
    exact = "int32" if is_wide else "float32"
    centred = body.cast(body.input(0), exact)
    if body.has_input(2):
        centred = body.op("Sub", centred, body.cast(place.write(body, body.input(2)), exact))
    factor = body.cast(place.write(body, body.input(1)), "float32")
    return body.function(body.cast(body.op("Mul", body.cast(centred, "float32"), factor), result))


def _constants(node: ir.Node) -> list[ir.TensorProtocol | None] | None:
    """The tensors of a DequantizeLinear of constants: x, scale and zero point, or None for that; None where one changes."""
    tensors = [None if value is None else constant_tensor(value) for value in (*node.inputs, None)[:3]]
    changing = [value for value, tensor in zip(node.inputs, tensors, strict=False) if value is not None and tensor is None]
    return None if changing else tensors


def _dequantized(tensors: list[ir.TensorProtocol | None], place: Placement, result: ir.DataType) -> np.ndarray:
    x, scale, zero = (None if tensor is None else tensor.numpy() for tensor in tensors)
    assert x is not None
    assert scale is not None
    exact = np.int32 if x.dtype.kind in "iu" or x.dtype.name.startswith(("int", "uint")) else np.float32
    centred = x.astype(exact)
    if zero is not None:
        centred -= place.apply(zero.astype(exact))
    product: np.ndarray = np.multiply(centred, place.apply(scale.astype(np.float32)), dtype=np.float32)
    return product.astype(result.numpy(), copy=False)


def quantize_linear(node: ir.Node) -> ir.Function | None:
    """saturate(round(x / scale) + zero point), halves to even.

    The quotient has the scale's type or that of `precision`; a scale that has no arithmetic of its own, or an integer one,
    divides in float32 or float64.
    """
    scale, place, body = dtype_of(node.inputs[1]), placement_of(node), Body(node)
    zero = node.inputs[2] if body.has_input(2) else None
    result = ir.DataType(node.attributes.get_int("output_dtype", 0) or int(ir.DataType.UINT8)) if zero is None else dtype_of(zero)
    if place is None:
        return None
    working = ir.DataType(node.attributes.get_int("precision", 0) or int(scale))
    if working in (ir.DataType.INT32, ir.DataType.FLOAT8E8M0):
        working = ir.DataType.DOUBLE if dtype_of(node.inputs[0]) == ir.DataType.INT32 else ir.DataType.FLOAT
    wide, divisor = body.cast(body.input(0), working), body.cast(place.write(body, body.input(1)), working)
    offset = None if zero is None else body.cast(place.write(body, body.input(2)), "float32")
    known = scalar_constant(node.inputs[1])
    quotient = wide if known == 1 else body.op("Div", wide, divisor)
    if working != ir.DataType.DOUBLE:
        quotient = body.cast(quotient, "float32")  # Round takes bfloat16 since opset 22 only
    return body.function(saturated(body, quotient, offset, result, node.attributes.get_int("saturate", 1)))


def dynamic_quantize_linear(node: ir.Node) -> str:
    """ONNX's own body, but for zeros alone, whose scale is 0 there, and quotients 0 / 0: here it is 1, as in ONNX Runtime.

    The range of each row comes first, which one kernel finds for all rows; what follows of these is one kernel again, as the
    greatest is looked for in numbers that depend on the least (`above`, which are those of `high`).
    """
    shape, byte = dims(node.inputs[0]), int(ir.DataType.UINT8)
    has_rows = 1 < len(shape) <= _ROW_RANKS and hint_of(shape[-1]) >= _LEAST_ROW and hint_of(prod(shape[:-1])) > 1
    rows = "last = Constant<value_ints=[-1]>() low = ReduceMin<keepdims=1>(i0, last) high = ReduceMax<keepdims=1>(i0, last)"
    if not has_rows:
        rows = "low = Identity(i0) high = Identity(i0)"
    return f"""{rows} lowest = ReduceMin<keepdims=1>(low)
        {"above = Max(high, lowest)" if has_rows else "above = Identity(high)"} highest = ReduceMax<keepdims=1>(above)
        zero = Constant<value_float=0.0>() one = Constant<value_float=1.0>() levels = Constant<value_float=255.0>()
        least = Min(lowest, zero) greatest = Max(highest, zero)
        range = Sub(greatest, least) step = Div(range, levels) is_flat = Equal(step, zero) scale = Where(is_flat, one, step)
        below = Div(least, scale) place = Sub(zero, below) held = Clip(place, zero, levels) point = Round(held)
        y1 = Squeeze(scale) offset = Squeeze(point) y2 = Cast<to={byte}>(offset)
        quotient = Div(i0, y1) nearest = Round(quotient) moved = Add(nearest, offset) fitted = Clip(moved, zero, levels)
        y = Cast<to={byte}>(fitted)"""
