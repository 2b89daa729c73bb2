"""Groups without an anchor: any DAG of pointwise operators in one trip over memory, which may read operands through views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod

from ...runtime.plan import TensorType
from ...runtime.symbolic.shapes import is_one, is_symbolic, same_shape
from ...runtime.symbolic.sizes import SizeLike, estimating, hint_of
from ...runtime.target import Target
from ..codegen.builder import Expr, Index
from ..codegen.gpu_builder import GpuBuilder
from ..cost.estimate import Estimate, with_bytes
from ..cost.memory import parallel_work
from ..cost.movement import reading
from ..cost.pointwise import LoopBody, operator_body, scalar_steps
from ..groups.group import Group
from ..movement.injective import as_bits
from ..template.contract import BuiltKernel, Candidate, Refusal
from ..template.kernel import (
    finish,
    map_elements,
    narrowest_lanes,
    new_builder,
    pointwise_cost,
    result_elements,
    result_machine,
    same_place_operands,
    store_elements,
)
from ..template.values import GroupValues, Reader, pointwise_obstacle
from .interleaved import can_interleave, lies_in_turns, map_in_turns
from .joined_results import Joins, store_joined, through_concat
from .row_blocks import RowBlocks, Steps, choose_blocks, map_blocks
from .strided_operands import Strided, Views, is_contiguous, merged_strides, neighbours, through_views

_ROW_CYCLES = 4.0  # of a row's address and its loop


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes pointwise operators, all of whose outputs have one shape, and views of operands."""
    joined = through_concat(group)
    if isinstance(joined, Refusal):
        return joined
    parts, joins = joined
    found = through_views(parts if joins else _choices_as_bits(parts))
    if isinstance(found, Refusal):
        return found
    direct, views = found
    if reason := pointwise_obstacle(direct):
        return Refusal(reason)
    if not all(same_shape(direct.types[name].shape, direct.types[direct.outputs[0]].shape) for name in direct.outputs):
        return Refusal("outputs differ in shape")
    if (views or joins) and has_block_scales(direct):
        return Refusal("has scales along an axis beside parts of tensors")
    estimate = _estimate(*merge_dimensions(direct, views, joins), target)
    return Candidate(estimate, partial(_build, group, direct, views, joins, target))


@estimating
def _estimate(merged: Group, views: Views, joins: Joins, target: Target) -> Estimate:
    """Of one trip: operators on smaller values once for each of their elements, and values that rows share once for a row."""
    machine = result_machine(merged, target)
    shape = merged.types[merged.outputs[0]].shape
    *outer, inner = shape
    rows, spans = prod(outer), {name for name, kind in merged.types.items() if kind.shape[-1] == inner}
    read = [name for name in merged.inputs if name in spans and merged.literal(name) is None]
    body = LoopBody(stores=len(merged.outputs)) if not joins else _joining(joins, machine.lanes)
    for name in read:
        body += reading(views[name].strides[-1] if name in views else 1, machine.lanes)
    beside = 0.0
    for op in merged.ops:
        one = operator_body(merged, op, machine)
        if merged.types[op.outputs[0]].elements == prod(shape):
            body += one
        else:
            beside += one.cycles(machine) * merged.types[op.outputs[0]].elements / machine.lanes
    cut = None if views or joins else _blocks(merged, Steps(machine.lanes, target.machine.lanes))
    if cut is not None:
        cycles = prod(shape) / machine.lanes * body.cycles(machine) + cut.block_cycles(Steps(machine.lanes, target.machine.lanes))
    else:
        cycles = rows * (scalar_steps(inner, machine.lanes) * body.cycles(machine) + (_ROW_CYCLES if rows > 1 else 0.0))
    work = prod(shape) * pointwise_cost(merged)
    return with_bytes(Estimate(cycles + beside, work, unit="vector", is_parallel=work >= parallel_work(target.machine)), merged)


def _blocks(merged: Group, steps: Steps) -> RowBlocks | None:
    return None if has_block_scales(merged) else choose_blocks(merged, steps)


def _joining(joins: Joins, lanes: int) -> LoopBody:
    """What stores a vector of each part: one by one where elements do not lie side by side, or by shuffles."""
    if can_interleave(joins):
        return LoopBody(2.0 * len(joins), stores=len(joins))
    return LoopBody(stores=sum(1 if is_one(one.strides[-1]) else lanes for one in joins))


