"""MatMul and Gemm of activations by constant weights by Strassen's algorithm, where the precision allows its larger errors."""

from __future__ import annotations

from ...runtime.target import Target
from ..codegen.builder import Expr
from ..groups.group import Group
from ..template.contract import Candidate, Refusal
from ..template.kernel import epilogue_operands
from ..template.values import anchor_of
from .matmul import MatMulKernel
from .strassen_product import StrassenProduct, strassen_obstacle


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes one float32 MatMul or Gemm with a pointwise epilogue, large enough to be cut into blocks."""
    anchor = anchor_of(group)
    if reason := strassen_obstacle(group, group, anchor, target):
        return Refusal(reason)
    product = MatMulKernel(group, anchor, target)
    a, b, store = product.a, product.b, product.store()
    if b.name not in group.constants or a.name in group.constants:
        return Refusal("is not of activations by constant weights")
    if product.shares_weights:
        return Refusal("would pack sums of weights that kernels for other sizes read as they are")
    if product.batch or a.lines_last:
        return Refusal("its left operand is not one matrix that lies row after row")

    def put(row: Expr, column: Expr, value: Expr) -> None:
        store(0, row, 0, column, value)

    def begin(row: Expr) -> Expr:
        return row * a.depth

    builder, inplace = product.builder, epilogue_operands(product.builder, group, anchor)
    one = StrassenProduct("strassen_matmul", group, anchor, target, builder, a, b, begin=begin, store=put, inplace=inplace)
    return one.plan(group)
