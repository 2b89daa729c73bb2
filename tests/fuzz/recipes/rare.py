"""Operators that few models have: losses, signals, newer attention, optional values, sequences that are mapped."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto, helper

from ..draft import BOOL, DOUBLE, FLOAT, INT64, Draft


def attention(b: Draft) -> None:
    """Attention of opset 23, with heads apart or side by side."""
    batch, groups, share, size, wide = b.integer(1, 2), b.integer(1, 2), b.integer(1, 2), b.integer(1, 5), b.integer(1, 5)
    queries, keys, heads = b.integer(1, 5), b.integer(1, 6), groups * share
    is_apart, past = b.chance(0.5), b.integer(1, 3) if b.chance(0.3) else 0
    lengths = [(heads, queries, size), (groups, keys, size), (groups, keys, wide)]
    shapes = [(batch, h, n, d) if is_apart else (batch, n, h * d) for h, n, d in lengths]
    operands = [b.finite(FLOAT, shape, 0.1) for shape in shapes]
    extra = []
    if b.chance(0.5) or past:
        mask = (batch, heads, queries, past + keys)[b.integer(0, 2) :]
        extra.append(b.fresh(BOOL, mask) if b.chance(0.3) and not past else b.finite(FLOAT, mask))
    if past:
        extra += [b.finite(FLOAT, (batch, groups, past, width), 0.1) for width in (size, wide)]
    attributes: dict[str, Any] = {"is_causal": b.integer(0, 1), "scale": b.pick([None, 0.3]), "softcap": b.pick([None, 1.5])}
    if not is_apart:
        attributes |= {"q_num_heads": heads, "kv_num_heads": groups}
    if extra and b.types[extra[0]][0] == BOOL:
        attributes["is_causal"] = 0  # a row of which nothing is seen has no answer
        b.initializers = [each for each in b.initializers if each.name != extra[0]]
        b.feeds.pop(extra[0], None)
        b.inputs = [each for each in b.inputs if each.name != extra[0]]
        seen = b.rng.random(b.shape_of(extra[0])) < 0.7
        seen[..., 0] = True
        extra[0] = b.value(seen)
    b.op("Attention", *operands, *extra, outputs=3 if past else 1, **attributes)


def rotary(b: Draft) -> None:
    batch, heads, steps, size = b.integer(1, 2), b.integer(1, 3), b.integer(1, 5), 2 * b.integer(1, 4)
    turned = 2 * b.integer(1, size // 2)
    x = b.finite(FLOAT, (batch, heads, steps, size), 0.0)
    tables = [b.finite(FLOAT, (9, turned // 2), 0.8) for _ in range(2)]
    places = b.value(b.rng.integers(0, 9, (batch, steps)))
    part = None if turned == size else turned
    b.op("RotaryEmbedding", x, *tables, places, interleaved=b.integer(0, 1), rotary_embedding_dim=part)


def fourier(b: Draft) -> None:
    shape = (b.integer(1, 2), b.integer(1, 9), b.integer(1, 8), b.integer(1, 2))
    x = b.finite(b.pick([FLOAT, DOUBLE]), shape, 0.05)
    inverse, axis = b.integer(0, 1), b.pick([1, 2, -2])
    one_sided = 0 if inverse or shape[-1] == 2 else b.integer(0, 1)
    length = b.value(np.array(b.integer(1, 12)), 1.0) if b.chance(0.3) else ""
    if b.since(20):
        b.op("DFT", x, length, b.value(np.array(axis), 1.0), inverse=inverse, onesided=one_sided)
    else:
        b.op("DFT", x, *([length] if length else []), axis=axis % 4, inverse=inverse, onesided=one_sided)


def loss(b: Draft) -> None:
    op_type = b.pick(["NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"])
    batch, classes, rest = b.integer(1, 4), b.integer(1, 6), b.shape(0, 2, nonempty=True)
    scores = b.finite(FLOAT, (batch, classes, *rest), 0.1)
    labels = b.rng.integers(0, classes, (batch, *rest))
    weights = [b.value((b.rng.random(classes) + 0.1).astype(np.float32))] if b.chance(0.5) else []
    ignored = b.integer(0, classes - 1) if b.chance(0.4) and classes > 1 else None
    if ignored is not None:  # a mean of nothing is 0 / 0
        labels.reshape(-1)[0] = (ignored + 1) % classes
    reduction = b.pick(["none", "sum", "mean"])
    outputs = b.integer(1, 2) if op_type == "SoftmaxCrossEntropyLoss" else 1
    b.op(op_type, scores, b.value(labels), *weights, reduction=reduction, ignore_index=ignored, outputs=outputs)


def deformed(b: Draft) -> None:
    groups, size = b.integer(1, 2), b.integer(3, 6)
    inside, outside, shifts = groups * b.integer(1, 2), groups * b.integer(1, 3), 1
    x, weight = b.finite(FLOAT, (1, inside, size, size), 0.05), b.finite(FLOAT, (outside, inside // groups, 2, 2), 0.8)
    moved = b.value((b.rng.standard_normal((1, shifts * 8, size - 1, size - 1)) * 0.7).astype(np.float32), 0.2)
    more = [b.finite(FLOAT, (outside,))] if b.chance(0.5) else []
    if more and b.chance(0.5):
        more.append(b.finite(FLOAT, (1, shifts * 4, size - 1, size - 1)))
    b.op("DeformConv", x, weight, moved, *more, group=groups, kernel_shape=[2, 2])


def unpool(b: Draft) -> None:
    x = b.finite(FLOAT, (b.integer(1, 2), b.integer(1, 3), 2 * b.integer(1, 4), 2 * b.integer(1, 4)), 0.05)
    greatest, places = b.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2], outputs=2)
    b.op("MaxUnpool", greatest, places, kernel_shape=[2, 2], strides=[2, 2])


def grid(b: Draft) -> None:
    angles = b.finite(FLOAT, (b.integer(1, 2), 2, 3), 0.05)
    n = b.shape_of(angles)[0]
    b.op("AffineGrid", angles, b.ints(n, 3, b.integer(1, 5), b.integer(1, 5)), align_corners=b.integer(0, 1))


def determinant(b: Draft) -> None:
    size = b.integer(1, 5)
    b.op("Det", b.finite(FLOAT, (*b.shape(0, 1, nonempty=True), size, size), 0.05))


def running_product(b: Draft) -> None:
    x = b.finite(b.dtype("CumProd", kinds="fi"), b.shape(1, 3, nonempty=True), 0.1)
    axis = b.value(np.array(b.axis(len(b.shape_of(x)))), 0.8)
    b.op("CumProd", x, axis, exclusive=b.integer(0, 1), reverse=b.integer(0, 1))


def cache(b: Draft) -> None:
    batch, most, new, width = b.integer(1, 2), b.integer(3, 7), b.integer(1, 3), b.integer(1, 4)
    past, update = b.fresh(FLOAT, (batch, 2, most, width), 0.0), b.fresh(FLOAT, (batch, 2, new, width), 0.0)
    begin = b.value(b.rng.integers(0, most - new + 1, batch))
    b.op("TensorScatter", past, update, begin, axis=b.pick([None, -2, 2]), mode=b.pick([None, "linear", "circular"]))


def optional(b: Draft) -> None:
    x = b.tensor(FLOAT, 0, 3)
    (held,) = b.op("Optional", x)
    (given,) = b.op("OptionalGetElement", held)
    b.op("OptionalHasElement", held)
    b.op("Neg", given)


def mapped(b: Draft) -> None:
    shape = b.shape(1, 2, nonempty=True)
    items = [b.fresh(FLOAT, shape) for _ in range(b.integer(1, 3))]
    captured = b.fresh(FLOAT, shape)
    (made,) = b.op("SequenceConstruct", *items)
    p = b.name("m")
    nodes = [helper.make_node(b.pick(["Add", "Mul"]), [f"{p}_x", captured], [f"{p}_y"])]
    given, result = (helper.make_tensor_value_info(f"{p}_{name}", TensorProto.FLOAT, shape) for name in "xy")
    (done,) = b.op("SequenceMap", made, body=helper.make_graph(nodes, "body", [given], [result]))
    b.op("SequenceAt", done, b.value(np.array(0), 0.8))


def windows(b: Draft) -> None:
    size = b.value(np.array(b.integer(2, 20), INT64), 0.8)
    b.op(b.pick(["HannWindow", "HammingWindow", "BlackmanWindow"]), size, periodic=b.integer(0, 1))


RECIPES = [
    attention, attention, rotary, fourier, loss, deformed, unpool, grid, determinant, running_product, cache, optional, mapped,
    windows,
]  # fmt: skip
