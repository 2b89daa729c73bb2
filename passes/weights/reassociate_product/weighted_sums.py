"""Sums of rows by weights: [rows, terms] weights times [terms, depth] values, however they are spelled."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import onnx_ir as ir

from ....compiler.ir.aliases import is_view
from ....compiler.ir.constants import constant_tensor
from ....compiler.ir.matching import static_shape
from ....compiler.ir.rows import reduced_axes


@dataclass(frozen=True, slots=True)
class WeightedSum:
    """`node` makes the matrix product of `weights`, seen as [rows, terms], and `values`, seen as [terms, depth]."""

    node: ir.Node
    weights: ir.Value
    values: ir.Value
    rows: int
    terms: int
    depth: int

    @property
    def is_of_constants(self) -> bool:
        """Whether the values are constant, so that their product by another constant is computed at compile time."""
        return constant_tensor(self.values) is not None


def weighted_sum(node: ir.Node) -> WeightedSum | None:
    """A node as a weighted sum: MatMul by weights that are computed, or ReduceSum of weights times values, one row."""
    if node.domain != "" or static_shape(node.outputs[0]) is None:
        return None
    if node.op_type == "ReduceSum":
        return _reduced_product(node)
    return _product(node) if node.op_type == "MatMul" else None


def _product(node: ir.Node) -> WeightedSum | None:
    weights, values = node.inputs
    if weights is None or values is None or _is_constant(weights):
        return None
    left, right = static_shape(weights), static_shape(values)
    if left is None or right is None or len(left) < 2 or len(right) < 2 or prod(right[:-2]) != 1 or 0 in (*left, *right):
        return None
    return WeightedSum(node, weights, values, prod(left[:-1]), *right[-2:])


def _reduced_product(node: ir.Node) -> WeightedSum | None:
    """ReduceSum(Mul(weights [1, terms, 1], values [1, terms, depth])) over the terms."""
    product = None if node.inputs[0] is None else node.inputs[0].producer()
    if product is None or product.op_type != "Mul" or product.domain != "":
        return None
    shape, axes = static_shape(product.outputs[0]), reduced_axes(node)
    if shape is None or len(shape) < 2 or axes is None or 0 in shape or prod(shape[:-2]) != 1:
        return None
    if [axis % len(shape) for axis in axes] != [len(shape) - 2]:
        return None
    terms, depth = shape[-2:]
    for weights, values in (product.inputs, product.inputs[::-1]):
        if weights is None or values is None or _is_constant(weights) or _is_constant(values):
            continue
        if static_shape(weights) in ((terms, 1), (*shape[:-1], 1)) and prod(static_shape(values) or ()) == terms * depth:
            return WeightedSum(node, weights, values, 1, terms, depth)
    return None


def same_rows(value: ir.Value, depth: int) -> list[ir.Value]:
    """The value and its views whose last dimension is `depth`, too: the same matrix."""
    views = [
        reader.outputs[0]
        for reader in value.consumers()
        if is_view(reader) and reader.inputs[0] is value and (static_shape(reader.outputs[0]) or (0,))[-1] == depth
    ]
    return [value, *(one for view in views for one in same_rows(view, depth))]


def _is_constant(value: ir.Value) -> bool:
    return constant_tensor(value) is not None
