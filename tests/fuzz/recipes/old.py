"""Operators as models of older opsets have them: attributes where newer ones have inputs, and what is no longer there."""

from __future__ import annotations

import numpy as np

from ..draft import FLOAT, INT64, Draft, NotPossibleError


def _before(b: Draft, opset: int) -> None:
    if b.since(opset):
        raise NotPossibleError("inputs since then")


def axes(b: Draft) -> None:
    """Squeeze, Unsqueeze and ReduceSum by attribute."""
    _before(b, 13)
    kind = b.integer(0, 2)
    if kind == 0:
        shape = (1, *b.shape(0, 2), 1)
        x = b.fresh(b.dtype("Squeeze"), shape, 0.1)
        least = -len(shape) if b.since(11) else 0
        b.op("Squeeze", x, axes=b.pick([None, [0], [len(shape) - 1], [b.pick([0, least])]]))
    elif kind == 1:
        b.op("Unsqueeze", b.tensor(b.dtype("Unsqueeze"), 0, 3), axes=b.pick([[0], [0, 1], [1, 0]]))
    else:
        x = b.tensor(b.dtype("ReduceSum"), 1, nonempty=True)
        rank = len(b.shape_of(x))
        chosen = sorted({axis % rank for axis in b.axes(rank)})
        b.op("ReduceSum", x, axes=chosen or None, keepdims=b.pick([None, 0, 1]))


def split(b: Draft) -> None:
    _before(b, 13)
    x = b.tensor(b.dtype("Split"), 1, nonempty=True)
    shape = b.shape_of(x)
    axis = b.integer(0, len(shape) - 1)
    first = b.integer(0, shape[axis])
    b.op("Split", x, axis=axis, split=[first, shape[axis] - first], outputs=2)


def cut(b: Draft) -> None:
    _before(b, 10)
    x = b.tensor(b.dtype("Slice"), 1)
    shape = b.shape_of(x)
    chosen = sorted({axis % len(shape) for axis in b.axes(len(shape), 1)})
    starts = [b.integer(-shape[axis] - 2, shape[axis] + 2) for axis in chosen]
    ends = [b.pick([b.integer(-shape[axis] - 2, shape[axis] + 2), 2**31 - 1, 2**63 - 1]) for axis in chosen]
    b.op("Slice", x, axes=chosen, starts=starts, ends=ends)


def pad(b: Draft) -> None:
    _before(b, 11)
    mode = b.pick(["constant", "edge", "reflect"])
    x = b.tensor(b.dtype("Pad"), 1, 4, nonempty=True)
    shape = b.shape_of(x)
    pads = [b.integer(0, min(size - 1, 3)) for size in shape * 2]
    b.op("Pad", x, mode=mode, pads=pads, value=b.pick([None, 1.5]) if mode == "constant" else None)


def clip(b: Draft) -> None:
    _before(b, 11)
    x = b.finite(b.dtype("Clip"), b.shape())  # infinities stay where no bound is given
    b.op("Clip", x, min=b.pick([None, -0.5, 0.0]), max=b.pick([None, 0.5, 6.0]))


def top_k(b: Draft) -> None:
    _before(b, 10)
    x = b.finite(b.dtype("TopK"), b.shape(1, 4, nonempty=True), 0.1)
    shape = b.shape_of(x)
    axis = b.integer(0, len(shape) - 1)
    b.op("TopK", x, axis=axis, k=b.integer(1, shape[axis]), outputs=2)


def upsample(b: Draft) -> None:
    _before(b, 11)
    x = b.finite(FLOAT, (b.integer(1, 2), b.integer(1, 3), b.integer(1, 6), b.integer(1, 6)), 0.05)
    scales = [1.0, 1.0, float(b.integer(1, 3)), float(b.integer(1, 3))]
    mode = b.pick(["nearest", "linear"])
    if b.since(10):
        b.op("Resize", x, b.value(np.array(scales, np.float32), 1.0), mode=mode)
    elif b.since(9):
        b.op("Upsample", x, b.value(np.array(scales, np.float32), 1.0), mode=mode)
    else:
        b.op("Upsample", x, scales=scales, mode=mode)


def softmax(b: Draft) -> None:
    """Over all dimensions from the axis on."""
    _before(b, 13)
    x = b.finite(b.dtype("Softmax"), b.shape(1, 4, nonempty=True), 0.1)  # onnx.reference takes the axis alone, at any opset
    b.op(b.pick(["Softmax", "LogSoftmax", "Hardmax"]), x, axis=b.pick([None, b.integer(0, len(b.shape_of(x)) - 1)]))


def dropout(b: Draft) -> None:
    _before(b, 12)
    b.op("Dropout", b.tensor(b.dtype("Dropout")), ratio=0.3)  # a mask meant nothing yet


def batch_norm(b: Draft) -> None:
    _before(b, 14)
    x = b.tensor(FLOAT, 2, 4, nonempty=True)
    channels = (b.shape_of(x)[1],)
    variance = b.value(b.rng.random(channels).astype(FLOAT) + FLOAT.type(0.5))
    b.op("BatchNormalization", x, *(b.finite(FLOAT, channels) for _ in range(3)), variance, epsilon=1e-3)


def arithmetic(b: Draft) -> None:
    """Operators whose types were fewer, and Scatter."""
    _before(b, 13)
    kind = b.integer(0, 2)
    if kind == 0:
        op_type = b.pick(["Add", "Mul", "Sub", "Div", "Pow", "PRelu"])
        x = b.tensor(FLOAT)
        b.op(op_type, x, b.like(x))
    elif kind == 1:
        x = b.tensor(FLOAT, 1, 3, nonempty=True)
        shape = b.shape_of(x)
        b.op("Gather", x, b.value(b.rng.integers(0, shape[0], b.shape(0, 2)).astype(INT64)), axis=0)
    else:
        _before(b, 11)
        x = b.tensor(FLOAT, 1, 3, nonempty=True)
        shape = b.shape_of(x)
        places = np.argsort(b.rng.random(shape), 0)[: b.integer(1, shape[0])].astype(INT64)
        b.op("Scatter", x, b.value(places), b.fresh(FLOAT, places.shape), axis=0)


RECIPES = [axes, axes, split, cut, pad, clip, top_k, upsample, softmax, dropout, batch_norm, arithmetic]
