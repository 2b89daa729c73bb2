"""Operators that ONNX has under another name, or that take a few of its nodes: indexing, spectra, distances, position biases."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from .activations import Results
from .call import Call, RefusedNodeError
from .masks import ascending

_INT64 = int(ir.DataType.INT64)


def expand_dims(call: Call) -> Results:
    """Unsqueeze at one axis."""
    axis = call.op("Reshape", call.op("Cast", call.input(1), to=_INT64), [1])
    return (call.op("Unsqueeze", call.input(0), axis),)


def gather_nd(call: Call) -> Results:
    """GatherND"""
    return (call.op("GatherND", call.input(0), call.op("Cast", call.input(1), to=_INT64)),)


def trilu(call: Call) -> Results:
    """Trilu"""
    return (call.op("Trilu", call.input(0), call.optional(1), **call.forwarded("upper")),)


def unique(call: Call) -> Results:
    """Unique in the order of first appearance, without the indices of those."""
    y, _, inverse, counts = call.ops(4, "Unique", call.input(0), sorted=0)
    return y, inverse, counts


def pad(call: Call) -> Results:
    """Pad, whose pads may have two dimensions."""
    pads = call.op("Reshape", call.op("Cast", call.input(1), to=_INT64), [-1])
    value = call.optional(2)
    scalar = None if value is None else call.op("Reshape", value, np.zeros(0, np.int64))
    return (call.op("Pad", call.input(0), pads, scalar, **call.forwarded("mode")),)


def arange(call: Call) -> Results:
    """Range, whose step may be left out; the operands may have one dimension of one element."""
    empty = np.zeros(0, np.int64)
    start, limit, step = call.input(0), call.input(1), call.optional(2)
    scalars = [call.op("Reshape", one, empty) for one in (start, limit)]
    step = call.like(start, 1) if step is None else call.op("Reshape", step, empty)
    return (call.op("Range", *scalars, step),)


def grid_sample(call: Call) -> Results:
    """GridSample, whose modes had other names."""
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(call.text("mode", "bilinear"), call.text("mode", "bilinear"))
    attributes = call.forwarded("align_corners", "padding_mode")
    return (call.op("GridSample", call.input(0), call.input(1), mode=mode, **attributes),)


def embedding(call: Call) -> Results:
    """Gather of rows; what the rest says is of training."""
    call.optional(2)
    call.optional(3)
    return (call.op("Gather", call.input(0), call.input(1), axis=0),)


def cdist(call: Call) -> Results:
    """Distances of all rows of a to all rows of b, the square of them by default."""
    metric = call.text("metric", "sqeuclidean")
    if metric not in ("sqeuclidean", "euclidean"):
        raise RefusedNodeError(f"metric {metric} is not taken")
    difference = call.op("Sub", call.op("Unsqueeze", call.input(0), [1]), call.op("Unsqueeze", call.input(1), [0]))
    square = call.op("ReduceSumSquare", difference, [2], keepdims=0)
    return (square if metric == "sqeuclidean" else call.op("Sqrt", square),)


def unfold(call: Call) -> Results:
    """All slices of a size along a dimension, which become a new last dimension."""
    x, step, size = call.input(0), call.integer("step", 1), call.integer("size")
    axis = call.integer("dim", -1) % call.rank(x)
    starts = np.arange(0, call.size(x, axis) - size + 1, step)
    slices = call.op("Gather", x, starts[:, None] + np.arange(size), axis=axis)
    rank = call.rank(x)
    return (call.op("Transpose", slices, perm=[*range(axis + 1), *range(axis + 2, rank + 1), axis + 1]),)


def complex_multiply(call: Call) -> Results:
    """Products of complex numbers in pairs of the last axis; the second is conjugated in ComplexMulConj."""
    (a, b), (c, d) = (call.ops(2, "Split", call.input(position), axis=-1, num_outputs=2) for position in (0, 1))
    d = call.op("Neg", d) if call.op_type == "ComplexMulConj" else d
    real = call.op("Sub", call.op("Mul", a, c), call.op("Mul", b, d))
    imaginary = call.op("Add", call.op("Mul", a, d), call.op("Mul", b, c))
    return (call.op("Concat", real, imaginary, axis=-1),)


def rfft(call: Call) -> Results:
    """The one-sided spectrum along the last axis, complex numbers in pairs."""
    if call.integer("signal_ndim", 1) != 1 or call.integer("normalized", 0) or not call.integer("onesided", 1):
        raise RefusedNodeError("only plain one-sided spectra of one axis are taken")
    x = call.op("Unsqueeze", call.input(0), [call.rank(call.input(0))])
    return (call.op("DFT", x, None, call.constant_int(-2), onesided=1),)


def is_all_finite(call: Call) -> Results:
    """Whether no element of any input is infinite or NaN; or just one of the two."""
    only_nan, only_infinite = call.integer("isnan_only", 0), call.integer("isinf_only", 0)
    tests = ["IsNaN"] * (not only_infinite) + ["IsInf"] * (not only_nan)
    faults: ir.Value | None = None
    for position in range(call.input_count):
        flat = call.op("Reshape", call.input(position), [-1])
        for test in tests:
            found = call.op("ReduceMax", call.op("Cast", call.op(test, flat), to=int(ir.DataType.INT32)), [0], keepdims=0)
            faults = found if faults is None else call.op("Max", faults, found)
    if faults is None:
        raise RefusedNodeError("tests nothing")
    return (call.op("Less", faults, call.like(faults, 1)),)  # of nothing the greatest is the least integer


def relative_position_bias(call: Call) -> Results:
    """T5's bias [1, heads, queries, keys]: a row of the table for each bucket of distances (Raffel et al., arXiv 1910.10683)."""
    table, is_bidirectional = call.input(0), call.integer("is_bidirectional", 0)
    buckets, furthest = call.size(table, 0), call.integer("max_distance")
    queries, keys = (
        ascending(call, call.op("Reshape", call.op("Cast", call.input(position), to=_INT64), [1])) for position in (1, 2)
    )
    distance = call.op("Sub", call.op("Unsqueeze", queries, [1]), keys)  # how far the key lies before the query
    zero = call.constant_int(0)
    if is_bidirectional:
        buckets //= 2
        first = call.op("Where", call.op("Less", distance, zero), call.constant_int(buckets), zero)
        distance = call.op("Abs", distance)
    else:
        first, distance = zero, call.op("Max", distance, zero)
    exact = buckets // 2
    wide = call.op("Cast", call.op("Max", distance, call.constant_int(1)), to=int(ir.DataType.FLOAT))
    ratio = call.op("Log", call.op("Div", wide, call.like(wide, exact)))
    steps = call.op("Mul", call.op("Div", ratio, call.like(wide, math.log(furthest / exact))), call.like(wide, buckets - exact))
    far = call.op("Add", call.op("Cast", steps, to=_INT64), call.constant_int(exact))
    bounded = call.op("Min", far, call.constant_int(buckets - 1))
    bucket = call.op("Where", call.op("Less", distance, call.constant_int(exact)), distance, bounded)
    rows = call.op("Gather", table, call.op("Add", bucket, first), axis=0)
    return (call.op("Unsqueeze", call.op("Transpose", rows, perm=[2, 0, 1]), [0]),)


def gated_relative_position_bias(call: Call) -> Results:
    """WavLM's bias [B, heads, S, S]: the relative positions times a gate of each query (Chen et al., arXiv 2110.13900)."""
    heads = call.integer("num_heads")
    q = call.op("Add", call.input(0), call.input(1))
    size = call.size(q, 2) // heads
    q = call.op("Transpose", call.op("Reshape", q, [0, 0, heads, size]), perm=[0, 2, 1, 3])
    logits = call.op("Add", call.op("MatMul", q, call.input(3)), call.input(4))
    halves = call.op("Reshape", logits, [0, 0, 0, 2, -1])
    gates = call.op("Sigmoid", call.op("ReduceSum", halves, [4], keepdims=0))
    update, reset = call.ops(2, "Split", gates, axis=-1, num_outputs=2)
    inner = call.op("Sub", call.op("Mul", reset, call.input(5)), call.like(reset, 1.0))
    gate = call.op("Add", call.op("Mul", update, inner), call.like(update, 2.0))
    return (call.op("Mul", gate, call.input(2)),)
