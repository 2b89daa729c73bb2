"""Operators that move elements: shapes, slices, pads, joins."""

from __future__ import annotations

import numpy as np

from ..draft import BOOL, DOUBLE, FLOAT, HALF, INT64, Draft, NotPossibleError


def transpose(b: Draft) -> None:
    x = b.tensor(b.dtype("Transpose"))
    perm = [int(axis) for axis in b.rng.permutation(len(b.shape_of(x)))]
    b.op("Transpose", x, perm=perm if b.chance(0.8) else None)


def reshape(b: Draft) -> None:
    x = b.tensor(b.dtype("Reshape"))
    shape = b.shape_of(x)
    sizes = [int(size) for size in b.rng.permutation(shape)]
    if len(sizes) > 1 and b.chance(0.5):
        sizes[:2] = [sizes[0] * sizes[1]]
    if b.chance(0.3):
        sizes.insert(b.integer(0, len(sizes)), 1)
    if sizes and 0 not in sizes and b.chance(0.5):
        sizes[b.integer(0, len(sizes) - 1)] = -1
    if 0 in sizes and not b.since(14):  # it would name the size of the operand's dimension
        sizes = list(shape)
    b.op("Reshape", x, b.ints(*sizes), allowzero=1 if 0 in sizes and b.since(14) else None)


def copied_size(b: Draft) -> None:
    x = b.tensor(b.dtype("Reshape"), 2, nonempty=True)
    b.op("Reshape", x, b.ints(0, -1))


def squeeze(b: Draft) -> None:
    shape = list(b.shape(0, 3))
    ones = [b.integer(0, len(shape)) for _ in range(b.integer(1, 2))]
    for at in ones:
        shape.insert(at, 1)
    x = b.fresh(b.dtype("Squeeze"), tuple(shape), 0.1)
    axes = [axis - len(shape) * b.chance(0.4) for axis, size in enumerate(shape) if size == 1]
    b.op("Squeeze", x, *([b.ints(*axes[: b.integer(1, len(axes))])] if b.chance(0.7) else []))


def unsqueeze(b: Draft) -> None:
    x = b.tensor(b.dtype("Unsqueeze"), 0, 3)
    b.op("Unsqueeze", x, b.ints(*b.axes(len(b.shape_of(x)) + 2, 2)[:2]))


def flatten(b: Draft) -> None:
    x = b.tensor(b.dtype("Flatten"))
    rank = len(b.shape_of(x))
    b.op("Flatten", x, axis=b.integer(-rank, rank))


def expand(b: Draft) -> None:
    x = b.tensor(b.dtype("Expand"), 0, 4)
    sizes = [b.pick([1, 2, 3]) if size == 1 else b.pick([1, size]) for size in b.shape_of(x)]
    if b.chance(0.3):
        sizes = [b.integer(0, 3), *sizes]
    elif b.chance(0.2):
        sizes = sizes[b.integer(0, len(sizes)) :]
    b.op("Expand", x, b.ints(*sizes))


def tile(b: Draft) -> None:
    x = b.tensor(b.dtype("Tile"), 0, 4)
    b.op("Tile", x, b.ints(*(b.pick([0, 1, 1, 2, 3]) for _ in b.shape_of(x))))


def concat(b: Draft) -> None:
    x = b.tensor(b.dtype("Concat"), 1)
    dtype, shape = b.types[x]
    axis = b.axis(len(shape))
    others = []
    for _ in range(b.integer(0, 3)):
        other = list(shape)
        other[axis] = b.integer(0, 5)
        others.append(b.fresh(dtype, tuple(other)))
    at = b.integer(0, len(others))
    b.op("Concat", *others[:at], x, *others[at:], axis=axis)


