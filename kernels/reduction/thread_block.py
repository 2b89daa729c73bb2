"""Rows that a block of threads works on together: each has one accumulator, brought together through shared memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod

from tvm import tirx

from ...runtime.symbolic.shapes import is_one
from ..codegen.builder import Buffer, Expr, Index
from ..codegen.gpu_builder import GpuBuilder
from ..codegen.grids import BLOCK_THREADS
from ..template.loops import bound_unravel
from .reduction_loops import Block, Combine, Loop, Update, offset_of

SHORT_ROW = 64  # elements below which a thread of its own for each row does better


@dataclass(frozen=True)
class ThreadBlock(Block):
    """A row whose element number i belongs to thread i / `count` % `threads`, a power of two, of the block.

    The neighbours of a thread are loaded and stored as vectors, if rows begin where vectors do.
    """

    thread: Expr
    threads: int
    count: int = 1

    def once(self) -> AbstractContextManager[None]:
        return self.builder.when(tirx.EQ(self.thread, 0))

    def bring_together(self, total: Buffer, combine: Combine) -> None:
        """Combine the accumulators of all threads in each one's slot 0, by a tree reduction of fixed order."""
        (found,) = combined_threads(self._builder, [total[tirx.const(0, "int32")]], self.thread, self.threads, combine)
        self._builder.store(total, tirx.const(0, "int32"), found)

    def each_of_row(self, extents: Sequence[int], body: Callable[[Index, Expr], None]) -> None:
        self._each(extents, lambda index, number: body(index, self.base + number))

    def walk(self, update: Update) -> None:
        def element(index: Index, number: Expr) -> None:
            offset = self.builder.bind(self.base + offset_of(index, self.reduced))
            update(tirx.const(0, "int32"), offset, index[-1] if index else number)

        self._each([loop.extent for loop in self.reduced], element)

    @property
    def _builder(self) -> GpuBuilder:
        assert isinstance(self.builder, GpuBuilder)
        return self.builder

    def _each(self, extents: Sequence[int], body: Callable[[Index, Expr], None]) -> None:
        """`body(index, number)` for those of the row's elements that are this thread's."""
        builder, vectors = self.builder, prod(extents) // self.count
        with builder.loop(-(-vectors // self.threads), name="turn") as turn:
            number = builder.bind(turn * self.threads + self.thread)
            if vectors % self.threads == 0:
                self._neighbours(extents, number, body)
                return
            with builder.when(number < vectors):
                self._neighbours(extents, number, body)

    def _neighbours(self, extents: Sequence[int], vector: Expr, body: Callable[[Index, Expr], None]) -> None:
        """Those of one vector of the row."""
        builder, count = self._builder, self.count
        if count == 1 or not extents or extents[-1] % count:
            with builder.neighbours(count) as e:
                number = builder.bind(vector * count + e) if count > 1 else vector
                body(bound_unravel(builder, number, extents), number)
            return
        *outer, run = bound_unravel(builder, vector, [*extents[:-1], extents[-1] // count])
        with builder.neighbours(count) as e:
            body((*outer, run * count + e), vector * count + e)


def combined_threads(builder: GpuBuilder, values: Sequence[Expr], thread: Expr, threads: int, combine: Combine) -> list[Expr]:
    """Each of these values of one type of all threads, a power of two, in one: a tree reduction of fixed order.

    The results lie in shared memory, which the next use of the same statements overwrites: a barrier must come before it.
    """
    width, places = threads, range(len(values))
    shared = builder.shared(width * len(values), str(values[0].ty), "partial")
    for i in places:
        builder.store(shared, i * threads + thread, values[i])
    builder.barrier()
    while width > 1:
        width //= 2
        with builder.when(thread < width):
            for i in places:
                own = i * threads + thread
                builder.store(shared, own, combine(shared[own], shared[own + width]))
        builder.barrier()
    return [shared[i * threads] for i in places]


def scanned_threads(
    builder: GpuBuilder, value: Expr, neutral: Expr, thread: Expr, threads: int, combine: Combine
) -> tuple[Expr, Expr]:
    """One value of each thread of those before this one, combined in their order, and of all threads (Hillis and Steele, 1986).

    `neutral` is that of no threads. Shared memory is overwritten by the next use of the same statements: a barrier must come
    before it.
    """
    sides = builder.shared(2 * threads, str(value.ty), "scan")
    builder.store(sides, thread, value)
    builder.barrier()

    def earlier(begin: int, distance: int) -> Expr:
        """What a thread before this one has; named outside of a Select, both sides of which may be computed."""
        return builder.name(sides[begin + builder.bind(tirx.max(thread - distance, 0))])

    begin, distance = 0, 1
    while distance < threads:
        own = builder.name(sides[begin + thread])
        combined = builder.name(combine(earlier(begin, distance), own))
        begin = threads - begin
        builder.store(sides, begin + thread, tirx.Select(thread >= distance, combined, own))
        builder.barrier()
        distance *= 2
    before = builder.name(tirx.Select(thread >= 1, earlier(begin, 1), neutral))
    return before, builder.name(sides[begin + threads - 1])


def threads_of_rows(builder: GpuBuilder, dtypes: Iterable[str] | None, length: int) -> tuple[int, int]:
    """How many neighbours a thread takes of rows of so many elements, of tensors of these types that lie row after row (None:
    they do not), and how many threads, a power of two, share a row."""
    count = 1 if dtypes is None else builder.vector_count(dtypes, length)
    return count, min(BLOCK_THREADS, 1 << max(length // count - 1, 31).bit_length())


def emit_rows(
    builder: GpuBuilder,
    extents: Sequence[int],
    base: Callable[[Index], Expr],
    reduced: tuple[Loop, ...],
    compute: Callable[[Block], None],
    dtypes: Iterable[str],
) -> None:
    """A thread block for each index of `extents`; its row begins at `base(index)`, and `reduced` are the loops over it.

    `dtypes` are those of tensors of its elements.
    """
    length = prod(loop.extent for loop in reduced)
    count, threads = threads_of_rows(builder, dtypes if reduced and is_one(reduced[-1].stride) else None, length)
    with builder.blocks(prod(extents), threads) as (block, thread):
        index = bound_unravel(builder, block, extents)
        compute(ThreadBlock(builder, 1, 1, True, builder.bind(base(index)), reduced, index, thread, threads, count))
