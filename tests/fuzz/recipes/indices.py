"""Operators that read or write at places which data name, that sort, and whose results' sizes data decide."""

from __future__ import annotations

import numpy as np

from ..draft import BOOL, FLOAT, INT64, Draft, Shape


def _places(b: Draft, size: int, shape: Shape, dtype: type = np.int64) -> np.ndarray:
    """Indices within a dimension, some of them counted from the end."""
    return b.rng.integers(-size, size, shape).astype(dtype)


def gather(b: Draft) -> None:
    x = b.tensor(b.dtype("Gather"), 1, 4, nonempty=True)
    shape = b.shape_of(x)
    axis = b.axis(len(shape))
    indices = _places(b, shape[axis], b.shape(0, 2), b.pick([np.int32, np.int64]))
    b.op("Gather", x, b.value(indices), axis=axis)


def gather_elements(b: Draft) -> None:
    x = b.tensor(b.dtype("GatherElements"), 1, 4, nonempty=True)
    shape = b.shape_of(x)
    axis = b.axis(len(shape))
    sizes = [b.integer(0, size) for size in shape]
    sizes[axis] = b.integer(0, 6)
    b.op("GatherElements", x, b.value(_places(b, shape[axis], tuple(sizes))), axis=axis)


def gather_nd(b: Draft) -> None:
    x = b.tensor(b.dtype("GatherND"), 1, 4, nonempty=True)
    shape = b.shape_of(x)
    batch = b.integer(0, len(shape) - 1) if b.chance(0.4) else 0
    depth = b.integer(1, len(shape) - batch)
    rows = (*shape[:batch], *b.shape(0, 2))
    places = [_places(b, shape[batch + at], rows) for at in range(depth)]
    b.op("GatherND", x, b.value(np.stack(places, -1)), batch_dims=batch or None)


def scatter_elements(b: Draft) -> None:
    reduction = _reduction(b)
    x = _scattered_into(b, "ScatterElements", reduction)
    dtype, shape = b.types[x]
    axis = b.axis(len(shape))
    sizes = [b.integer(0, size) for size in shape]
    if reduction is not None:
        sizes[axis] = b.integer(0, 6)
        indices = _places(b, shape[axis], tuple(sizes))
    else:  # no place twice
        indices = np.argsort(b.rng.random((*shape,)), axis)[tuple(slice(size) for size in sizes)]
    updates = _updates(b, dtype, indices.shape, reduction)
    b.op("ScatterElements", x, b.value(indices.astype(INT64)), updates, axis=axis, reduction=reduction)


def scatter_nd(b: Draft) -> None:
    reduction = _reduction(b)
    x = _scattered_into(b, "ScatterND", reduction)
    dtype, shape = b.types[x]
    depth = b.integer(1, len(shape))
    all_places = np.stack(np.meshgrid(*map(np.arange, shape[:depth]), indexing="ij"), -1).reshape(-1, depth)
    count = b.integer(0, min(6, len(all_places)))
    rows = all_places[b.rng.choice(len(all_places), count, replace=reduction is not None)]
    updates = _updates(b, dtype, (count, *shape[depth:]), reduction)
    b.op("ScatterND", x, b.value(rows.astype(INT64)), updates, reduction=reduction)


def _reduction(b: Draft) -> str | None:
    allowed = ["add", "mul"] * b.since(16) + ["max", "min"] * b.since(18)
    return b.pick([None, None, *allowed])


def _scattered_into(b: Draft, op_type: str, reduction: str | None) -> str:
    """Data to update; without NaN for a greatest or least, of which the references let the order of operands decide."""
    dtype = b.dtype(op_type)
    if reduction in ("max", "min"):
        return b.finite(dtype, b.shape(1, 4, nonempty=True), 0.1)
    return b.tensor(dtype, 1, 4, nonempty=True)


def _updates(b: Draft, dtype: np.dtype, shape: Shape, reduction: str | None) -> str:
    return b.finite(dtype, shape) if reduction in ("max", "min") else b.fresh(dtype, shape)


