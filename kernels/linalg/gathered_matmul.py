"""Products by matrices that a Gather chooses, read where they lie: mixtures of experts.

A Gather before a MatMul would copy an expert's whole matrix for each token that chooses it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...runtime.target import Target
from ..codegen.builder import Expr
from ..groups.group import Group, Op
from ..movement.gather import index_at
from ..template.contract import BuiltKernel
from .matmul import MatMulKernel, Side

OPERATORS = frozenset(["Gather", "MatMul"])


def obstacle(group: Group, target: Target) -> str:
    """Why the kernel cannot be written for a group; empty if it can."""
    if target.is_gpu:
        return "is for CPUs"
    if [op.op_type for op in group.ops] != ["Gather", "MatMul"]:
        return "is not a product by gathered matrices"
    gather, product = group.ops
    ranks = [len(group.types[name].shape) for name in (*gather.inputs, product.inputs[0])]
    if ranks != [3, 1, 3] or gather.attribute("axis", 0) not in (0, -3) or product.inputs[1] != gather.outputs[0]:
        return "the matrices are not gathered one for each product"
    dtype = group.types[product.inputs[0]].dtype
    return "" if dtype in ("float32", "float64") else f"no product of {dtype}"


def build(group: Group, target: Target) -> BuiltKernel:
    """Takes y[s] = a[s] @ w[indices[s]]: a Gather along the first axis, and the MatMul whose second operand it makes."""
    gather, product = group.ops
    return _GatheredProduct(group, gather, product, target).build()


@dataclass(frozen=True)
class _GatheredSide(Side):
    """B of all experts; `choose(s)` is the number of the matrix for product s."""

    choose: Callable[[Expr], Expr]

    def matrix_of(self, batch: tuple[int, ...], position: Expr) -> Expr:
        return self.choose(position)


class _GatheredProduct(MatMulKernel):
    """The loop over columns is outermost, so that neighbouring products by one matrix find its panel in cache."""

    template = "gathered_matmul"
    shares_b = True

    def __init__(self, group: Group, gather: Op, product: Op, target: Target) -> None:
        super().__init__(group, product, target)
        name = gather.inputs[0]
        count, depth, columns = group.types[name].shape
        self.b = _GatheredSide(
            name, (count,), columns, depth, True, lambda position: index_at(group, gather, self.builder, position, count)
        )
