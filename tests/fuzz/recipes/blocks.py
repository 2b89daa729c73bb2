"""What networks are made of, as exporters write it, of sizes that fill kernels' tiles and leave a rest."""

from __future__ import annotations

import numpy as np

from ..draft import INT8, UINT8, Draft, NotPossibleError

_ACTIVATIONS = ["Relu", "Sigmoid", "Tanh", "HardSwish", "LeakyRelu", "Softplus", "Elu"]


def _weight(b: Draft, *shape: int) -> str:
    """Constant weights of a size that keeps sums of products near 1."""
    inside = max(1, int(np.prod(shape[1:] if len(shape) > 2 else shape[:1])))
    return b.value((b.rng.standard_normal(shape) / np.sqrt(inside)).astype(np.float32), 0.95)


def _row(b: Draft, size: int) -> str:
    return b.value((b.rng.standard_normal(size) * 0.5).astype(np.float32), 0.95)


def _number(b: Draft, number: float) -> str:
    return b.value(np.array(number, np.float32), 1.0)


def _input(b: Draft, *shape: int) -> str:
    return b.value(b.rng.standard_normal(shape).astype(np.float32), 0.0)


def _over_last(b: Draft, op_type: str, x: str) -> str:
    by_input = b.since(18) or (op_type == "ReduceSum" and b.since(13))
    if by_input:
        return b.op(op_type, x, b.value(np.array([-1]), 1.0), keepdims=1)[0]
    return b.op(op_type, x, axes=[len(b.shape_of(x)) - 1], keepdims=1)[0]


def _normalized(b: Draft, x: str, width: int) -> str:
    """LayerNorm or RMSNorm, spelled out or as one operator."""
    if b.since(17) and b.chance(0.3):
        return b.op("LayerNormalization", x, _row(b, width), _row(b, width), axis=-1)[0]
    centred = b.op("Sub", x, _over_last(b, "ReduceMean", x))[0] if b.chance(0.6) else x
    square = b.op("Mul", centred, centred)[0] if b.chance(0.5) else b.op("Pow", centred, _number(b, 2.0))[0]
    spread = b.op("Sqrt", b.op("Add", _over_last(b, "ReduceMean", square), _number(b, 1e-3))[0])[0]
    scaled = b.op("Mul", b.op("Div", centred, spread)[0], _row(b, width))[0]
    return b.op("Add", scaled, _row(b, width))[0] if b.chance(0.7) else scaled


def _linear(b: Draft, x: str, inside: int, outside: int) -> str:
    product = b.op("MatMul", x, _weight(b, inside, outside))[0]
    return b.op("Add", *b.pick([(product, _row(b, outside)), (_row(b, outside), product)]))[0] if b.chance(0.8) else product


def transformer(b: Draft) -> None:
    """Layers with attention and a perceptron, whose residuals are read again."""
    batch, steps, heads, size = b.integer(1, 3), b.pick([1, 3, 16, 33]), b.integer(1, 4), b.pick([4, 8, 16])
    width = heads * size
    x = _input(b, batch, steps, width)
    for _ in range(b.integer(1, 2)):
        start = _normalized(b, x, width) if b.chance(0.7) else x
        parts = []
        for _ in range(3):
            apart = b.op("Reshape", _linear(b, start, width, width), b.value(np.array([0, 0, heads, size]), 1.0))[0]
            parts.append(b.op("Transpose", apart, perm=[0, 2, 1, 3])[0])
        query, key, value = parts
        scores = b.op("MatMul", query, b.op("Transpose", key, perm=[0, 1, 3, 2])[0])[0]
        scores = b.op("Mul", scores, _number(b, size**-0.5))[0]
        if b.chance(0.5):
            mask = np.where(np.tri(steps, dtype=bool), np.float32(0), np.float32(-1e9)).astype(np.float32)
            scores = b.op("Add", scores, b.value(mask, 0.8))[0]
        mixed = b.op("MatMul", b.op("Softmax", scores, axis=3)[0], value)[0]
        joined = b.op("Reshape", b.op("Transpose", mixed, perm=[0, 2, 1, 3])[0], b.value(np.array([0, 0, width]), 1.0))[0]
        x = b.op("Add", x, _linear(b, joined, width, width))[0]
        inner = _linear(b, _normalized(b, x, width), width, 2 * width)
        x = b.op("Add", _linear(b, b.op(b.pick(_ACTIVATIONS), inner)[0], 2 * width, width), x)[0]


def _batch_norm(b: Draft, x: str, channels: int) -> str:
    variance = b.value(b.rng.random(channels).astype(np.float32) + np.float32(0.5), 1.0)
    return b.op("BatchNormalization", x, _row(b, channels), _row(b, channels), _row(b, channels), variance)[0]


