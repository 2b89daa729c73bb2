"""Softmax of rows of scores in scratch: of whole rows, or of parts of rows that come one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import numpy as np
from tvm import tirx

from ..codegen.builder import Expr, KernelBuilder
from ..expressions import math
from ..microkernels.packed_gemm import Lines, Scratch, store_line, store_words
from ..reduction.reduction import add
from ..reduction.reduction_loops import Combine
from ..template.loops import sweep

_LINE_BYTES = 64
Weigh = Callable[[Expr, Expr, Expr], Expr]  # of (row, key, probability)
Store = Callable[[Expr, Expr, Expr], None]  # of (row, column, value)
_Update = Callable[[Expr, Expr], None]  # of (slot, value)


@dataclass(frozen=True)
class Rows:
    """Scratch of a thread: the scores of a block of rows, and a factor for each row of it.

    A row is followed by minus infinities up to whole vectors. `words`, where given, is for its exponentials as words of two
    bfloat16 numbers, which else take the places of the scores; `is_rough`: they need no better error than these have.
    `state`, of rows whose keys come in parts, is kept for all rows of the thread: the greatest score so far, the sum of the
    exponentials of the differences to it, and the results so far, which are not yet divided by that sum.
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
        """Scores of a row and what follows them: whole pairs of vectors, each of which makes one of words."""
        return ceil(keys / (2 * self.lanes)) * 2 * self.lanes

    def line(self, keys: int) -> Lines:
        """Rows of scores, an odd number of cache lines apart, so that they lie in all sets of a cache."""
        return Lines(self.scores.buffer, self.scores.base, odd_lines(self.extent(keys), self.dtype))

    def exponential_lines(self, keys: int) -> Lines:
        """Rows of exponentials, as products read them."""
        if self.words is None:
            return self.line(keys)
        return Lines(self.words.buffer, self.words.base, odd_lines(self.extent(keys) // 2, "int32"))

    def end_rows(self, count: Expr, keys: int) -> None:
        """Put minus infinities behind the scores of `count` rows."""
        builder, line, rest = self.builder, self.line(keys), self.extent(keys) - keys
        if rest:
            with builder.loop(count, name="row") as row:
                base = builder.bind(line.base + row * line.pitch + keys)
                sweep(builder, rest, self.lanes, lambda i: builder.store(line.buffer, base + i, tirx.const(-np.inf, self.dtype)))

    def maximum(self, row: Expr, keys: int, end: Expr) -> Expr:
        """The greatest of the scores [0, end) of a row; of one with a NaN any, as its exponentials will not lose that."""

        def emit(first: Expr, update: _Update) -> None:
            for slot in range(0, self._step(end), self.lanes):
                with self.builder.loop(self.lanes, "vectorized", "lane") as lane:
                    update(slot + lane, self.scores.buffer[first + slot + lane])

        return self.builder.name(self._fold(row, keys, end, -np.inf, tirx.max, emit))

    def exponentials(self, row: Expr, keys: int, end: Expr, shift: Expr) -> Expr:
        """Put exp(x - shift) in the place of the scores x in [0, end) of a row, or its words into theirs; returns their sum."""
        builder, scores, lanes = self.builder, self.line(keys), self.lanes
        lines = self.exponential_lines(keys)
        base, target = (builder.bind(some.base + row * some.pitch) for some in (scores, lines))

        def emit(first: Expr, update: _Update) -> None:
            for begin in range(0, self._step(end), 2 * lanes):

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

        return self._fold(row, keys, end, 0, add, emit)

    def _step(self, end: Expr) -> int:
        """Scores at once, of `end`: independent vectors, as an addition takes four cycles."""
        return self.lanes * (4 if isinstance(end, int) and end % (4 * self.lanes) == 0 else 2)

    def _fold(
        self, row: Expr, keys: int, end: Expr, initial: float, combine: Combine, emit: Callable[[Expr, _Update], None]
    ) -> Expr:
        """What `emit(offset, update)` gives `update(slot, value)` of some scores at once, from an offset on, brought together."""
        builder, line, slots, lanes = self.builder, self.line(keys), self._step(end), self.lanes
        total = builder.local(slots, self.dtype)
        for slot in range(0, slots, lanes):
            with builder.loop(lanes, "vectorized", "lane") as lane:
                builder.store(total, slot + lane, tirx.const(initial, self.dtype))
        base = builder.bind(line.base + row * line.pitch)
        with builder.loop(end // slots if isinstance(end, int) else tirx.floordiv(end, slots), name="v") as number:
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


def softmax(rows: Rows, count: Expr, keys: int, end: Expr, guard: float | None) -> None:
    """Exponentials in place of the scores [0, end) of `count` rows, and the factors that make probabilities of them.

    Those of a row of minus infinity are NaN, as its probabilities are; or all are `guard`, if that is given.
    """
    builder = rows.builder
    with builder.loop(count, name="row") as row:
        total = builder.name(rows.exponentials(row, keys, end, rows.maximum(row, keys, end)))
        rows.put(rows.factors, row, tirx.const(1, rows.dtype) / total)
        if guard is not None:
            with builder.when(tirx.isnan(total)):
                _fill_row(rows, row, keys, guard)


def _fill_row(rows: Rows, row: Expr, keys: int, value: float) -> None:
    """All probabilities of a row are one value."""
    builder, element, lines = rows.builder, tirx.const(value, rows.dtype), rows.exponential_lines(keys)
    rows.put(rows.factors, row, tirx.const(1, rows.dtype))
    base = builder.bind(lines.base + row * lines.pitch)
    if rows.words is None:
        builder.vector_loop(keys, rows.lanes, lambda i: builder.store(lines.buffer, base + i, element))
    else:
        store_line(builder, Scratch(lines.buffer, base), keys, rows.lanes, lambda i: element)


def weigh_rows(rows: Rows, count: Expr, keys: int, weigh: Weigh) -> None:
    """What `weigh` makes of the probabilities, in place of the exponentials of `count` rows, which have no words."""
    builder, line = rows.builder, rows.line(keys)
    with builder.loop(count, name="row") as row:
        base = builder.bind(line.base + row * line.pitch)
        factor = builder.name(rows.factors[row])

        def element(key: Expr, row: Expr = row, factor: Expr = factor, base: Expr = base) -> None:
            builder.store(line.buffer, base + key, weigh(row, key, builder.name(line.buffer[base + key] * factor)))

        sweep(builder, keys, rows.lanes, element)


def round_rows(rows: Rows, to: Scratch, count: Expr, keys: int) -> Lines:
    """The words of what is in the places of the scores of `count` rows."""
    builder, line = rows.builder, rows.line(keys)
    words = Lines(to.buffer, to.base, odd_lines(ceil(keys / 2), "int32"))
    with builder.loop(count, name="row") as row:
        base, target = builder.bind(line.base + row * line.pitch), builder.bind(to.base + row * words.pitch)
        store_line(builder, Scratch(to.buffer, target), keys, rows.lanes, lambda i: line.buffer[base + i])
    return words


def odd_lines(elements: int, dtype: str) -> int:
    """So many elements or a few more, an odd number of cache lines."""
    line = _LINE_BYTES // np.dtype(dtype).itemsize
    return (ceil(elements / line) | 1) * line


def start_rows(rows: Rows, count: Expr, width: int) -> None:
    """The state of rows that have seen no key."""
    assert rows.state is not None
    builder, (tops, sums, results) = rows.builder, rows.state
    with builder.loop(count, name="row") as row:
        rows.put(tops, row, tirx.const(-np.inf, rows.dtype))
        rows.put(sums, row, tirx.const(0, rows.dtype))
        base = builder.bind(row * width)
        builder.vector_loop(width, rows.lanes, lambda i: rows.put(results, base + i, tirx.const(0, rows.dtype)))


def running_softmax(rows: Rows, first: Expr, count: Expr, keys: int, end: Expr) -> None:
    """Exponentials in place of the scores [0, end) of `count` rows, of which the first is `first` of the state, by more keys.

    The factors are what results so far must be multiplied by. While a row has seen nothing but minus infinity, its exponentials
    are 0, and so is their sum, by which it is divided in the end: NaN, as of the whole row.
    """
    assert rows.state is not None
    builder, (tops, sums, _) = rows.builder, rows.state
    with builder.loop(count, name="row") as row:
        at = builder.bind(first + row)
        before = builder.name(tops[at])
        top = builder.name(math.maximum(before, rows.maximum(row, keys, end)))
        shift = builder.name(tirx.Select(tirx.EQ(top, tirx.const(-np.inf, rows.dtype)), tirx.const(0, rows.dtype), top))
        factor = builder.name(rows.exponential(before - shift))
        total = rows.exponentials(row, keys, end, shift)
        rows.put(sums, at, sums[at] * factor + total)
        rows.put(tops, at, top)
        rows.put(rows.factors, row, factor)


def finish_rows(rows: Rows, first: Expr, count: Expr, width: int, store: Store) -> None:
    """`store(row, column, value)` for the results of `count` rows, of which the first is `first` of the state."""
    assert rows.state is not None
    builder, (_, sums, results) = rows.builder, rows.state
    with builder.loop(count, name="row") as row:
        at = builder.bind(first + row)
        factor = builder.name(tirx.const(1, rows.dtype) / sums[at])
        base = builder.bind(at * width)
        builder.vector_loop(width, rows.lanes, lambda i: store(row, i, results[base + i] * factor))
