"""Products of what DequantizeLinear makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import onnx_ir as ir

from ....compiler.ir.constants import add_constant, constant_array, scalar_constant
from ....compiler.ir.matching import producer_of, static_shape
from ....compiler.ir.rewriter import Rejection, operation, replace_node
from ..products import CONVOLUTIONS
from .operands import BYTES, Operands, channel_shape, known_floats, placed_constant

_PRODUCTS = (*CONVOLUTIONS, "Gemm", "MatMul")
_ROUNDING = 2.0**-22  # of two products


@dataclass(frozen=True, slots=True)
class Dequantized:
    """Finds a product of two operands, both dequantized."""

    name: str

    def match(self, node: ir.Node) -> _Scaled | Rejection | None:
        if node.domain != "" or node.op_type not in _PRODUCTS:
            return None
        a, b = (producer_of(node.inputs[position], "DequantizeLinear") for position in (0, 1))
        if a is None or b is None:
            return None
        (x, s, x_zero), (w, t, w_zero) = ((*one.inputs, None)[:3] for one in (a, b))
        if scalar_constant(s) == scalar_constant(t) == 1.0 and w_zero is None:  # kernels multiply them as they are
            return None
        if x is None or s is None or w is None or t is None or x.dtype not in BYTES:
            return None
        if constant_array(w) is None:
            why = "no kernel makes words of what a run computes along rows"
            return Rejection(f"{node.op_type} of two dequantized activations stays in floating point: {why}", (node,))
        if node.outputs[0].dtype != ir.DataType.FLOAT:  # by their attributes, whatever the scales are
            return Rejection(f"{node.op_type} of dequantized operands stays: they are no float32", (node,))
        found = Operands(node.op_type, node, x, w, x_zero, w_zero)
        reason = found.fault() or _scale_fault(found, b, s, t) or _product_fault(node, s, t)
        if reason:
            return Rejection(f"{node.op_type} of dequantized operands stays in floating point: {reason}", (node,))
        return _Scaled(found, s, t)


def _scale_fault(found: Operands, b: ir.Node, s: ir.Value, t: ir.Value) -> str:
    shape, scales = static_shape(s), constant_array(t)
    if shape is None or prod(shape) != 1 or s.dtype != ir.DataType.FLOAT:
        return "activations have more than one scale"
    if scales is None or b.attributes.get_int("block_size", 0) != 0:
        return "weights have no constant scales, or scales for blocks"
    rank = len(static_shape(found.w) or ())
    is_by_channel = rank > 0 and b.attributes.get_int("axis", 1) % rank == found.channel_axis
    return "" if scales.size == 1 or is_by_channel else "scales of weights do not belong to columns"


def _product_fault(node: ir.Node, s: ir.Value, t: ir.Value) -> str:
    """Whether float32 holds the products of constant scales, by which sums are multiplied, as exactly as the scales."""
    known = [constant_array(one) for one in (s, t)]
    if known[0] is None or known[1] is None:
        return ""
    products, exact = (
        _products(node, *[one.astype(kind) for one in known if one is not None]) for kind in ("float32", "float64")
    )
    is_exact = np.isfinite(products) & (np.abs(products - exact) <= _ROUNDING * np.abs(exact))
    return "" if is_exact.all() else "products of their scales are out of float32's range"


def _products(node: ir.Node, s: np.ndarray, t: np.ndarray) -> np.ndarray:
    """The scales of a product's sums, in the type of these."""
    with np.errstate(over="ignore", under="ignore"):
        alpha = t.dtype.type(node.attributes.get_float("alpha", 1.0) if node.op_type == "Gemm" else 1.0)
        return np.asarray(t * alpha * s.reshape(()))


@dataclass(frozen=True, slots=True)
class _Scaled:
    """A product with the scale `s` of its activations and `t` of its weights."""

    found: Operands
    s: ir.Value
    t: ir.Value

    def rewrite(self, model: ir.Model) -> Sequence[ir.Node]:
        node = self.found.product
        nodes = self.found.multiplied(model)
        scales, made = self._scales(model)
        scaled = operation("Mul", [nodes[-1].outputs[0], scales])
        nodes += [*made, scaled]
        bias, made = self._bias(model)
        nodes += made
        if bias is not None:
            nodes.append(operation("Add", [scaled.outputs[0], bias]))
        replace_node(model, node, nodes, nodes[-1].outputs)
        return nodes

    def _scales(self, model: ir.Model) -> tuple[ir.Value, list[ir.Node]]:
        """The product of the scales, shaped to broadcast over the result, and what computes it where a run does."""
        s, t = constant_array(self.s), constant_array(self.t)
        assert t is not None
        known = np.ones((), np.float32) if s is None else s.astype(np.float32)
        scales = _products(self.found.product, known, t.astype(np.float32))
        if s is not None:
            return placed_constant(model, self.found, scales, f"{self.s.name}_product"), []
        factor = operation("Mul", [self.s, placed_constant(model, self.found, scales, f"{self.t.name}_placed")])
        return factor.outputs[0], [factor]

    def _bias(self, model: ir.Model) -> tuple[ir.Value | None, list[ir.Node]]:
        """What is added to the scaled product, and the nodes that shape it for that."""
        node, made = self.found.product, list[ir.Node]()
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        beta = node.attributes.get_float("beta", 1.0) if node.op_type == "Gemm" else 1.0
        if bias is None or beta == 0.0:
            return None, made
        if (known := known_floats(bias)) is not None and (node.op_type in CONVOLUTIONS or known.ndim < 2):
            return placed_constant(model, self.found, known * np.float32(beta), f"{bias.name}_placed"), made
        if node.op_type in CONVOLUTIONS:
            shape = add_constant(model, np.array(channel_shape(self.found, -1), np.int64), f"{bias.name}_shape")
            made.append(operation("Reshape", [bias, shape]))
        if beta != 1.0:
            made.append(operation("Mul", [bias, add_constant(model, np.array(beta, np.float32), f"{bias.name}_beta")]))
        return (made[-1].outputs[0] if made else bias), made
