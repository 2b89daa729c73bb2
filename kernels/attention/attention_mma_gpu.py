"""Fused attention on the matrix unit of an NVIDIA GPU, as FlashAttention-2 (Dao, arXiv 2307.08691, 2023) does it.

A warp has 16 queries of a head, whose fragments, scores and results stay in registers; parts of keys and values pass through two
stages of shared memory that all warps of a block read. The online softmax is computed on the sums of the first product as they
lie in registers, which are the second product's fragments. Operands of 16 bits are multiplied as they are, probabilities rounded
likewise; those of float32 are sums of bfloat16 numbers (bf16_split.py), probabilities too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod

import numpy as np
from tvm import tirx

from ...runtime.hardware.gpu import gpu_machine, has_half_products
from ...runtime.target import Target
from ..codegen import ptx
from ..codegen.builder import Buffer, Expr, Index
from ..codegen.gpu_builder import GpuBuilder
from ..cost.estimate import Estimate
from ..groups.group import Group
from ..microkernels.bf16_split import PRODUCTS
from ..microkernels.gpu_mma_sync import FragmentReader, MmaSync, split_pair
from ..microkernels.gpu_operand_tiles import ConvertedSource, CopiedSource, Source
from ..microkernels.gpu_part_layout import CHUNK, PartLayout
from ..template.contract import BuiltKernel, Candidate, Refusal
from ..template.kernel import finish, new_builder
from ..template.loops import bound_unravel
from .located import Located, locate, result_offset
from .operands import Elements
from .pattern import Attention, attention_of

_KINDS: dict[str, ptx.Half] = {"bfloat16": "bf16", "float16": "f16"}
_WARP, _WARP_QUERIES, _STEP = 32, 16, 16  # _STEP: of k that the matrix unit multiplies at once
_STAGES = 2
_MOST_DEPTH = 128  # of heads: results of 16 queries are 64 registers
_HELD_FRAGMENTS = 12  # of queries, of 16 x 16 each, that stay in registers; more are loaded for each part of the keys
_LEAST_QUERIES = 8
_PART_CLOCKS, _SCORE_CLOCKS = 900.0, 0.25  # of a part's latency and barrier, and of a score's softmax


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes attention whose operands are tensors of one floating type seen through views and scales, heads up to 128 deep."""
    if target.kind != "cuda" or not has_half_products(target.level):
        return Refusal(f"{target} has no mma.sync of 16-bit floats with asynchronous copies")
    form = attention_of(group)
    if isinstance(form, Refusal):
        return form
    if form.dtype != "float32" or max(form.depth, form.width) > _MOST_DEPTH or form.queries < _LEAST_QUERIES:
        return Refusal(f"{form.queries} queries of {form.depth} and {form.width} {form.dtype} fill no tiles of the matrix unit")
    if form.weighs_probabilities and form.guard != 0.0:
        return Refusal("computes something from each probability")
    found = [locate(form, product, position) for product, position in ((form.scores, 0), (form.scores, 1), (form.product, 1))]
    operands = [one for one in found if not isinstance(one, Refusal)]
    if len(operands) < len(found):
        return next(one for one in found if isinstance(one, Refusal))
    dtypes = {group.types[one.source].dtype for one in operands}
    if len(dtypes) > 1 or not dtypes <= {"float32", *_KINDS}:
        return Refusal(f"the matrix unit does not multiply {' by '.join(sorted(dtypes))}")
    if dtypes != {"float32"} and any(one.is_scaled for one in operands):
        return Refusal("scales operands of 16 bits")
    kernel = _Attention(form, target, *operands)
    return Candidate(kernel.estimate(), kernel.build)


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


