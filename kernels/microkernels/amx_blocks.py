"""The AMX micro-kernel: 32 x 32 blocks of C, two tiles of A by two of B, so that four tiles are loaded for four products.

A float32 operand is several bfloat16 terms (bf16_split.py), whose products are added to the same sums. A block in which a sum is
not finite is computed again by float32 multiply-adds: infinity times a number is then infinity, where its terms would give
infinity times zero, and what overflows only in a term is right, too. A finished block lies in L1, for the epilogue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from math import ceil, prod

from tvm import tirx

from ...runtime.symbolic.sizes import Size, SizeLike
from ..codegen.builder import Buffer, Expr, Index, KernelBuilder, row_major
from ..codegen.work_stealing import Shares
from ..cost.amx import LEAST_STEPS
from .amx_packing import LINES
from .amx_unit import BF16_TILES, COLUMNS, DEPTH, ROWS, WORDS, TileDot, TileUnit
from .bf16_split import PRODUCTS, joined
from .packed_gemm import Scratch

_A, _B = (4, 5), (6, 7)  # tile registers of the operands; the accumulators are 0 to 3
_SUMS = ((0, 1), (2, 3))
_RUNS = 4  # of lines of a panel that is prefetched; a step has a multiple of them
_SIZE, _INFINITY = 0x7FFFFFFF, 0x7F800000
# Scalar operations that a product of two tiles counts for in the work dealt to threads: its 16 cycles, at four a cycle, as
# multiply-adds are counted (cost/memory.py: WORK_PER_OPERATION).
_WORK_PER_DOT = 64


@dataclass(frozen=True)
class TileOperand:
    """32 rows of A or columns of B, as tiles that TILELOADD reads.

    Tile `half` (0 or 1: the first or last 16) of a term of step `ks` begins at element `at(ks, term, half)`; the tile's rows are
    `stride` elements apart. Elements are numbers of A (as bits), and 32-bit words of neighbours along k (VNNI layout) of B.
    What `is_streamed` leaves L1 to what other blocks read again.
    """

    buffer: Buffer
    stride: int
    at: Callable[[Index, int, Expr], Expr]
    is_streamed: bool = False


@dataclass(frozen=True)
class NextPanel:
    """The next panel of B, prefetched from memory into L2 while `blocks` blocks of A are multiplied by the current one.

    It begins at element `base` of B's buffer (behind the last panel: the current one's, so that nothing is fetched); `block` is
    the number of the current block, which prefetches its share.
    """

    base: Expr
    block: Expr
    blocks: int


@dataclass(frozen=True)
class BlockEpilogue:
    """The epilogue of a finished block: `store(row)` for each of its first `rows` rows, at most 32."""

    rows: Expr
    store: Callable[[Expr], None]


def work_of_dots(dots: int, terms: int) -> int:
    """Scalar operations of so many pairs of tiles, of operands of so many terms each."""
    return dots * (_WORK_PER_DOT * len(PRODUCTS[terms]))


@contextmanager
def tile_threads(builder: KernelBuilder, unit: TileUnit, count: int, blocks: int = 1) -> Iterator[tuple[Expr, Scratch]]:
    """A parallel region whose threads configure AMX; yields the thread's number and its scratch for the sums of `blocks` blocks,
    behind which are two lines for those that a block and the next one begin with."""
    size = (blocks * LINES + 2) * LINES
    sums = builder.workspace(count * size, unit.product.sums)  # in the arena, as the stack aligns to 16 bytes only
    with builder.loop(count, "parallel", "thread") as thread:
        unit.configure()
        yield thread, Scratch(sums, builder.bind(thread * size))
        unit.release()


@contextmanager
def tile_chunks(
    builder: KernelBuilder, unit: TileUnit, extent: SizeLike, work: SizeLike, blocks: int = 1
) -> Iterator[tuple[Expr, Scratch]]:
    """A loop over [0, extent), dealt to threads that configure AMX; `work` is the scalar operations of the whole loop.

    Yields an iteration and the thread's scratch for the sums of `blocks` blocks of C.
    """
    threads = builder.threads_for(work)
    threads = threads if isinstance(extent, Size) else min(threads, max(extent, 1))
    shares = Shares(builder, threads, extent, work)
    with (
        tile_threads(builder, unit, threads, blocks) as (thread, sums),
        shares.of(thread) as (begin, end),
        builder.loop(end - begin if threads > 1 else extent, name="chunk") as i,
    ):
        yield builder.bind(begin + i), sums


class AmxMicroKernel:
    """The micro-kernel of one thread. `steps`: extents of the loops over k; `halves`: tiles of A and of B in a block, 1 or 2."""

    def __init__(
        self, builder: KernelBuilder, unit: TileUnit, steps: Sequence[int], terms: int, halves: tuple[int, int] = (2, 2)
    ) -> None:
        self.builder, self.unit, self.steps, self.terms, self.halves = builder, unit, tuple(steps), terms, halves
        builder.tiles = f"tiles{len(PRODUCTS[terms])}"

    def multiply(
        self,
        a: TileOperand,
        b: TileOperand,
        sums: Scratch,
        *,
        is_short: Expr | None = None,
        then: NextPanel | None = None,
        first: Scratch | None = None,
        between: BlockEpilogue | None = None,
    ) -> None:
        """Store the sums over all steps to `sums`: 32 rows of 32, or 16 rows where `is_short`. They begin with the 32 of `first`
        in each row, or with zeros. The rows of `between`, an earlier block's, are stored between the steps."""
        if is_short is None or self.halves[0] == 1:
            self._multiply(a, b, sums, self.halves, then, first, between)
            return
        with self.builder.when(is_short):
            self._multiply(a, b, sums, (1, self.halves[1]), then, first, between)
        with self.builder.when(tirx.Not(is_short)):
            self._multiply(a, b, sums, self.halves, then, first, between)

    def pipeline(
        self,
        count: Expr,
        sums: Scratch,
        multiply: Callable[[Expr, Scratch | None, BlockEpilogue | None], None],
        epilogue: Callable[[Expr], BlockEpilogue],
        begin: Callable[[Expr, Scratch], None] | None = None,
    ) -> None:
        """Blocks 0 to `count` - 1 of a thread, in a software pipeline: while the tile unit adds up a block's products, vectors
        store the block before it. `sums` is scratch as of `tile_threads`: what was a block's is stored before the next one's are.

        `multiply(block, first, between)` calls `multiply` for a block, with `first` and `between`; `epilogue(block)` stores the
        block whose sums are there. It is also asked for block -1, of which no row is stored. `begin(block, line)` stores what
        the block's sums begin with, during the block before: tiles that are loaded from a line just stored would wait for it.
        """
        builder = self.builder
        is_short = prod(self.steps) * len(PRODUCTS[self.terms]) < LEAST_STEPS or (isinstance(count, int) and count == 1)

        def line_of(block: Expr) -> Scratch:
            return Scratch(sums.buffer, builder.bind(sums.base + (tirx.floormod(block, 2) + LINES) * LINES))

        def if_any() -> AbstractContextManager[object]:
            return nullcontext() if isinstance(count, int) else builder.when(count > 0)

        def finish(rest: BlockEpilogue) -> None:
            with builder.loop(rest.rows, name="row") as row:
                rest.store(row)

        if begin is not None:
            with if_any():
                begin(0, line_of(0))
        with builder.loop(count, name="block") as block:
            first = None if begin is None else line_of(block)
            if begin is not None:
                begin(builder.bind(tirx.min(block + 1, count - 1)), line_of(block + 1))
            if is_short:
                multiply(block, first, None)
                finish(epilogue(block))
            else:
                previous = epilogue(builder.bind(block - 1))
                rows = builder.bind(tirx.Select(block > 0, previous.rows, 0))
                multiply(block, first, BlockEpilogue(rows, previous.store))
        if not is_short:
            with if_any():
                finish(epilogue(builder.bind(count - 1)))

    def _multiply(
        self,
        a: TileOperand,
        b: TileOperand,
        sums: Scratch,
        halves: tuple[int, int],
        then: NextPanel | None,
        first: Scratch | None,
        between: BlockEpilogue | None,
    ) -> None:
        cells = [(i, j) for i in range(halves[0]) for j in range(halves[1])]
        for i, j in cells:
            if first is None:
                self.unit.zero(_SUMS[i][j])
            else:
                self.unit.begin(_SUMS[i][j], first.buffer, first.base + j * COLUMNS)
        with ExitStack() as loops:
            ks = tuple(loops.enter_context(self.builder.loop(extent, name="step")) for extent in self.steps)
            self._add(a, b, cells, ks)
            if then is not None:
                self._prefetch_next(b.buffer, then, ks)
            if between is not None:
                self._store_rows(between, row_major(ks, self.steps))
        for i, j in cells:
            self.unit.store(_SUMS[i][j], sums.buffer, sums.base + (i * ROWS * LINES + j * COLUMNS), LINES)
        if self.terms > 1:
            self._mend(a, b, sums, halves)

    def _add(self, a: TileOperand, b: TileOperand, cells: list[tuple[int, int]], ks: Index) -> None:
        """The products of one step. A tile is loaded just before the first product that reads it. Where operands have several
        terms, tiles of the next step are prefetched into L1 between products; with one term, prefetches take the places of loads
        (measured: 10 ns a product and load for 8.5 without, from L2)."""
        dots = [(terms, cell) for terms in PRODUCTS[self.terms] for cell in cells]
        halves = [sorted({cell[axis] for cell in cells}) for axis in range(2)]
        tiles = zip((a, b), halves, strict=True)
        later = [(lines, term, half) for lines, some in tiles for half in some for term in range(self.terms) if self.terms > 1]
        following = (*ks[:-1], ks[-1] + 1)
        held: dict[int, int] = {}  # the term in each tile register
        for number, (terms, (i, j)) in enumerate(dots):
            for lines, register, term, half in ((a, _A[i], terms[0], i), (b, _B[j], terms[1], j)):
                if held.get(register) != term:
                    self.unit.load(register, lines.buffer, lines.at(ks, term, half), lines.stride, is_streamed=lines.is_streamed)
                    held[register] = term
            self.unit.dot(_SUMS[i][j], _A[i], _B[j])
            begin, end = (len(later) * (number + place) // len(dots) for place in range(2))
            for lines, term, half in later[begin:end]:
                self.unit.prefetch(lines.buffer, lines.at(following, term, half), lines.stride)

    def _prefetch_next(self, buffer: Buffer, then: NextPanel, ks: Index) -> None:
        """Prefetch this step's share of the next panel: evenly many lines a step, or one in each of evenly many steps. All blocks
        that read the current panel prefetch the whole of it, once, in turns from several runs of its lines: each is in a page of
        its own, in which the hardware prefetches, too."""
        builder, of_step, steps = self.builder, 2 * ROWS * self.terms, prod(self.steps)
        of_run = of_step * steps // _RUNS
        every, lines = max(then.blocks // of_step, 1), ceil(of_step / then.blocks)
        number = builder.bind(then.block * steps + row_major(ks, self.steps))
        first = builder.bind(tirx.floordiv(number, every) * lines)
        is_left = tirx.And(first < of_step * steps, tirx.EQ(tirx.floormod(number, every), 0))
        with builder.when(is_left) if lines * then.blocks != of_step else nullcontext():  # no branch where shares are even
            for line in range(lines):
                number = first + line
                place = tirx.floormod(number, _RUNS) * of_run + tirx.floordiv(number, _RUNS)
                self.unit.prefetch_line(buffer, then.base + place * WORDS)

    def _store_rows(self, epilogue: BlockEpilogue, step: Expr) -> None:
        """Store the rows of an earlier block that are this step's: evenly many a step, or one in each of evenly many steps."""
        builder, steps = self.builder, prod(self.steps)
        every, count = max(steps // LINES, 1), ceil(LINES / steps)
        first = builder.bind(tirx.floordiv(step, every) * count)
        left = tirx.max(tirx.min(epilogue.rows - first, count), 0)
        rows = builder.bind(left if every == 1 else tirx.Select(tirx.EQ(tirx.floormod(step, every), 0), left, 0))
        with builder.loop(rows, name="row") as row:
            epilogue.store(builder.bind(first + row))

    # Sums that are not finite -----------------------------------------------------------------------------------------

    def _mend(self, a: TileOperand, b: TileOperand, sums: Scratch, halves: tuple[int, int]) -> None:
        with self.builder.when(self._largest(sums, halves) >= _INFINITY), ExitStack() as loops:
            i, row, j = (
                loops.enter_context(self.builder.loop(extent, name=name))
                for extent, name in ((halves[0], "i"), (ROWS, "row"), (halves[1], "j"))
            )
            self._mend_row(a, b, sums, i, row, j)

    def _largest(self, sums: Scratch, halves: tuple[int, int]) -> Expr:
        """The bits of the largest absolute value of a sum: at least those of infinity where one is not finite."""
        builder = self.builder
        sizes, one = builder.local(COLUMNS, "int32", "sizes"), builder.local(1, "int32", "size")
        with builder.loop(COLUMNS, "vectorized", "lane") as lane:
            builder.store(sizes, lane, tirx.const(0, "int32"))
        with builder.loop(halves[0] * ROWS, name="row") as row, builder.loop(halves[1], name="j") as j:
            at = builder.bind(row * LINES + j * COLUMNS)
            with builder.loop(COLUMNS, "vectorized", "lane") as lane:
                size = tirx.reinterpret("int32", sums[at + lane]) & tirx.const(_SIZE, "int32")
                builder.store(sizes, lane, tirx.max(sizes[lane], size))
        builder.store(one, 0, tirx.const(0, "int32"))
        with builder.loop(COLUMNS, name="lane") as lane:
            builder.store(one, 0, tirx.max(one[0], sizes[lane]))
        return one[0]

    def _mend_row(self, a: TileOperand, b: TileOperand, sums: Scratch, i: Expr, row: Expr, j: Expr) -> None:
        """Compute 16 sums of a row again, by float32 multiply-adds of the terms' sums."""
        builder = self.builder
        at = builder.bind((i * ROWS + row) * LINES + j * COLUMNS)
        with builder.loop(COLUMNS, "vectorized", "lane") as lane:
            builder.store(sums.buffer, sums.base + at + lane, tirx.const(0, "float32"))
        with ExitStack() as loops:
            ks = tuple(loops.enter_context(builder.loop(extent, name="step")) for extent in self.steps)
            pair = loops.enter_context(builder.loop(DEPTH // 2, name="pair"))
            for half in range(2):
                k = row * a.stride + pair * 2 + half
                x = builder.bind(joined([a.buffer[a.at(ks, term, i) + k] for term in range(self.terms)]))
                with builder.loop(COLUMNS, "vectorized", "lane") as lane:
                    words = [b.buffer[b.at(ks, term, j) + pair * b.stride + lane] for term in range(self.terms)]
                    y = joined([_half(word, half) for word in words])
                    builder.store(sums.buffer, sums.base + at + lane, sums[at + lane] + x * y)


def begin_sums(builder: KernelBuilder, line: Scratch, columns: Expr, number: Callable[[Expr], Expr]) -> None:
    """Store what the sums of a block's first `columns` columns begin with to a line; others begin with anything."""
    lanes = builder.lanes("int32")
    builder.dynamic_vector_loop(0, columns, lanes, lambda i: builder.store(line.buffer, line.base + i, number(i)))


def stored_lanes(builder: KernelBuilder, width: Expr, bits: int) -> int:
    """Sums of a row of `width` that are stored at a time, as numbers of so many bits: as many as fill a vector of these, where
    each row has as many."""
    lanes = builder.lanes("float32")
    return min(lanes * 32 // bits, LINES) if isinstance(width, int) else lanes


def packed_operand(
    buffer: Buffer, base: Expr, terms: int, *, words: bool, product: TileDot = BF16_TILES, is_streamed: bool = False
) -> TileOperand:
    """A panel packed by `PackTiles`, from element `base` of a buffer on; with `words` the buffer's elements are words."""
    stride = WORDS if words else product.depth

    def at(ks: Index, term: int, half: Expr) -> Expr:
        (step,) = ks
        return base + ((step * terms + term) * 2 + half) * (ROWS * stride)

    return TileOperand(buffer, stride, at, is_streamed)


def _half(word: Expr, half: int) -> Expr:
    """The bits of one of the two bfloat16 numbers of a 32-bit pair."""
    return tirx.Cast("uint16", word >> tirx.const(16, "uint32") if half else word & tirx.const(0xFFFF, "uint32"))
