"""Regions of an output that are strided views of an operand: how they merge into few long loops, and those loops.

Concat, Split, Slice, Transpose, Expand, Tile, Pad, DepthToSpace and SpaceToDepth are all lists of such regions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

from tvm import tirx

from ...runtime.hardware.machine import Machine
from ...runtime.symbolic.shapes import equal, is_one
from ...runtime.symbolic.sizes import Size, estimating, hint_of, least_of
from ..codegen.builder import Buffer, Expr, Index, KernelBuilder, int32_of, row_major
from ..codegen.gpu_builder import GpuBuilder
from ..cost.movement import copied_cycles, repeated_cycles, transposed_cycles
from ..cost.pointwise import LoopBody
from ..groups.group import Group, Op
from ..template.loops import bound_unravel, cover, merge_sections, parallel_nest, store_epilogue
from ..template.prologue import is_computed, source_of
from ..template.values import GroupValues
from .block_transpose import LEAST_SIDE, transpose_by_blocks

_TILE = 16  # largest side of a tile that is transposed in registers
_MOST_REPEATED = 8  # repetitions of each element in registers, at most
_PIECE = 4096  # elements of a contiguous run that are worth a thread of their own


@dataclass(frozen=True, slots=True)
class Axis:
    """A loop of a region: `extent` iterations, each `stride` elements further in the source."""

    extent: int
    stride: int


@dataclass(frozen=True, slots=True)
class Region:
    """The box of an output that begins at `starts`; dimension d is the product of the loops `axes[d]`, outermost first.

    Its elements are source[base + sum(i * stride)]. A source of None means zeros.
    """

    source: str | None
    starts: tuple[int, ...]
    axes: tuple[tuple[Axis, ...], ...]
    base: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(prod(axis.extent for axis in axes) for axes in self.axes)


def copy_regions(group: Group, builder: KernelBuilder, anchor: Op, output: str, regions: Sequence[Region]) -> None:
    """Write `output`, which is the anchor's own or that of its followers, region by region."""
    for copy in _copies(group, builder, anchor, output, regions):
        copy.emit()


@estimating
def regions_cycles(
    group: Group, builder: KernelBuilder, anchor: Op, output: str, regions: Sequence[Region], machine: Machine, store: LoopBody
) -> float:
    """Estimated cycles of one core for what `copy_regions` writes; `store` is what a vector takes beside reading it."""
    return sum(copy.cycles(machine, store) for copy in _copies(group, builder, anchor, output, regions))


@estimating
def stored_runs(group: Group, builder: KernelBuilder, anchor: Op, output: str, regions: Sequence[Region]) -> tuple[int, ...]:
    """Neighbouring elements that `copy_regions` stores at a time, region by region without those of zeros.

    None where any are repeated in registers.
    """
    copied = [region for region in regions if region.source is not None]
    runs = tuple(copy.stored_run for copy in _copies(group, builder, anchor, output, copied))
    return runs if all(runs) else ()


def _copies(group: Group, builder: KernelBuilder, anchor: Op, output: str, regions: Sequence[Region]) -> list[_Copy]:
    """The regions that are not empty, over merged dimensions."""
    shape = group.types[output].shape
    sections: list[list[int]] = []
    for axis, extent in enumerate(shape):
        joins = bool(sections) and (
            all(equal(region.starts[axis], 0) and equal(region.shape[axis], extent) for region in regions)
            or is_one(prod(shape[a] for a in sections[-1]))
        )
        sections = [*sections[:-1], [*sections[-1], axis]] if joins else [*sections, [axis]]
    merged, sections_runs = merge_sections(group, shape, sections)
    runs = [run for section in sections_runs for run in section]
    found = [_merged(region, shape, runs) for region in regions if prod(region.shape) != 0]
    return [_Copy(merged, builder, anchor, output, region) for region in found]


