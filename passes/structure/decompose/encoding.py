"""Hardmax."""

from __future__ import annotations

import onnx_ir as ir

from ....runtime.symbolic.shapes import equal
from ....runtime.symbolic.sizes import Size
from .common import dims, dtype_of


def hardmax(node: ir.Node) -> str | None:
    """One at the first of the greatest elements along an axis, zeros elsewhere; NaN is the greatest, as for ArgMax."""
    shape = dims(node.inputs[0])
    if any(equal(dim, 0) for dim in shape):
        return "y = Identity(i0)"
    axis = node.attributes.get_int("axis", -1) % len(shape)
    if isinstance(shape[axis], Size):
        return None
    return f"""place = ArgMax<axis={axis}>(i0) count = Constant<value_int={shape[axis]}>()
        pair = Constant<value_floats=[0.0, 1.0]>() hot = OneHot<axis={axis}>(place, count, pair)
        one = Constant<value_ints=[{axis + 1}]>() whole = Squeeze(hot, one) y = Cast<to={int(dtype_of(node.inputs[0]))}>(whole)"""
