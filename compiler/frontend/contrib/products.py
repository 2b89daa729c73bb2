"""Matrix products and convolutions with transpositions, scales, layouts and activations of their own."""

from __future__ import annotations

import onnx_ir as ir

from .activations import Results, activate, add_all, named_parameters
from .call import Call, RefusedNodeError

_WINDOW = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")


def fused_matmul(call: Call) -> Results:
    """alpha * (transposed a @ transposed b)"""
    return (_fused_product(call),)


def fused_matmul_activation(call: Call) -> Results:
    """activation(alpha * (transposed a @ transposed b))"""
    name = call.text("activation", "")
    call.ignore("activation_axis")
    return (activate(call, _fused_product(call), name, named_parameters(call, name)),)


def fused_gemm(call: Call) -> Results:
    """activation(Gemm(a, b, c))"""
    attributes = call.forwarded("alpha", "beta", "transA", "transB")
    product = call.op("Gemm", call.input(0), call.input(1), call.optional(2), **attributes)
    name = call.text("activation", "")
    parameters = (call.number("leaky_relu_alpha"),) if call.forwarded("leaky_relu_alpha") else named_parameters(call, name)
    return (activate(call, product, name, parameters),)


def gemm_fast_gelu(call: Call) -> Results:
    """Gelu(x @ w + bias) by tanh."""
    product = call.op("MatMul", call.input(0), call.input(1))
    return (call.op("Gelu", add_all(call, product, call.optional(2)), approximate="tanh"),)


def fused_conv(call: Call) -> Results:
    """activation(Conv(x, w, b) + z)"""
    product = call.op("Conv", call.input(0), call.input(1), call.optional(2), **call.forwarded(*_WINDOW))
    total = add_all(call, product, call.optional(3))
    return (activate(call, total, call.text("activation", ""), call.numbers("activation_params")),)


def nhwc_fused_conv(call: Call) -> Results:
    """activation(Conv(x, w, b) + z) of channels-last x and z; the weight as ONNX has it."""
    x = channels_first(call, call.input(0))
    product = call.op("Conv", x, call.input(1), call.optional(2), **call.forwarded(*_WINDOW))
    total = add_all(call, channels_last(call, product), call.optional(3))
    return (activate(call, total, call.text("activation", ""), call.numbers("activation_params")),)


def nhwc_conv(call: Call) -> Results:
    """Conv of channels-last x. The weight is channels last too, unless its shape says that it is ONNX's."""
    x, w, group = call.input(0), call.input(1), call.integer("group", 1)
    rank = call.rank(x)
    channels = call.size(x, rank - 1)
    is_first, is_last = (call.size(w, axis) * group == channels for axis in (1, rank - 1))
    if is_first == is_last and any(call.size(w, axis) != call.size(w, 1) for axis in range(2, rank)):
        raise RefusedNodeError("the shape of its weight does not tell where the input channels are")
    if is_last:
        w = channels_first(call, w)
    product = call.op("Conv", channels_first(call, x), w, call.optional(2), **call.forwarded(*_WINDOW))
    return (channels_last(call, product),)


def nhwc_max_pool(call: Call) -> Results:
    """MaxPool of channels-last x."""
    names = ("auto_pad", "ceil_mode", "dilations", "kernel_shape", "pads", "strides")
    return (channels_last(call, call.op("MaxPool", channels_first(call, call.input(0)), **call.forwarded(*names))),)


def conv_transpose_with_dynamic_pads(call: Call) -> Results:
    """ConvTranspose whose pads are an input, which must be constant."""
    pads = call.optional(2)
    names = ("auto_pad", "dilations", "group", "kernel_shape", "output_padding", "strides")
    attributes: dict[str, ir.Attr] = call.forwarded(*names)
    if pads is not None:
        attributes["pads"] = ir.AttrInt64s("pads", call.known(pads, "pads").reshape(-1).tolist())
    return (call.op("ConvTranspose", call.input(0), call.input(1), call.optional(3), **attributes),)


def integer_matmul(call: Call) -> Results:
    """The int32 product of int16 matrices."""
    wide = [call.op("Cast", call.input(position), to=int(ir.DataType.INT32)) for position in (0, 1)]
    return (call.op("MatMul", *wide),)


def channels_first(call: Call, x: ir.Value) -> ir.Value:
    """[N, spatial..., C] as [N, C, spatial...]"""
    rank = call.rank(x)
    return call.op("Transpose", x, perm=[0, rank - 1, *range(1, rank - 1)])


def channels_last(call: Call, x: ir.Value) -> ir.Value:
    """[N, C, spatial...] as [N, spatial..., C]"""
    return call.op("Transpose", x, perm=[0, *range(2, call.rank(x)), 1])


def _fused_product(call: Call) -> ir.Value:
    alpha = call.number("alpha", 1.0)
    a, b = (
        _transposed(call, call.input(position), call.integer(f"trans{name}", 0), call.integer(f"transBatch{name}", 0))
        for position, name in enumerate("AB")
    )
    product = call.op("MatMul", a, b)
    return product if alpha == 1 else call.op("Mul", product, call.like(product, alpha))


def _transposed(call: Call, x: ir.Value, is_transposed: int, is_batch_transposed: int) -> ir.Value:
    """x with its first dimension moved behind the batch dimensions, then the last two exchanged."""
    if not is_transposed and not is_batch_transposed:
        return x
    order = list(range(call.rank(x)))
    if len(order) < 2:
        return x
    if is_batch_transposed:
        order = [*order[1:-1], 0, order[-1]]
    if is_transposed:
        order[-2:] = [order[-1], order[-2]]
    return call.op("Transpose", x, perm=order)
