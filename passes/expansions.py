"""Bodies, in ONNX's text, of operators that ONNX defines by prose alone: what `decompose` puts in their place."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir

_FLOAT = int(ir.DataType.FLOAT)
_INT32 = int(ir.DataType.INT32)
_MAX_CLASSES = 4096  # of a OneHot, which become a constant


def expansion_of(node: ir.Node, opset: int) -> ir.Function | None:
    """A body for this node; None where there is none for its operator, types or shapes."""
    write = _BODIES.get(node.op_type) if node.domain == "" else None
    body = None if write is None or not _is_static(node) else write(node)
    if body is None:
        return None
    names = ", ".join(f"i{position}" for position in range(len(node.inputs)))
    text = f'<domain: "prefuse.expansions", opset_import: ["": {opset}]> {node.op_type} ({names}) => (y) {{ {body} }}'
    return ir.serde.deserialize_function(onnx.parser.parse_function(text))


def _is_static(node: ir.Node) -> bool:
    return all(
        value is None or (value.dtype is not None and value.shape is not None and value.shape.is_static())
        for value in node.inputs
    )


def _lp_normalization(node: ir.Node) -> str:
    """x / norm, which is 0 where the norm is."""
    order, axis = node.attributes.get_int("p", 2), node.attributes.get_int("axis", -1)
    return f"""axes = Constant<value_ints=[{axis}]>() norm = ReduceL{order}<keepdims=1>(i0, axes)
        none = Constant<value_int=0>() zero = CastLike(none, norm) empty = Equal(norm, zero)
        quotient = Div(i0, norm) y = Where(empty, zero, quotient)"""


def _dequantize(node: ir.Node) -> str | None:
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


def _quantize(node: ir.Node) -> str | None:
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


def _one_hot(node: ir.Node) -> str | None:
    """Whether each class is the index, counted from the end where that is negative; an index out of range is no class."""
    indices, result = _dims(node.inputs[0]), node.outputs[0]
    if result.shape is None or not result.shape.is_static():
        return None
    axis = node.attributes.get_int("axis", -1) % len(result.shape)
    depth = int(result.shape.numpy()[axis])
    if not 0 < depth <= _MAX_CLASSES:
        return None
    column = [depth if d == axis else 1 for d in range(len(indices) + 1)]
    return f"""row = Constant<value_ints={list(range(depth))}>()
        column = Constant<value_ints={column}>() classes = Reshape(row, column)
        axis = Constant<value_ints=[{axis}]>() spread = Unsqueeze(i0, axis) index = Cast<to={int(ir.DataType.INT64)}>(spread)
        zero = Constant<value_int=0>() one = Constant<value_int=1>() depth = Constant<value_int={depth}>()
        negative = Less(index, zero) turned = Add(index, depth) found = Where(negative, turned, index) hit = Equal(found, classes)
        off = Gather(i2, zero) on = Gather(i2, one) y = Where(hit, on, off)"""


def _placed(node: ir.Node) -> Callable[[str, str], str] | None:
    """How to give a scale or zero point the place of the elements that it belongs to; None where its shape is none of ONNX's."""
    x, scale = node.inputs[0], node.inputs[1]
    shape, parts = _dims(x), _dims(scale)
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


def _dims(value: ir.Value | None) -> tuple[int, ...]:
    return tuple(value.shape.numpy()) if value is not None and value.shape is not None else ()


_BODIES: dict[str, Callable[[ir.Node], str | None]] = {
    "DequantizeLinear": _dequantize,
    "LpNormalization": _lp_normalization,
    "OneHot": _one_hot,
    "QuantizeLinear": _quantize,
}
