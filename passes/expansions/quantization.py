"""QuantizeLinear and DequantizeLinear."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import onnx_ir as ir

from .common import dims

_FLOAT = int(ir.DataType.FLOAT)
_INT32 = int(ir.DataType.INT32)


def dequantize_linear(node: ir.Node) -> str | None:
    """(x - zero point) * scale, in float32 where the scale is narrower."""
    x, scale = node.inputs[0], node.inputs[1]
    zero = node.inputs[2] if len(node.inputs) > 2 else None
    place = _placed(node)
    if x is None or scale is None or place is None or x.dtype is None or scale.dtype in (None, ir.DataType.FLOAT8E8M0):
        return None
    exact = _FLOAT if x.dtype.is_floating_point() else _INT32
    result = node.attributes.get_int("output_dtype", 0) or int(scale.dtype)
    body = f"whole = Cast<to={exact}>(i0) "
    if zero is not None:
        body += f"{place('i2', 'zero')} offset = Cast<to={exact}>(zero) centred = Sub(whole, offset) "
    else:
        body += "centred = Identity(whole) "
    return (
        body
        + f"""number = Cast<to={_FLOAT}>(centred) {place("i1", "scale")} factor = Cast<to={_FLOAT}>(scale)
        product = Mul(number, factor) y = Cast<to={result}>(product)"""
    )


def quantize_linear(node: ir.Node) -> str | None:
    """saturate(round(x / scale) + zero point), halves to even; the quotient in x's type, or as `precision` says."""
    x, scale = node.inputs[0], node.inputs[1]
    zero = node.inputs[2] if len(node.inputs) > 2 else None
    place = _placed(node)
    if x is None or scale is None or x.dtype is None:
        return None
    result = zero.dtype if zero is not None else ir.DataType(node.attributes.get_int("output_dtype", 0) or int(ir.DataType.UINT8))
    if place is None or result is None or not x.dtype.is_floating_point() or scale.dtype == ir.DataType.FLOAT8E8M0:
        return None
    working = node.attributes.get_int("precision", 0) or int(x.dtype)
    body = f"""{place("i1", "scale")} wide = Cast<to={working}>(i0) divisor = Cast<to={working}>(scale)
        exact = Div(wide, divisor) quotient = Cast<to={_FLOAT}>(exact) """
    offset = ""
    if zero is not None:
        offset = f"{place('i2', 'zero')} offset = Cast<to={_FLOAT}>(zero) "
    if result.is_floating_point():
        total = offset + "total = Add(quotient, offset) " if zero is not None else "total = Identity(quotient) "
        return body + total + f"y = Cast<to={int(result)}, saturate={node.attributes.get_int('saturate', 1)}>(total)"
    info = ml_dtypes.iinfo(result.numpy())
    if info.max > 2**24:
        return None
    total = offset + "total = Add(rounded, offset) " if zero is not None else "total = Identity(rounded) "
    return (
        body
        + f"""rounded = Round(quotient) {total}
        low = Constant<value_float={float(info.min)}>() high = Constant<value_float={float(info.max)}>()
        bounded = Clip(total, low, high) y = Cast<to={int(result)}>(bounded)"""
    )


def _placed(node: ir.Node) -> Callable[[str, str], str] | None:
    """How to give a scale or zero point the place of the elements that it belongs to; None where its shape is none of ONNX's."""
    x, scale = node.inputs[0], node.inputs[1]
    shape, parts = dims(x), dims(scale)
    axis, block = node.attributes.get_int("axis", 1), node.attributes.get_int("block_size", 0)
    if int(np.prod(parts)) == 1 and not block and len(parts) <= len(shape):
        return lambda name, placed: f"{placed} = Identity({name}) "
    if len(parts) == 1 and -len(shape) <= axis < len(shape) and shape[axis] == parts[0]:
        ones = [1] * len(shape)
        ones[axis] = parts[0]
        return lambda name, placed: f"{placed}_shape = Constant<value_ints={ones}>() {placed} = Reshape({name}, {placed}_shape) "
    axis %= max(len(shape), 1)
    if not block or len(parts) != len(shape) or parts[axis] * block != shape[axis]:
        return None
    apart = [*parts[: axis + 1], 1, *parts[axis + 1 :]]
    spread = [*parts[: axis + 1], block, *parts[axis + 1 :]]
    return lambda name, placed: (
        f"""{placed}_apart = Constant<value_ints={apart}>() {placed}_1 = Reshape({name}, {placed}_apart)
        {placed}_spread = Constant<value_ints={spread}>() {placed}_2 = Expand({placed}_1, {placed}_spread)
        {placed}_whole = Constant<value_ints={list(shape)}>() {placed} = Reshape({placed}_2, {placed}_whole) """
    )