def _build(group: Group, direct: Group, views: Views, joins: Joins, target: Target) -> BuiltKernel:
    merged, views, joins = merge_dimensions(direct, views, joins)
    shape = merged.types[merged.outputs[0]].shape
    builder = new_builder(target)
    given = {name: one.reader(group, builder) for name, one in views.items()}

    def results(index: Index, loaded: Mapping[str, Reader]) -> list[Expr]:
        return result_elements(GroupValues(merged, builder, {**given, **loaded}), index)

    def store(index: Index, found: Sequence[Expr]) -> None:
        if joins:
            store_joined(builder, group, joins, index, found)
        else:
            store_elements(builder, merged, index, found)

    def element(index: Index) -> None:
        store(index, results(index, {}))

    work = hint_of(prod(shape) * pointwise_cost(direct))
    lanes = _vector_count(builder, merged, views, joins) if isinstance(builder, GpuBuilder) else narrowest_lanes(builder, merged)
    is_flat = builder.is_grid or views or joins or is_symbolic(shape)
    is_in_turns = not builder.is_grid and lies_in_turns(group, shape, lanes, views, joins)
    if is_in_turns:
        by = None if can_interleave(joins) else store
        map_in_turns(builder, group, shape, lanes, work, views, results, by, joins)
    elif not is_flat and (cut := _blocks(merged, Steps(lanes, builder.lanes("float32")))):
        map_blocks(builder, cut, lanes, work)
    else:
        map_elements(builder, shape, lanes, work, element)
    sources = {one.source for one in views.values()}
    inplace = tuple((number, name) for number, name in same_place_operands(direct) if name not in sources)
    if joins or is_in_turns:  # of which the last vectors of rows are computed twice in part
        return finish("elementwise", builder, group, flops=work)
    return finish("elementwise", builder, merged, flops=work, inplace=inplace)


def _vector_count(builder: GpuBuilder, merged: Group, views: Views, joins: Joins) -> int:
    """Neighbours that a thread takes, of what lies along rows of the results."""
    *_, inner = merged.types[merged.outputs[0]].shape
    along = [kind.dtype for name in (*merged.inputs, *merged.outputs) if (kind := merged.types[name]).shape[-1:] == (inner,)]
    count = builder.vector_count(along, inner)
    places = [(one.base, one.strides) for one in views.values()] + [(one.base, one.strides) for one in joins]
    for base, strides in places:
        count = neighbours(base, strides, count)
    return count


def has_block_scales(group: Group) -> bool:
    """Whether a DequantizeLinear has scales along an axis, or of blocks."""
    return any(op.op_type == "DequantizeLinear" and group.types[op.inputs[1]].elements > 1 for op in group.ops)


def _choices_as_bits(group: Group) -> Group:
    """The group, if it only chooses elements, with them seen as integers: complex ones can be chosen, too."""
    names = {name for op in group.ops for name in (*op.inputs[1:], *op.outputs)}
    if all(op.op_type == "Where" and op.inputs[0] not in names for op in group.ops):
        return as_bits(group, sorted(names))
    return group


def merge_dimensions(group: Group, views: Views, joins: Joins = ()) -> tuple[Group, Views, Joins]:
    """The same group over fewer, longer dimensions, all values of one rank (at least 1), its views and where its parts go.

    Neighbouring dimensions merge when each value spans all of them or none, and no view or part leaves something out between
    them, so that most groups become one flat loop. Scales of blocks do neither: their groups stay as they are.
    """
    if has_block_scales(group):
        return group, views, joins
    shape = group.types[group.outputs[0]].shape or (1,)
    padded = {name: (1,) * (len(shape) - len(kind.shape)) + kind.shape for name, kind in _values(group).items()}
    strides = {name: (0,) * (len(shape) - len(one.strides)) + one.strides for name, one in views.items()}
    stored = {one.part: (0,) * (len(shape) - len(one.strides)) + one.strides for one in joins}
    runs: list[list[int]] = []
    for axis, extent in enumerate(shape):
        if runs and (is_one(extent) or _can_merge(padded, strides | stored, [*runs[-1], axis], shape)):
            runs[-1].append(axis)
        else:
            runs.append([axis])
    types = {
        name: TensorType(tuple(prod(dims[axis] for axis in run) for run in runs), group.types[name].dtype)
        for name, dims in padded.items()
    }
    merged = {
        name: Strided(views[name].source, views[name].base, merged_strides(padded[name], runs, strides[name])) for name in views
    }
    joined = tuple(replace(one, strides=merged_strides(padded[one.part], runs, stored[one.part])) for one in joins)
    return replace(group, types=types), merged, joined


def _values(group: Group) -> dict[str, TensorType]:
    """The types of what the operators of a group read and make: not of what views of theirs are of."""
    made = (name for op in group.ops for name in (*op.inputs, *op.outputs) if name)
    names = dict.fromkeys((*group.inputs, *made, *group.outputs))
    return {name: group.types[name] for name in names}


def _can_merge(
    padded: Mapping[str, Sequence[SizeLike]], strides: Mapping[str, Sequence[SizeLike]], run: list[int], shape: Sequence[SizeLike]
) -> bool:
    return all(_spans_all_or_none(dims, run, shape) for dims in padded.values()) and all(
        is_contiguous(padded[name], run, steps) for name, steps in strides.items()
    )


def _spans_all_or_none(dims: Sequence[SizeLike], run: list[int], shape: Sequence[SizeLike]) -> bool:
    return len({is_one(dims[axis]) for axis in run if not is_one(shape[axis])}) <= 1
