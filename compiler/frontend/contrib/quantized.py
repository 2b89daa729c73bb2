"""Operators on 8-bit integers with scales and zero points: dequantize, compute, quantize; products stay in integers."""

from __future__ import annotations

import onnx_ir as ir

from .activations import Results, add_all
from .call import Call, RefusedNodeError
from .normalization import embedding_sum, mask_length
from .products import channels_first, channels_last

_POOL = ("auto_pad", "ceil_mode", "count_include_pad", "kernel_shape", "pads", "strides")
_CONV = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
_FLOAT, _INT32 = int(ir.DataType.FLOAT), int(ir.DataType.INT32)


def quantize_linear(call: Call) -> Results:
    """ONNX's own, which had fewer types when ONNX Runtime made this one."""
    return (call.op("QuantizeLinear", call.input(0), call.input(1), call.optional(2), **call.forwarded("axis")),)


def dequantize_linear(call: Call) -> Results:
    """ONNX's own, which had fewer types when ONNX Runtime made this one."""
    return (call.op("DequantizeLinear", call.input(0), call.input(1), call.optional(2), **call.forwarded("axis")),)


def binary(call: Call) -> Results:
    """QLinearAdd and QLinearMul."""
    a, b = _dequantized(call, 0), _dequantized(call, 3)
    return (_quantized(call, call.op(call.op_type.removeprefix("QLinear"), a, b), 6, call.input(0)),)


def sigmoid(call: Call) -> Results:
    """QLinearSigmoid"""
    return (_quantized(call, call.op("Sigmoid", _dequantized(call, 0)), 3, call.input(0)),)


def leaky_relu(call: Call) -> Results:
    """QLinearLeakyRelu"""
    y = call.op("LeakyRelu", _dequantized(call, 0), alpha=call.number("alpha", 0.01))
    return (_quantized(call, y, 3, call.input(0)),)


def softmax(call: Call) -> Results:
    """QLinearSoftmax; before opset 13 over all axes from `axis` on, as one."""
    x, axis = _dequantized(call, 0), call.integer("axis", -1)
    if call.integer("opset") >= 13 or axis % call.rank(x) == call.rank(x) - 1:
        y = call.op("Softmax", x, axis=axis)
    else:
        flat = call.op("Reshape", x, [*[0] * (axis % call.rank(x)), -1])
        y = call.op("Reshape", call.op("Softmax", flat, axis=-1), call.op("Shape", x))
    return (_quantized(call, y, 3, call.input(0)),)


def average_pool(call: Call) -> Results:
    """QLinearAveragePool"""
    return (_pooled(call, "AveragePool", call.forwarded(*_POOL)),)


def global_average_pool(call: Call) -> Results:
    """QLinearGlobalAveragePool"""
    return (_pooled(call, "GlobalAveragePool", {}),)


def reduce_mean(call: Call) -> Results:
    """QLinearReduceMean"""
    axes = call.integers("axes")
    y = call.op("ReduceMean", _dequantized(call, 0), axes, keepdims=call.integer("keepdims"))
    return (_quantized(call, y, 3, call.input(0)),)


def concat(call: Call) -> Results:
    """QLinearConcat: the scale and zero point of the result, then those of each operand behind it."""
    parts = [_dequantized(call, position) for position in range(2, call.input_count, 3)]
    return (_quantized(call, call.op("Concat", *parts, axis=call.integer("axis")), 0, call.input(2)),)


def where(call: Call) -> Results:
    """QLinearWhere"""
    y = call.op("Where", call.input(0), _dequantized(call, 1), _dequantized(call, 4))
    return (_quantized(call, y, 7, call.input(1)),)


def conv(call: Call) -> Results:
    """QLinearConv, whose x and y may be channels last."""
    is_last = call.integer("channels_last", 0)
    x = channels_first(call, call.input(0)) if is_last else call.input(0)
    rest = [call.input(position) for position in range(1, 8)]
    y = call.op("QLinearConv", x, *rest, call.optional(8), **call.forwarded(*_CONV))
    return (channels_last(call, y) if is_last else y,)


def gemm(call: Call) -> Results:
    """alpha * a_scale * b_scale * (a @ b + c) for the integers a and b, quantized where y has a scale."""
    a, b = (
        call.op("Transpose", call.input(position), perm=[1, 0]) if call.integer(name, 0) else call.input(position)
        for position, name in ((0, "transA"), (3, "transB"))
    )
    total = call.op("Cast", call.op("MatMulInteger", a, b, call.input(2), call.input(5)), to=_FLOAT)
    bias = call.optional(6)
    total = total if bias is None else call.op("Add", total, call.op("Cast", bias, to=_FLOAT))
    scale = call.op("Mul", call.input(1), call.input(4))
    alpha = call.number("alpha", 1.0)
    scale = scale if alpha == 1 else call.op("Mul", scale, call.like(scale, alpha))
    y = call.op("Mul", total, scale)
    return (y if call.optional(7) is None else _quantized(call, y, 7, call.input(0)),)


