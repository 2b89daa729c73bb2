"""Gather, GatherElements and GatherND: elements at indices known at run time only.

Negative indices count from the end; all are clamped to their dimension, so that a wrong index reads a wrong element, never memory
outside of the tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod

from tvm import tirx

from ...runtime.hardware.machine import PAGE_BYTES
from ...runtime.symbolic.shapes import is_one
from ...runtime.symbolic.sizes import Size, estimating, hint_of, maximum_of, minimum_of
from ...runtime.target import Target
from ..codegen.builder import Expr, Index, KernelBuilder, int32_of, row_major
from ..codegen.gpu_builder import GpuBuilder
from ..cost.estimate import Estimate, with_bytes
from ..cost.memory import parallel_work
from ..cost.movement import arrival_cycles, chosen_elements_cycles, chosen_rows_cycles
from ..groups.group import Group, Op
from ..template.contract import BuiltKernel, Candidate, Refusal
from ..template.kernel import anchor_bodies, finish, map_elements, narrowest_lanes, new_builder, pointwise_cost, result_machine
from ..template.loops import bound_unravel, merge_sections, nest, store_epilogue
from ..template.prologue import flat_obstacle, source_of
from ..template.values import PANELS, anchor_of, followers_of
from .injective import as_bits

OPERATORS = frozenset(["Gather", "GatherElements", "GatherND"])


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes one gathering operator with its epilogue."""
    anchor, followers = anchor_of(group), followers_of(group)
    if PANELS in anchor.attributes and anchor.inputs[0] in group.constants:
        return Refusal("its table lies in panels of a product's weights")
    if reason := flat_obstacle(group, anchor.inputs[0]):
        return Refusal(reason)
    if not followers:
        group = as_bits(group, (anchor.inputs[0], anchor.outputs[0]))
    run = group.types[anchor.outputs[0]].shape[-1:] if anchor.op_type == "GatherElements" else (_row_length(group, anchor),)
    runs = run if not is_one(prod(run)) else ()  # single elements are gathered by whole vectors
    return Candidate(gather_estimate(group, anchor, target), partial(_build, group, anchor, target), stored_runs=runs)


