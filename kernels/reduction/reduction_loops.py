"""The loops of a reduction, whatever is accumulated in them.

Dimensions are merged into as few loops as possible. If the elements of a result are contiguous, vectors run along them, with
several accumulators (row-wise); otherwise along the last kept dimension, a block of results at once (column-wise).

Results that are few, of many elements each, are computed one block after the other: one of the loops over the elements is cut
into parts, which are dealt to the threads. Each part is accumulated apart, in scratch, and the parts are combined in their order.
How many there are depends on sizes alone, so that the bits of a result do not depend on the threads, and chains of sums are
short, so that they lose few digits. Where a call decides a size, nothing is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, isqrt, prod

from tvm import tirx

from ...runtime.hardware.machine import Machine
from ...runtime.symbolic.shapes import is_one
from ...runtime.symbolic.sizes import Size, SizeLike, least_of
from ..codegen.builder import Buffer, Expr, Index, KernelBuilder, row_major
from ..cost.reduction import Reduction
from ..groups.group import Group, Op
from ..template.loops import merge_sections, nest, parallel_nest, sweep

_ACCUMULATORS = 4  # independent vectors: they hide the loop-carried latency of an addition, four cycles
_CUT_ELEMENTS = 1 << 17  # of a block, from which on its loops are cut, for each block: they take turns, and threads wake for each
_CHAIN = 256  # elements that are added up in one accumulator of a part, at least
Update = Callable[[Expr, Expr, Expr], None]  # (accumulator slot, offset of the element, its number along the innermost loop)
Combine = Callable[[Expr, Expr], Expr]


@dataclass(frozen=True, slots=True)
class Loop:
    """`extent` iterations, `stride` elements apart."""

    extent: SizeLike
    stride: SizeLike


@dataclass(frozen=True)
class Block:
    """Results that are accumulated together: one of `slots` partial accumulators (row-wise) or `slots` of their own.

    On a GPU a row-wise one may be the work of a block of threads, each with one accumulator (thread_block.py).
    """

    builder: KernelBuilder
    slots: int
    lanes: int
    rowwise: bool
    base: Expr
    reduced: tuple[Loop, ...]
    index: Index  # of the first result

    def each_slot(self, body: Callable[[Expr], None]) -> None:
        for vector in range(self.slots // self.lanes):
            with self.builder.loop(self.lanes, "vectorized", "lane") as lane:
                body(vector * self.lanes + lane)

    def each_result(self, body: Callable[[Expr, Index], None]) -> None:
        """`body(slot, index)` for each result of the block, once row-wise accumulators are combined in slot 0."""
        if self.rowwise:
            body(tirx.const(0, "int32"), self.index)
        else:
            self.each_slot(lambda slot: body(slot, (*self.index[:-1], self.index[-1] + slot)))

    def once(self) -> AbstractContextManager[None]:
        """A context in which one thread alone stores results."""
        return nullcontext()

    def bring_together(self, total: Buffer, combine: Combine) -> None:
        """Combine row-wise accumulators in slot 0."""
        width = self.slots if self.rowwise else 1
        while width > 1:
            width = 1 << (width - 1).bit_length() - 1
            rest = (self.slots if width * 2 > self.slots else width * 2) - width
            with self.builder.loop(rest, "vectorized", "lane") as lane:
                self.builder.store(total, lane, combine(total[lane], total[width + lane]))

    def gather(self, total: Buffer, initial: Expr, update: Callable[[Buffer], Update], combine: Combine) -> None:
        """Accumulate every element in the slots of `total`, by `update(total)`, from `initial` on."""
        self.each_slot(lambda slot: self.builder.store(total, slot, initial))
        self.walk(update(total))

    def each_of_row(self, extents: Sequence[int], body: Callable[[Index, Expr], None]) -> None:
        """`body(index, offset)` for each element of a contiguous row of these extents from `base` on."""
        builder, last = self.builder, extents[-1]

        def along(outer: Index) -> None:
            base = builder.bind(self.base + row_major(outer, extents[:-1]) * last)
            sweep(builder, last, self.lanes, lambda i: body((*outer, i), base + i))

        nest(builder, extents[:-1], along)

    def walk(self, update: Update) -> None:
        """Call `update` for every element, inside of vectorised loops."""
        if not self.rowwise:
            nest(self.builder, [loop.extent for loop in self.reduced], lambda index: self._columns(index, update))
            return
        *outer, inner = self.reduced

        def row(index: Index) -> None:
            base = self.builder.bind(self.base + offset_of(index, outer))
            self._row(base, inner.extent, update)

        nest(self.builder, [loop.extent for loop in outer], row)

    def _columns(self, index: Index, update: Update) -> None:
        base = self.builder.bind(self.base + offset_of(index, self.reduced))
        self.each_slot(lambda slot: update(slot, base + slot, index[-1] if index else tirx.const(0, "int32")))

    def _row(self, base: Expr, extent: SizeLike, update: Update) -> None:
        """Whole blocks, then whole vectors, then ever shorter ones; or of a length that only a run knows, one by one."""
        builder = self.builder
        if not isinstance(extent, int):
            self._dynamic_row(base, extent, update)
            return
        done = extent // self.slots * self.slots
        with builder.loop(extent // self.slots, name="block") as block:
            self.each_slot(lambda slot: update(slot, base + block * self.slots + slot, block * self.slots + slot))
        lanes, slot = self.lanes, 0
        while done < extent:
            while lanes > extent - done:
                lanes //= 2
            with builder.loop(lanes, "vectorized", "lane") as lane:
                update(slot + lane, base + done + lane, done + lane)
            done, slot = done + lanes, (slot + lanes) % self.slots if lanes == self.lanes else 0

    def _dynamic_row(self, base: Expr, extent: Expr, update: Update) -> None:
        builder, lanes = self.builder, self.lanes
        blocks = builder.bind(extent // self.slots)
        with builder.loop(blocks, name="block") as block:
            self.each_slot(lambda slot: update(slot, base + block * self.slots + slot, block * self.slots + slot))
        done = builder.bind(blocks * self.slots)
        vectors = builder.bind(tirx.floordiv(extent - done, lanes))
        with builder.loop(vectors, name="v") as vector, builder.loop(lanes, "vectorized", "lane") as lane:
            update(lane, base + done + vector * lanes + lane, done + vector * lanes + lane)
        done = builder.bind(done + vectors * lanes)
        with builder.loop(builder.bind(extent - done), name="tail") as i:
            update(i, base + done + i, done + i)


@dataclass(frozen=True, slots=True)
class Cut:
    """Reduced loop number `loop` in runs of `piece` iterations, `parts` of them, of which the last may be shorter."""

    loop: int
    piece: int
    parts: int


def cut_of(reduced: Sequence[Loop], slots: int, blocks: SizeLike, is_rowwise: bool) -> Cut | None:
    """How the longest loop over the elements of a block is cut, of `blocks` that take turns; None where it is not.

    A part adds up about as many elements in each accumulator as there are parts.
    """
    extents = [loop.extent for loop in reduced]
    if any(isinstance(size, Size) for size in (*extents, blocks)):
        return None
    if prod(extents) * (1 if is_rowwise else slots) < _CUT_ELEMENTS * blocks or not blocks:
        return None
    unit = [1] * len(extents)
    if is_rowwise:
        unit[-1] = slots
    steps = [ceil(extent / size) for extent, size in zip(extents, unit, strict=True)]
    loop = max(range(len(steps)), key=steps.__getitem__)
    chain = max(_CHAIN, 1 << (isqrt(prod(steps)) - 1).bit_length())
    piece = max(chain * steps[loop] // prod(steps), 1) * unit[loop]
    parts = ceil(extents[loop] / piece)
    return Cut(loop, piece, parts) if parts > 1 else None


@dataclass(frozen=True)
class CutBlock(Block):
    """A block of `work` scalar operations whose elements are the work of all threads; the one that began stores its results.

    What `update` of `gather` knows as the element's number is counted from the beginning of its part.
    """

    cut: Cut
    work: SizeLike

    def gather(self, total: Buffer, initial: Expr, update: Callable[[Buffer], Update], combine: Combine) -> None:
        builder, slots, dtype = self.builder, self.slots, str(initial.ty)
        partial = builder.workspace(self.cut.parts * slots, dtype)
        with builder.chunks(self.cut.parts, self.work) as part:
            own = builder.local(slots, dtype)
            self._part(part).gather(own, initial, update, combine)
            first = builder.bind(part * slots)
            self.each_slot(lambda slot: builder.store(partial, first + slot, own[slot]))
        self.each_slot(lambda slot: builder.store(total, slot, initial))
        with builder.loop(self.cut.parts, name="part") as part:
            first = builder.bind(part * slots)
            self.each_slot(lambda slot: builder.store(total, slot, combine(total[slot], partial[first + slot])))

    def each_of_row(self, extents: Sequence[int], body: Callable[[Index, Expr], None]) -> None:
        """The same on all threads: runs of the last dimension, which may be all of it."""
        builder, last = self.builder, extents[-1]
        runs = ceil(self.cut.parts / prod(extents[:-1]))
        run = ceil(ceil(last / runs) / self.slots) * self.slots

        def along(index: Index) -> None:
            first = builder.bind(index[-1] * run)
            base = builder.bind(self.base + row_major(index[:-1], extents[:-1]) * last + first)
            count = run if last % run == 0 else builder.bind(tirx.min(last - first, run))
            builder.dynamic_vector_loop(0, count, self.lanes, lambda i: body((*index[:-1], first + i), base + i))

        parallel_nest(builder, [*extents[:-1], ceil(last / run)], self.work, along)

    def _part(self, part: Expr) -> Block:
        """The elements of a part."""
        builder, reduced, cut = self.builder, list(self.reduced), self.cut
        extent, stride = reduced[cut.loop].extent, reduced[cut.loop].stride
        first = builder.bind(part * cut.piece)
        count = cut.piece if extent % cut.piece == 0 else builder.bind(tirx.min(extent - first, cut.piece))
        reduced[cut.loop] = Loop(count, stride)
        base = builder.bind(self.base + first * stride)
        return Block(builder, self.slots, self.lanes, self.rowwise, base, tuple(reduced), self.index)


def reduce_blocks(
    group: Group,
    builder: KernelBuilder,
    shape: tuple[SizeLike, ...],
    axes: Sequence[int],
    result: str,
    lanes: int,
    work: SizeLike,
    compute: Callable[[Group, Block], None],
    emit: EmitResults | None = None,
) -> bool:
    """Run `compute(merged group, block)` over all results of reducing an operand of this shape over `axes`, and say whether each
    result is in one block only.

    `result` names the anchor's output, with or without the reduced dimensions. `emit` writes the loops over the results,
    `Results.emit` if it is left out.
    """
    if prod(group.types[result].shape) == 0:
        return True
    merged_group, kept, reduced = reduction_form(group, shape, axes, result)
    results = Results(builder, kept, reduced, lanes)
    (emit or Results.emit)(results, work, lambda block: compute(merged_group, block))
    return results.is_once


def counted_reduction(group: Group, anchor: Op, axes: Sequence[int], machine: Machine, *, in_parts: bool = False) -> Reduction:
    """The loops of a reduction of an anchor's first operand, as numbers; `machine` computes numbers of the working type.

    `in_parts`: `Results.emit_in_parts` writes them.
    """
    operand = group.types[anchor.inputs[0]]
    shape, axes = (operand.shape, axes) if operand.shape else ((1,), (0,))
    _, kept, reduced = reduction_form(group, shape, axes, anchor.outputs[0])
    results, elements = prod(loop.extent for loop in kept), prod(loop.extent for loop in reduced)
    is_rowwise = bool(reduced) and is_one(reduced[-1].stride)
    side = reduced[-1].extent if is_rowwise else kept[-1].extent
    lanes, slots = block_slots(machine.lanes, side)
    stride_bytes = operand.bytes_of(reduced[-1].stride) if reduced else 0
    one = Reduction(results, elements, side, lanes, slots, is_rowwise, stride_bytes)
    cut = cut_of(reduced, slots, prod(block_extents(kept, slots, is_rowwise)), is_rowwise) if in_parts else None
    return one if cut is None else replace(one, parts=cut.parts)


def reduction_form(
    group: Group, shape: tuple[SizeLike, ...], axes: Sequence[int], result: str
) -> tuple[Group, tuple[Loop, ...], tuple[Loop, ...]]:
    """The group over merged dimensions, the loops over the results, and those over the elements of each; see `reduce_blocks`."""
    out = group.types[result].shape
    keeps = len(out) == len(shape)
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    sections: list[list[int]] = [[]]
    input_axis: dict[int, int] = {}
    reduced: list[Loop] = []
    open_run = False  # whether the last axis that is longer than 1 was reduced
    for axis, extent in enumerate(shape):
        if axis in axes and not is_one(extent):
            merged = reduced.pop().extent if open_run else 1
            reduced.append(Loop(merged * extent, strides[axis]))
            open_run = True
        elif not is_one(extent):
            if open_run and sections[-1]:
                sections.append([])
            open_run = False
        if keeps or axis not in axes:
            position = len(input_axis)
            input_axis[position] = axis
            sections[-1].append(position)
    merged_group, runs = merge_sections(group, out, sections)
    kept = []
    for run in (run for section in runs for run in section):
        long = [input_axis[axis] for axis in run if not is_one(out[axis])]
        kept.append(Loop(prod(out[axis] for axis in run), strides[long[-1]] if long else 0))
    return merged_group, tuple(kept), tuple(reduced)


@dataclass(frozen=True)
class Results:
    """The results of a reduction: `kept` are the loops over them, `reduced` those over the elements of each."""

    builder: KernelBuilder
    kept: tuple[Loop, ...]
    reduced: tuple[Loop, ...]
    lanes: int  # of a vector, at most

    @property
    def extents(self) -> list[int]:
        return [loop.extent for loop in self.kept]

    @property
    def rowwise(self) -> bool:
        """Whether the elements of a result are contiguous."""
        return bool(self.reduced) and is_one(self.reduced[-1].stride)

    @property
    def side(self) -> SizeLike:
        """The extent that vectors run along."""
        return self.reduced[-1].extent if self.rowwise else self.kept[-1].extent

    @property
    def is_once(self) -> bool:
        """Whether no two blocks have a result in common: the last one of columns is moved back to end with them."""
        return self.rowwise or (not isinstance(self.side, Size) and self.side % block_slots(self.lanes, self.side)[1] == 0)

    def emit(self, work: SizeLike, compute: Callable[[Block], None]) -> None:
        """Run `compute(block)` for every result that vectors run along, or for every block of neighbouring ones."""
        parallel_nest(self.builder, self._blocks, work, lambda index: compute(self._block(index, Block)))

    def emit_in_parts(self, work: SizeLike, compute: Callable[[Block], None]) -> None:
        """The same for `compute` that accumulates by `Block.gather` alone: blocks that are few and long take turns, in parts."""
        blocks = prod(self._blocks)
        cut = cut_of(self.reduced, self._slots[1], blocks, self.rowwise)
        if cut is None:
            self.emit(work, compute)
            return
        make = partial(CutBlock, cut=cut, work=work // blocks)
        nest(self.builder, self._blocks, lambda index: compute(self._block(index, make)))

    @property
    def _slots(self) -> tuple[int, int]:
        """Lanes, and slots of a block."""
        return block_slots(self.lanes, self.side, is_row=self.rowwise)

    @property
    def _blocks(self) -> list[SizeLike]:
        return block_extents(self.kept, self._slots[1], self.rowwise)

    def _block(self, index: Index, make: Callable[..., Block]) -> Block:
        """The block of an index of the loops over them: the last one of columns is moved back to end with them."""
        builder, (lanes, slots) = self.builder, self._slots
        if not self.rowwise:
            index = (*index[:-1], builder.bind(tirx.min(index[-1] * slots, self.side - slots)))
        return make(builder, slots, lanes, self.rowwise, offset_of(index, self.kept), self.reduced, index)


EmitResults = Callable[[Results, int, Callable[[Block], None]], None]


def block_slots(lanes: int, side: SizeLike, *, is_row: bool = False) -> tuple[int, int]:
    """Lanes, and slots of a block, for rows or runs of `side` elements, which of rows (`is_row`) a call may make shorter."""
    if isinstance(side, Size):
        return block_slots(lanes, least_of(side)) if not is_row else (lanes, lanes * _ACCUMULATORS)
    while lanes > max(side, 1):
        lanes //= 2
    return lanes, lanes * max(min(_ACCUMULATORS, side // lanes), 1)


def block_extents(kept: Sequence[Loop], slots: int, is_rowwise: bool) -> list[SizeLike]:
    """Extents of the loops over blocks: over all results, or over those side by side in blocks of `slots`."""
    *outer, last = (loop.extent for loop in kept)
    return [*outer, last if is_rowwise else -(-last // slots)]


def offset_of(index: Sequence[Expr], loops: Sequence[Loop]) -> Expr:
    offset: Expr = 0
    for i, loop in zip(index, loops, strict=True):
        offset = offset + i * loop.stride
    return offset