@dataclass(frozen=True)
class _Attention:
    """The kernel of one attention."""

    form: Attention
    target: Target
    query: Located
    key: Located
    value: Located

    @cached_property
    def dtype(self) -> str:
        """Of the operands in memory."""
        return self.form.group.types[self.query.source].dtype

    @cached_property
    def terms(self) -> int:
        """Numbers of 16 bits that each operand is the sum of; two make far less error than float16 promises."""
        if self.dtype in _KINDS:
            return 1
        tolerance = self.form.group.tolerance
        return 2 if tolerance.storage == "float16" else tolerance.terms

    @cached_property
    def keys(self) -> int:
        """Of a part: scores of 16 queries by them are two registers each."""
        return 64 if self.terms == 1 else 32

    @cached_property
    def warps(self) -> int:
        """Of a block: the most that still give every multiprocessor a block."""
        heads, machine = prod(self.form.batch), gpu_machine(self.target.level)
        rows = ceil(self.form.queries / _WARP_QUERIES)
        return next((n for n in (4, 2) if heads * ceil(rows / n) >= machine.multiprocessors and n <= rows), 1)

    @property
    def queries(self) -> int:
        """Of a block."""
        return self.warps * _WARP_QUERIES

    @property
    def blocks(self) -> int:
        return prod(self.form.batch) * ceil(self.form.queries / self.queries)

    @property
    def flops(self) -> int:
        form = self.form
        return 2 * prod(form.batch) * form.queries * form.keys * (form.depth + form.width)

    def estimate(self) -> Estimate:
        """In clocks of the whole GPU: products and softmax of all blocks, or the wait for parts where there are few."""
        machine, form = gpu_machine(self.target.level), self.form
        products = self.flops * len(PRODUCTS[self.terms]) / machine.half_flops
        softmax = prod(form.batch) * form.queries * form.keys * _SCORE_CLOCKS
        turns = ceil(self.blocks / machine.multiprocessors)
        waiting = ceil(turns / 4) * ceil(form.keys / self.keys) * _PART_CLOCKS
        clocks = max((products + softmax) / machine.multiprocessors, waiting)
        return Estimate(clocks, self.flops, unit="tile", is_parallel=False)

    def build(self) -> BuiltKernel:
        builder = new_builder(self.target, self.form.group.configuration)
        assert isinstance(builder, GpuBuilder)
        rows = ceil(self.form.queries / self.queries)
        with builder.blocks(self.blocks, self.warps * _WARP) as (block, thread):
            *batch, number = bound_unravel(builder, block, (*self.form.batch, rows))
            _Block(self, builder, thread, tuple(batch), builder.bind(number * self.queries)).emit()
        return finish("gpu_mma_attention", builder, self.form.group, flops=self.flops)


