"""Attention of few queries, of all heads that share K and V, which are read where they lie: packing them would cost more.

By vectors (GEMV), or by AMX where K and V are bfloat16 numbers in memory: keys are rows of A as they lie, so that queries are
columns of B, packed once, and squares of scores are transposed in registers; pairs of values are interleaved, a tile at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from tvm import tirx

from ..codegen.builder import Buffer, Expr, Index
from ..microkernels.amx_unit import COLUMNS, DEPTH, ROWS, TILE_WORDS, WORDS, TileUnit
from ..microkernels.gemv import AHEAD_BYTES, Gemv
from ..microkernels.packed_gemm import Scratch, ScratchMatrix, Span
from ..movement.strided_copy import transposed
from ..template.contract import Refusal
from .located import Located, locate
from .online_softmax import Rows, odd_lines
from .pattern import Attention
from .query_block import QueryBlocks
from .scratch import Head, Keys, Places, QueryBlock

_SUMS = 4  # accumulator tiles of results: of 16 columns each
_KEYS, _QUERIES = (2, 3), (4, 5, 6, 7)  # tile registers of scores, whose sums are in 0 and 1; queries stay there, if they fit
_PROBABILITIES, _VALUES = 4, (5, 6, 7)  # tile registers of results
_BITS = "uint16"  # of a bfloat16


@dataclass(frozen=True)
class FewQueries:
    """`count` rows, each of a query.

    `step`: keys that all queries see or do not see together, where a mask hides keys; 0: all are read. `operands`: K and V as AMX
    reads them, with its `unit`; or None.
    """

    blocks: QueryBlocks
    count: int
    step: int
    operands: Operands | None = None
    unit: TileUnit | None = None

    def scratch(self, own: Callable[[int, str], Scratch]) -> Places:
        """What a thread needs; `own(elements, type)` is scratch of a thread."""
        form, builder, dtype = self.blocks.form, self.blocks.builder, self.blocks.form.dtype
        lanes, is_tiled = builder.lanes(dtype), self.operands is not None
        scores = own(self.count * odd_lines(form.keys + 2 * lanes, dtype), dtype)
        none, words = own(0, dtype), own(ROWS * odd_lines(form.keys // 2 + lanes, "int32") if is_tiled else 0, "int32")
        rows = Rows(builder, dtype, scores, own(self.count, dtype), words if is_tiled else None, is_tiled, None)
        if not is_tiled:
            return Places(own(self.count * form.depth, dtype), none, none, rows, none, None, none)
        queries = own(self.count * form.depth // 2, "int32")
        tiles = own(max(form.depth // DEPTH, _SUMS) * TILE_WORDS, "int32")  # of queries, then of values
        return Places(queries, tiles, own(_SUMS * TILE_WORDS, dtype), rows, words, None, none)

    def attend(self, head: Head) -> None:
        blocks, block = self.blocks, QueryBlock(0, self.count, 0)
        keys = Keys(0, blocks.form.keys)
        for row in range(self.count):
            blocks.pack_query(head, block, row)
        span = blocks.visible_keys(head, keys, block, self.step) if self.step else None
        scores, results = (self._scores, self._results) if self.operands is None else (self._tiled_scores, self._tiled_results)
        scores(head, keys, block, span)
        probabilities = blocks.softmax(head, block, keys.count, span)
        results(head, keys, block, probabilities, self._counted(span, self.step))

    def _counted(self, span: Span | None, size: int) -> Span | None:
        """A span of keys in units of so many, which divide both ends."""
        if span is None:
            return None
        begin, end = (self.blocks.builder.bind(tirx.floordiv(one, size)) for one in span)
        return begin, end

    def _scores(self, head: Head, keys: Keys, block: QueryBlock, span: Span | None) -> None:
        blocks, form, builder = self.blocks, self.blocks.form, self.blocks.builder
        lanes = builder.lanes(form.dtype)
        product, queries = Gemv(builder, self.count, form.depth, form.keys, lanes), blocks.queries(head)

        def store(*at: Expr) -> None:
            blocks.store_score(head, keys, block, *at)

        if blocks.elements.is_transposed(form.scores):
            product.multiply_rows(queries, blocks.key_of(head, keys), store, self._counted(span, lanes))
        else:
            product.multiply_columns(queries, blocks.key_of(head, keys), store)

    def _results(self, head: Head, keys: Keys, block: QueryBlock, rows: ScratchMatrix, seen: Span | None) -> None:
        """`seen`: these steps of keys; None: all."""
        blocks, form, builder = self.blocks, self.blocks.form, self.blocks.builder
        product = Gemv(builder, self.count, form.keys, form.width, builder.lanes(form.dtype))
        some = None if seen is None else (self.step, *seen)
        product.multiply_columns(rows, blocks.value_of(head, keys), lambda *at: blocks.scale_result(head, block, *at), some)

    def _tiled_scores(self, head: Head, keys: Keys, block: QueryBlock, span: Span | None) -> None:
        builder, unit, steps = self.blocks.builder, self.unit, self.blocks.form.depth // DEPTH
        assert self.operands is not None
        assert unit is not None
        source, tiles, sums = self.operands.keys, head.keys, head.values
        builder.tiles = "tiles1"
        self._pack_queries(head)
        is_kept = steps <= len(_QUERIES)

        def load_queries(step: int) -> int:
            register = _QUERIES[step % len(_QUERIES)]
            unit.load(register, tiles.buffer, tiles.base + step * TILE_WORDS, COLUMNS)
            return register

        if is_kept:
            for step in range(steps):
                load_queries(step)
        numbers = source.bits(self.blocks)
        low, high = self._counted(span, DEPTH) or (0, keys.count // DEPTH)
        end = high * DEPTH
        with builder.loop(high - low, name="keys") as number:
            firsts = [builder.bind((low + number) * DEPTH + half * ROWS) for half in range(2)]
            for half, first in enumerate(firsts):
                unit.zero(half)
                ahead = builder.bind(tirx.min(first + source.ahead, end - ROWS))
                for step in range(steps):
                    unit.prefetch(numbers, builder.bind(source.offset(head.batch, ahead, step * DEPTH)), source.pitch)
                    at = builder.bind(source.offset(head.batch, first, step * DEPTH))
                    unit.load(_KEYS[half], numbers, at, source.pitch)
                    unit.dot(half, _KEYS[half], _QUERIES[step] if is_kept else load_queries(step))
            for half, first in enumerate(firsts):
                unit.store(half, sums.buffer, builder.bind(sums.base + half * TILE_WORDS), COLUMNS)
                self._store_scores(head, keys, block, builder.bind(sums.base + half * TILE_WORDS), first)

    def _pack_queries(self, head: Head) -> None:
        """Queries as columns of B: rows of 32-bit pairs, transposed in squares."""
        builder, queries, tiles = self.blocks.builder, self.blocks.queries(head), head.keys
        with builder.loop(queries.pitch // WORDS, name="step") as step:
            square = builder.local(ROWS * WORDS, "int32", "square")
            for row in range(ROWS):
                with builder.loop(WORDS, "vectorized", "lane") as lane:
                    at = queries.base + row * queries.pitch + step * WORDS + lane
                    builder.store(square, row * WORDS + lane, queries.buffer[at] if row < self.count else tirx.const(0, "int32"))
            self._store_square(transposed(builder, square, ROWS), tiles, builder.bind(tiles.base + step * TILE_WORDS))

    def _store_square(self, square: Buffer, to: Scratch, base: Expr) -> None:
        for row in range(ROWS):
            with self.blocks.builder.loop(WORDS, "vectorized", "lane") as lane:
                self.blocks.builder.store(to.buffer, base + row * WORDS + lane, square[row * WORDS + lane])

    def _store_scores(self, head: Head, keys: Keys, block: QueryBlock, base: Expr, first: Expr) -> None:
        """The scores of 16 keys, which are the rows of a finished tile."""
        builder, sums = self.blocks.builder, head.values
        square = builder.local(ROWS * COLUMNS, "float32", "square")
        for row in range(ROWS):
            with builder.loop(COLUMNS, "vectorized", "lane") as lane:
                builder.store(square, row * COLUMNS + lane, sums.buffer[base + row * COLUMNS + lane])
        scores = transposed(builder, square, ROWS)
        for row in range(self.count):
            with builder.loop(COLUMNS, "vectorized", "lane") as lane:
                self.blocks.store_score(head, keys, block, row, first + lane, scores[row * COLUMNS + lane])

    def _tiled_results(self, head: Head, keys: Keys, block: QueryBlock, rows: ScratchMatrix, seen: Span | None) -> None:
        builder, unit, width = self.blocks.builder, self.unit, self.blocks.form.width
        assert self.operands is not None
        assert unit is not None
        sums = head.values
        units = self.step // DEPTH
        low, high = (0, keys.count // DEPTH) if seen is None else (builder.bind(one * units) for one in seen)
        for begin in range(0, width, _SUMS * COLUMNS):
            tiles = min(_SUMS, (width - begin) // COLUMNS)
            for tile in range(tiles):
                unit.zero(tile)
            with builder.loop(high - low, name="keys") as number:
                step = number if seen is None else builder.bind(low + number)
                unit.load(_PROBABILITIES, rows.buffer, builder.bind(rows.base + step * WORDS), rows.pitch)
                first = builder.bind(step * DEPTH)
                ahead = builder.bind(tirx.min(first + self.operands.values.ahead, (high - 1) * DEPTH))
                for tile in range(tiles):
                    register, words = _VALUES[tile % len(_VALUES)], builder.bind(head.keys.base + tile * TILE_WORDS)
                    self._interleave(head, (first, ahead), begin + tile * COLUMNS, words)
                    unit.load(register, head.keys.buffer, words, COLUMNS)
                    unit.dot(tile, _PROBABILITIES, register)
            columns = tiles * COLUMNS
            for tile in range(tiles):
                unit.store(tile, sums.buffer, builder.bind(sums.base + tile * COLUMNS), columns)
            lanes = builder.lanes("float32")
            with builder.loop(self.count, name="row") as row:
                base = builder.bind(sums.base + row * columns)

                def store(i: Expr, row: Expr = row, base: Expr = base, begin: int = begin) -> None:
                    self.blocks.scale_result(head, block, row, begin + i, sums.buffer[base + i])

                builder.vector_loop(columns, lanes, store)

    def _interleave(self, head: Head, firsts: tuple[Expr, Expr], column: int, words: Expr) -> None:
        """Write a tile of B: 16 columns of 32 values from the first of `firsts` on, neighbours along the keys as words; and
        prefetch those from the second on."""
        assert self.operands is not None
        builder, source = self.blocks.builder, self.operands.values
        numbers = source.bits(self.blocks)
        with builder.loop(WORDS, "unrolled", name="word") as word:
            at, ahead = (builder.bind(source.offset(head.batch, first + 2 * word, column)) for first in firsts)
            if column % (2 * COLUMNS) == 0:  # a cache line
                for line in range(2):
                    builder.prefetch(numbers[ahead + line * source.pitch])
            with builder.loop(COLUMNS, "vectorized", "lane") as lane:
                low, high = (tirx.Cast("int32", numbers[at + line * source.pitch + lane]) for line in range(2))
                builder.store(head.keys.buffer, words + word * WORDS + lane, low | (high << tirx.const(16, "int32")))


@dataclass(frozen=True)
class InPlace:
    """K or V in memory: a line is the `length` neighbouring bfloat16 numbers of a key, lines of a head are `pitch` apart."""

    located: Located
    is_transposed: bool  # of the product's operand, lines are columns
    length: int
    pitch: int

    @property
    def ahead(self) -> int:
        """Lines by which prefetches run ahead."""
        return ceil(AHEAD_BYTES / (2 * self.length))

    def bits(self, blocks: QueryBlocks) -> Buffer:
        name = self.located.source
        return blocks.builder.parameter(name, blocks.form.group.types[name].elements, _BITS)

    def offset(self, batch: Index, key: Expr, i: Expr) -> Expr:
        """Of number `i` of a key, for an index in the batch dimensions of the scores."""
        return self.located.offset(batch, *((i, key) if self.is_transposed else (key, i)))


@dataclass(frozen=True)
class Operands:
    """K and V, as tiles read them."""

    keys: InPlace
    values: InPlace


def operands_of(form: Attention) -> Operands | Refusal:
    """K and V in place, where AMX can read them: whole tiles of bfloat16 numbers of all heads, which meet such numbers."""
    types = form.group.types
    narrow = (types[product.inputs[0]].dtype == "bfloat16" for product in (form.scores, form.product))
    if not (form.group.tolerance.may_round or all(narrow)):
        return Refusal("queries and probabilities may not be rounded")
    if types[form.product.outputs[0]].shape[:-2] != form.batch:
        return Refusal("the batches of the two products differ")
    if form.keys % DEPTH or form.depth % DEPTH or form.width % COLUMNS:
        return Refusal("keys fill no tiles")
    if form.weighs_probabilities and form.guard is None:
        return Refusal("probabilities are weighed")
    found = []
    of_products = (form.scores, True, form.depth, DEPTH), (form.product, False, form.width, COLUMNS)
    for product, is_transposed, length, run in of_products:
        located = locate(form, product, 1)
        if isinstance(located, Refusal):
            return located
        if located.is_scaled or types[located.source].dtype != "bfloat16":
            return Refusal(f"{located.source} is no tensor of bfloat16 numbers")
        pitch = _pitch(form, InPlace(located, is_transposed, length, 0))
        if pitch is None or not located.has_runs(run, along_rows=not is_transposed):
            return Refusal(f"{located.source} has no lines of {run} neighbours")
        found.append(InPlace(located, is_transposed, length, pitch))
    return Operands(*found)


def _pitch(form: Attention, operand: InPlace) -> int | None:
    """How far apart the lines of a head are, where all are equally far apart; of all heads.

    Views cut the keys into digits by their divisors, so that lines there tell of all.
    """
    places = {0, form.keys - 2, *(one - 1 for one in range(1, form.keys) if form.keys % one == 0)}
    pitches = {
        int(operand.offset(batch, place + 1, 0)) - int(operand.offset(batch, place, 0))
        for batch in {tuple(0 for _ in form.batch), tuple(n - 1 for n in form.batch)}
        for place in places
    }
    return pitches.pop() if len(pitches) == 1 else None
