"""Groups without an anchor: any DAG of pointwise operators in one trip over memory."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from ...runtime.plan import TensorType
from ...runtime.target import Target
from ..codegen.builder import Index
from ..expressions.pointwise import POINTWISE
from ..groups.group import Group
from ..movement.injective import as_bits
from ..template.contract import BuiltKernel, Refusal
from ..template.kernel import (
    finish,
    map_elements,
    narrowest_lanes,
    new_builder,
    pointwise_cost,
    same_place_operands,
    store_outputs,
)
from ..template.values import GroupValues, pointwise_obstacle
from .row_blocks import Steps, choose_blocks, map_blocks


def build(group: Group, target: Target) -> BuiltKernel | Refusal:
    """Takes pointwise operators only, all of whose outputs have one shape."""
    if any(op.op_type not in POINTWISE for op in group.ops):
        return Refusal("has an operator that is not pointwise")
    group = _choices_as_bits(group)
    if reason := pointwise_obstacle(group):
        return Refusal(reason)
    if len({group.types[name].shape for name in group.outputs}) != 1:
        return Refusal("outputs differ in shape")
    merged = merge_dimensions(group)
    shape = merged.types[merged.outputs[0]].shape
    builder = new_builder(target)

    def element(index: Index) -> None:
        store_outputs(GroupValues(merged, builder), index)

    work = prod(shape) * pointwise_cost(group)
    lanes = narrowest_lanes(builder, merged)
    if not builder.is_grid and (cut := choose_blocks(merged, Steps(lanes, builder.lanes("float32")))):
        map_blocks(builder, cut, lanes, work)
    else:
        map_elements(builder, shape, lanes, work, element)
    return finish("elementwise", builder, merged, flops=work, inplace=same_place_operands(group))


def _choices_as_bits(group: Group) -> Group:
    """The group, if it only chooses elements, with them seen as integers: complex ones can be chosen, too."""
    names = {name for op in group.ops for name in (*op.inputs[1:], *op.outputs)}
    if all(op.op_type == "Where" and op.inputs[0] not in names for op in group.ops):
        return as_bits(group, sorted(names))
    return group


def merge_dimensions(group: Group) -> Group:
    """The same group over fewer, longer dimensions, all values of one rank (at least 1).

    Neighbouring dimensions merge when each value spans all of them or none, so that most groups become one flat loop.
    """
    shape = group.types[group.outputs[0]].shape or (1,)
    padded = {name: (1,) * (len(shape) - len(kind.shape)) + kind.shape for name, kind in group.types.items()}
    runs: list[list[int]] = []
    for axis, extent in enumerate(shape):
        if (extent == 1 and runs) or (
            runs and all(_spans_all_or_none(dims, [*runs[-1], axis], shape) for dims in padded.values())
        ):
            runs[-1].append(axis)
        else:
            runs.append([axis])
    types = {
        name: TensorType(tuple(prod(dims[axis] for axis in run) for run in runs), group.types[name].dtype)
        for name, dims in padded.items()
    }
    return replace(group, types=types)


def _spans_all_or_none(dims: tuple[int, ...], run: list[int], shape: tuple[int, ...]) -> bool:
    return len({dims[axis] != 1 for axis in run if shape[axis] != 1}) <= 1
