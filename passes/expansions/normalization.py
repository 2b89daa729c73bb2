"""LpNormalization."""

from __future__ import annotations

import onnx_ir as ir


def lp_normalization(node: ir.Node) -> str:
    """x / norm, which is 0 where the norm is."""
    order, axis = node.attributes.get_int("p", 2), node.attributes.get_int("axis", -1)
    return f"""axes = Constant<value_ints=[{axis}]>() norm = ReduceL{order}<keepdims=1>(i0, axes)
        none = Constant<value_int=0>() zero = CastLike(none, norm) empty = Equal(norm, zero)
        quotient = Div(i0, norm) y = Where(empty, zero, quotient)"""