def split(b: Draft) -> None:
    x = b.tensor(b.dtype("Split"), 1)
    shape = b.shape_of(x)
    axis = b.axis(len(shape))
    cuts = sorted(b.integer(0, shape[axis]) for _ in range(b.integer(0, 3)))
    sizes = np.diff([0, *cuts, shape[axis]])
    if b.since(18) and b.chance(0.3):
        count = b.integer(1, max(1, min(4, shape[axis])))
        if -(-shape[axis] // count) * (count - 1) > shape[axis]:
            raise NotPossibleError("whole pieces are longer than all")
        b.op("Split", x, axis=axis, num_outputs=count, outputs=count)
    else:
        b.op("Split", x, b.ints(*map(int, sizes)), axis=axis, outputs=len(sizes))


def cut(b: Draft) -> None:
    x = b.tensor(b.dtype("Slice"), 1)
    shape = b.shape_of(x)
    axes = b.axes(len(shape), 1)
    starts, ends, steps = [], [], []
    for axis in axes:
        size = shape[axis]
        starts.append(b.integer(-size - 2, size + 2))
        ends.append(b.pick([b.integer(-size - 2, size + 2), 2**63 - 1, -(2**63), size]))
        steps.append(b.pick([1, 1, 2, 3, -1, -2]))
    optional = [b.ints(*axes), b.ints(*steps)]
    if len(axes) == len(shape) and b.chance(0.2):
        optional = []
    b.op("Slice", x, b.ints(*starts), b.ints(*ends), *optional)


def pad(b: Draft) -> None:
    mode = b.pick(["constant", "edge", "reflect", "wrap" if b.since(19) else "constant"])
    x = b.tensor(b.dtype("Pad"), 1, 4, nonempty=mode != "constant")
    dtype, shape = b.types[x]
    axes = b.axes(len(shape), 1) if b.since(18) and b.chance(0.5) else None
    sizes = [shape[axis] for axis in (axes or range(len(shape)))]
    pads = [b.integer(0, size - 1 if mode in ("reflect", "wrap") else 3) for size in sizes * 2]
    pads = [min(each, 4) for each in pads]
    if b.chance(0.25) and mode == "constant":
        pads = [b.integer(-(size // 2), 2) for size in sizes * 2]
    inputs = [b.ints(*pads)]
    if mode == "constant" and b.chance(0.6):
        inputs.append(b.fresh(dtype, ()))
    if axes:
        inputs = [*inputs, *([""] if len(inputs) == 1 else []), b.ints(*axes)]
    b.op("Pad", x, *inputs, mode=mode)


def blocks(b: Draft) -> None:
    size = b.integer(1, 3)
    n, c, h, w = b.integer(0, 2), b.integer(1, 3), b.integer(1, 4), b.integer(1, 4)
    if b.chance(0.5):
        x = b.fresh(b.dtype("DepthToSpace"), (n, c * size * size, h, w), 0.1)
        b.op("DepthToSpace", x, blocksize=size, mode=b.pick(["DCR", "CRD"]))
    else:
        b.op("SpaceToDepth", b.fresh(b.dtype("SpaceToDepth"), (n, c, h * size, w * size), 0.1), blocksize=size)


def triangle(b: Draft) -> None:
    x = b.tensor(b.dtype("Trilu"), 2)
    b.op("Trilu", x, *([b.value(np.array(b.integer(-5, 5)), 0.8)] if b.chance(0.7) else []), upper=b.integer(0, 1))


def shape(b: Draft) -> None:
    x = b.tensor(b.dtype("Shape"))
    rank = len(b.shape_of(x))
    if b.chance(0.3):
        b.op("Size", x)
    elif b.since(15):
        b.op("Shape", x, start=b.pick([None, b.integer(-rank - 1, rank + 1)]), end=b.pick([None, b.integer(-rank - 1, rank + 1)]))
    else:
        b.op("Shape", x)


def reshape_by_arithmetic(b: Draft) -> None:
    """As exporters write it: the sizes are computed from the shape."""
    x = b.tensor(FLOAT, 2, 4, nonempty=True)
    (sizes,) = b.op("Shape", x)
    (first,) = b.op("Gather", sizes, b.value(np.array(b.axis(len(b.shape_of(x)))), 1.0), axis=0)
    (rows,) = b.op("Unsqueeze", first, b.value(np.array([0]), 1.0))
    (target,) = b.op("Concat", rows, b.value(np.array([-1]), 1.0), axis=0)
    b.op("Reshape", x, target)


def filled(b: Draft) -> None:
    kind = b.integer(0, 2)
    if kind == 0:
        b.op("ConstantOfShape", b.ints(*b.shape(0, 4)))
    elif kind == 1:
        dtype = b.dtype("Range")
        step = b.pick([1, 2, 3]) * (-1 if dtype.kind in "if" and b.chance(0.4) else 1)
        ends = [b.integer(0, 12), b.integer(0, 12), step]
        b.op("Range", *(b.value(np.array(end, dtype), 0.9) for end in ends))
    else:
        b.op("EyeLike", b.tensor(b.dtype("EyeLike"), 2, 2), k=b.integer(-3, 3))


def crop(b: Draft) -> None:
    x = b.tensor(b.dtype("CenterCropPad"), 1, 3)
    axes = b.axes(len(b.shape_of(x)), 1)
    b.op("CenterCropPad", x, b.ints(*(b.integer(1, 9) for _ in axes)), axes=axes)


def dropout(b: Draft) -> None:
    b.op("Dropout", b.tensor(b.dtype("Dropout")), b.value(np.array(0.5, np.float32)), outputs=b.integer(1, 2))


def cast_like(b: Draft) -> None:
    b.op("CastLike", b.fresh(FLOAT, b.shape()), b.fresh(b.pick([FLOAT, BOOL, DOUBLE, HALF]), (1,)))


def long_chain_of_views(b: Draft) -> None:
    """Views of views, which are one buffer in memory."""
    x = b.tensor(b.pick([FLOAT, INT64]), 1, 3, nonempty=True)
    for _ in range(b.integer(2, 4)):
        recipe = b.pick([flatten, reshape, unsqueeze])
        recipe(b)
    b.op("Identity", x)


RECIPES = [
    transpose, reshape, copied_size, squeeze, unsqueeze, flatten, expand, tile, concat, split, cut, cut, pad, pad, blocks,
    triangle, shape, reshape_by_arithmetic, filled, crop, dropout, cast_like, long_chain_of_views,
]  # fmt: skip
