"""Hardmax."""

from __future__ import annotations

import onnx_ir as ir

from .common import dims, dtype_of


def hardmax(node: ir.Node) -> str:
    """One at the first of the greatest elements along an axis, zeros elsewhere; NaN is the greatest, as for ArgMax."""
    shape = dims(node.inputs[0])
    if 0 in shape:
        return "y = Identity(i0)"
    axis = node.attributes.get_int("axis", -1) % len(shape)
    return f"""place = ArgMax<axis={axis}>(i0) count = Constant<value_int={shape[axis]}>()
        pair = Constant<value_floats=[0.0, 1.0]>() hot = OneHot<axis={axis}>(place, count, pair)
        shape = Constant<value_ints={list(shape)}>() whole = Reshape<allowzero=1>(hot, shape)
        y = Cast<to={int(dtype_of(node.inputs[0]))}>(whole)"""
