"""MatMul and Gemm by AMX, of bfloat16 operands, of float32 ones as sums of bfloat16 terms, or of bytes.

Weights are packed into AMX tiles at compile time, other operands by the kernel. If all of A fits L2, it is packed once and each
thread multiplies it by panels of B of its own, so that weights come from memory once; else each thread packs blocks of its own
rows and multiplies each by all panels of B. Rows of bfloat16 or bytes that fill whole tiles are read in place.

A float32 weight of three terms takes 6 bytes as tiles. Where memory is short it stays as it is (`WEIGHTS`: `PLAIN`): each thread
then splits a panel of it into the same tiles before all rows are multiplied by that, and the bits of the result are the same.
So it is where kernels for other numbers of rows read the weights, too, which lie in panels of 32 columns then: these are split,
or of bfloat16 read as tiles where they lie.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil, prod

from tvm import tirx

from ...runtime.symbolic.sizes import Size, SizeLike, estimate, estimating, greatest_of, hint_of, least_of
from ...runtime.target import Target
from ..codegen.builder import Buffer, Expr, unravel
from ..codegen.work_stealing import Shares
from ..cost.amx import OVERLAP, STREAMED_SHARE, memory_share, tile_product_cycles
from ..cost.estimate import Estimate, epilogue_cycles, with_bytes
from ..formats.format import formats_for
from ..groups.group import Group, Op
from ..microkernels.amx_blocks import (
    AmxMicroKernel,
    BlockEpilogue,
    NextPanel,
    TileOperand,
    begin_sums,
    packed_operand,
    stored_lanes,
    tile_threads,
    work_of_dots,
)
from ..microkernels.amx_packing import LINES, TERM_WORDS, PackTiles, StepPacker
from ..microkernels.amx_unit import BF16_TILES, ROWS, WORDS, tile_dot_of, tile_unit
from ..microkernels.bf16_split import PRODUCTS
from ..microkernels.packed_gemm import Scratch
from ..template.contract import BuiltKernel, Candidate, Operand, Refusal, packed_name
from ..template.kernel import pointwise_cost
from ..template.values import anchor_of
from .matmul import MatMulKernel, Side

_NEAR_SHARE = 0.5  # of L2, for packed rows of A that stay there beside a panel of B and the next one
_PREFETCHED_SHARE = 1 / 16  # of L2, for weights that are worth prefetching: those that L2 would hold come from memory in a model
_RUNS = 4  # of a thread, which others can take from it, where these have as many panels of rows
_BAD_STRIDE_BYTES = 2048  # a pitch in whose multiples 32 rows fall into two sets of L1
WEIGHTS, TILES, PLAIN = "weights", "tiles", "plain"  # the choice of how a constant B lies in memory
PanelAt = Callable[[Expr, Expr], TileOperand]  # of (matrix, panel)
Place = tuple[Expr, Expr, Expr]  # of a block of C: batch, panel of A, panel of B


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes one MatMul or Gemm of float32 or bfloat16 operands with float32 sums, or of bytes by signed ones with sums of
    integers, and an epilogue of pointwise operators."""
    anchor = anchor_of(group)
    dtypes = [group.types[name].dtype for name in (*anchor.inputs[:2], anchor.outputs[0])]
    a, b = map(group.storage, anchor.inputs[:2])
    formats = formats_for(a, b, target, unit="tile")
    if not formats or dtypes[2] not in ("float32", "bfloat16", formats[0].sums):
        return Refusal(f"no product of {' and '.join(dict.fromkeys(dtypes[:2]))} as {dtypes[2]} on the tile unit")
    zeros, is_constant = group.zero_points, anchor.inputs[1] in group.constants
    if anchor.inputs[1] in zeros or (anchor.inputs[0] in zeros and not is_constant):
        return Refusal("a zero point needs the sums of constant numbers that are multiplied by it")
    if anchor.inputs[0] == anchor.inputs[1] and anchor.inputs[0] in group.constants:
        return Refusal("both operands are one constant")
    product = AmxProduct(group, anchor, target)
    if not product.flops:
        return Refusal("has nothing to multiply")
    if reason := product.shared_obstacle():
        return Refusal(reason)
    return Candidate(product.estimate(), product.build, stored_runs=(product.b.lines,))


