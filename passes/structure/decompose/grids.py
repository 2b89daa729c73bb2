"""AffineGrid."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ....compiler.ir.constants import constant_array
from .body import Body
from .common import dims


def affine_grid(node: ir.Node) -> ir.Function | None:
    """theta[:, i, 0] x + theta[:, i, 1] y (+ theta[:, i, 2] z) + theta[:, i, last] at each pixel, in float32 at least.

    Along each axis the coordinates of the pixels' centres divide -1 to 1 evenly; with `align_corners` the first is -1 and the
    last is 1, and that of an only pixel is -1, as ONNX's own body has it.
    """
    theta, size = node.inputs[0], constant_array(node.inputs[1])
    if theta is None or theta.dtype is None or size is None:
        return None
    batch, rank, _ = dims(theta)
    lengths = [int(length) for length in size[2:]][::-1]  # of x, y (, z)
    if rank != len(lengths) or 0 in lengths:
        return None
    working = np.dtype(np.float64 if theta.dtype == ir.DataType.DOUBLE else np.float32)
    body = Body(node)
    whole = body.cast(body.input(0), working.name)
    columns = [body.op("Gather", whole, np.array(column), axis=2) for column in range(rank + 1)]
    *factors, total = [body.reshape(column, (batch, *[1] * rank, rank)) for column in columns]
    for axis, length in enumerate(lengths):
        spread = [1] * (rank + 2)
        spread[rank - axis] = length
        centres = _centres(length, node.attributes.get_int("align_corners", 0)).astype(working)
        total = body.op("Add", total, body.op("Mul", factors[axis], centres.reshape(spread)))
    return body.function(body.cast(total, theta.dtype))


def _centres(length: int, is_aligned: int) -> np.ndarray:
    """Coordinates of `length` pixels between -1 and 1."""
    places = np.arange(length, dtype=np.float64)
    if is_aligned:
        return places * (2 / max(length - 1, 1)) - 1
    return (places * 2 + 1) / length - 1
