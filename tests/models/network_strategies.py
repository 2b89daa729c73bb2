"""Random networks: blocks that exporters write and fusing passes look for, wired at random with the moves of `strategies`."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from hypothesis import strategies as st
from prefuse.tests.models.program_strategies import EXTRA_MOVES, random_program, scalar
from prefuse.tests.models.strategies import MOVES, Builder, Move, Shape, shape_of

_SHAPES: tuple[Shape, ...] = (
    (16,), (5, 16), (2, 3, 16), (1, 4, 8), (2, 2, 3, 16), (1, 16, 6, 6), (2, 8, 5, 5), (1, 8, 1, 1),
)  # fmt: skip


def _rows(b: Builder) -> ir.Value | None:
    """A value whose last dimension is long enough for a kernel over rows."""
    value = b.value(min_rank=2)
    return value if value is not None and shape_of(value)[-1] >= 4 and 0 not in shape_of(value) else None


def _images(b: Builder) -> ir.Value | None:
    value = b.value(min_rank=4)
    return value if value is not None and 0 not in shape_of(value) else None


def _mean(b: Builder, value: ir.Value) -> ir.Value:
    return b.over_axes("ReduceMean", value, (-1,), 18, keepdims=1)


def _spelled_norm(b: Builder) -> ir.Value | None:
    """LayerNorm, RMSNorm or torch's normalize, of single operators, perhaps of a sum, and read once more by a sum."""
    value = _rows(b)
    if value is None:
        return None
    start = b.add("Add", [value, b.floats(shape_of(value))]) if b.draw(st.booleans()) else value
    kind = b.draw(st.sampled_from(["layer", "rms", "l2"]))
    centered = b.add("Sub", [start, _mean(b, start)]) if kind == "layer" else start
    square = b.add("Mul", [centered, centered]) if b.draw(st.booleans()) else b.add("Pow", [centered, scalar(b, 2.0)])
    if kind == "l2":
        size = b.add("Sqrt", [b.over_axes("ReduceSum", square, (-1,), 13, keepdims=1)])
        result = b.add("Div", [centered, b.add("Max", [size, scalar(b, 1e-3)])])
    else:
        deviation = b.add("Sqrt", [b.add("Add", [_mean(b, square), scalar(b, 1e-3)])])
        factor = b.add("Reciprocal", [deviation]) if b.draw(st.booleans()) else None
        result = b.add("Div", [centered, deviation]) if factor is None else b.add("Mul", [centered, factor])
        result = b.add("Mul", [result, b.floats(shape_of(value)[-1:])])
        result = b.add("Add", [result, b.floats(shape_of(value)[-1:])]) if kind == "layer" else result
    return b.add("Add", [result, start]) if b.draw(st.booleans()) else result


def _activation(b: Builder) -> ir.Value | None:
    """GELU with erf or tanh, SiLU, hard-swish, Softmax of single operators."""
    value = b.value(min_rank=1)
    if value is None or 0 in shape_of(value):
        return None
    match b.draw(st.sampled_from(["erf", "tanh", "silu", "hardswish", "softmax"])):
        case "erf":
            erf = b.add("Erf", [b.add("Div", [value, scalar(b, 2**0.5)])])
            return b.add("Mul", [b.add("Mul", [value, b.add("Add", [erf, scalar(b, 1.0)])]), scalar(b, 0.5)])
        case "tanh":
            cube = b.add("Mul", [b.add("Pow", [value, scalar(b, 3.0)]), scalar(b, 0.044715)])
            tanh = b.add("Tanh", [b.add("Mul", [b.add("Add", [value, cube]), scalar(b, (2 / np.pi) ** 0.5)])])
            return b.add("Mul", [b.add("Mul", [value, scalar(b, 0.5)]), b.add("Add", [tanh, scalar(b, 1.0)])])
        case "silu":
            return b.add("Mul", [value, b.add("Sigmoid", [value])])
        case "hardswish":
            clipped = b.add("Clip", [b.add("Add", [value, scalar(b, 3.0)]), scalar(b, 0.0), scalar(b, 6.0)])
            return b.add("Div", [b.add("Mul", [value, clipped]), scalar(b, 6.0)])
        case _:
            high = b.over_axes("ReduceMax", value, (-1,), 18, keepdims=1)
            power = b.add("Exp", [b.add("Sub", [value, high])])
            return b.add("Div", [power, b.over_axes("ReduceSum", power, (-1,), 13, keepdims=1)])