class AmxProduct(MatMulKernel):
    """The AMX kernel of a MatMul or Gemm being built."""

    template = "matmul_tiles"

    def __init__(self, group: Group, anchor: Op, target: Target) -> None:
        super().__init__(group, anchor, target)
        a, b = map(group.storage, anchor.inputs[:2])
        tiles = formats_for(a, b, target, unit="tile")
        self.format = next((one for one in tiles if one.terms >= group.tolerance.terms), tiles[-1])
        self.accumulator = self.format.sums
        self.terms, self.product = self.format.terms, tile_dot_of(self.format)
        self.matrices = prod(self.batch)
        self.rows, self.columns = ceil(self.a.lines / LINES), ceil(self.b.lines / LINES)
        self.steps = ceil(self.a.depth / self.product.depth)
        halves = 1 if greatest_of(self.a.lines) <= ROWS else 2, 1 if greatest_of(self.b.lines) <= ROWS else 2
        self.unit = tile_unit(self.builder, target, self.product)
        self.near_bytes = target.machine.l2.part_bytes(_NEAR_SHARE)
        self.blocks = AmxMicroKernel(self.builder, self.unit, (self.steps,), self.terms, halves)
        forms = [TILES, *([PLAIN] if self._can_split() else [])]
        if self.shares_weights:
            forms = [PLAIN if self.format.a.dtype == "float32" else TILES]
        self.splits_b = self.builder.choose(WEIGHTS, {form: form == PLAIN for form in forms})

    def shared_obstacle(self) -> str:
        """Why weights cannot be read as kernels for other numbers of rows read them; empty if they can, or need not."""
        if not self.shares_weights:
            return ""
        if self.splits_b and (self.matrices > 1 or isinstance(self.rows, Size)):
            return "splits weights that other kernels read for one matrix of a known number of rows only"
        if not self.splits_b and (self.product is not BF16_TILES or self.a.depth % self.product.depth):
            return "reads weights that other kernels read as bfloat16 in whole steps only"
        return ""

    @property
    def flops(self) -> int:
        return 2 * self.matrices * self.a.lines * self.b.lines * self.a.depth

    @estimating
    def estimate(self) -> Estimate:
        """The estimate of all products, with packing of what is neither constant nor read in place."""
        machine, size = self.target.machine, (self.a.lines, self.b.lines, self.a.depth)
        packs_a, packs_b = (side.name not in self.group.constants for side in (self.a, self.b))
        packs_a, packs_b = packs_a and not self._reads_rows(), packs_b or self.splits_b
        k_pack = self.product.k_pack
        packs, passes = {"packs_a": packs_a, "packs_b": packs_b, "is_a_apart": self._reads_rows()}, self._b_passes()
        beside = epilogue_cycles(self.group, machine, self.anchor) / max(self.matrices, 1)
        one = tile_product_cycles(*size, self.terms, machine, k_pack=k_pack, b_passes=passes, beside=beside, **packs)
        cycles = self.matrices * one
        is_prefetched = self.rows > 1 and passes == 1
        overlap, share = OVERLAP if is_prefetched else 0.0, memory_share(self.terms, is_prefetched=is_prefetched)
        return with_bytes(Estimate(cycles, self.flops, unit="tile", overlap=overlap, memory_share=share), self.group)

    def _b_passes(self) -> int:
        """How often a matrix of B is read as a whole: once where its panels are the outer loop."""
        panel_bytes = self.steps * self.terms * TERM_WORDS * 4
        if self.a.name in self.group.constants or panel_bytes * self.rows * prod(self.a.batch) <= self.near_bytes:
            return 1
        return self.rows if self._reads_rows() else ceil(self.rows / max(self.near_bytes // panel_bytes, 1))

    @property
    def _work(self) -> int:
        """Scalar operations of the whole."""
        beside = self.matrices * self.a.lines * self.b.lines * pointwise_cost(self.group)
        return work_of_dots(self.matrices * self.rows * self.columns * self.steps * 4, self.terms) + beside

    def build(self) -> BuiltKernel:
        builder = self.builder
        if self.splits_b:
            self._split_and_walk()
            return self.finish(self.flops)
        threads = builder.threads_for(self._work)
        b = self._constant_panels(self.b, True) if self.b.name in self.group.constants else self._packed_panels(self.b, True)
        packer = self._packer(self.a, False)
        a_bytes = 4 * packer.panel_words * packer.panels * prod(self.a.batch)
        if self.a.name in self.group.constants:
            self._walk(self._constant_panels(self.a, False), b, threads, columns_outside=True)
        elif self._reads_rows():
            with estimate():
                is_near = a_bytes <= self.near_bytes
            self._walk(self._rows_in_place(), b, threads, columns_outside=is_near)
        elif isinstance(self.rows, Size):
            self._pack_some_or_all(packer, a_bytes, b, threads)
        elif a_bytes <= self.near_bytes or self.matrices * self.rows < 2 * threads:
            self._walk(self._packed_panels(self.a, False), b, threads, columns_outside=True)
        else:
            self._pack_and_walk(packer, b, threads)
        return self.finish(self.flops)

    # Operands ---------------------------------------------------------------------------------------------------------

    def _source(self, side: Side) -> Buffer:
        """The operand in place: float32, or bits."""
        kind = "float32" if self.format.a.dtype == "float32" else self.product.numbers
        return self.builder.parameter(side.name, self.group.types[side.name].elements, kind)

    def _reads_rows(self) -> bool:
        """Whether tiles of A are loaded in place."""
        a = self.a
        if self.format.a.dtype == "float32" or a.lines_last or a.name in self.group.constants:
            return False
        pitch_bytes = self.group.types[a.name].bytes_of(a.depth)
        return a.depth % self.product.depth == 0 and least_of(a.lines) >= LINES and pitch_bytes % _BAD_STRIDE_BYTES != 0

    def _first_row(self, m: Expr) -> Expr:
        """The first row of A of panel `m` (32 rows). In place the last panel is moved back to end with A, and overlaps."""
        top = m * LINES
        if not self._reads_rows():
            return top
        has_short = self._has_short()
        last = tirx.Select(has_short, ROWS, LINES) if isinstance(has_short, tirx.Expr) else ROWS if has_short else LINES
        return tirx.min(top, self.a.lines - last)

    def _has_short(self) -> Expr:
        """Whether the last of several panels of A has at most the 16 rows of one tile; of a symbolic A, which may have but one
        panel, an expression."""
        if isinstance(self.a.lines, Size) and self.blocks.halves[0] > 1:
            rest = self.builder.bind(self.a.lines % LINES)
            return tirx.And(rest > 0, rest <= ROWS)
        return self.rows > 1 and 0 < self.a.lines % LINES <= ROWS

    def _rows_in_place(self) -> PanelAt:
        source, depth, of_step = self._source(self.a), self.a.depth, self.product.depth

        def lines(matrix: Expr, panel: Expr) -> TileOperand:
            base = self.builder.bind((matrix * self.a.lines + self._first_row(panel)) * depth)
            return TileOperand(source, depth, lambda ks, _, half: base + half * (ROWS * depth) + ks[0] * of_step)

        return lines

    def _constant_panels(self, side: Side, words: bool) -> PanelAt:
        """The panels of a constant operand, packed at compile time."""
        if self.shares_weights and words:
            return self._shared_panels(side)
        pack, key = PackTiles(side.pack(LINES), self.terms, words, product=self.product), packed_name(side.name)
        self.packed[key] = Operand(side.name, pack)
        elements = pack.packed_type(self.group.types[side.name]).elements
        return self._lines(side, self.builder.parameter(key, *self._stored(elements // self.product.k_pack, words)), words)

    def _shared_panels(self, side: Side) -> PanelAt:
        """Panels of bfloat16 as other kernels read them, too: [matrices, panels, words along k, 32 columns]."""
        buffer, panels = self._shared_buffer(side, self.product.k_pack), ceil(side.lines / LINES)
        panel_words = self.steps * WORDS * LINES

        def lines(matrix: Expr, panel: Expr) -> TileOperand:
            base = self.builder.bind((matrix * panels + panel) * panel_words)
            return TileOperand(buffer, LINES, lambda ks, _, half: base + ks[0] * (WORDS * LINES) + half * ROWS)

        return lines

    def _shared_buffer(self, side: Side, k_pack: int) -> Buffer:
        """Weights packed as kernels for other numbers of rows read them, too: words of bfloat16, or float32."""
        pack, key = side.pack(LINES, k_pack), packed_name(side.name)
        self.packed[key] = Operand(side.name, pack)
        elements = pack.packed_type(self.group.types[side.name]).elements // k_pack
        return self.builder.parameter(key, elements, "uint32" if k_pack > 1 else "float32")

    def _splitter(self, side: Side, panel: Expr) -> StepPacker:
        """What makes tiles of a panel of float32 weights."""
        if not self.shares_weights:
            return self._packer(side, True)
        source, depth = self._shared_buffer(side, 1), side.depth
        start = self.builder.bind(panel * ((depth - 1) * LINES))  # less what the panel's number adds to that of its lines

        def element(matrix: Expr, line: Expr, k: Expr) -> Expr:
            return source[start + k * LINES + line]

        padded = ceil(side.lines / LINES) * LINES
        return StepPacker(self.builder, element, padded, depth, self.terms, True, product=self.product)

    def _stored(self, count: int, words: bool) -> tuple[int, str]:
        """Elements of a buffer of so many words, and their type."""
        return (count, "uint32") if words else (count * self.product.k_pack, self.product.numbers)

    def _packer(self, side: Side, words: bool) -> StepPacker:
        def element(matrix: Expr, line: Expr, k: Expr) -> Expr:
            return self._source(side)[side.offset(matrix, line, k)]

        along_depth = not side.lines_last and self.format.a.dtype == "float32"
        return StepPacker(self.builder, element, side.lines, side.depth, self.terms, words, along_depth, self.product)

    def _packed_panels(self, side: Side, words: bool) -> PanelAt:
        """The panels of an operand that the kernel packs as a whole before the product."""
        builder, packer = self.builder, self._packer(side, words)
        matrices, step = prod(side.batch), packer.panel_elements // packer.steps
        buffer = builder.workspace(*self._stored(matrices * packer.panels * packer.panel_words, words))
        extents = matrices, packer.panels, packer.steps
        with builder.chunks(prod(extents), prod(extents) * packer.panel_words // packer.steps * 2) as chunk:
            matrix, panel, k = (builder.bind(i) for i in unravel(chunk, extents))
            packer.pack(buffer, builder.bind(chunk * step), matrix, panel, k)
        return self._lines(side, buffer, words)

    def _lines(self, side: Side, buffer: Buffer, words: bool) -> PanelAt:
        packer = self._packer(side, words)

        def lines(matrix: Expr, panel: Expr) -> TileOperand:
            return self._panel(buffer, (matrix * packer.panels + panel) * packer.panel_elements, words)

        return lines

    def _panel(self, buffer: Buffer, base: Expr, words: bool) -> TileOperand:
        return packed_operand(buffer, self.builder.bind(base), self.terms, words=words, product=self.product)

    # Loops ------------------------------------------------------------------------------------------------------------

    def _walk(self, a: PanelAt, b: PanelAt, threads: int, *, columns_outside: bool) -> None:
        """The loops over panels of A and B, in place or packed; with `columns_outside` panels of B are the outer loop.

        Blocks are dealt to the threads in contiguous runs of that order.
        """
        builder = self.builder
        extents = {
            "batch": self.matrices,
            **({"n": self.columns, "m": self.rows} if columns_outside else {"m": self.rows, "n": self.columns}),
        }
        shares = Shares(builder, threads, prod(extents.values()), self._work)
        with tile_threads(builder, self.unit, threads) as (thread, sums), shares.of(thread) as (begin, end):

            def place(block: Expr) -> Place:
                parts = unravel(builder.bind(begin + block), tuple(extents.values()))
                at = {axis: builder.bind(part) for axis, part in zip(extents, parts, strict=True)}
                return at["batch"], at["m"], at["n"]

            a_share, b_share = (STREAMED_SHARE, 1.0) if columns_outside else (1.0, STREAMED_SHARE)
            a_panels, b_panels = (self.rows, 1) if columns_outside else (1, self.columns)
            streams = self._is_streamed(a_panels, a_share), self._is_streamed(b_panels, b_share)
            self._blocks(end - begin, place, self._of_batch(a), b, sums, prefetches=columns_outside, streams=streams)

    def _of_batch(self, a: PanelAt) -> PanelAt:
        """Panels of A by the batch of C."""
        return lambda batch, m: a(self.a.matrix_of(self.batch, batch), m)

    def _is_streamed(self, panels: SizeLike, share: float = STREAMED_SHARE) -> bool:
        """Whether so many panels of one term, more than a share of L1, leave it to others: none is there any more when it is
        read again. An operand of the outer loop has one, to which those of the inner loop leave the half that they need not."""
        with estimate():
            size_bytes = 4 * self.steps * TERM_WORDS * panels
            return self.terms == 1 and size_bytes > self.target.machine.l1.part_bytes(share)

    def _can_split(self) -> bool:
        """Whether a constant B may lie there as it is: all terms of A fit L2, so that each panel of B is split but once."""
        if isinstance(self.rows, Size):
            return False
        is_weight = self.b.name in self.group.constants and self.a.name not in self.group.constants
        is_larger = self.format.a.dtype == "float32" and self.terms == len(PRODUCTS)
        a_bytes = 4 * self.steps * self.terms * TERM_WORDS * self.rows
        return is_weight and is_larger and self.matrices == 1 and a_bytes <= self.near_bytes

    def _split_and_walk(self) -> None:
        """Each thread splits its panels of B, one by one, and multiplies all of A by each."""
        builder, panel_words = self.builder, self.steps * self.terms * TERM_WORDS
        threads = builder.threads_for(self._work)
        a = self._packed_panels(self.a, False)
        scratch = builder.workspace(threads * panel_words, "uint32")
        shares = Shares(builder, threads, self.columns, self._work)
        with tile_threads(builder, self.unit, threads) as (thread, sums), shares.of(thread) as (begin, end):
            near = builder.bind(thread * panel_words)
            with builder.loop(end - begin, name="columns") as i:
                n = builder.bind(begin + i)
                self._pack_panels(self._splitter(self.b, n), scratch, near, self.b.matrix_of(self.batch, 0), n, 1)
                b, streams = self._panel(scratch, near, words=True), (self._is_streamed(self.rows), False)
                self._blocks(self.rows, lambda m: (0, m, n), self._of_batch(a), lambda *_: b, sums, streams=streams)

    def _pack_and_walk(self, packer: StepPacker, b: PanelAt, threads: int) -> None:
        """Each thread packs as many panels of its rows of A as L2 holds and multiplies them by all panels of B, in turn."""
        builder, size = self.builder, packer.panel_elements
        of_thread = hint_of(ceil(self.matrices * self.rows / threads))
        balanced = min(max(ceil(of_thread / _RUNS), _RUNS), of_thread) if threads > 1 else of_thread
        panels = max(min(self.near_bytes // (4 * packer.panel_words), balanced, hint_of(self.rows)), 1)
        scratch = builder.workspace(threads * panels * size, self.product.numbers)
        extents = self.matrices, ceil(self.rows / panels)
        shares = Shares(builder, threads, prod(extents), self._work)
        with tile_threads(builder, self.unit, threads) as (thread, sums), shares.of(thread) as (begin, end):
            near = builder.bind(thread * (panels * size))
            with builder.loop(end - begin, name="rows") as i:
                batch, part = (builder.bind(place) for place in unravel(builder.bind(begin + i), extents))
                first = builder.bind(part * panels)
                count = builder.bind(tirx.min(self.rows - first, panels))
                self._pack_panels(packer, scratch, near, self.a.matrix_of(self.batch, batch), first, count)

                def place(block: Expr, batch: Expr = batch, first: Expr = first, count: Expr = count) -> Place:
                    n, m = (builder.bind(divide(block, count)) for divide in (tirx.floordiv, tirx.floormod))
                    return batch, builder.bind(first + m), n

                def rows(_: Expr, m: Expr, first: Expr = first) -> TileOperand:
                    return self._panel(scratch, near + (m - first) * size, words=False)

                streams = self._is_streamed(panels), self._is_streamed(1, 1.0)
                self._blocks(count * self.columns, place, rows, b, sums, streams=streams)

    def _pack_some_or_all(self, packer: StepPacker, a_bytes: SizeLike, b: PanelAt, threads: int) -> None:
        """Both ways, where a call decides whether all of A fits L2."""
        is_near = a_bytes - self.near_bytes
        if greatest_of(is_near) > 0:
            with self.builder.when(is_near > tirx.const(0, "int32")):
                self._pack_and_walk(packer, b, threads)
        if least_of(is_near) <= 0:
            with self.builder.when(is_near <= tirx.const(0, "int32")):
                self._walk(self._packed_panels(self.a, False), b, threads, columns_outside=True)

    def _pack_panels(self, packer: StepPacker, to: Buffer, base: Expr, matrix: Expr, first: Expr, count: Expr) -> None:
        builder, size = self.builder, packer.panel_elements // packer.steps
        with builder.loop(count, name="panel") as panel, builder.loop(packer.steps, name="step") as step:
            at = builder.bind(base + (panel * packer.steps + step) * size)
            packer.pack(to, at, matrix, builder.bind(first + panel), step)

    def _next(self, panel: TileOperand, m: Expr, n: Expr) -> NextPanel | None:
        """The panel of B to prefetch while all rows are multiplied by panel `n`; None unless B is constant and not small."""
        size = self.steps * self.terms * TERM_WORDS
        is_small = 4 * hint_of(size * self.columns) < self.target.machine.l2.part_bytes(_PREFETCHED_SHARE)
        if self.columns == 1 or self.b.name not in self.group.constants or is_small:
            return None
        ahead = self.builder.bind(tirx.Select(n < self.columns - 1, self.steps, 0))
        return NextPanel(self.builder.bind(panel.at((ahead,), 0, 0)), m, hint_of(self.rows))

    def _blocks(
        self,
        count: Expr,
        place: Callable[[Expr], Place],
        a: PanelAt,
        b: PanelAt,
        sums: Scratch,
        *,
        prefetches: bool = False,
        streams: tuple[bool, bool] = (False, False),
    ) -> None:
        """`count` blocks of C with their epilogues, those at `place(block)`; `a` is of (batch, panel), `b` of (matrix, panel).
        `streams`: whether these are streamed."""

        def multiply(block: Expr, first: Scratch | None, between: BlockEpilogue | None) -> None:
            batch, m, n = place(block)
            has_short = self._has_short()
            is_short = None if has_short is False else tirx.EQ(m, self.rows - 1)
            is_short = tirx.And(is_short, has_short) if isinstance(has_short, tirx.Expr) else is_short
            panel = b(self.b.matrix_of(self.batch, batch), n)
            then = self._next(panel, m, n) if prefetches else None
            rows, panel = (replace(one, is_streamed=is_so) for one, is_so in zip((a(batch, m), panel), streams, strict=True))
            self.blocks.multiply(rows, panel, sums, is_short=is_short, then=then, first=first, between=between)

        self.blocks.pipeline(count, sums, multiply, lambda block: self._epilogue(*place(block), sums), self._begin(place))

    def _width(self, left: Expr) -> Expr:
        """Columns of a block that begins at column `left`."""
        return LINES if self.b.lines % LINES == 0 else self.builder.bind(tirx.min(self.b.lines - left, LINES))

    def _begin(self, place: Callable[[Expr], Place]) -> Callable[[Expr, Scratch], None] | None:
        """What stores the sums that a block's begin with; None: zeros."""
        number = self._first_sums(LINES)
        if number is None:
            return None

        def begin(block: Expr, line: Scratch) -> None:
            batch, _, n = place(block)
            left = self.builder.bind(n * LINES)
            begin_sums(self.builder, line, self._width(left), lambda c: number(batch, left + c))

        return begin

    def _epilogue(self, batch: Expr, m: Expr, n: Expr, sums: Scratch) -> BlockEpilogue:
        """What stores a 32 x 32 block of C."""
        builder, store = self.builder, self.store(is_corrected=True)
        top, left, skipped = builder.bind(m * LINES), builder.bind(n * LINES), builder.bind(m * LINES - self._first_row(m))
        width = self._width(left)
        lanes = stored_lanes(builder, width, min(self.group.types[name].bits for name in self.group.outputs))

        def store_row(row: Expr) -> None:
            line, base = builder.bind(top + row), builder.bind((skipped + row) * LINES)
            builder.dynamic_vector_loop(0, width, lanes, lambda c: store(batch, line, 0, left + c, sums[base + c]))

        return BlockEpilogue(builder.bind(tirx.min(self.a.lines - top, LINES)), store_row)
