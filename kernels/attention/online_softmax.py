"""Softmax of rows of scores in scratch: of whole rows, or online, of rows that come block by block.

Online: Milakov, Gimelshein: Online normalizer calculation for softmax, arXiv 1805.02867, 2018.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import numpy as np
from tvm import tirx

from ..codegen.builder import Expr, KernelBuilder
from ..expressions import math
from ..microkernels.packed_gemm import Scratch, ScratchMatrix, Span, store_line, store_words
from ..reduction.reduction import add
from ..reduction.reduction_loops import Combine
from ..template.loops import sweep

_LINE_BYTES = 64
Weigh = Callable[[Expr, Expr, Expr], Expr]  # of (row, key, probability)
Store = Callable[[Expr, Expr, Expr], None]  # of (row, column, value)
_Update = Callable[[Expr, Expr], None]  # of (slot, value)


@dataclass(frozen=True)
class Rows:
    """Scratch of a thread: the scores of a block of rows, and a factor for each row.

    Rows are padded with -inf to whole vectors. Exponentials overwrite the scores, unless `words` is given: then they are stored
    there as bfloat16 pairs. `is_rough`: exponentials need no smaller error than bfloat16's. `state`, of online softmax, is kept
    for all rows of the thread: a row's maximum m so far, the sum of exp(x - m), and the results not yet divided by that sum.
    """

    builder: KernelBuilder
    dtype: str
    scores: Scratch
    factors: Scratch
    words: Scratch | None
    is_rough: bool
    state: tuple[Scratch, Scratch, Scratch] | None

    @property
    def results(self) -> Scratch:
        assert self.state is not None
        return self.state[2]

    @property
    def lanes(self) -> int:
        return self.builder.lanes(self.dtype)

    def extent(self, keys: int) -> int:
        """Elements of a padded row: whole pairs of vectors, each of which makes one vector of bfloat16 pairs."""
        return ceil(keys / (2 * self.lanes)) * 2 * self.lanes

    def line(self, keys: int) -> ScratchMatrix:
        """The rows of scores, an odd number of cache lines apart to avoid set conflicts."""
        return ScratchMatrix(self.scores.buffer, self.scores.base, odd_lines(self.extent(keys), self.dtype))

    def exponential_rows(self, keys: int) -> ScratchMatrix:
        """The rows of exponentials, as products read their A."""
        if self.words is None:
            return self.line(keys)
        return ScratchMatrix(self.words.buffer, self.words.base, odd_lines(self.extent(keys) // 2, "int32"))

    def end_rows(self, count: Expr, keys: int) -> None:
        """Pad the scores of `count` rows with -inf."""
        builder, line, rest = self.builder, self.line(keys), self.extent(keys) - keys
        if rest:
            with builder.loop(count, name="row") as row:
                base = builder.bind(line.base + row * line.pitch + keys)
                sweep(builder, rest, self.lanes, lambda i: builder.store(line.buffer, base + i, tirx.const(-np.inf, self.dtype)))

    def maximum(self, row: Expr, keys: int, span: Span) -> Expr:
        """The maximum of scores of a span of a row; any number if one is NaN, which the exponentials keep."""

        def emit(first: Expr, update: _Update) -> None:
            for slot in range(0, self._step(span), self.lanes):
                with self.builder.loop(self.lanes, "vectorized", "lane") as lane:
                    update(slot + lane, self.scores.buffer[first + slot + lane])

        return self.builder.name(self._fold(row, keys, span, -np.inf, tirx.max, emit))

    def exponentials(self, row: Expr, keys: int, span: Span, shift: Expr) -> Expr:
        """Store exp(x - shift) for scores x in a span of a row, over them or as pairs to `words`; returns their sum."""
        builder, scores, lanes = self.builder, self.line(keys), self.lanes
        lines = self.exponential_rows(keys)
        base, target = (builder.bind(some.base + row * some.pitch) for some in (scores, lines))

        def emit(first: Expr, update: _Update) -> None:
            for begin in range(0, self._step(span), 2 * lanes):

                def element(i: Expr, begin: int = begin) -> Expr:
                    value = builder.name(self.exponential(scores.buffer[first + begin + i] - shift))
                    update(begin + i, value)
                    return value

                if self.words is not None:
                    at = builder.bind(target + tirx.floordiv(first - base + begin, 2))
                    store_words(builder, Scratch(lines.buffer, at), 0, lanes, element)
                    continue
                for half in (0, lanes):
                    with builder.loop(lanes, "vectorized", "lane") as lane:
                        builder.store(scores.buffer, first + begin + half + lane, element(half + lane))

        return self._fold(row, keys, span, 0, add, emit)

    def _step(self, span: Span) -> int:
        """Scores of an iteration: several accumulators, as additions have a latency of four cycles."""
        return self.lanes * (4 if isinstance(span[1], int) and span[1] % (4 * self.lanes) == 0 else 2)

    def _fold(
        self, row: Expr, keys: int, span: Span, initial: float, combine: Combine, emit: Callable[[Expr, _Update], None]
    ) -> Expr:
        """A reduction over scores of a span of a row by `combine`, with `_step` accumulators that are combined in the end.

        `emit(offset, update)` writes the code for the scores from an offset on and calls `update(accumulator, value)`.
        """
        builder, line, slots, lanes = self.builder, self.line(keys), self._step(span), self.lanes
        total = builder.local(slots, self.dtype)
        for slot in range(0, slots, lanes):
            with builder.loop(lanes, "vectorized", "lane") as lane:
                builder.store(total, slot + lane, tirx.const(initial, self.dtype))
        begin, end = span
        base = builder.bind(line.base + row * line.pitch + begin)
        with builder.loop(end // slots if isinstance(end, int) else tirx.floordiv(end - begin, slots), name="v") as number:
            emit(
                builder.bind(base + number * slots),
                lambda slot, value: builder.store(total, slot, combine(total[slot], value)),
            )
        while slots > 1:
            slots //= 2
            with builder.loop(slots, "vectorized", "lane") as lane:
                builder.store(total, lane, combine(total[lane], total[slots + lane]))
        return total[tirx.const(0, "int32")]

    def exponential(self, x: Expr) -> Expr:
        """e**x of x <= 0."""
        if self.dtype != "float32":
            return tirx.exp(x)
        return (math.rough_exp_nonpositive if self.is_rough else math.exp_nonpositive)(self.builder.name, x)

    def put(self, to: Scratch, row: Expr, value: Expr) -> None:
        self.builder.store(to.buffer, to.base + row, value)


def softmax(rows: Rows, count: Expr, keys: int, span: Span, guard: float | None) -> None:
    """Replace the scores of a span of `count` rows by exponentials, and store each row's factor: 1 / sum of them.

    In a row of -inf alone all are NaN, as in ONNX; or all probabilities are `guard`, if given.
    """
    builder = rows.builder
    with builder.loop(count, name="row") as row:
        total = builder.name(rows.exponentials(row, keys, span, rows.maximum(row, keys, span)))
        rows.put(rows.factors, row, tirx.const(1, rows.dtype) / total)
        if guard is not None:
            with builder.when(tirx.isnan(total)):
                _fill_row(rows, row, keys, guard)


def _fill_row(rows: Rows, row: Expr, keys: int, value: float) -> None:
    """Make all probabilities of a row one value."""
    builder, element, lines = rows.builder, tirx.const(value, rows.dtype), rows.exponential_rows(keys)
    rows.put(rows.factors, row, tirx.const(1, rows.dtype))
    base = builder.bind(lines.base + row * lines.pitch)
    if rows.words is None:
        builder.vector_loop(keys, rows.lanes, lambda i: builder.store(lines.buffer, base + i, element))
    else:
        store_line(builder, Scratch(lines.buffer, base), keys, rows.lanes, lambda i: element)


def weigh_rows(rows: Rows, count: Expr, keys: int, weigh: Weigh) -> None:
    """Replace the exponentials of `count` rows by `weigh` of the probabilities; for rows without `words`."""
    builder, line = rows.builder, rows.line(keys)
    with builder.loop(count, name="row") as row:
        base = builder.bind(line.base + row * line.pitch)
        factor = builder.name(rows.factors[row])

        def element(key: Expr, row: Expr = row, factor: Expr = factor, base: Expr = base) -> None:
            builder.store(line.buffer, base + key, weigh(row, key, builder.name(line.buffer[base + key] * factor)))

        sweep(builder, keys, rows.lanes, element)


def round_rows(rows: Rows, to: Scratch, count: Expr, keys: int) -> ScratchMatrix:
    """Round what is in the places of the scores of `count` rows to bfloat16 pairs in `to`, as the product reads its A."""
    builder, line = rows.builder, rows.line(keys)
    words = ScratchMatrix(to.buffer, to.base, odd_lines(ceil(keys / 2), "int32"))
    with builder.loop(count, name="row") as row:
        base, target = builder.bind(line.base + row * line.pitch), builder.bind(to.base + row * words.pitch)
        store_line(builder, Scratch(to.buffer, target), keys, rows.lanes, lambda i: line.buffer[base + i])
    return words


def odd_lines(elements: int, dtype: str) -> int:
    """The least pitch of at least `elements` that is an odd number of cache lines."""
    line = _LINE_BYTES // np.dtype(dtype).itemsize
    return (ceil(elements / line) // 2 * 2 + 1) * line


def start_rows(rows: Rows, count: Expr, width: int) -> None:
    """Initialise the state of `count` rows: maximum -inf, sum and results 0."""
    assert rows.state is not None
    builder, (tops, sums, results) = rows.builder, rows.state
    with builder.loop(count, name="row") as row:
        rows.put(tops, row, tirx.const(-np.inf, rows.dtype))
        rows.put(sums, row, tirx.const(0, rows.dtype))
        base = builder.bind(row * width)
        builder.vector_loop(width, rows.lanes, lambda i: rows.put(results, base + i, tirx.const(0, rows.dtype)))


def running_softmax(rows: Rows, first: Expr, count: Expr, keys: int, span: Span) -> None:
    """Online softmax: replace the scores of a span of `count` rows by exponentials, and update the state of rows from `first`.

    The factors are those by which results so far must be rescaled. While a row has met only -inf, its exponentials and their sum
    are 0; the division in the end then gives NaN, as softmax of such a row does.
    """
    assert rows.state is not None
    builder, (tops, sums, _) = rows.builder, rows.state
    with builder.loop(count, name="row") as row:
        at = builder.bind(first + row)
        before = builder.name(tops[at])
        top = builder.name(math.maximum(before, rows.maximum(row, keys, span)))
        shift = builder.name(tirx.Select(tirx.EQ(top, tirx.const(-np.inf, rows.dtype)), tirx.const(0, rows.dtype), top))
        factor = builder.name(rows.exponential(before - shift))
        total = rows.exponentials(row, keys, span, shift)
        rows.put(sums, at, sums[at] * factor + total)
        rows.put(tops, at, top)
        rows.put(rows.factors, row, factor)


def finish_rows(rows: Rows, first: Expr, count: Expr, width: int, store: Store, *, is_guarded: bool = False) -> None:
    """`store(row, column, value)` for the results of `count` rows, from row `first` of the state on, divided by their sums.

    A row that has met only -inf is NaN; or 0, if rows are guarded.
    """
    assert rows.state is not None
    builder, (_, sums, results) = rows.builder, rows.state
    with builder.loop(count, name="row") as row:
        at = builder.bind(first + row)
        total, zero = builder.name(sums[at]), tirx.const(0, rows.dtype)
        factor = builder.name(tirx.const(1, rows.dtype) / total)
        has_none = builder.name(tirx.Or(tirx.isnan(total), tirx.EQ(total, zero))) if is_guarded else None
        base = builder.bind(at * width)

        def divided(i: Expr, base: Expr = base, factor: Expr = factor, has_none: Expr | None = has_none) -> Expr:
            value = results[base + i] * factor
            return value if has_none is None else tirx.Select(has_none, tirx.const(0, rows.dtype), value)

        builder.vector_loop(width, rows.lanes, lambda i: store(row, i, divided(i)))