@estimating
def gather_estimate(group: Group, anchor: Op, target: Target) -> Estimate:
    """Of the rows that indices choose, or of elements one by one."""
    data, elements = group.types[anchor.inputs[0]], group.types[anchor.outputs[0]].elements
    machine, length = result_machine(group, target), _row_length(group, anchor)
    before, after = anchor_bodies(group, anchor, machine)
    rows = elements // max(length, 1)
    if length == 1:
        cycles = chosen_elements_cycles(rows, before + after, machine)
    else:
        cycles = chosen_rows_cycles(rows, length, machine.lanes, before + after, machine)
    cycles += arrival_cycles(rows, data.size_bytes, machine)
    is_parallel = 4 * elements >= parallel_work(target.machine)
    places = min(rows, data.size_bytes // PAGE_BYTES) if anchor.inputs[0] in group.constants else 0
    estimate = Estimate(cycles, elements * pointwise_cost(group), unit="vector", is_parallel=is_parallel, places=places)
    return with_bytes(estimate, group)


def _row_length(group: Group, anchor: Op) -> int:
    """Neighbouring elements that one index chooses."""
    data, indices = (group.types[name].shape for name in anchor.inputs)
    if anchor.op_type == "GatherElements":
        return 1
    if anchor.op_type == "GatherND":
        return prod(data[anchor.attribute("batch_dims", 0) + indices[-1] :])
    return prod(data[anchor.attribute("axis", 0) % len(data) + 1 :])


def _build(group: Group, anchor: Op, target: Target) -> BuiltKernel:
    builder = new_builder(target)
    elements = group.types[anchor.outputs[0]].elements
    if elements != 0 and group.types[anchor.inputs[0]].elements != 0:
        {"Gather": _gather, "GatherElements": _gather_elements, "GatherND": _gather_nd}[anchor.op_type](group, anchor, builder)
    elif elements != 0:
        _fill(group, anchor, builder)
    return finish("gather", builder, group, flops=hint_of(elements) * pointwise_cost(group))


def _fill(group: Group, anchor: Op, builder: KernelBuilder) -> None:
    """Zeros: an operand without elements has none to give, whatever the indices say."""
    kind = group.types[anchor.outputs[0]]
    zero = tirx.const(0, kind.dtype)
    lanes = narrowest_lanes(builder, group)
    map_elements(builder, kind.shape, lanes, kind.elements, lambda index: store_epilogue(group, builder, anchor, index, zero))


def _gather(group: Group, anchor: Op, builder: KernelBuilder) -> None:
    data, indices = (group.types[name].shape for name in anchor.inputs)
    axis = anchor.attribute("axis", 0) % len(data)
    rank, last = len(data) + len(indices) - 1, axis + len(indices)
    inner = prod(data[axis + 1 :])

    def origin(outer: Expr, position: Expr) -> Expr:
        return (outer * data[axis] + index_at(group, anchor, builder, position, data[axis])) * inner

    sections = (range(axis), range(axis, last), range(last, rank))
    _copy_rows(group, anchor, builder, sections, origin)


def _gather_nd(group: Group, anchor: Op, builder: KernelBuilder) -> None:
    data, indices = (group.types[name].shape for name in anchor.inputs)
    batches, depth = anchor.attribute("batch_dims", 0), indices[-1]
    rows = prod(indices[batches:-1])
    inner = prod(data[batches + depth :])
    out_rank = len(group.types[anchor.outputs[0]].shape)

    def origin(outer: Expr, _: Expr) -> Expr:
        place = tirx.floordiv(outer, rows) if not is_one(rows) else outer
        for part, extent in enumerate(data[batches : batches + depth]):
            place = place * extent + index_at(group, anchor, builder, outer * depth + part, extent)
        return place * inner

    lead = len(indices) - 1
    _copy_rows(group, anchor, builder, (range(lead), range(0), range(lead, out_rank)), origin)


def _gather_elements(group: Group, anchor: Op, builder: KernelBuilder) -> None:
    data = group.types[anchor.inputs[0]]
    shape = group.types[anchor.outputs[0]].shape
    axis = anchor.attribute("axis", 0) % len(data.shape)
    source = source_of(group, builder, anchor.inputs[0])

    def element(index: Index) -> None:
        place = index_at(group, anchor, builder, row_major(index, shape), data.shape[axis])
        value = source[row_major((*index[:axis], place, *index[axis + 1 :]), data.shape)]
        store_epilogue(group, builder, anchor, index, value)

    map_elements(builder, shape, narrowest_lanes(builder, group), 4 * prod(shape), element)


def _copy_rows(
    group: Group,
    anchor: Op,
    builder: KernelBuilder,
    sections: tuple[range, range, range],
    origin: Callable[[Expr, Expr], Expr],
) -> None:
    """For each position of the first two sections of the output's dimensions, copy the third from `origin` of the operand."""
    shape = group.types[anchor.outputs[0]].shape
    merged, runs = merge_sections(group, shape, sections)
    extents = [[prod(shape[axis] for axis in run) for run in section] for section in runs]
    source = source_of(group, builder, anchor.inputs[0])
    first, lead = len(extents[0]), extents[0] + extents[1]
    if isinstance(builder, GpuBuilder):
        *outer, last = [*lead, *extents[2]]
        kinds = [group.types[name].dtype for name in (anchor.inputs[0], *group.outputs)]
        count = builder.vector_count(kinds, last) if extents[2] else 1
        with builder.chunks(prod(shape) // count, 4 * prod(shape)) as i:
            *before, run = bound_unravel(builder, i, [*outer, last // count])
            chosen = row_major([*before, run][first : len(lead)], lead[first:])
            place = builder.bind(origin(row_major(before[:first], lead[:first]), chosen))
            with builder.neighbours(count) as e:
                index = (*before, run * count + e if count > 1 else run)
                inner = row_major(index[len(lead) :], extents[2])
                store_epilogue(merged, builder, anchor, index, source[builder.bind(place + inner)])
        return
    *middle, last = extents[2]
    if is_one(prod(extents[2])):
        _copy_elements(merged, anchor, builder, [*lead, *extents[2]], first, origin)
        return
    with builder.chunks(prod(lead), 4 * prod(shape)) as chunk:
        at = bound_unravel(builder, chunk, lead)
        begin = builder.bind(origin(row_major(at[:first], lead[:first]), row_major(at[first:], lead[first:])))

        def rows(index: Index) -> None:
            place = builder.bind(begin + row_major(index, middle) * last)
            builder.vector_loop(
                last,
                narrowest_lanes(builder, group),
                lambda j: store_epilogue(merged, builder, anchor, (*at, *index, j), source[place + j]),
            )

        nest(builder, middle, rows)


def _copy_elements(
    group: Group, anchor: Op, builder: KernelBuilder, extents: list[int], first: int, origin: Callable[[Expr, Expr], Expr]
) -> None:
    """As `_copy_rows`, of rows of one element: vectors run along the second section, or the `first` dimensions if it is short."""
    source = source_of(group, builder, anchor.inputs[0])
    lanes = narrowest_lanes(builder, group)
    lead = extents[: len(extents) - 1]
    inner = len(lead) - 1 if lead[-1] >= lanes or first == 0 else max(range(first), key=lambda d: (lead[d] >= lanes, d))
    order = [*(d for d in range(len(extents)) if d != inner), inner]

    def element(permuted: Index) -> None:
        index = tuple(permuted[order.index(d)] for d in range(len(extents)))
        outer, position = row_major(index[:first], lead[:first]), row_major(index[first:-1], lead[first:])
        store_epilogue(group, builder, anchor, index, source[origin(outer, position)])

    map_elements(builder, tuple(extents[d] for d in order), lanes, 4 * prod(extents), element)


def index_at(group: Group, anchor: Op, builder: KernelBuilder, offset: Expr, extent: int) -> Expr:
    """The index at a flat offset of the operand of indices, within its dimension."""
    name = anchor.inputs[1]
    literal = group.literal(name)
    if literal is not None and literal.size == 1:
        place = literal.item()
        place = place if isinstance(place, Size) else int(place)
        return int32_of(minimum_of(maximum_of(place + extent if place < 0 else place, 0), extent - 1))
    kind = group.types[name]
    value = builder.parameter(name, kind.elements, kind.dtype)[offset]
    value = tirx.Cast("int64", value)
    wrapped = tirx.Select(value < 0, value + extent, value)
    return tirx.Cast("int32", tirx.max(tirx.min(wrapped, extent - 1), tirx.const(0, "int64")))
