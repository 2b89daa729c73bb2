"""Pointwise groups with broadcasts whose rows are short or no multiple of a vector: blocks of many rows as flat runs of vectors.

Broadcast operands are first expanded ("spread") to full size, block by block, into small buffers on the stack: an element over a
part of a row, or a row over many.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, gcd, prod

from tvm import tirx

from ...runtime.plan import TensorType
from ...runtime.symbolic.sizes import Size
from ..codegen.builder import Buffer, Expr, Index, KernelBuilder, broadcast_index, row_major, unravel
from ..codegen.work_stealing import Shares
from ..cost.operations import operations_of
from ..formats.minifloat import is_coded
from ..groups.group import Group, Op
from ..template.kernel import minimum, store_outputs
from ..template.values import GroupValues, Reader

_BLOCK_ELEMENTS = 1024  # amortise the loops around a block, while its buffers stay in L1
_BUFFER_BYTES = 16 * 1024  # of L1 for a block's buffers
# Estimates, measured on kernels of one to four operators.
_MEMORY_CYCLES = 0.2  # of an element, for what is read and written in any case
_SPREAD_CYCLES = 1.25  # of broadcasting an element over a few others or copying a short row, without the stores
_STORED_BYTES = 32  # a cycle
_BLOCK_CYCLES = 50.0  # overhead of a block
_LIGHT_REST = 8  # remaining elements up to which LLVM vectorises simple operators by itself
_GAIN = 1.12  # speed-up that is worth a longer kernel
_LATENCY = 6  # of an operator on one element of a row, for which the row waits: times its throughput in cycles
_DIVISIONS, _DIVISION_CYCLES = ("Div", "Mod", "Reciprocal", "Sqrt"), 5


@dataclass(frozen=True)
class RowBlocks:
    """How the elements of a group are cut: blocks of `rows` indices of the dimension `axis`, with all dimensions after it.

    All values of the group have one rank, and no two dimensions could be merged. Blocks are whole vectors, the last one along
    `axis` excepted, where their buffers may be as large.
    """

    group: Group
    axis: int
    rows: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.group.types[self.group.outputs[0]].shape

    @property
    def outer(self) -> tuple[int, ...]:
        return self.shape[: self.axis]

    @property
    def width(self) -> int:
        """Elements of a row."""
        return prod(self.shape[self.axis + 1 :])

    @property
    def elements(self) -> int:
        """Elements of a block."""
        return self.rows * self.width

    @property
    def run(self) -> int:
        """Neighbouring elements that are cut into blocks."""
        return self.shape[self.axis] * self.width

    @property
    def blocks(self) -> int:
        """Blocks of a run."""
        return ceil(self.run / self.elements)

    def extents(self, name: str) -> tuple[int, ...]:
        """Of a value in a run: 1 in dimensions that it does not span."""
        return self.group.types[name].shape[self.axis :]

    @cached_property
    def spread(self) -> tuple[str, ...]:
        """Values that operators at full size read and that span some dimensions of a run, but not all."""
        return tuple(name for name in self._smaller if prod(self.extents(name)) > 1)

    @cached_property
    def uniform(self) -> tuple[str, ...]:
        """Values that the group computes, that operators at full size read, and that have one element for a run."""
        return tuple(name for name in self._smaller if prod(self.extents(name)) == 1 and name in self.group.producers)

    @cached_property
    def _smaller(self) -> tuple[str, ...]:
        is_full = {name: prod(kind.shape[self.axis :]) == self.run for name, kind in self.group.types.items()}
        read = [name for op in self.group.ops if is_full[op.outputs[0]] for name in op.inputs if name and not is_full[name]]
        return tuple(dict.fromkeys(read))

    def is_constant(self, name: str) -> bool:
        """Whether a value is the same in all blocks."""
        return prod(self.group.types[name].shape[: self.axis + 1]) == 1

    def parts(self, name: str) -> list[tuple[int, bool]]:
        """The dimensions of a run as a value sees them: extents, and whether it spans them, neighbours alike merged."""
        parts: list[tuple[int, bool]] = []
        extents = (self.rows, *self.shape[self.axis + 1 :])
        for extent, own in zip(extents, self.extents(name), strict=True):
            spans = own != 1
            if parts and parts[-1][1] == spans:
                extent *= parts.pop()[0]
            parts.append((extent, spans))
        return parts

    def cycles(self, steps: Steps) -> float:
        """Estimated cycles of an element."""
        computing = sum(_cycles_of(op) * self._steps_of(op, steps) for op in self.group.ops)
        return _MEMORY_CYCLES + computing + self._cut_cycles(steps)

    def block_cycles(self, steps: Steps) -> float:
        """Estimated cycles that blocks take of all elements beside the operators."""
        return prod(self.shape) * self._cut_cycles(steps)

    def _cut_cycles(self, steps: Steps) -> float:
        """Of an element, for spreading values and starting blocks."""
        spreading = sum(self._spread_cycles(name, steps) for name in self.spread if not self.is_constant(name))
        return spreading + _BLOCK_CYCLES * self.blocks / self.run

    def _steps_of(self, op: Op, steps: Steps) -> float:
        """Operations in the place of one on each element at full size."""
        part = prod(self.group.types[op.outputs[0]].shape) / prod(self.shape)
        if part < 1:
            return part / steps.register
        blocks, rest = divmod(self.run, self.elements)
        return (blocks * steps.of_run(self.elements, op) + steps.of_run(rest, op)) / self.run

    def _spread_cycles(self, name: str, steps: Steps) -> float:
        """Of an element: a store of a whole cache line mostly takes parts of two."""
        last, _ = self.parts(name)[-1]
        stored = last if last >= steps.register else _power_of_two(last)
        return (_SPREAD_CYCLES + self.group.types[name].bytes_of(stored) / _STORED_BYTES) / last


@dataclass(frozen=True)
class Steps:
    """What a loop over a run does at a time: `lanes` elements; `register` elements of float32 are one operation."""

    lanes: int
    register: int

    def of_run(self, extent: int, op: Op) -> float:
        """Operations in the place of one on each element.

        What is left after whole vectors goes one by one, unless LLVM makes vectors of it, which are slower than ours.
        """
        vectors, rest = divmod(extent, self.lanes)
        register = min(self.lanes, self.register)
        left = rest % register
        is_light = _cycles_of(op) == 1 and left <= _LIGHT_REST
        return vectors * (self.lanes // register) + 2 * (rest // register) + (left / 2 if is_light else left)


def _row_cycles(group: Group, steps: Steps) -> float:
    """Estimated cycles of an element of a group that goes from row to row, along its last dimension."""
    inner = group.types[group.outputs[0]].shape[-1]
    spans = {name: kind.shape[-1] == inner for name, kind in group.types.items()}
    row = sum(_cycles_of(op) * (steps.of_run(inner, op) if spans[op.outputs[0]] else _LATENCY) for op in group.ops)
    return _MEMORY_CYCLES + row / inner


def _cycles_of(op: Op) -> int:
    return _DIVISION_CYCLES if op.op_type in _DIVISIONS else operations_of(op.op_type)


def _power_of_two(extent: int) -> int:
    """The least one that is not below."""
    return 1 << (extent - 1).bit_length()


def choose_blocks(group: Group, steps: Steps) -> RowBlocks | None:
    """The cut with the fewest estimated cycles; None where none saves much over a loop over rows."""
    *outer, inner = group.types[group.outputs[0]].shape
    if inner % steps.lanes == 0 or prod(outer) * inner < 2 * steps.lanes:
        return None
    cuts = [cut for axis in range(len(outer)) if (cut := _cut(group, axis, steps.lanes))]
    best = min(cuts, key=lambda cut: cut.cycles(steps), default=None)
    return best if best and best.cycles(steps) * _GAIN < _row_cycles(group, steps) else None


def _cut(group: Group, axis: int, lanes: int) -> RowBlocks | None:
    """Blocks of whole vectors along a dimension, or of all of it, or of what fits the buffers; None if that is no row."""
    row = RowBlocks(group, axis, 1)
    if isinstance(row.width, Size):  # buffers on the stack are of a known size
        return None
    row_bytes = sum(group.types[name].bytes_of(row.width) for name in row.spread)
    fitting = _BUFFER_BYTES // row_bytes if row_bytes else row.shape[axis]
    step = lanes // gcd(row.width, lanes)
    whole = max(min(_BLOCK_ELEMENTS // row.width, fitting) // step, 1) * step
    rows = min(whole, fitting, row.shape[axis])
    return replace(row, rows=rows) if rows else None


def map_blocks(builder: KernelBuilder, cut: RowBlocks, lanes: int, work: int) -> None:
    """Store all outputs of the group, vectorised along the runs of a cut, whose blocks are dealt to the threads.

    `work` is the estimated number of scalar operations of the whole.
    """
    units = prod(cut.outer) * cut.blocks
    threads = min(builder.threads_for(work), units)
    shares = Shares(builder, threads, units, work)
    with builder.loop(threads, "parallel", "thread") as thread:
        buffers = {name: _buffer(builder, cut, name, cut.elements) for name in cut.spread}
        start = _Block(builder, cut, (0,) * cut.axis, 0, cut.rows)
        for name, buffer in buffers.items():
            if cut.is_constant(name):
                start.spread(name, buffer)
        with shares.of(thread) as (begin, end), builder.loop(end - begin if threads > 1 else units, name="chunk") as i:
            *outer, number = unravel(builder.bind(begin + i), (*cut.outer, cut.blocks))
            first = builder.bind(number * cut.rows)
            is_ragged = cut.shape[cut.axis] % cut.rows != 0
            rows = builder.bind(minimum(cut.rows, cut.shape[cut.axis] - first)) if is_ragged else cut.rows
            block = _Block(builder, cut, (*outer,), first, rows)
            for name, buffer in buffers.items():
                if not cut.is_constant(name):
                    block.spread(name, buffer)
            block.compute(buffers, lanes)


@dataclass(frozen=True)
class _Block:
    """Writes the statements for `rows` rows from `first` on, at one index of the dimensions before."""

    builder: KernelBuilder
    cut: RowBlocks
    outer: Index
    first: Expr
    rows: Expr

    def spread(self, name: str, buffer: Buffer) -> None:
        """Fill a buffer with what operators at full size read of a value.

        Vectors reach beyond what they are to fill: into what is filled next, or what lies behind the block.
        """
        builder = self.builder
        *parts, (last, is_copied) = self.cut.parts(name)
        source, start = self._source(name, is_copied=is_copied)
        lanes = min(builder.lanes(str(buffer.dtype)), _power_of_two(last))
        extents = [extent for extent, _ in parts]
        counts = [self.rows * (extents[0] // self.cut.rows), *extents[1:]]
        with ExitStack() as loops:
            place = [loops.enter_context(builder.loop(count)) for count in counts]
            spanned = [number for number, (_, spans) in enumerate(parts) if spans]
            row = row_major([place[number] for number in spanned], [extents[number] for number in spanned])
            target = builder.bind(row_major(place, extents) * last)
            element = None if is_copied else builder.name(source[start + row])
            with builder.loop(ceil(last / lanes), name="v") as v, builder.loop(lanes, "vectorized", "lane") as lane:
                i = v * lanes + lane
                builder.store(buffer, target + i, source[start + row * last + i] if is_copied else element)

    def _source(self, name: str, *, is_copied: bool) -> tuple[Buffer, Expr]:
        """Where the elements of a value in this block are neighbours: a buffer, and the place of the first one.

        That is the operand itself, unless its elements are computed, or copied by vectors, which reach beyond its end.
        """
        group, kind = self.cut.group, self.cut.group.types[name]
        is_computed = name in group.producers
        offset = 0 if is_computed else self.builder.bind(row_major(self._index(name), kind.shape))
        if not is_computed and not is_copied:
            return self.builder.parameter(name, kind.elements, kind.dtype), offset
        own_rows, *extents = self.cut.extents(name)
        spans_rows = own_rows != 1
        buffer = _buffer(self.builder, self.cut, name, prod(extents) * (self.cut.rows if spans_rows else 1))
        rows = self.rows if spans_rows else 1
        if is_computed:
            self._compute_into(buffer, name, [rows, *extents])
        else:
            lanes, values = self.builder.lanes(str(buffer.dtype)), GroupValues(group, self.builder)
            self._vector_loop(rows * prod(extents), lanes, lambda i: self.builder.store(buffer, i, values.load(name, offset + i)))
        return buffer, tirx.const(0, "int32")

    def _compute_into(self, buffer: Buffer, name: str, counts: Sequence[Expr]) -> None:
        """Store a value's elements, of which there are `counts` in each dimension, vectorised along the last that it spans."""
        own, start = self.cut.extents(name), self._index(name)
        *outer, inner = (axis for axis, extent in enumerate(own) if extent != 1)
        strides = [prod(own[axis + 1 :]) for axis in range(len(own))]
        with ExitStack() as loops:
            place: list[Expr] = [0] * len(own)
            for axis in outer:
                place[axis] = loops.enter_context(self.builder.loop(counts[axis]))

            def element(i: Expr) -> None:
                place[inner] = i
                index = (*start[: self.cut.axis], *(a + b for a, b in zip(start[self.cut.axis :], place, strict=True)))
                value = GroupValues(self.cut.group, self.builder).read(name, index)
                self.builder.store(buffer, sum(a * b for a, b in zip(place, strides, strict=True)), value)

            self._vector_loop(counts[inner], self.builder.lanes(str(buffer.dtype)), element)

    def compute(self, buffers: Mapping[str, Buffer], lanes: int) -> None:
        """Store the outputs; `buffers` hold the values that were spread."""
        builder, cut, flat = self.builder, self.cut, _flat_group(self.cut)
        once = GroupValues(cut.group, builder)
        uniform = {name: builder.name(once.read(name, self._index(name))) for name in cut.uniform}

        def element(i: Expr) -> None:
            given = uniform | {name: buffer[i] for name, buffer in buffers.items()}
            values = GroupValues(flat, builder, {name: _reader(value) for name, value in given.items()})
            store_outputs(values, (*self.outer, self.first * cut.width + i))

        self._vector_loop(self.rows * cut.width, lanes, element, is_whole=cut.elements % lanes == cut.run % lanes == 0)

    def _index(self, name: str) -> Index:
        """Of the first element of a value in the block."""
        cut = self.cut
        first = (*self.outer, self.first, *(0 for _ in cut.shape[cut.axis + 1 :]))
        return broadcast_index(first, cut.shape, cut.group.types[name].shape)

    def _vector_loop(self, count: Expr, lanes: int, body: Callable[[Expr], None], *, is_whole: bool = False) -> None:
        """`body(i)` for i in [0, count); `is_whole` says that these are whole vectors, though `count` is an expression."""
        if not is_whole or isinstance(count, int):
            self.builder.dynamic_vector_loop(0, count, lanes, body)
            return
        with self.builder.loop(count // lanes, name="v") as v, self.builder.loop(lanes, "vectorized", "lane") as lane:
            body(v * lanes + lane)


def _reader(value: Expr) -> Reader:
    """A reader of a value of one element."""
    return lambda _: value


def _buffer(builder: KernelBuilder, cut: RowBlocks, name: str, elements: int) -> Buffer:
    """For elements of a value, and vectors that reach beyond them."""
    dtype = cut.group.types[name].dtype
    return builder.local(elements + builder.lanes(dtype), "uint8" if is_coded(dtype) else dtype, "spread")


def _flat_group(cut: RowBlocks) -> Group:
    """The group with runs as the last dimension, which values that are spread span, too."""

    def seen(name: str, kind: TensorType) -> TensorType:
        is_one = prod(cut.extents(name)) == 1
        return replace(kind, shape=(*kind.shape[: cut.axis], 1 if is_one else cut.run))

    return replace(cut.group, types={name: seen(name, kind) for name, kind in cut.group.types.items()})
