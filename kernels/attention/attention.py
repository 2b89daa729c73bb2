"""Fused attention, softmax(Q K) V by blocks of queries: a block's scores stay in L2, the matrix of all scores never exists.

Q, K and V are read through the views and the pointwise prologue before them, and the result is stored through the views after it,
so that splitting and merging heads copies nothing. Each thread packs K and V of its head into panels in scratch. Rows of the
result are divided by the sum of their exponentials at the end, unless something is computed from the probabilities.

Where K and V of a head exceed L2, blocks of keys meet all queries in turn, and results so far are rescaled when a row's maximum
grows: online softmax (Milakov, Gimelshein: Online normalizer calculation for softmax, arXiv 1805.02867, 2018), as in
FlashAttention (Dao et al., arXiv 2205.14135, 2022).
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod

import numpy as np
from tvm import tirx

from ...runtime.symbolic.sizes import Size, estimate, hint_of, maximum_of
from ...runtime.target import Target
from ..codegen.builder import Expr, KernelBuilder
from ..codegen.work_stealing import Shares, share
from ..cost.amx import tile_product_cycles, vector_product_cycles
from ..cost.product import heads_of_task
from ..formats.format import BF16X1, Format, Storage, format_for, plain
from ..groups.group import Group
from ..microkernels.amx_packing import LINES, TERM_ELEMENTS
from ..microkernels.amx_unit import DEPTH, ROWS, TileUnit, tile_unit
from ..microkernels.packed_gemm import (
    WHOLE,
    Bounds,
    PackedPanels,
    Scratch,
    ScratchMatrix,
    Span,
    padded_columns,
    tiles_options,
)
from ..microkernels.packed_gemm_amx import AmxPanels, TileScratch, panel_words
from ..microkernels.register_tile import Tile
from ..template.contract import BuiltKernel, Candidate, Refusal
from ..template.kernel import finish, machine_of, new_builder
from ..template.loops import bound_unravel
from .estimate import attention_estimate, attention_flops, attention_work
from .few_queries import FewQueries, Operands, operands_of
from .mask import may_hide_keys, share_seen
from .online_softmax import Rows, finish_rows, odd_lines, running_softmax, start_rows
from .operands import Elements
from .pattern import Attention, attention_of
from .query_block import QueryBlocks
from .scratch import SPAN_NUMBERS, Head, PackedKeys, Places, QueryBlock, head_chunks

ANCHORS = frozenset(["MatMul", "Softmax"])
_BLOCK_ROWS = 48  # queries of a block, about
_MASKED_ROWS = 24  # queries of a block where a mask hides keys from some
_CACHE_SHARE = 35 / 64  # of L2 for keys, values and scores that are used together; the rest is for queries and results
_TILED_ROWS = 64  # queries of a block by AMX
_RUNNING_ROWS = 1024  # queries whose unfinished results a thread keeps from one block of keys to the next
_FEW_QUERIES = 8  # up to which K and V are not packed (GEMV)
_FEW_OF_PAIRS = 4  # the same where panels would be of bfloat16 pairs
_FEW_ROWS = 8  # rows of a product of heads that share K and V, at most
_TILED_ROWS_OF_FEW = 2  # of such a product from which on AMX pays
_CHAIN = 1024  # keys whose values are added up in one chain (`sum_tile`)
_LINE_BYTES = 64


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes two products with a softmax between them, and pointwise operators and views around and between."""
    form = attention_of(group)
    if isinstance(form, Refusal):
        return form
    if target.is_gpu:
        return Refusal("is for CPUs")
    kernel = _Kernel(form, new_builder(target, group.configuration), target)
    how = {"is_packed": not kernel.is_few, "is_rough": kernel.is_rough}
    estimate = attention_estimate(form, target, kernel.format, kernel.tile_cycles, kernel.seen, in_place=kernel.in_place, **how)
    return Candidate(estimate, lambda: _Kernel(form, new_builder(target, group.configuration), target).build())


