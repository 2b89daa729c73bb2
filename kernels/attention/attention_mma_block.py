"""A block of fused attention on the matrix unit of a GPU (attention_mma_gpu.py): its registers, stages, and online softmax."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np
from tvm import tirx

from ...runtime.hardware.gpu import gpu_machine
from ...runtime.target import Target
from ..codegen import amdgcn
from ..codegen.builder import Expr, Index
from ..codegen.gpu_builder import GpuBuilder
from ..microkernels.bf16_split import PRODUCTS
from ..microkernels.gpu_matrix_unit import Fragments
from ..microkernels.gpu_operand_tiles import ConvertedSource, CopiedSource, Source
from ..microkernels.gpu_part_layout import PartLayout
from ..microkernels.gpu_units import chunk_of, new_unit
from .located import Located, result_offset
from .operands import Elements
from .pattern import Attention

STAGES = 2
_HELD_FRAGMENTS = 12  # of queries, of 16 x 16 each, that stay in registers; more are loaded for each part of the keys


@dataclass(frozen=True)
class AttentionTile:
    """What a block computes at once: `warps` of it `rows` queries each, by `keys` keys and values after the other.

    Operands are multiplied as `kind`, each as the sum of so many `terms`.
    """

    target: Target
    kind: amdgcn.Number
    terms: int
    rows: int
    warps: int
    keys: int

    @property
    def queries(self) -> int:
        return self.rows * self.warps

    @property
    def threads(self) -> int:
        return self.warps * gpu_machine(self.target.level).lanes


@dataclass(frozen=True)
class LocatedOperands:
    """Where queries, keys and values lie."""

    query: Located
    key: Located
    value: Located


@dataclass
class _ScaledSource(ConvertedSource):
    """float32 numbers that operators with single numbers change on their way."""

    operand: Located | None = None

    def finish(self, address: Expr) -> None:
        if self.operand is not None and self.operand.is_scaled:
            builder = self.unit.builder
            for i in range(self._turns * self.layout.chunk):
                at = tirx.const(i, "int32")
                builder.store(self._waiting, at, tirx.Cast("float32", self.operand.scaled(builder, self._waiting[at])))
        super().finish(address)


class AttentionBlock:
    """The code of one block."""

    def __init__(self, form: Attention, tile: AttentionTile, operands: LocatedOperands, builder: GpuBuilder) -> None:
        self.form, self.tile, self.operands, self.builder = form, tile, operands, builder
        rows, chunk = tile.rows, chunk_of(tile.kind)
        self.unit = unit = new_unit(builder, tile.target, tile.kind, rows, rows)
        depth, width = (max(power(n), unit.depth, rows) for n in (form.depth, form.width))
        self.of_queries = PartLayout(tile.queries, depth, tile.terms, True, chunk)
        self.of_keys = PartLayout(depth, tile.keys, tile.terms, False, chunk)  # rows of shared memory are keys
        self.of_values = PartLayout(width, tile.keys, tile.terms, False, chunk, unit.swizzles_lines)
        self.depth_steps, self.columns = ceil(form.depth / unit.depth), ceil(form.width / rows) * rows
        self.parts = ceil(form.keys / tile.keys)
        self.elements = Elements(form, builder)
        # Chunks that wait in registers are stored when the queries have been read, to where these were.
        self.shares_queries = unit.copies_wait_in_registers
        self.stages = 0 if self.shares_queries else self.of_queries.chunks
        is_few = tile.terms * self.depth_steps <= _HELD_FRAGMENTS
        self.held = self.depth_steps if is_few or self.shares_queries else 1

    def emit(self, thread: Expr, batch: Index, first: Expr) -> None:
        """Compute the queries from `first` on of one matrix of the batch."""
        builder, unit = self.builder, self.unit
        self.thread, self.batch, self.first = thread, batch, first
        stages = self.stages + STAGES * (self.of_keys.chunks + self.of_values.chunks)
        self.base = builder.bind(unit.allocate(max(stages, self.of_queries.chunks)), "base")
        self.lane = builder.bind(tirx.floormod(self.thread, unit.lanes))
        self.warp_row = builder.bind(tirx.floordiv(self.thread, unit.lanes) * unit.rows)
        self._allocate()
        self._begin()
        with builder.loop(self.parts, name="part") as part:
            unit.wait(0)
            builder.barrier()
            coming = builder.bind(part + 1)
            with builder.when(coming < self.parts):
                self._fetch(coming)
            unit.commit()
            unit.pin()
            self._multiply_keys(part)
            self._softmax(part)
            self._multiply_values(part)
            unit.pin()
            with builder.when(coming < self.parts):
                self._finish(coming)
        self._store()

    def _allocate(self) -> None:
        """Registers of a thread: scores and results of its rows, their maxima and sums."""
        builder, tile, unit = self.builder, self.tile, self.unit
        self.score_blocks, self.result_blocks = tile.keys // unit.columns, self.columns // unit.columns
        self.rows = sorted({down for down, _ in unit.groups})
        self.scores = builder.local(self.score_blocks * unit.sums, "float32", "scores")
        self.results = builder.local(self.result_blocks * unit.sums, "float32", "results")
        self.maxima, self.sums = (builder.local(len(self.rows), "float32", name) for name in ("maxima", "sums"))
        for cell in range(self.result_blocks * unit.sums):
            builder.store(self.results, cell, _f32(0))
        for row in range(len(self.rows)):
            builder.store(self.maxima, row, _f32(-np.inf))
            builder.store(self.sums, row, _f32(0))
        zero = tirx.const(0, "int32")
        self.q = [unit.fragments(self.of_queries, self.warp_row, unit.rows, self.lane, is_a=True) for _ in range(self.held)]
        chunk = self.of_keys.chunk
        seen = PartLayout(tile.keys, self.of_keys.lines, tile.terms, True, chunk)  # the same bytes, keys as lines
        self.k = unit.fragments(seen, zero, tile.keys, self.lane, is_a=False)
        self.v = unit.fragments(self.of_values, zero, self.columns, self.lane, is_a=False, with_sums=True)
        self.weights = unit.sums_as_fragments(self.scores, tile.terms, self.lane)

    def _cells(self, row: int, blocks: int) -> list[tuple[int, int]]:
        """Registers of one of the thread's rows, each with its distance from the thread's first column."""
        unit = self.unit
        return [
            (block * unit.sums + number * unit.neighbours + e, block * unit.columns + across + e)
            for block in range(blocks)
            for number, (down, across) in enumerate(unit.groups)
            if down == self.rows[row]
            for e in range(unit.neighbours)
        ]

    # Operands ---------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Queries and the first part of keys and values; fragments of queries, where they stay in registers."""
        builder, unit, form, operands = self.builder, self.unit, self.form, self.operands
        zero = tirx.const(0, "int32")
        queries = self._source(operands.query, self.of_queries, form.queries, form.depth, is_turned=False)
        self.keys = self._source(operands.key, self.of_keys, form.depth, form.keys, is_turned=False)
        self.values = self._source(operands.value, self.of_values, form.width, form.keys, is_turned=True)
        queries.prepare(zero, self.first, self.thread)
        queries.fetch(zero, self.base)
        for source in (self.keys, self.values):
            source.prepare(zero, zero, self.thread)
        self._fetch(zero)
        unit.commit()
        queries.finish(self.base)
        if not self.shares_queries:
            self._finish(zero)
        if self.held == self.depth_steps:
            unit.wait(0)
            builder.barrier()
            for step, reader in enumerate(self.q):
                self._load_queries(reader, step)
        if self.shares_queries:
            builder.barrier()
            self._finish(zero)

    def _load_queries(self, reader: Fragments, step: int) -> None:
        for term in range(self.tile.terms):
            reader.load(0, self.base, step, term)

    def _source(self, operand: Located, layout: PartLayout, lines: int, k: int, *, is_turned: bool) -> Source:
        """What brings parts of an operand, whose matrix has lines as rows, or as columns if it `is_turned`."""
        builder, batch = self.builder, self.batch
        kind = self.form.group.types[operand.source]
        is_wide = kind.dtype == "float32"
        buffer = builder.parameter(operand.source, kind.elements, kind.dtype if is_wide else "uint16")

        def offset(_: Expr, line: Expr, k: Expr) -> Expr:
            return operand.offset(batch, *((k, line) if is_turned else (line, k)))

        along_rows = layout.along_k != is_turned
        rest = self.unit, layout, self.tile.threads, buffer, offset, lines, k
        is_multiplied = is_wide == (self.tile.kind == "f32") and not operand.is_scaled
        if is_multiplied and operand.has_runs(layout.chunk, along_rows=along_rows):
            return CopiedSource(*rest)
        lanes = 4 if is_wide and operand.has_runs(4, along_rows=along_rows) else 1
        return _ScaledSource(*rest, vector_lanes=lanes, operand=operand)

    def _stage(self, part: Expr) -> Expr:
        chunks = self.of_keys.chunks + self.of_values.chunks
        return self.builder.bind(self.base + self.unit.offset(self.stages + tirx.floormod(part, STAGES) * chunks))

    def _fetch(self, part: Expr) -> None:
        stage = self._stage(part)
        self.keys.fetch(part, stage)
        self.values.fetch(part, stage + self.unit.offset(self.of_keys.chunks))

    def _finish(self, part: Expr) -> None:
        stage = self._stage(part)
        self.keys.finish(stage)
        self.values.finish(stage + self.unit.offset(self.of_keys.chunks))

    # A part of the keys -----------------------------------------------------------------------------------------------

    def _multiply_keys(self, part: Expr) -> None:
        """Scores of the warp's queries and the part's keys."""
        builder, terms, stage = self.builder, self.tile.terms, self._stage(part)
        for cell in range(self.score_blocks * self.unit.sums):
            builder.store(self.scores, cell, _f32(0))
        for step in range(self.depth_steps):
            reader = self.q[step % self.held]
            if self.held < self.depth_steps:
                self._load_queries(reader, step)
            for term in range(terms):
                self.k.load(0, stage, step, term)
            for pair in PRODUCTS[terms]:
                self.unit.multiply(self.scores, reader, self.k, 0, pair)

    def _multiply_values(self, part: Expr) -> None:
        """Add the values of the part, weighed by exponentials, which are fragments as they lie."""
        terms, stage = self.tile.terms, self._stage(part) + self.unit.offset(self.of_keys.chunks)
        for step in range(self.tile.keys // self.unit.depth):
            self.weights.take(step)
            for term in range(terms):
                self.v.load(0, stage, step, term)
            for pair in PRODUCTS[terms]:
                self.unit.multiply(self.results, self.weights, self.v, 0, pair)

    def _softmax(self, part: Expr) -> None:
        """Scores become exponentials; what was summed before is rescaled where a row's maximum has grown."""
        builder, form = self.builder, self.form
        of_row, of_column = self.unit.place(self.lane)
        first = builder.bind(self.first + self.warp_row + of_row)
        column = builder.bind(part * self.tile.keys + of_column)
        has_queries, has_keys = form.queries % self.tile.queries == 0, form.keys % self.tile.keys == 0
        for row, down in enumerate(self.rows):
            query = builder.bind(first + down)
            inner = query if has_queries else builder.bind(tirx.min(query, form.queries - 1))
            for cell, across in self._cells(row, self.score_blocks):
                key = builder.bind(column + across)
                product = builder.name(self.scores[_i32(cell)])
                if has_keys:
                    score = self.elements.score(self.batch, inner, key, product)
                else:
                    score = self.elements.score(self.batch, inner, builder.bind(tirx.min(key, form.keys - 1)), product)
                    score = tirx.Select(key < form.keys, score, _f32(-np.inf))
                builder.store(self.scores, cell, score)
            self._rescale(row)

    def _rescale(self, row: int) -> None:
        builder, at = self.builder, _i32(row)
        cells = [_i32(cell) for cell, _ in self._cells(row, self.score_blocks)]
        grown = builder.local(1, "float32", "grown")
        builder.store(grown, 0, self.maxima[at])
        for cell in cells:
            builder.store(grown, 0, self.unit.maximum(grown[_i32(0)], self.scores[cell]))
        for distance in self.unit.row_lanes:
            builder.store(grown, 0, self.unit.maximum(grown[_i32(0)], self._of_lane(grown[_i32(0)], distance)))
        best = builder.name(grown[_i32(0)])
        base = builder.name(tirx.Select(best.equal(_f32(-np.inf)), _f32(0), best))
        factor = builder.name(self.unit.exponential(self.maxima[at] - base))
        builder.store(self.maxima, at, best)
        builder.store(self.sums, at, self.sums[at] * factor)
        for cell in cells:
            builder.store(self.scores, cell, self.unit.exponential(self.scores[cell] - base))
            builder.store(self.sums, at, self.sums[at] + self.scores[cell])
        for number, _ in self._cells(row, self.result_blocks):
            builder.store(self.results, number, self.results[_i32(number)] * factor)

    def _of_lane(self, value: Expr, distance: int) -> Expr:
        """The value of the lane whose number differs in one bit."""
        return self.builder.shuffle(value, self.lane ^ _i32(distance), self.unit.lanes)

    def _store(self) -> None:
        builder, form, neighbours = self.builder, self.form, self.unit.neighbours
        of_row, column = self.unit.place(self.lane)
        column = builder.bind(column)
        has_neighbours = self._stores_neighbours(neighbours)
        for row, down in enumerate(self.rows):
            total = builder.local(1, "float32", "total")
            builder.store(total, 0, self.sums[_i32(row)])
            for distance in self.unit.row_lanes:
                builder.store(total, 0, total[_i32(0)] + self._of_lane(total[_i32(0)], distance))
            query = builder.bind(self.first + self.warp_row + of_row + down)
            for cell, across in self._cells(row, self.result_blocks)[::neighbours]:
                at = builder.bind(column + across)

                def store_one(e: int, at: Expr = at, cell: int = cell) -> None:
                    value = self.results[_i32(cell + e)] / total[_i32(0)]  # noqa: B023 - called at once
                    if form.weighs_probabilities:  # a guard: rows without a key are zeros
                        value = tirx.Select(total[_i32(0)] > _f32(0), value, _f32(0))  # noqa: B023
                    self.elements.store_result(self.batch, query, at + e, builder.name(value))  # noqa: B023

                if has_neighbours:
                    with builder.when(tirx.And(query < form.queries, at < form.width)):
                        builder.store_neighbours(neighbours, store_one)
                    continue
                for e in range(neighbours):
                    with builder.when(tirx.And(query < form.queries, at + e < form.width)):
                        store_one(e)

    def _stores_neighbours(self, count: int) -> bool:
        """Whether neighbours of a row are so in the result, too, and begin at a multiple of their size."""
        form = self.form
        if form.width % count:
            return False
        batches = form.group.types[form.product.outputs[0]].shape[:-2]
        corners = [tuple(0 for _ in batches), tuple(n - 1 for n in batches)]
        places = [
            (batch, query, at) for batch in corners for query in {0, form.queries - 1} for at in range(0, form.width, count)
        ]
        return all(
            result_offset(form, batch, query, at) % count == 0
            and all(result_offset(form, batch, query, at + e) == result_offset(form, batch, query, at) + e for e in range(count))
            for batch, query, at in places
        )


def power(number: int) -> int:
    """The least power of two that is no less."""
    return 1 << (number - 1).bit_length()


def _i32(value: int) -> Expr:
    return tirx.const(value, "int32")


def _f32(value: float) -> Expr:
    return tirx.const(value, "float32")