def _merged(region: Region, shape: tuple[int, ...], runs: Sequence[Sequence[int]]) -> Region:
    """The region over merged dimensions, with loops joined where the source is contiguous across them."""
    starts, axes = [], []
    for run in runs:
        starts.append(row_major([region.starts[a] for a in run], [shape[a] for a in run]))
        loops: list[Axis] = []
        for axis in (axis for a in run for axis in region.axes[a] if not is_one(axis.extent)):
            if loops and equal(loops[-1].stride, axis.stride * axis.extent):
                loops[-1] = Axis(loops[-1].extent * axis.extent, axis.stride)
            else:
                loops.append(axis)
        axes.append(tuple(loops))
    return replace(region, starts=tuple(starts), axes=tuple(axes))


@dataclass(frozen=True)
class _Copy:
    """The loops of one merged region."""

    group: Group
    builder: KernelBuilder
    anchor: Op
    output: str
    region: Region

    @property
    def _loops(self) -> list[Axis]:
        return [axis for axes in self.region.axes for axis in axes]

    @property
    def stored_run(self) -> int:
        """Neighbouring elements that are stored at a time; 0 where vectors are full in any case."""
        loops = self._loops
        if not loops:
            return 1
        if (across := self._transposed_loop(loops)) is not None:
            return min(loops[across].extent, loops[-1].extent)
        return 0 if self._repeats(loops) else loops[-1].extent

    def cycles(self, machine: Machine, store: LoopBody) -> float:
        """Estimated, of one core; `store` is what a vector takes beside reading it."""
        loops, lanes = self._loops, self._lanes()
        if not loops:
            return 1.0
        *outer, last = loops
        if (across := self._transposed_loop(loops)) is not None:
            item_bytes = self.group.types[self.output].bytes_of(1)
            others = prod(axis.extent for i, axis in enumerate(outer) if i != across)
            below = prod(axis.extent for axis in loops[across + 1 :]) * item_bytes
            sides = loops[across].extent, last.extent
            side = self._tile_side(loops[across], last)
            return transposed_cycles(others, sides, (below, last.stride * item_bytes), side, store, machine)
        if self._repeats(loops):
            return repeated_cycles(prod(axis.extent for axis in outer[:-1]), outer[-1].extent, last.extent, lanes, store, machine)
        return copied_cycles([axis.extent for axis in loops], last.stride, lanes, store, machine)

    def emit(self) -> None:
        loops = self._loops
        work = prod(axis.extent for axis in loops)
        lanes = self._lanes()
        if not loops:
            self._store((), self._load(()))
        elif isinstance(self.builder, GpuBuilder) and (across := self._block_loop(loops)) is not None:
            extents, outputs = [axis.extent for axis in loops], [self.group.types[name].dtype for name in self.group.outputs]
            transpose_by_blocks(self.builder, extents, across, self._source(), outputs, self._load, self._store)
        elif isinstance(self.builder, GpuBuilder):
            *outer, last = [axis.extent for axis in loops]
            count = self.builder.vector_count([self.group.types[self.output].dtype], last)
            with self.builder.chunks(work // count, work) as i:
                *index, run = bound_unravel(self.builder, i, [*outer, last // count])
                with self.builder.neighbours(count) as e:
                    self._move((*index, run * count + e if count > 1 else run))
        elif (across := self._transposed_loop(loops)) is not None:
            self._transpose(loops, across, work)
        elif self._repeats(loops):
            self._repeat(loops, lanes, work)
        elif self._has_long_rows(loops):
            self._copy_pieces(loops, lanes, work)
        else:
            extents = [axis.extent for axis in loops]
            parallel_nest(
                self.builder,
                extents[:-1],
                work,
                lambda outer: cover(self.builder, extents[-1], lanes, lambda i: self._move((*outer, i))),
            )

    @estimating
    def _has_long_rows(self, loops: Sequence[Axis]) -> bool:
        """Whether rows are few and long."""
        return prod(axis.extent for axis in loops[:-1]) < 8 * self.builder.threads and loops[-1].extent >= 2 * _PIECE

    def _lanes(self) -> int:
        types = self.group.types
        return min(self.builder.lanes(types[name].dtype) for name in (self.output, self.anchor.outputs[0]))

    def _copy_pieces(self, loops: Sequence[Axis], lanes: int, work: int) -> None:
        """Few long rows: each is cut into pieces for the threads."""
        extent = loops[-1].extent
        rows = prod(axis.extent for axis in loops[:-1])
        pieces = min(hint_of(extent) // _PIECE, 4 * self.builder.threads)
        with self.builder.chunks(rows * pieces, work) as chunk:
            *outer, piece = bound_unravel(self.builder, chunk, [*(axis.extent for axis in loops[:-1]), pieces])
            step = -(-extent // pieces)
            begin = self.builder.bind(piece * step)
            end = self.builder.bind(tirx.min(begin + step, extent))
            self.builder.dynamic_vector_loop(begin, end, lanes, lambda i: self._move((*outer, i)))

    def _transposed_loop(self, loops: Sequence[Axis]) -> int | None:
        """The loop along which the source is contiguous, if that is not the last one and a tile of both fits."""
        last = len(loops) - 1
        source = self.region.source
        if source is None or is_computed(self.group, source) or is_one(loops[last].stride) or equal(loops[last].stride, 0):
            return None
        if loops[last].extent < 4:
            return None
        return next((i for i, axis in enumerate(loops[:last]) if is_one(axis.stride) and axis.extent >= 4), None)

    def _block_loop(self, loops: Sequence[Axis]) -> int | None:
        """The loop along which the source is contiguous, where blocks of threads transpose tiles."""
        across = self._transposed_loop(loops)
        if across is None or any(isinstance(axis.extent, Size) for axis in loops):
            return None
        return across if min(loops[across].extent, loops[-1].extent) >= LEAST_SIDE else None

    def _tile_side(self, down: Axis, along: Axis) -> int:
        """A power of two that neither loop is shorter than."""
        side = min(_TILE, self._lanes())
        while side > min(least_of(down.extent), least_of(along.extent)):
            side //= 2
        return side

    def _transpose(self, loops: Sequence[Axis], across: int, work: int) -> None:
        """Square tiles over the loop that runs along the source and the last one, which runs along the output."""
        builder = self.builder
        down, along = loops[across], loops[-1]
        side = self._tile_side(down, along)
        outer = [axis.extent for i, axis in enumerate(loops[:-1]) if i != across]
        blocks = (-(-down.extent // side), -(-along.extent // side))

        def tile(index: Index) -> None:
            *others, i, j = index
            top = builder.bind(tirx.min(i * side, down.extent - side))
            left = builder.bind(tirx.min(j * side, along.extent - side))
            others.insert(across, top)
            origin = builder.bind(self._source_offset((*others, left)))
            elements = transposed_tile(builder, self._source(), origin, along.stride, side)
            for c in range(side):
                row = (*others[:across], top + c, *others[across + 1 :])
                with builder.loop(side, "vectorized", "lane") as lane:
                    self._store((*row, left + lane), elements[c * side + lane])

        parallel_nest(builder, [*outer, *blocks], work, tile)

    def _repeats(self, loops: Sequence[Axis]) -> bool:
        """Whether each element of a contiguous run is repeated a few times (nearest-neighbour upsampling)."""
        if len(self.region.axes[-1]) < 2:
            return False
        along, times = loops[-2:]
        is_repeated = is_one(along.stride) and equal(times.stride, 0)
        is_few = not isinstance(times.extent, Size) and times.extent <= _MOST_REPEATED
        return is_repeated and is_few and least_of(along.extent) > 1  # of which a vector is made

    def _repeat(self, loops: Sequence[Axis], lanes: int, work: int) -> None:
        """Vectors of the source, their elements repeated in registers. The last vector overlaps the one before it."""
        builder = self.builder
        *outer, along, times = loops
        while lanes > least_of(along.extent):
            lanes //= 2

        def block(index: Index) -> None:
            *others, number = index
            first = builder.bind(tirx.min(number * lanes, along.extent - lanes))
            elements = builder.local(lanes, str(self._source().dtype), "run")
            with builder.loop(lanes, "vectorized", "lane") as lane:
                builder.store(elements, lane, self._load((*others, first + lane, 0)))
            repeated = builder.local(lanes * times.extent, str(self._source().dtype), "repeated")
            for start in range(0, lanes * times.extent, lanes):
                places = [(start + place) // times.extent for place in range(lanes)]
                run = elements[tirx.Ramp(int32_of(0), 1, lanes)]
                builder.store(repeated, tirx.Ramp(int32_of(start), 1, lanes), tirx.Shuffle([run], places))
                with builder.loop(lanes, "vectorized", "lane") as lane:
                    self._store((*others, 0, first * times.extent + start + lane), repeated[start + lane])

        parallel_nest(builder, [*(axis.extent for axis in outer), -(-along.extent // lanes)], work, block)

    def _move(self, index: Index) -> None:
        self._store(index, self._load(index))

    def _load(self, index: Index) -> Expr:
        source = self.region.source
        if source is None:
            return tirx.const(0, self.group.types[self.anchor.outputs[0]].dtype)
        literal = self.group.literal(source)
        if literal is not None and literal.size == 1:
            return GroupValues(self.group, self.builder).read(source, ())
        return self._source()[int32_of(self._source_offset(index))]

    def _source(self) -> Buffer:
        assert self.region.source is not None
        return source_of(self.group, self.builder, self.region.source)

    def _source_offset(self, index: Index) -> Expr:
        strides = [axis.stride for axes in self.region.axes for axis in axes]
        return sum((i * stride for i, stride in zip(index, strides, strict=True) if not equal(stride, 0)), start=self.region.base)

    def _store(self, index: Index, value: Expr) -> None:
        """Store at the place of the output that belongs to a loop index."""
        counts = [len(axes) for axes in self.region.axes]
        ends = list(accumulate(counts))
        place = tuple(
            row_major(index[end - count : end], [axis.extent for axis in axes]) + start
            for end, count, axes, start in zip(ends, counts, self.region.axes, self.region.starts, strict=True)
        )
        kind = self.group.types[self.output]
        if self.output in self.anchor.outputs:
            self.builder.store(
                self.builder.parameter(self.output, kind.elements, kind.dtype), row_major(place, kind.shape), value
            )
        else:
            store_epilogue(self.group, self.builder, self.anchor, place, value)


def transposed_tile(builder: KernelBuilder, source: Buffer, origin: Expr, stride: int, side: int) -> Buffer:
    """A square tile whose rows lie `stride` apart, transposed in registers: element [c * side + r] is source[r * stride + c]."""
    rows = builder.local(side * side, str(source.dtype), "tile")
    for r in range(side):
        builder.store(rows, tirx.Ramp(int32_of(r * side), 1, side), source[tirx.Ramp(origin + r * stride, 1, side)])
    return transposed(builder, rows, side)


def transposed(builder: KernelBuilder, rows: Buffer, side: int) -> Buffer:
    """A square array transposed in registers.

    Butterflies: stage s exchanges, between rows r and r + s, the elements whose column has bit s set.
    """
    dtype, step = str(rows.dtype), 1
    while step < side:
        following = builder.local(side * side, dtype, "tile")
        for r in range(side):
            if not r & step:
                pair = [rows[tirx.Ramp(int32_of(row * side), 1, side)] for row in (r, r | step)]
                low = [c if not c & step else side + (c ^ step) for c in range(side)]
                high = [side + c if c & step else c ^ step for c in range(side)]
                builder.store(following, tirx.Ramp(int32_of(r * side), 1, side), tirx.Shuffle(pair, low))
                builder.store(following, tirx.Ramp(int32_of((r | step) * side), 1, side), tirx.Shuffle(pair, high))
        rows = following
        step *= 2
    return rows