@dataclass(frozen=True)
class _Kernel:
    form: Attention
    builder: KernelBuilder
    target: Target

    @cached_property
    def elements(self) -> Elements:
        return Elements(self.form, self.builder)

    @cached_property
    def blocks(self) -> QueryBlocks:
        return QueryBlocks(self.builder, self.form, self.elements, self.format, self.shared)

    @cached_property
    def few(self) -> FewQueries:
        """Attention of queries that are few."""
        step = self.visible_step if self.hides_keys_of_few else 0
        return FewQueries(self.blocks, self.block_rows, step, self.operands, self.unit)

    @cached_property
    def key_block(self) -> int:
        """Keys of a block: all, or equal runs of whole vectors."""
        form, lanes = self.form, self.builder.lanes(self.form.dtype)
        number_bytes = np.dtype(form.dtype).itemsize
        line_bytes = (form.depth + form.width + _BLOCK_ROWS) * number_bytes
        if self.has_words:  # bfloat16 pairs: K and V take half the bytes, exponentials have memory of their own
            line_bytes = (form.depth + form.width) * number_bytes // 2 + _BLOCK_ROWS * (number_bytes + number_bytes // 2)
        most = max(self.target.machine.l2.part_bytes(_CACHE_SHARE) // line_bytes, lanes)
        if form.keys <= most or (form.weighs_probabilities and form.guard != 0.0) or self.is_few:
            return form.keys
        return ceil(form.keys / ceil(form.keys / most) / lanes) * lanes

    @property
    def is_few(self) -> bool:
        """Whether K and V are read in place (GEMV), as so few queries do not pay for packing."""
        if self.is_sized:
            return False
        most = _FEW_OF_PAIRS if self._words is not None else _FEW_QUERIES
        return self.form.queries <= most and not self.elements.is_transposed(self.form.product)

    @property
    def is_sized(self) -> bool:
        """Whether a call decides how many queries or keys there are."""
        return isinstance(self.form.queries, Size) or isinstance(self.form.keys, Size)

    @cached_property
    def shared(self) -> int:
        """Neighbouring heads with the same K and V (grouped-query attention) whose few queries become rows of one product.

        By vectors fewer, where these would leave threads without tasks. By AMX a row more takes nothing.
        """
        tiled, queries = self.operands is not None, self.form.queries
        most = self.elements.shared_heads((ROWS if tiled else _FEW_ROWS) // queries) if self.is_few else 1
        if tiled or most == 1:
            return most
        return heads_of_task(most, prod(self.form.batch), queries, self.builder.threads_for(attention_work(self.form)))

    @cached_property
    def operands(self) -> Operands | None:
        """K and V of few queries, where AMX reads them in place."""
        form = self.form
        if not (self.is_few and self.target.has_tiles and form.dtype == "float32"):
            return None
        found = operands_of(form)
        rows = self.elements.shared_heads(ROWS // form.queries) * form.queries
        return None if isinstance(found, Refusal) or rows < _TILED_ROWS_OF_FEW else found

    @property
    def in_place(self) -> int:
        """Heads whose products AMX makes at once of K and V in place; 0 where it does not."""
        return self.shared if self.operands is not None else 0

    @property
    def terms(self) -> tuple[int, int]:
        """bfloat16 terms by AMX, of scores and of results. Absolute errors of scores become relative ones of probabilities."""
        terms = self.form.group.tolerance.terms
        return (1 if terms == 1 else 3), terms

    @cached_property
    def unit(self) -> TileUnit | None:
        """AMX, where the target has it and makes both products."""
        return tile_unit(self.builder, self.target) if self.tile_cycles or self.operands is not None else None

    @cached_property
    def tile_cycles(self) -> float:
        """Cycles of both products of a head by AMX; 0 where these are not made by it, as they are not faster."""
        form, machine = self.form, self.target.machine
        if not self.target.has_tiles or form.dtype != "float32" or self.is_few:
            return 0.0
        queries, keys = hint_of(form.queries), hint_of(form.keys)
        sizes = ((queries, keys, form.depth), (queries, form.width, keys))
        pairs = zip(sizes, self.terms, strict=True)
        tiles = sum(tile_product_cycles(*size, terms, machine, packs_a=True, packs_b=True) for size, terms in pairs)
        vectors = sum(vector_product_cycles(*size, machine, is_narrow=False) for size in sizes)
        return tiles if tiles < vectors else 0.0

    @cached_property
    def format(self) -> Format:
        """The format of both products; for one of bfloat16 pairs the operands are rounded."""
        found = self._words if self.unit is None and not self.is_few else BF16X1 if self.operands is not None else None
        return found or plain(self.form.dtype)

    @property
    def is_rough(self) -> bool:
        """Whether exponentials need no smaller error than bfloat16's."""
        return self.form.group.tolerance.may_round and self.form.dtype == "float32" and not self.is_few

    @property
    def has_words(self) -> bool:
        return self.format.k_pack > 1

    @cached_property
    def _words(self) -> Format | None:
        """The format of dot products of bfloat16 pairs, where the operands may be rounded to it."""
        form, storage = self.form, Storage("bfloat16")
        if not form.group.tolerance.may_round or form.dtype != "float32":
            return None
        return format_for(storage, storage, self.target, lambda one: form.depth % one.k_pack == 0, unit="dot")

    @cached_property
    def hides_keys(self) -> bool:
        """Whether each block of queries finds at run time how many keys its mask leaves."""
        is_plain = self.unit is None and not self.is_few and not self.blocks.weighs and self.form.guard in (None, 0)
        return is_plain and may_hide_keys(self.form)

    @cached_property
    def hides_keys_of_few(self) -> bool:
        """The same where queries are few, and read keys and values where they lie: of a cache, those that are there."""
        is_plain = (
            self.is_few
            and not self.blocks.weighs
            and self.form.guard in (None, 0)
            and self.visible_step > 0
            and self.form.keys % self.visible_step == 0
        )
        return is_plain and may_hide_keys(self.form)

    @property
    def seen(self) -> float:
        """The part of the scores that is computed, as far as that is known."""
        return share_seen(self.form, self.block_rows, self.visible_step) if self.hides_keys else 1.0

    @property
    def visible_step(self) -> int:
        """Keys that few queries see or do not see together. Where there are more than a chain of a sum may have, as many as are
        one; 0 where no such number divides them."""
        keys = self.form.keys
        return 32 if keys <= _CHAIN else next((step for step in range(256, _CHAIN + 1, 32) if keys % step == 0), 0)

    @property
    def is_running(self) -> bool:
        return self.key_block < self.form.keys

    @cached_property
    def tiles(self) -> tuple[Tile, Tile]:
        """Register tiles of the scores and of the result, with equally many rows."""
        form = self.form
        sizes = ((form.depth // self.format.k_pack, self.key_block), (ceil(self.key_block / self.format.k_pack), form.width))
        options = tiles_options(
            hint_of(form.queries),
            [(hint_of(depth), hint_of(columns)) for depth, columns in sizes],
            machine_of(self.target, form.dtype),
            even=self.hides_keys,
        )
        scores, result = self.builder.choose("rows", options)
        return scores, result

    @property
    def block_rows(self) -> int:
        """Queries of a block: a multiple of a register tile's rows, the last of which may be beyond the edge."""
        if self.is_few:
            return self.shared * self.form.queries
        if self.unit is not None:
            return _TILED_ROWS
        rows = self.tiles[0].rows
        most = _MASKED_ROWS if self.hides_keys else _BLOCK_ROWS
        return rows * max(min(most, hint_of(self.form.queries)) // rows, 1)

    def build(self) -> BuiltKernel:
        form, builder = self.form, self.builder
        groups = (*form.batch[:-1], form.batch[-1] // self.shared) if form.batch else ()
        heads, blocks = prod(groups), ceil(form.queries / self.block_rows)
        work = attention_work(form)
        threads = builder.threads_for(work)
        with estimate():  # of runs that a call has no blocks for, nothing comes
            least = ceil(form.queries / _RUNNING_ROWS) if self.is_running else 1
            chunks = head_chunks(hint_of(heads), hint_of(blocks), threads, least)
        shares = Shares(builder, threads, heads * chunks, work)
        with builder.loop(threads, "parallel", "thread") as thread:
            scratch = self._scratch(thread, threads, ceil(blocks / chunks) * self.block_rows)
            if self.unit is not None:
                self.unit.configure()
            with shares.of(thread) as (begin, end), builder.loop(end - begin, name="task") as i:
                *batch, chunk = bound_unravel(builder, builder.bind(begin + i), (*groups, chunks))
                if self.shared > 1:  # the first of the heads that share K and V
                    batch[-1] = builder.bind(batch[-1] * self.shared)
                first, last = share(chunk, chunks, blocks)
                head = Head(**vars(scratch), batch=tuple(batch))
                if self.is_few:
                    self.few.attend(head)
                else:
                    with builder.when(last > first) if self.is_sized else nullcontext():
                        self._rows(head, builder.bind(first), builder.bind(last - first))
            if self.unit is not None:
                self.unit.release()
        return finish("attention", builder, form.group, flops=attention_flops(form))

    def _scratch(self, thread: Expr, threads: int, rows: int) -> Places:
        """The scratch of a thread that computes up to `rows` rows in a run."""
        form, lanes = self.form, self.builder.lanes(self.form.dtype)

        def own(elements: int, dtype: str = form.dtype) -> Scratch:
            line = _LINE_BYTES // np.dtype(dtype).itemsize
            size = ceil(elements / line) * line
            return Scratch(self.builder.workspace(size * threads, dtype), thread * size)

        if self.is_few:
            return self.few.scratch(own)
        shapes = (form.depth, self.key_block), (self.key_block, form.width)
        queries, tiles = own(self.block_rows * form.depth // self.format.k_pack, "int32" if self.has_words else form.dtype), None
        if self.unit is None:
            held = "int32" if self.has_words else form.dtype
            sizes = [
                ceil(depth / self.format.k_pack) * padded_columns(columns, tile, lanes)
                for (depth, columns), tile in zip(shapes, self.tiles, strict=True)
            ]
            keys, values = (own(size, held) for size in sizes)
        else:
            keys, values = (own(panel_words(*shape, terms), "uint32") for shape, terms in zip(shapes, self.terms, strict=True))
            deepest = ceil(maximum_of(form.depth, self.key_block) / DEPTH) * max(self.terms) * TERM_ELEMENTS
            tiles = TileScratch(self.unit, own(deepest, "uint16"), own(LINES * LINES))
        longest = odd_lines(self.key_block + 2 * lanes, form.dtype)  # pitch of rows of scores, at most
        pairs = odd_lines(self.key_block // 2 + lanes, "int32")  # pitch of rows of bfloat16 pairs, at most
        words = own(self.block_rows * pairs if self.has_words else 0, "int32")
        scores, factors = own(self.block_rows * longest), own(self.block_rows)
        state = (own(rows), own(rows), own(rows * form.width)) if self.is_running else None
        of_rows = words if self.has_words and not self.blocks.weighs else None
        block = Rows(self.builder, form.dtype, scores, factors, of_rows, self.is_rough, state)
        spans = own(SPAN_NUMBERS * rows if self.hides_keys else 0, "int32")
        return Places(queries, keys, values, block, words, tiles, spans)

    def _keys(self, scratch: Places, first: Expr, count: int) -> PackedKeys:
        form, builder = self.form, self.builder
        if scratch.tiles is not None:
            panels = AmxPanels(builder, form.depth, count, self.terms[0], scratch.tiles)
            return PackedKeys(first, count, panels, AmxPanels(builder, count, form.width, self.terms[1], scratch.tiles))
        key_tile, value_tile = self.tiles
        keys = PackedPanels(builder, form.depth, count, key_tile, self.format)
        return PackedKeys(first, count, keys, PackedPanels(builder, count, form.width, value_tile, self.format))

    def _rows(self, head: Head, first: Expr, blocks: Expr) -> None:
        """Attention of `blocks` blocks of queries from `first` on, by one thread."""
        builder, size, (whole, rest) = self.builder, self.key_block, divmod(self.form.keys, self.key_block)
        if self.is_running:
            start_rows(head.rows, builder.bind(blocks * self.block_rows), self.form.width)
            if self.hides_keys:
                self._look_for_keys(head, first, blocks)
        with builder.loop(whole, name="keys") as number:
            self._attend(head, self._keys(head, builder.bind(number * size), size), first, blocks)
        if rest:
            self._attend(head, self._keys(head, whole * size, rest), first, blocks)
        if self.is_running:
            with builder.loop(blocks, name="block") as number:
                block = self._block(first, number)

                def store(row: Expr, column: Expr, value: Expr, block: QueryBlock = block) -> None:
                    self.elements.store_result(head.batch, block.first + row, column, value)

                finish_rows(head.rows, block.row, block.count, self.form.width, store, is_guarded=self.form.guard == 0.0)

    def _look_for_keys(self, head: Head, first: Expr, blocks: Expr) -> None:
        """Note of each block of queries whether all of them see some key, in whichever block of keys that is."""
        builder = self.builder
        with builder.loop(blocks, name="block") as number:
            block = self._block(first, number)
            sees = self.blocks.each_sees(head, block, self._looked_step)
            one, none = (tirx.const(number, "int32") for number in (1, 0))
            builder.store(head.spans.buffer, self._span_place(head, block) + 2, tirx.Select(sees, one, none))

    def _attend(self, head: Head, keys: PackedKeys, first: Expr, blocks: Expr) -> None:
        """Scores, softmax and results of `blocks` blocks of queries by one block of keys."""
        if self.hides_keys:
            self._attend_visible(head, keys, first, blocks)
            return
        self._pack(head, keys, None)
        with self.builder.loop(blocks, name="block") as number:
            self._multiply(head, keys, self._block(first, number), None)

    def _attend_visible(self, head: Head, keys: PackedKeys, first: Expr, blocks: Expr) -> None:
        """The same, where nothing but what queries see is read and computed."""
        builder, zero = self.builder, tirx.const(0, "int32")
        low, high = (builder.local(1, "int32", name) for name in ("low", "high"))
        builder.store(low, zero, builder.bind(keys.count) if isinstance(keys.count, Size) else tirx.const(keys.count, "int32"))
        builder.store(high, zero, zero)
        with builder.loop(blocks, name="block") as number:
            block = self._block(first, number)
            spans, at = head.spans.buffer, self._span_place(head, block)
            sees = builder.bind(tirx.NE(spans[at + 2], zero)) if self.is_running else None
            begin, end = self.blocks.visible_keys(head, keys, block, self._looked_step, sees)
            for place, value in enumerate((begin, end)):
                builder.store(spans, at + place, value)
            builder.store(low, zero, tirx.Select(end > zero, tirx.min(low[0], begin), low[0]))
            builder.store(high, zero, tirx.max(high[0], end))
        with builder.when(high[0] > zero):
            self._pack(head, keys, (builder.bind(low[0]), builder.bind(high[0])))
            with builder.loop(blocks, name="block") as number:
                block = self._block(first, number)
                at = self._span_place(head, block)
                begin, end = (builder.bind(head.spans.buffer[at + place]) for place in range(2))
                with builder.when(end > zero):
                    self._multiply(head, keys, block, (begin, end))

    @property
    def _looked_step(self) -> int:
        """Keys that queries of a block see or do not see together."""
        return 2 * self.builder.lanes(self.form.dtype)

    def _span_place(self, head: Head, block: QueryBlock) -> Expr:
        return self.builder.bind(head.spans.base + block.row * SPAN_NUMBERS)

    def _pack(self, head: Head, keys: PackedKeys, span: Span | None) -> None:
        """Pack keys and values, those of a span where given."""
        pack = keys.keys.pack_rows if self.elements.is_transposed(self.form.scores) else keys.keys.pack_columns
        pack(head.keys, self.blocks.key_of(head, keys), WHOLE if span is None else Bounds(columns=span))
        keys.values.pack_columns(head.values, self.blocks.value_of(head, keys), self._of_values(keys, span))

    def _of_values(self, keys: PackedKeys, span: Span | None) -> Bounds:
        """What of the product with V is of a span of keys, whose ends may be beyond the last key."""
        if span is None:
            return WHOLE
        pairs, (begin, end) = self.format.k_pack, span
        used = tirx.min(tirx.floordiv(end, pairs), ceil(keys.count / pairs))
        return Bounds(depth=(self.builder.bind(tirx.floordiv(begin, pairs)), self.builder.bind(used)))

    def _multiply(self, head: Head, keys: PackedKeys, block: QueryBlock, span: Span | None) -> None:
        """Scores, softmax and results of a block of queries by a span of a block of keys; None: all of them."""
        with self.builder.loop(block.count, name="row") as row:
            self.blocks.pack_query(head, block, row)
        columns, queries = WHOLE if span is None else Bounds(columns=span), self.blocks.queries(head)
        keys.keys.multiply(queries, head.keys, block.count, lambda *at: self.blocks.store_score(head, keys, block, *at), columns)
        probabilities = self._softmax(head, block, keys.count, span)
        add, depth = self._add_result if self.is_running else self.blocks.scale_result, self._of_values(keys, span)
        keys.values.multiply(probabilities, head.values, block.count, lambda *at: add(head, block, *at), depth)

    def _block(self, first: Expr, number: Expr) -> QueryBlock:
        builder = self.builder
        start = builder.bind((first + number) * self.block_rows)
        count = builder.bind(tirx.min(self.form.queries - start, self.block_rows))
        return QueryBlock(start, count, builder.bind(number * self.block_rows))

    def _softmax(self, head: Head, block: QueryBlock, keys: int, span: Span | None) -> ScratchMatrix:
        """Softmax of a block's scores; returns A of the product with V. `span`: the keys that have scores; None: all."""
        if not self.is_running:
            return self.blocks.softmax(head, block, keys, span)
        rows = head.rows
        rows.end_rows(block.count, keys)
        running_softmax(rows, block.row, block.count, keys, span or (0, rows.extent(keys)))
        return self.blocks.probabilities(head, block, keys)

    def _add_result(self, head: Head, block: QueryBlock, row: Expr, column: Expr, value: Expr) -> None:
        """Add to the results of earlier blocks of keys."""
        results = head.rows.results
        place = results.base + (block.row + row) * self.form.width + column
        self.builder.store(results.buffer, place, results.buffer[place] * head.rows.factors[row] + value)