def _convolved(b: Draft, x: str, outside: int, *, kernel: int, stride: int = 1, group: int = 1) -> str:
    inside = b.shape_of(x)[1]
    pads = [kernel // 2] * 4
    bias = [_row(b, outside)] if b.chance(0.5) else []
    weight = _weight(b, outside, inside // group, kernel, kernel)
    y = b.op("Conv", x, weight, *bias, pads=pads, strides=[stride, stride], group=group)[0]
    return _batch_norm(b, y, outside) if b.chance(0.5) else y


def image_network(b: Draft) -> None:
    """Convolutions, residuals, joins, gates and pools."""
    channels, size = b.pick([3, 8, 16, 24, 33]), b.pick([5, 8, 14, 17])
    x = _input(b, b.integer(1, 2), channels, size, size)
    for _ in range(b.integer(2, 5)):
        channels = b.shape_of(x)[1]
        kind = b.integer(0, 5)
        if kind == 0:
            x = b.op("Add", x, _convolved(b, b.op("Relu", x)[0], channels, kernel=3))[0]
        elif kind == 1:
            more = b.pick([8, 16, 20, 32])
            x = b.op(b.pick(_ACTIVATIONS), _convolved(b, x, more, kernel=b.pick([1, 3, 5]), stride=b.pick([1, 1, 2])))[0]
        elif kind == 2:
            x = b.op("Concat", x, _convolved(b, x, b.pick([4, 8, 16]), kernel=b.pick([1, 3])), axis=1)[0]
        elif kind == 3:
            x = b.op("Relu", _convolved(b, x, channels, kernel=3, stride=b.pick([1, 2]), group=channels))[0]
        elif kind == 4:
            mean = b.op("GlobalAveragePool", x)[0]
            gate = b.op("Sigmoid", _convolved(b, mean, channels, kernel=1))[0]
            x = b.op("Mul", x, gate)[0]
        else:
            pool = b.pick(["MaxPool", "AveragePool"])
            x = b.op(pool, x, kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[b.integer(1, 2)] * 2)[0]
    if b.chance(0.5):
        mean = b.op("Flatten", b.op("GlobalAveragePool", x)[0], axis=1)[0]
        _linear(b, mean, b.shape_of(x)[1], b.pick([1, 10, 17]))


def gated_perceptron(b: Draft) -> None:
    """Two products of one value, one of which gates the other, between norms."""
    rows, width, inner = b.pick([1, 2, 7, 32]), b.pick([8, 16, 40, 65]), b.pick([16, 33, 64])
    x = _input(b, rows, width)
    start = _normalized(b, x, width)
    one, other = _linear(b, start, width, inner), _linear(b, start, width, inner)
    gate = b.op("Mul", one, b.op("Sigmoid", one)[0])[0]
    y = b.op("Add", _linear(b, b.op("Mul", gate, other)[0], inner, width), x)[0]
    b.op("Softmax", y, axis=1) if b.chance(0.4) else _over_last(b, b.pick(["ReduceMax", "ReduceSum", "ReduceMean"]), y)


def _requantized(b: Draft, x: str, scale: float = 0.04) -> str:
    """Through 8 bits and back, as quantizers write it around operators."""
    steps = b.value(np.array(scale, np.float32), 1.0), b.value(np.array(b.pick([0, 3, 128]), UINT8), 1.0)
    return b.op("DequantizeLinear", b.op("QuantizeLinear", x, *steps)[0], *steps)[0]


def quantized_network(b: Draft) -> None:
    """Convolutions or products whose weights are 8-bit integers by channel, and activations go through 8 bits."""
    if not b.since(13):
        raise NotPossibleError("scales by channel")
    outside, inside = b.pick([4, 8, 17]), b.pick([3, 8, 16])
    is_image = b.chance(0.6)
    x = _requantized(b, _input(b, 1, inside, 7, 7) if is_image else _input(b, 5, inside))
    for _ in range(b.integer(1, 2)):
        shape = (outside, inside, 3, 3) if is_image else (inside, outside)
        numbers = b.value(b.rng.integers(-127, 128, shape).astype(INT8), 1.0)
        scales = b.value((b.rng.random(outside) * 0.01 + 0.001).astype(np.float32), 1.0)
        zeros = [b.value(np.zeros(outside, INT8), 1.0)] if b.chance(0.7) else []
        weight = b.op("DequantizeLinear", numbers, scales, *zeros, axis=0 if is_image else 1)[0]
        x = b.op("Conv", x, weight, _row(b, outside), pads=[1, 1, 1, 1])[0] if is_image else b.op("MatMul", x, weight)[0]
        x = _requantized(b, b.op("Relu", x)[0] if b.chance(0.5) else x)
        inside = outside


RECIPES = [transformer, image_network, image_network, gated_perceptron, quantized_network]
