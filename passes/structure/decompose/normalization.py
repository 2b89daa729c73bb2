"""LpNormalization, LRN and MeanVarianceNormalization."""

from __future__ import annotations

from math import prod

import onnx_ir as ir

from .common import dims

_LEAST_DEVIATION = 1e-9  # ONNX's
_LRN_DEFAULTS = (("alpha", 1e-4), ("beta", 0.75), ("bias", 1.0))


def lp_normalization(node: ir.Node) -> str:
    """x / norm, which is 0 where the norm is."""
    order, axis = node.attributes.get_int("p", 2), node.attributes.get_int("axis", -1)
    return f"""axes = Constant<value_ints=[{axis}]>() norm = ReduceL{order}<keepdims=1>(i0, axes)
        none = Constant<value_int=0>() zero = CastLike(none, norm) empty = Equal(norm, zero)
        quotient = Div(i0, norm) y = Where(empty, zero, quotient)"""


def lrn(node: ir.Node) -> str | None:
    """x / (bias + alpha / size * the sum of squares of neighbouring channels) ** beta (ONNX LRN).

    The sum divided by the size is an average over windows along the channels, the padding counted in; the other dimensions
    are one.
    """
    shape, dtype = dims(node.inputs[0]), node.outputs[0].dtype
    if dtype is None:
        return None
    if 0 in shape:
        return "y = Identity(i0)"
    size = node.attributes.get_int("size")
    before, after = (size - 1) // 2, size // 2
    alpha, beta, bias = (node.attributes.get_float(name, value) for name, value in _LRN_DEFAULTS)
    planes = [shape[0], 1, shape[1], prod(shape[2:])]
    roots = "root = Sqrt(base) fourth = Sqrt(root) divisor = Mul(root, fourth)"  # less work than Pow, as AlexNet has it
    power = roots if beta == 0.75 else "divisor = Pow(base, own_beta)"
    return f"""squares = Mul(i0, i0) planes = Constant<value_ints={planes}>() plane = Reshape(squares, planes)
        means = AveragePool<kernel_shape=[{size}, 1], pads=[{before}, 0, {after}, 0], count_include_pad=1>(plane)
        shape = Constant<value_ints={list(shape)}>() mean = Reshape(means, shape)
        alpha = Constant<value_float={alpha!r}>() beta = Constant<value_float={beta!r}>() bias = Constant<value_float={bias!r}>()
        own_alpha = Cast<to={int(dtype)}>(alpha) own_beta = Cast<to={int(dtype)}>(beta) own_bias = Cast<to={int(dtype)}>(bias)
        scaled = Mul(own_alpha, mean) base = Add(own_bias, scaled) {power} y = Div(i0, divisor)"""


def mean_variance_normalization(node: ir.Node) -> str | None:
    """(x - mean) / (deviation + 1e-9), in float32 at least.

    The variance is the mean of squared differences. ONNX's body takes the square of the mean from the mean of squares, of which
    rounding leaves nothing where the differences are small beside the mean.
    """
    dtype = node.outputs[0].dtype
    if dtype is None:
        return None
    inner = dtype if dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
    axes = list(node.attributes.get_ints("axes", (0, 2, 3)))
    return f"""x = Cast<to={int(inner)}>(i0) axes = Constant<value_ints={axes}>() mean = ReduceMean(x, axes) rest = Sub(x, mean)
        squares = Mul(rest, rest) variance = ReduceMean(squares, axes) deviation = Sqrt(variance)
        least = Constant<value_float={_LEAST_DEVIATION!r}>() own_least = Cast<to={int(inner)}>(least)
        divisor = Add(deviation, own_least) quotient = Div(rest, divisor) y = Cast<to={int(dtype)}>(quotient)"""
