"""AffineGrid."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ....compiler.ir.constants import constant_array
from .common import dims

_FLOAT, _DOUBLE = int(ir.DataType.FLOAT), int(ir.DataType.DOUBLE)


def affine_grid(node: ir.Node) -> str | None:
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
    working = _DOUBLE if theta.dtype == ir.DataType.DOUBLE else _FLOAT
    place = [batch, *[1] * rank, rank]
    body = f"whole = Cast<to={working}>(i0) place = Constant<value_ints={place}>() "
    for column in range(rank + 1):
        body += f"""c{column} = Constant<value_int={column}>() t{column} = Gather<axis=2>(whole, c{column})
            theta{column} = Reshape(t{column}, place) """
    body += f"sum0 = Identity(theta{rank}) "
    for axis, length in enumerate(lengths):
        centres = _centres(length, node.attributes.get_int("align_corners", 0))
        spread = [1] * (rank + 2)
        spread[rank - axis] = length
        numbers = ", ".join(repr(float(number)) for number in centres)
        body += f"""row{axis} = Constant<value = double[{length}] {{{numbers}}}>() exact{axis} = Cast<to={working}>(row{axis})
            spread{axis} = Constant<value_ints={spread}>() x{axis} = Reshape(exact{axis}, spread{axis})
            product{axis} = Mul(theta{axis}, x{axis}) sum{axis + 1} = Add(sum{axis}, product{axis}) """
    return body + f"y = Cast<to={int(theta.dtype)}>(sum{rank})"


def _centres(length: int, is_aligned: int) -> np.ndarray:
    """Coordinates of `length` pixels between -1 and 1."""
    places = np.arange(length, dtype=np.float64)
    if is_aligned:
        return places * (2 / max(length - 1, 1)) - 1
    return (places * 2 + 1) / length - 1
