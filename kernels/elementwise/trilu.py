"""Trilu: the upper or lower triangle of matrices, zeros elsewhere."""

from __future__ import annotations

from math import prod

from tvm import tirx

from ...runtime.symbolic.sizes import greatest_of
from ...runtime.target import Target
from ..codegen.builder import Expr, Index, row_major
from ..groups.group import Group
from ..movement.injective import as_bits, moved_values
from ..template.contract import BuiltKernel
from ..template.kernel import finish, narrowest_lanes, new_builder, pointwise_cost
from ..template.loops import cover, merge_sections, parallel_nest, store_epilogue
from ..template.values import GroupValues, anchor_of, followers_of

OPERATORS = frozenset(["Trilu"])


def build(group: Group, target: Target) -> BuiltKernel:
    """Takes one Trilu, with an epilogue; the number of the diagonal may be known at run time only."""
    anchor, followers = anchor_of(group), followers_of(group)
    if not followers:
        group = as_bits(group, moved_values(anchor))
    builder = new_builder(target)
    operand = group.types[anchor.inputs[0]]
    rank = len(operand.shape)
    merged, runs = merge_sections(group, operand.shape, [range(rank - 2), [rank - 2], [rank - 1]])
    shape = tuple(prod(operand.shape[d] for d in run) for section in runs for run in section)
    work = operand.elements * (2 + pointwise_cost(group))
    upper = bool(anchor.attribute("upper", 1))
    values = GroupValues(group, builder)
    diagonal = None
    if len(anchor.inputs) > 1 and anchor.inputs[1]:
        literal = group.literal(anchor.inputs[1])
        bound = sum(shape[-2:])  # beyond it nothing changes, and it fits an int32
        known = None if literal is None else min(max(int(literal.item()), -bound), bound)
        diagonal = _held(values.load(anchor.inputs[1], 0), greatest_of(bound)) if known is None else tirx.const(known, "int32")

    def element(index: Index) -> None:
        *_, row, column = index
        value = values.load(anchor.inputs[0], row_major(index, shape))
        first: Expr = row if diagonal is None else row + diagonal
        kept = column >= first if upper else column <= first
        store_epilogue(merged, builder, anchor, index, tirx.Select(kept, value, tirx.const(0, str(value.ty))))

    def rows(outer: Index) -> None:
        cover(builder, shape[-1], narrowest_lanes(builder, merged), lambda i: element((*outer, i)))

    if operand.elements:
        parallel_nest(builder, shape[:-1], work, rows)
    return finish("trilu", builder, group, flops=work)


def _held(number: Expr, bound: int) -> Expr:
    """A number held within [-bound, bound], as an int32."""
    least, most = (tirx.const(end, str(number.ty)) for end in (-bound, bound))
    return tirx.Cast("int32", tirx.max(tirx.min(number, most), least))
