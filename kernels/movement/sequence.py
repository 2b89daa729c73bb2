"""ReverseSequence and TensorScatter: slices along a dimension whose place depends on a number of each batch."""

from __future__ import annotations

from math import prod

from tvm import tirx

from ...runtime.target import Target
from ..codegen.builder import Expr, Index, KernelBuilder, row_major
from ..codegen.gpu_builder import GpuBuilder
from ..groups.group import Group, Op
from ..template.contract import BuiltKernel
from ..template.kernel import finish, narrowest_lanes, new_builder, pointwise_cost
from ..template.loops import merge_sections, nest, parallel_nest, store_epilogue, sweep
from ..template.values import anchor_of, followers_of
from .injective import as_bits
from .scatter import copy_unless_aliased

OPERATORS = frozenset(["ReverseSequence", "TensorScatter"])


def build(group: Group, target: Target) -> BuiltKernel:
    """Takes one of the operators, with an epilogue."""
    anchor, followers = anchor_of(group), followers_of(group)
    is_scatter = anchor.op_type == "TensorScatter"
    if not followers:
        group = as_bits(group, (*anchor.inputs[: 2 if is_scatter else 1], anchor.outputs[0]))
    builder = new_builder(target)
    kind = group.types[anchor.outputs[0]]
    if kind.elements:
        (_scatter if is_scatter else _reverse)(group, builder, anchor)
    work = kind.elements * (1 + pointwise_cost(group))
    cache = anchor.inputs[0]
    is_free = is_scatter and not followers and cache not in group.constants and cache not in anchor.inputs[1:]
    inplace = ((0, cache),) if is_free else ()
    return finish("sequence", builder, group, flops=work, inplace=inplace)


def _reverse(group: Group, builder: KernelBuilder, anchor: Op) -> None:
    """The first `sequence_lens[batch]` slices along the time axis in reverse order, the others as they are."""
    shape, rows = group.types[anchor.outputs[0]].shape, _Rows(group, builder, anchor, 2)
    batch, time = anchor.attribute("batch_axis", 1), anchor.attribute("time_axis", 0)

    def row(place: Index) -> None:
        length = tirx.max(tirx.min(_number(group, builder, anchor.inputs[1], place[batch]), shape[time]), 0)
        at = place[time]
        turned = builder.bind(tirx.Select(at < length, tirx.Cast("int32", length) - 1 - at, at))
        rows.copy(place, anchor.inputs[0], (*place[:time], turned, *place[time + 1 :]))

    parallel_nest(builder, shape[:2], prod(shape), row)


def _scatter(group: Group, builder: KernelBuilder, anchor: Op) -> None:
    """The cache with the update stored from `write_indices[batch]` on, wrapping around if it is circular.

    What would be out of bounds is not stored.
    """
    shape, update = (group.types[name].shape for name in (anchor.outputs[0], anchor.inputs[1]))
    axis = anchor.attribute("axis", -2) % len(shape)
    rows = _Rows(group, builder, anchor, axis + 1)
    is_alone = not followers_of(group)  # so that the cache may be the output itself
    if is_alone and not builder.is_grid:
        _scatter_in_place(group, builder, anchor, rows, axis)
        return
    indices = anchor.inputs[2] if len(anchor.inputs) > 2 else ""
    extent, length = shape[axis], update[axis]
    is_kept_there: Expr = tirx.const(False, "bool")  # whether the cache is the output itself
    if is_alone and isinstance(builder, GpuBuilder):
        cache = group.types[anchor.inputs[0]]
        is_kept_there = builder.is_same(
            *(builder.parameter(name, cache.elements, cache.dtype) for name in (anchor.inputs[0], anchor.outputs[0]))
        )

    def row(place: Index) -> None:
        number = place[axis]
        if indices:
            first = _number(group, builder, indices, place[0])
            if anchor.attribute("mode", "linear") == "circular":
                number = builder.bind(tirx.floormod(number - tirx.Cast("int32", tirx.floormod(first, extent)), extent))
            else:  # a first place out of range leaves nothing to write, or its end alone
                number = builder.bind(number - tirx.Cast("int32", tirx.max(tirx.min(first, extent), -length)))
        is_new = tirx.And(number >= 0, number < length)
        with builder.when(is_new):
            rows.copy(place, anchor.inputs[1], (*place[:axis], number))
        with builder.when(tirx.Not(tirx.Or(is_new, is_kept_there))):
            rows.copy(place, anchor.inputs[0], place)

    parallel_nest(builder, shape[: axis + 1], prod(shape), row)


def _scatter_in_place(group: Group, builder: KernelBuilder, anchor: Op, rows: _Rows, axis: int) -> None:
    """As `_scatter`: the cache copied unless it is the output, and each row of the update stored at its place."""
    cache, update = (group.types[name] for name in anchor.inputs[:2])
    source, out = (builder.parameter(name, cache.elements, cache.dtype) for name in (anchor.inputs[0], anchor.outputs[0]))
    copy_unless_aliased(builder, source, out, cache)
    extent, indices = cache.shape[axis], anchor.inputs[2] if len(anchor.inputs) > 2 else ""

    def row(place: Index) -> None:
        number = place[axis]
        if indices:
            first = _number(group, builder, indices, place[0])
            if anchor.attribute("mode", "linear") == "circular":
                number = builder.bind(tirx.floormod(number + tirx.Cast("int32", tirx.floormod(first, extent)), extent))
            else:
                number = builder.bind(number + tirx.Cast("int32", tirx.max(tirx.min(first, extent), -update.shape[axis])))
        with builder.when(tirx.And(number >= 0, number < extent)):
            rows.copy((*place[:axis], number), anchor.inputs[1], place)

    if update.elements:
        parallel_nest(builder, update.shape[: axis + 1], update.elements, row)


class _Rows:
    """The dimensions of the output after the first `leading`, which are copied whole."""

    def __init__(self, group: Group, builder: KernelBuilder, anchor: Op, leading: int) -> None:
        shape = group.types[anchor.outputs[0]].shape
        sections = [*((axis,) for axis in range(leading)), range(leading, len(shape))]
        self.group, runs = merge_sections(group, shape, sections)
        self.builder, self.anchor = builder, anchor
        self.types = group.types
        self.extents = [prod(shape[axis] for axis in run) for run in runs[-1]]

    def copy(self, place: Index, name: str, source: Index) -> None:
        """Copy the row of an operand at `source` to the output's at `place`."""
        builder, kind = self.builder, self.types[name]
        buffer = builder.parameter(name, kind.elements, kind.dtype)
        *middle, columns = self.extents
        origin = builder.bind(row_major(source, kind.shape[: len(source)]) * prod(self.extents))
        lanes = min(narrowest_lanes(builder, self.group), builder.lanes(kind.dtype))

        def line(index: Index) -> None:
            begin = builder.bind(origin + row_major(index, middle) * columns)
            sweep(
                builder,
                columns,
                lanes,
                lambda j: store_epilogue(self.group, builder, self.anchor, (*place, *index, j), buffer[begin + j]),
            )

        nest(builder, middle, line)


def _number(group: Group, builder: KernelBuilder, name: str, batch: Expr) -> Expr:
    """The int64 number of a batch."""
    kind = group.types[name]
    return builder.bind(tirx.Cast("int64", builder.parameter(name, kind.elements, kind.dtype)[batch]))
