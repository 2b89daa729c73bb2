"""OneHot: one of two values at each place of a new dimension, by whether the index names it."""

from __future__ import annotations

from tvm import tirx

from ...runtime.target import Target
from ..codegen.builder import Index, row_major
from ..groups.group import Group
from ..movement.injective import as_bits
from ..template.contract import BuiltKernel
from ..template.kernel import finish, map_elements, narrowest_lanes, new_builder, pointwise_cost
from ..template.loops import store_epilogue
from ..template.values import GroupValues, anchor_of, followers_of

OPERATORS = frozenset(["OneHot"])


def build(group: Group, target: Target) -> BuiltKernel:
    """Takes one OneHot with an epilogue. Negative indices count from the end; one that is out of range gives `off` everywhere."""
    anchor, followers = anchor_of(group), followers_of(group)
    indices, _, pair = anchor.inputs
    if not followers:
        group = as_bits(group, (pair, anchor.outputs[0]))
    builder = new_builder(target)
    shape = group.types[anchor.outputs[0]].shape
    axis = anchor.attribute("axis", -1) % len(shape)
    values = GroupValues(group, builder)
    work = group.types[anchor.outputs[0]].elements * (2 + pointwise_cost(group))

    def element(index: Index) -> None:
        place = row_major((*index[:axis], *index[axis + 1 :]), (*shape[:axis], *shape[axis + 1 :]))
        number = tirx.Cast("int64", values.load(indices, place))
        number = builder.name(tirx.Select(number < 0, number + shape[axis], number))
        is_named = tirx.EQ(number, tirx.Cast("int64", index[axis]))
        store_epilogue(group, builder, anchor, index, tirx.Select(is_named, values.load(pair, 1), values.load(pair, 0)))

    map_elements(builder, shape, narrowest_lanes(builder, group), work, element)
    return finish("one_hot", builder, group, flops=work)
