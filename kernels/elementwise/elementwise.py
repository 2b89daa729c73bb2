"""Groups without an anchor: any DAG of pointwise operators in one trip over memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import prod

from ...runtime.plan import TensorType
from ...runtime.symbolic.shapes import is_one, is_symbolic, same_shape
from ...runtime.symbolic.sizes import SizeLike, estimating, hint_of
from ...runtime.target import Target
from ..codegen.builder import Index
from ..codegen.gpu_builder import GpuBuilder
from ..cost.estimate import Estimate, with_bytes
from ..cost.memory import parallel_work
from ..cost.pointwise import LoopBody, operator_body, scalar_steps
from ..expressions.pointwise import POINTWISE
from ..groups.group import Group
from ..movement.injective import as_bits
from ..template.contract import BuiltKernel, Candidate, Refusal
from ..template.kernel import (
    finish,
    map_elements,
    narrowest_lanes,
    new_builder,
    pointwise_cost,
    result_machine,
    same_place_operands,
    store_outputs,
)
from ..template.values import GroupValues, pointwise_obstacle
from .row_blocks import Steps, choose_blocks, map_blocks

_ROW_CYCLES = 4.0  # of a row's address and its loop


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes pointwise operators only, all of whose outputs have one shape."""
    if any(op.op_type not in POINTWISE for op in group.ops):
        return Refusal("has an operator that is not pointwise")
    group = _choices_as_bits(group)
    if reason := pointwise_obstacle(group):
        return Refusal(reason)
    if not all(same_shape(group.types[name].shape, group.types[group.outputs[0]].shape) for name in group.outputs):
        return Refusal("outputs differ in shape")
    return Candidate(_estimate(merge_dimensions(group), target), partial(_build, group, target))


@estimating
def _estimate(merged: Group, target: Target) -> Estimate:
    """Of one trip: operators on smaller values once for each of their elements, and values that rows share once for a row."""
    machine = result_machine(merged, target)
    shape = merged.types[merged.outputs[0]].shape
    *outer, inner = shape
    rows, spans = prod(outer), {name for name, kind in merged.types.items() if kind.shape[-1] == inner}
    read = [name for name in merged.inputs if name in spans and merged.literal(name) is None]
    body = LoopBody(loads=len(read), stores=len(merged.outputs))
    beside = 0.0
    for op in merged.ops:
        one = operator_body(merged, op, machine)
        if merged.types[op.outputs[0]].elements == prod(shape):
            body += one
        else:
            beside += one.cycles(machine) * merged.types[op.outputs[0]].elements / machine.lanes
    cut = None if has_block_scales(merged) else choose_blocks(merged, Steps(machine.lanes, target.machine.lanes))
    if cut is not None:
        cycles = prod(shape) / machine.lanes * body.cycles(machine) + cut.block_cycles(Steps(machine.lanes, target.machine.lanes))
    else:
        cycles = rows * (scalar_steps(inner, machine.lanes) * body.cycles(machine) + (_ROW_CYCLES if rows > 1 else 0.0))
    work = prod(shape) * pointwise_cost(merged)
    return with_bytes(Estimate(cycles + beside, work, unit="vector", is_parallel=work >= parallel_work(target.machine)), merged)


def _build(group: Group, target: Target) -> BuiltKernel:
    merged = merge_dimensions(group)
    shape = merged.types[merged.outputs[0]].shape
    builder = new_builder(target)

    def element(index: Index) -> None:
        store_outputs(GroupValues(merged, builder), index)

    work = hint_of(prod(shape) * pointwise_cost(group))
    lanes = _vector_count(builder, merged) if isinstance(builder, GpuBuilder) else narrowest_lanes(builder, merged)
    if (
        not builder.is_grid
        and not has_block_scales(group)
        and not is_symbolic(shape)
        and (cut := choose_blocks(merged, Steps(lanes, builder.lanes("float32"))))
    ):
        map_blocks(builder, cut, lanes, work)
    else:
        map_elements(builder, shape, lanes, work, element)
    return finish("elementwise", builder, merged, flops=work, inplace=same_place_operands(group))


def _vector_count(builder: GpuBuilder, merged: Group) -> int:
    """Neighbours that a thread takes, of what lies along rows of the results."""
    *_, inner = merged.types[merged.outputs[0]].shape
    along = [kind.dtype for name in (*merged.inputs, *merged.outputs) if (kind := merged.types[name]).shape[-1:] == (inner,)]
    return builder.vector_count(along, inner)


def has_block_scales(group: Group) -> bool:
    """Whether a DequantizeLinear has scales along an axis, or of blocks."""
    return any(op.op_type == "DequantizeLinear" and group.types[op.inputs[1]].elements > 1 for op in group.ops)


def _choices_as_bits(group: Group) -> Group:
    """The group, if it only chooses elements, with them seen as integers: complex ones can be chosen, too."""
    names = {name for op in group.ops for name in (*op.inputs[1:], *op.outputs)}
    if all(op.op_type == "Where" and op.inputs[0] not in names for op in group.ops):
        return as_bits(group, sorted(names))
    return group


def merge_dimensions(group: Group) -> Group:
    """The same group over fewer, longer dimensions, all values of one rank (at least 1).

    Neighbouring dimensions merge when each value spans all of them or none, so that most groups become one flat loop. Scales of
    blocks do neither: their groups stay as they are.
    """
    if has_block_scales(group):
        return group
    shape = group.types[group.outputs[0]].shape or (1,)
    padded = {name: (1,) * (len(shape) - len(kind.shape)) + kind.shape for name, kind in group.types.items()}
    runs: list[list[int]] = []
    for axis, extent in enumerate(shape):
        if (is_one(extent) and runs) or (
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


def _spans_all_or_none(dims: Sequence[SizeLike], run: list[int], shape: Sequence[SizeLike]) -> bool:
    return len({is_one(dims[axis]) for axis in run if not is_one(shape[axis])}) <= 1
