"""LpNormalization, LRN and MeanVarianceNormalization."""

from __future__ import annotations

from math import prod

import numpy as np
import onnx_ir as ir

from ....runtime.symbolic.shapes import equal
from .body import Body
from .common import dims

_LEAST_DEVIATION = 1e-9  # ONNX's
_LRN_DEFAULTS = (("alpha", 1e-4), ("beta", 0.75), ("bias", 1.0))


def lp_normalization(node: ir.Node) -> str:
    """x / norm, which is 0 where the norm is."""
    order, axis = node.attributes.get_int("p", 2), node.attributes.get_int("axis", -1)
    return f"""axes = Constant<value_ints=[{axis}]>() norm = ReduceL{order}<keepdims=1>(i0, axes)
        none = Constant<value_int=0>() zero = CastLike(none, norm) empty = Equal(norm, zero)
        quotient = Div(i0, norm) y = Where(empty, zero, quotient)"""


def lrn(node: ir.Node) -> ir.Function | None:
    """x / (bias + alpha / size * the sum of squares of neighbouring channels) ** beta (ONNX LRN), in float32 at least.

    The sum divided by the size is an average over windows along the channels, the padding counted in; the other dimensions
    are one.
    """
    shape, dtype, body = dims(node.inputs[0]), node.outputs[0].dtype, Body(node)
    if dtype is None:
        return None
    if any(equal(dim, 0) for dim in shape):
        return body.function(body.op("Identity", body.input(0)))
    inner = dtype if dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
    x = body.input(0) if dtype == inner else body.cast(body.input(0), inner)
    size = node.attributes.get_int("size")
    given = {name: node.attributes.get_float(name, value) for name, value in _LRN_DEFAULTS}
    own = {name: body.cast(np.array(value, np.float32), inner) for name, value in given.items()}
    plane = body.reshape(body.op("Mul", x, x), [shape[0], 1, shape[1], prod(shape[2:])])
    pads = [(size - 1) // 2, 0, size // 2, 0]
    mean = body.reshape(body.op("AveragePool", plane, kernel_shape=[size, 1], pads=pads, count_include_pad=1), shape)
    base = body.op("Add", own["bias"], body.op("Mul", own["alpha"], mean))
    if given["beta"] == 0.75:
        root = body.op("Sqrt", base)  # less work than Pow, as AlexNet has it
        divisor = body.op("Mul", root, body.op("Sqrt", root))
    else:
        divisor = body.op("Pow", base, own["beta"])
    result = body.op("Div", x, divisor)
    return body.function(result if dtype == inner else body.cast(result, dtype))


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