def matmul_to_float(call: Call) -> Results:
    """a_scale * b_scale * (a @ b) + bias for the integers a and b."""
    product = call.op("MatMulInteger", call.input(0), call.input(1), call.optional(4), call.optional(5))
    y = scaled_product(call, product, call.input(2), call.input(3))
    return (add_all(call, y, call.optional(6)),)


def scaled_product(call: Call, product: ir.Value, a_scale: ir.Value, b_scale: ir.Value) -> ir.Value:
    """Sums of integers times both scales, in the type of these; in float32, as sums are larger than what float16 holds."""
    kind, scales = call.dtype(b_scale), (a_scale, b_scale)
    if kind != ir.DataType.FLOAT:
        scales = (call.op("Cast", a_scale, to=_FLOAT), call.op("Cast", b_scale, to=_FLOAT))
    y = call.op("Mul", call.op("Cast", product, to=_FLOAT), call.op("Mul", *scales))
    return y if kind == ir.DataType.FLOAT else call.op("Cast", y, to=int(kind))


def dynamic_quantize_matmul(call: Call) -> Results:
    """`matmul_to_float` of a quantized to uint8 by its own range."""
    a, scale, zero = call.ops(3, "DynamicQuantizeLinear", call.input(0))
    product = call.op("MatMulInteger", a, call.input(1), zero, call.optional(3))
    y = call.op("Mul", call.op("Cast", product, to=_FLOAT), call.op("Mul", scale, call.input(2)))
    return (add_all(call, y, call.optional(4)),)


def multiply_integers(call: Call) -> Results:
    """(a - a_zero_point) * (b - b_zero_point) in int32"""
    return (call.op("Mul", _centred(call, 0), _centred(call, 2)),)


def sum_integers(call: Call) -> Results:
    """The sum of 8-bit integers in int32"""
    x = call.op("Cast", call.input(0), to=_INT32)
    return (call.op("ReduceSum", x, call.integers("axes"), keepdims=call.integer("keepdims")),)


def embed_layer_normalization(call: Call) -> Results:
    """EmbedLayerNormalization of tables of 8-bit integers, which are dequantized row by row."""
    ids, segments = call.input(0), call.optional(1)
    positions = call.op("Slice", call.input(3), [0], call.op("Shape", ids, start=1, end=2), [0])
    word = _scaled(call, call.op("Gather", call.input(2), ids, axis=0), 8, 13)
    place = _scaled(call, positions, 9, 14)
    kind = None if segments is None else _scaled(call, call.op("Gather", call.input(4), segments, axis=0), 10, 15)
    gamma, beta = _scaled(call, call.input(5), 11, 16), _scaled(call, call.input(6), 12, 17)
    total = embedding_sum(call, word, place, kind)
    y = call.op("LayerNormalization", total, gamma, beta, axis=-1, epsilon=call.number("epsilon", 1e-12))
    return y, mask_length(call, ids, call.optional(7))


def _pooled(call: Call, op_type: str, attributes: dict[str, ir.Attr]) -> ir.Value:
    x, is_last = _dequantized(call, 0), call.integer("channels_last", 0)
    y = call.op(op_type, channels_first(call, x) if is_last else x, **attributes)
    return _quantized(call, channels_last(call, y) if is_last else y, 3, call.input(0))


def _dequantized(call: Call, position: int) -> ir.Value:
    """The float of an integer input, which its scale and zero point follow."""
    return _scaled(call, call.input(position), position + 1, position + 2)


def _scaled(call: Call, x: ir.Value, scale: int, zero: int) -> ir.Value:
    """(x - zero point) * scale; both are inputs, of one element."""
    return call.op("DequantizeLinear", x, _scalar(call, call.input(scale)), _scalar(call, call.optional(zero)))


def _quantized(call: Call, y: ir.Value, position: int, like: ir.Value) -> ir.Value:
    """y as integers of the type of `like`, by the scale and zero point at a position."""
    scale, zero = _scalar(call, call.input(position)), _scalar(call, call.optional(position + 1))
    return call.op("QuantizeLinear", y, scale, call.like(like, 0) if zero is None else zero)


def _scalar(call: Call, value: ir.Value | None) -> ir.Value | None:
    """A parameter of one element without its dimensions."""
    if value is None or call.rank(value) == 0:
        return value
    if call.size(value, 0) != 1:
        raise RefusedNodeError("has a scale or zero point of more than one element")
    return call.op("Squeeze", value)


def _centred(call: Call, position: int) -> ir.Value:
    x, zero = call.op("Cast", call.input(position), to=_INT32), call.optional(position + 1)
    return x if zero is None else call.op("Sub", x, call.op("Cast", zero, to=_INT32))