class _Block:
    """The code of one block: queries from `first` on of one matrix of the batch."""

    def __init__(self, kernel: _Attention, builder: GpuBuilder, thread: Expr, batch: Index, first: Expr) -> None:
        self.kernel, self.form, self.builder = kernel, kernel.form, builder
        self.thread, self.batch, self.first = thread, batch, first
        self.unit = MmaSync(builder, _KINDS.get(kernel.dtype, "bf16"))
        depth, width = (max(_power(n), _STEP) for n in (self.form.depth, self.form.width))
        self.of_queries = PartLayout(kernel.queries, depth, kernel.terms, along_k=True)
        self.of_keys = PartLayout(depth, kernel.keys, kernel.terms, along_k=False)  # rows of shared memory are keys
        self.of_values = PartLayout(width, kernel.keys, kernel.terms, along_k=False)
        self.depth_steps, self.columns = ceil(self.form.depth / _STEP), ceil(self.form.width / _STEP) * _STEP
        self.parts = ceil(self.form.keys / kernel.keys)
        self.elements = Elements(self.form, builder)

    def emit(self) -> None:
        builder, unit = self.builder, self.unit
        stage = self.of_keys.chunks + self.of_values.chunks
        self.base = builder.bind(unit.allocate(self.of_queries.chunks + _STAGES * stage), "base")
        self.lane = builder.bind(tirx.floormod(self.thread, _WARP))
        self.warp_row = builder.bind(tirx.floordiv(self.thread, _WARP) * _WARP_QUERIES)
        self._allocate()
        self._begin()
        with builder.loop(self.parts, name="part") as part:
            unit.wait(0)
            builder.barrier()
            coming = builder.bind(part + 1)
            with builder.when(coming < self.parts):
                self._fetch(coming)
            unit.commit()
            self._multiply_keys(part)
            self._softmax(part)
            self._multiply_values(part)
            with builder.when(coming < self.parts):
                self._finish(coming)
        self._store()

    def _allocate(self) -> None:
        """Registers of a thread: scores and results of two rows, their maxima and sums."""
        builder, kernel = self.builder, self.kernel
        self.scores = builder.local(kernel.keys // 8 * 4, "float32", "scores")
        self.results = builder.local(self.columns // 8 * 4, "float32", "results")
        self.maxima, self.sums = builder.local(2, "float32", "maxima"), builder.local(2, "float32", "sums")
        for cell in range(self.columns // 8 * 4):
            builder.store(self.results, cell, _f32(0))
        for row in range(2):
            builder.store(self.maxima, row, _f32(-np.inf))
            builder.store(self.sums, row, _f32(0))
        unit, layout = self.unit, self.of_queries
        held = self.kernel.terms * self.depth_steps <= _HELD_FRAGMENTS
        count = self.depth_steps if held else 1
        self.q = [FragmentReader(builder, layout, True, self.warp_row, _WARP_QUERIES, self.lane) for _ in range(count)]
        seen = PartLayout(kernel.keys, self.of_keys.lines, kernel.terms, along_k=True)  # the same bytes, keys as lines
        self.k = unit.fragments(seen, tirx.const(0, "int32"), kernel.keys, self.lane, is_a=False)
        self.v = unit.fragments(self.of_values, tirx.const(0, "int32"), self.columns, self.lane, is_a=False)

    # Operands ---------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Queries and the first part of keys and values; fragments of queries, where they stay in registers."""
        builder, unit, form, kernel = self.builder, self.unit, self.form, self.kernel
        zero = tirx.const(0, "int32")
        queries = self._source(kernel.query, self.of_queries, form.queries, form.depth, is_turned=False)
        self.keys = self._source(kernel.key, self.of_keys, form.depth, form.keys, is_turned=False)
        self.values = self._source(kernel.value, self.of_values, form.width, form.keys, is_turned=True)
        queries.prepare(zero, self.first, self.thread)
        queries.fetch(zero, self.base)
        for source in (self.keys, self.values):
            source.prepare(zero, zero, self.thread)
        self._fetch(zero)
        unit.commit()
        queries.finish(self.base)
        self._finish(zero)
        if len(self.q) == self.depth_steps:
            unit.wait(0)
            builder.barrier()
            for step, reader in enumerate(self.q):
                self._load_queries(reader, step)

    def _load_queries(self, reader: FragmentReader, step: int) -> None:
        for term in range(self.kernel.terms):
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
        rest = self.unit, layout, self.kernel.warps * _WARP, buffer, offset, lines, k
        if not is_wide and operand.has_runs(CHUNK, along_rows=along_rows):
            return CopiedSource(*rest)
        lanes = 4 if is_wide and operand.has_runs(4, along_rows=along_rows) else 1
        return _ScaledSource(*rest, vector_lanes=lanes, operand=operand)

    def _stage(self, part: Expr) -> Expr:
        chunks = self.of_keys.chunks + self.of_values.chunks
        return self.builder.bind(self.base + self.unit.offset(self.of_queries.chunks + tirx.floormod(part, _STAGES) * chunks))

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
        builder, terms, stage = self.builder, self.kernel.terms, self._stage(part)
        for cell in range(self.kernel.keys // 8 * 4):
            builder.store(self.scores, cell, _f32(0))
        for step in range(self.depth_steps):
            reader = self.q[step % len(self.q)]
            if len(self.q) < self.depth_steps:
                self._load_queries(reader, step)
            for term in range(terms):
                self.k.load(0, stage, step, term)
            for one, other in PRODUCTS[terms]:
                words = [reader.registers[_i32(reader.first(0, one) + r)] for r in range(4)]
                self._multiply(self.scores, words, self.k, other)

    def _multiply_values(self, part: Expr) -> None:
        """Add the values of the part, weighed by exponentials, which are fragments as they lie."""
        terms, stage = self.kernel.terms, self._stage(part) + self.unit.offset(self.of_keys.chunks)
        for step in range(self.kernel.keys // _STEP):
            pairs = [self._weight_words((step * 2 + half) * 4 + row * 2) for half in range(2) for row in range(2)]
            for term in range(terms):
                self.v.load(0, stage, step, term)
            for one, other in PRODUCTS[terms]:
                self._multiply(self.results, [pair[one] for pair in pairs], self.v, other)

    def _weight_words(self, cell: int) -> list[Expr]:
        """The terms of two neighbouring exponentials, each a word."""
        low, high = self.scores[_i32(cell)], self.scores[_i32(cell + 1)]
        if self.kernel.terms > 1:
            return split_pair(self.builder, low, high, self.kernel.terms)
        word = self.builder.local(1, "uint32", "word")[0]
        self.builder.do(ptx.rounded_pair(word, low, high, self.unit.kind))
        return [word]

    def _multiply(self, sums: Buffer, a: list[Expr], b: FragmentReader, term: int) -> None:
        first = b.first(0, term)
        for j in range(b.lines // 8):
            cells = [sums[_i32(j * 4 + r)] for r in range(4)]
            words = [b.registers[_i32(first + j * 2 + r)] for r in range(2)]
            self.builder.do(ptx.multiply(cells, a, words, self.unit.kind))

    def _softmax(self, part: Expr) -> None:
        """Scores become exponentials; what was summed before is rescaled where a row's maximum has grown."""
        builder, form, blocks = self.builder, self.form, self.kernel.keys // 8
        row = builder.bind(self.first + self.warp_row + tirx.floordiv(self.lane, 4))
        column = builder.bind(part * self.kernel.keys + tirx.floormod(self.lane, 4) * 2)
        has_edge = form.queries % self.kernel.queries > 0 or form.keys % self.kernel.keys > 0
        for half in range(2):
            query = builder.bind(row + half * 8)
            for j, e in np.ndindex(blocks, 2):
                cell, key = j * 4 + half * 2 + e, builder.bind(column + (j * 8 + e))
                product = builder.name(self.scores[_i32(cell)])
                if not has_edge:
                    builder.store(self.scores, cell, self.elements.score(self.batch, query, key, product))
                    continue
                builder.store(self.scores, cell, _f32(-np.inf))
                with builder.when(tirx.all(query < form.queries, key < form.keys)):
                    builder.store(self.scores, cell, self.elements.score(self.batch, query, key, product))
            self._rescale(half)

    def _rescale(self, half: int) -> None:
        builder, at = self.builder, _i32(half)
        cells = [_i32(j * 4 + half * 2 + e) for j in range(self.kernel.keys // 8) for e in range(2)]
        grown = builder.local(1, "float32", "grown")
        builder.store(grown, 0, self.maxima[at])
        for cell in cells:
            builder.store(grown, 0, tirx.max(grown[_i32(0)], self.scores[cell]))
        for distance in (1, 2):
            builder.store(grown, 0, tirx.max(grown[_i32(0)], self._of_lane(grown[_i32(0)], distance)))
        best = builder.name(grown[_i32(0)])
        base = builder.name(tirx.Select(best.equal(_f32(-np.inf)), _f32(0), best))
        factor = builder.name(tirx.exp(self.maxima[at] - base))
        builder.store(self.maxima, at, best)
        builder.store(self.sums, at, self.sums[at] * factor)
        for cell in cells:
            builder.store(self.scores, cell, tirx.exp(self.scores[cell] - base))
            builder.store(self.sums, at, self.sums[at] + self.scores[cell])
        for j in range(self.columns // 8):
            for e in range(2):
                cell = _i32(j * 4 + half * 2 + e)
                builder.store(self.results, cell, self.results[cell] * factor)

    def _of_lane(self, value: Expr, distance: int) -> Expr:
        """The value of the lane whose number differs in one bit; four neighbours share rows."""
        return self.builder.shuffle(value, self.lane ^ _i32(distance))

    def _store(self) -> None:
        builder, form = self.builder, self.form
        column = builder.bind(tirx.floormod(self.lane, 4) * 2)
        has_pairs = self._stores_pairs()
        for half in range(2):
            total = builder.local(1, "float32", "total")
            builder.store(total, 0, self.sums[_i32(half)])
            for distance in (1, 2):
                builder.store(total, 0, total[_i32(0)] + self._of_lane(total[_i32(0)], distance))
            query = builder.bind(self.first + self.warp_row + tirx.floordiv(self.lane, 4) + half * 8)
            for j in range(self.columns // 8):
                at = builder.bind(column + j * 8)

                def store_one(e: int, at: Expr = at, j: int = j) -> None:
                    value = self.results[_i32(j * 4 + half * 2 + e)] / total[_i32(0)]  # noqa: B023 - called at once
                    if form.weighs_probabilities:  # a guard: rows without a key are zeros
                        value = tirx.Select(total[_i32(0)] > _f32(0), value, _f32(0))  # noqa: B023
                    self.elements.store_result(self.batch, query, at + e, builder.name(value))  # noqa: B023

                if has_pairs:
                    with builder.when(tirx.And(query < form.queries, at < form.width)):
                        builder.store_neighbours(2, store_one)
                    continue
                for e in range(2):
                    with builder.when(tirx.And(query < form.queries, at + e < form.width)):
                        store_one(e)

    def _stores_pairs(self) -> bool:
        """Whether two neighbours of a row are so in the result, too, and begin at a multiple of their size."""
        form = self.form
        if form.width % 2:
            return False
        batches = form.group.types[form.product.outputs[0]].shape[:-2]
        corners = [tuple(0 for _ in batches), tuple(n - 1 for n in batches)]
        places = [(batch, query, at) for batch in corners for query in {0, form.queries - 1} for at in range(0, form.width, 2)]
        return all(
            result_offset(form, batch, query, at) % 2 == 0
            and result_offset(form, batch, query, at + 1) == result_offset(form, batch, query, at) + 1
            for batch, query, at in places
        )


def _power(number: int) -> int:
    """The least power of two that is no less."""
    return 1 << (number - 1).bit_length()


def _i32(value: int) -> Expr:
    return tirx.const(value, "int32")


def _f32(value: float) -> Expr:
    return tirx.const(value, "float32")