def one_hot(b: Draft) -> None:
    depth = b.integer(1, 6)
    indices = b.value(_places(b, depth + 2, b.shape(0, 3)))
    values = b.fresh(b.pick([FLOAT, INT64]), (2,))
    rank = len(b.shape_of(indices)) + 1
    b.op("OneHot", indices, b.value(np.array(depth), 1.0), values, axis=b.axis(rank))


def top_k(b: Draft) -> None:
    dtype, shape = b.dtype("TopK", kinds="fiu"), b.shape(1, 4, nonempty=True)
    x = b.finite(dtype, shape, 0.1)  # of computed numbers, rounding would choose; ONNX does not say where NaN stands
    axis = b.axis(len(shape))
    b.op("TopK", x, b.ints(b.integer(0, shape[axis])), axis=axis, largest=b.integer(0, 1), outputs=2)


def non_zero(b: Draft) -> None:
    x = b.tensor(b.dtype("NonZero"), 1, 4)
    (places,) = b.op("NonZero", x)
    if b.chance(0.5):
        (rows,) = b.op("Transpose", places)
        if b.chance(0.7):
            b.op("GatherND", x, rows)


def compress(b: Draft) -> None:
    x = b.tensor(b.dtype("Compress"), 1, 4)
    shape = b.shape_of(x)
    axis = b.pick([None, b.axis(len(shape))])
    size = int(np.prod(shape)) if axis is None else shape[axis]
    (kept,) = b.op("Compress", x, b.fresh(BOOL, (b.integer(0, size),)), axis=axis)
    _after(b, kept, len(shape) if axis is not None else 1)


def unique(b: Draft) -> None:
    x = b.finite(b.dtype("Unique", kinds="fiu"), b.shape(1, 3, nonempty=True), 0.1)  # ONNX does not say whether NaN is itself
    shape = b.shape_of(x)
    axis = b.pick([None, b.axis(len(shape))])
    found = b.op("Unique", x, axis=axis, sorted=b.integer(0, 1), outputs=b.integer(1, 4))
    _after(b, found[0], len(shape) if axis is not None else 1)


def _after(b: Draft, name: str, rank: int) -> None:
    """Read a value whose size only a run knows."""
    if b.chance(0.3):
        b.op("Identity", name)
    elif b.chance(0.3):
        b.op("Shape", name)
    elif b.chance(0.3):
        b.op("Concat", name, name, axis=rank - 1)


def reverse_sequence(b: Draft) -> None:
    x = b.tensor(b.dtype("ReverseSequence"), 2, 4, nonempty=True)
    time = b.integer(0, 1)
    shape = b.shape_of(x)
    lengths = b.rng.integers(1, shape[time] + 1, shape[1 - time])
    b.op("ReverseSequence", x, b.value(lengths), time_axis=time, batch_axis=1 - time)


def suppression(b: Draft) -> None:
    batch, boxes, classes = b.integer(1, 2), b.integer(1, 9), b.integer(1, 3)
    corners = b.rng.random((batch, boxes, 2))
    sizes = b.rng.random((batch, boxes, 2))
    center = b.integer(0, 1)
    both = np.concatenate([corners, sizes if center else corners + sizes], -1).astype(np.float32)
    scores = b.rng.random((batch, classes, boxes)).astype(np.float32)
    limits = [np.array([b.integer(0, 5)]), np.array([0.4], np.float32), np.array([0.3], np.float32)]
    given = [b.value(limit, 0.7) for limit in limits[: b.integer(1, 3)]]
    b.op("NonMaxSuppression", b.value(both), b.value(scores), *given, center_point_box=center)


def embedding(b: Draft) -> None:
    """A table read by a run's indices, and normalized: what a language model begins with."""
    rows, width = b.integer(1, 30), b.integer(1, 16)
    (found,) = b.op(
        "Gather", b.fresh(FLOAT, (rows, width), 1.0), b.value(_places(b, rows, (b.integer(1, 3), b.integer(1, 5))), 0)
    )
    b.op("ReduceMean", found, axes=None if b.since(18) else [-1])


RECIPES = [
    gather, gather, gather_elements, gather_nd, scatter_elements, scatter_nd, one_hot, top_k, non_zero, compress, unique,
    reverse_sequence, suppression, embedding,
]  # fmt: skip