def _linear(b: Builder, value: ir.Value, columns: int) -> ir.Value:
    product = b.add("MatMul", [value, b.floats((shape_of(value)[-1], columns))])
    return b.add("Add", [product, b.floats((columns,))]) if b.draw(st.booleans()) else product


def _attention(b: Builder) -> ir.Value | None:
    """Self attention of two heads with its transposes, scale, mask and residual sum."""
    value = b.value(min_rank=3, max_rank=3)
    if value is None or 0 in shape_of(value) or shape_of(value)[-1] % 2:
        return None
    batch, length, width = shape_of(value)
    heads = [b.add("Reshape", [_linear(b, value, width), b.ints(batch, length, 2, width // 2)]) for _ in range(3)]
    orders = ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3])
    query, key, content = (b.add("Transpose", [one], perm=order) for one, order in zip(heads, orders, strict=True))
    if b.draw(st.booleans()):
        query = b.add("Mul", [query, scalar(b, 0.5)])
    scores = b.add("MatMul", [query, key])
    if b.draw(st.booleans()):
        scores = b.add("Div", [scores, scalar(b, 1.5)])
    if b.draw(st.booleans()):
        scores = b.add("Add", [scores, b.floats((length, length))])
    mixed = b.add("Transpose", [b.add("MatMul", [b.add("Softmax", [scores], axis=-1), content])], perm=[0, 2, 1, 3])
    joined = _linear(b, b.add("Reshape", [mixed, b.ints(batch, length, width)]), width)
    return b.add("Add", [value, joined]) if b.draw(st.booleans()) else joined


def _perceptron(b: Builder) -> ir.Value | None:
    """Two products with an activation between, of two branches multiplied or of one, and a residual sum."""
    value = _rows(b)
    if value is None:
        return None
    wide = b.add(b.draw(st.sampled_from(["Relu", "Tanh", "Sigmoid"])), [_linear(b, value, 24)])
    if b.draw(st.booleans()):
        wide = b.add("Mul", [wide, _linear(b, value, 24)])
    result = _linear(b, wide, shape_of(value)[-1])
    return b.add("Add", [result, value]) if b.draw(st.booleans()) else result


def _residual_images(b: Builder) -> ir.Value | None:
    """Convolutions with batch normalization before or after, activations, and the sum with what they read, or a join with it."""
    value = _images(b)
    if value is None or min(shape_of(value)[2:]) < 3:
        return None
    channels, result = shape_of(value)[1], value
    for _ in range(b.draw(st.integers(1, 2))):
        before, after = b.draw(st.booleans()), b.draw(st.booleans())
        result = _batch_normalized(b, result) if before else result
        weight = b.floats((channels, shape_of(result)[1], 3, 3))
        result = b.add("Conv", [result, weight], pads=(1, 1, 1, 1))
        result = _batch_normalized(b, result) if after else result
        result = b.add("Relu", [result]) if b.draw(st.booleans()) else result
    match b.draw(st.sampled_from(["sum", "join", "pool", "squeeze"])):
        case "sum":
            return b.add("Relu", [b.add("Add", [result, value])])
        case "join":
            joined = b.add("Concat", [result, value], axis=1)
            return b.add("Conv", [joined, b.floats((4, 2 * channels, 1, 1)), b.floats((4,))])
        case "pool":
            return b.add(b.draw(st.sampled_from(["MaxPool", "AveragePool"])), [result], kernel_shape=(2, 2), strides=(2, 2))
        case _:
            scores = b.add("Conv", [b.add("GlobalAveragePool", [result]), b.floats((channels, channels, 1, 1))])
            return b.add("Mul", [result, b.add("Sigmoid", [scores])])


def _batch_normalized(b: Builder, value: ir.Value) -> ir.Value:
    """Batch normalization; before opset 14 of single operators, as the reference then blends the statistics with the input's."""
    channels = shape_of(value)[1]
    scale, shift, mean = (b.floats((channels,)) for _ in range(3))
    variance = b.constant(np.linspace(0.5, 2, channels, dtype=np.float32))
    if b.opset >= 14:
        return b.add("BatchNormalization", [value, scale, shift, mean, variance])
    factor = b.floats((channels, 1, 1))
    return b.add("Add", [b.add("Mul", [value, factor]), b.floats((1, channels, 1, 1))])


def _recurrence(b: Builder) -> ir.Value | None:
    """Steps of a GRU cell or of a plain one, over the rows of a matrix."""
    value = b.value(min_rank=3, max_rank=3)
    if value is None or 0 in shape_of(value):
        return None
    batch, length, width = shape_of(value)
    size = 4
    weights, state_weights = b.floats((width, 3 * size)), b.floats((size, 3 * size))
    bias = b.floats((3 * size,))
    state = b.constant(np.zeros((batch, size), np.float32))
    states = []
    is_gru = b.draw(st.booleans())
    for step in range(min(length, 3)):
        x = b.add("Gather", [value, b.constant(np.array(step))], axis=1)
        given = b.add("Add", [b.add("MatMul", [x, weights]), bias])
        kept = b.add("MatMul", [state, state_weights])
        if is_gru:
            state = _gated(b, given, kept, state, size)
        else:
            state = b.add("Tanh", [b.add("Add", [_columns(b, given, 0, size), _columns(b, kept, 0, size)])])
        states.append(b.over_axes("Unsqueeze", state, (1,), 13))
    return b.add("Concat", states, axis=1) if b.draw(st.booleans()) else state


def _gated(b: Builder, given: ir.Value, kept: ir.Value, state: ir.Value, size: int) -> ir.Value:
    """torch's GRU cell: reset, update and new, in this order."""
    reset, update = (
        b.add("Sigmoid", [b.add("Add", [_columns(b, given, k, size), _columns(b, kept, k, size)])]) for k in range(2)
    )
    new = b.add("Tanh", [b.add("Add", [_columns(b, given, 2, size), b.add("Mul", [reset, _columns(b, kept, 2, size)])])])
    return b.add("Add", [b.add("Mul", [b.add("Sub", [scalar(b, 1.0), update]), new]), b.add("Mul", [update, state])])


def _columns(b: Builder, value: ir.Value, number: int, size: int) -> ir.Value:
    return b.add("Slice", [value, b.ints(number * size), b.ints((number + 1) * size), b.ints(1)])


def _embedding(b: Builder) -> ir.Value | None:
    """Rows of two tables, added, by indices that are computed."""
    value = b.value(min_rank=3, max_rank=3)
    if value is None or 0 in shape_of(value):
        return None
    indices = b.add("ArgMax", [value], axis=-1, keepdims=0)
    depth = shape_of(value)[-1]
    rows = [b.add("Gather", [b.floats((depth, 16)), indices], axis=0) for _ in range(2)]
    return b.add("Add", rows)


_BLOCKS: tuple[Move, ...] = (
    _spelled_norm, _activation, _attention, _perceptron, _residual_images, _residual_images, _recurrence, _embedding,
)  # fmt: skip


@st.composite
def networks(draw: st.DrawFn) -> ir.Model:
    """A model of one to three inputs that blocks and single operators read; outputs as those of `programs`."""
    return random_program(draw, (*_BLOCKS, *_BLOCKS, *_BLOCKS, *_BLOCKS, *MOVES, *EXTRA_MOVES), _SHAPES, (6, 12))
