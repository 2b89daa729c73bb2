"""Softmax of rows of scores in scratch: of whole rows, or of parts of rows that come one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from tvm import tirx

from .. import math
from ..builder import Expr, Index, KernelBuilder
from .panel_product import Scratch
from .reduction import Fold, add, fold_block
from .reduction_loops import Block, Loop, block_slots

Weigh = Callable[[Expr, Expr, Expr], Expr]  # of (row, key, probability)
Store = Callable[[Expr, Expr, Expr], None]  # of (row, column, value)


@dataclass(frozen=True)
class Rows:
    """Scratch of a thread: the scores of a block of rows, one after the other, and a factor for each row of it.

    `state`, of rows whose keys come in parts, is kept for all rows of the thread: the greatest score so far, the sum of the
    exponentials of the differences to it, and the results so far, which are not yet divided by that sum.
    """

    builder: KernelBuilder
    dtype: str
    scores: Scratch
    factors: Scratch
    state: tuple[Scratch, Scratch, Scratch] | None

    @property
    def results(self) -> Scratch:
        assert self.state is not None
        return self.state[2]

    @property
    def lanes(self) -> int:
        return self.builder.lanes(self.dtype)

    def block(self, row: Expr, keys: int) -> Block:
        """The scores of a row, as reductions walk them."""
        lanes, slots = block_slots(self.lanes, keys)
        base = self.builder.bind(self.scores.base + row * keys)
        return Block(self.builder, slots, lanes, True, base, (Loop(keys, 1),), ())

    def maximum(self, block: Block) -> Expr:
        """The greatest score of a row; of one with a NaN any, as its exponentials will not lose that."""
        top = fold_block(block, self.scores.buffer, self.dtype, Fold(-np.inf, tirx.max))
        return self.builder.name(top[tirx.const(0, "int32")])

    def exponentials(self, block: Block, shift: Expr) -> Expr:
        """Put exp(x - shift) in the place of every score x of a row; returns their sum."""
        builder = self.builder

        def exponential(x: Expr, slot: Expr, offset: Expr) -> Expr:
            value = builder.name(self.exponential(x - shift))
            builder.store(self.scores.buffer, offset, value)
            return value

        return fold_block(block, self.scores.buffer, self.dtype, Fold(0, add, exponential))[tirx.const(0, "int32")]

    def exponential(self, x: Expr) -> Expr:
        """e**x of x <= 0."""
        return math.exp_nonpositive(self.builder.name, x) if self.dtype == "float32" else tirx.exp(x)

    def put(self, to: Scratch, row: Expr, value: Expr) -> None:
        self.builder.store(to.buffer, to.base + row, value)


def softmax(rows: Rows, count: Expr, keys: int, guard: float | None) -> None:
    """Exponentials in place of the scores of `count` rows, and the factors that make probabilities of them.

    Those of a row of minus infinity are NaN, as its probabilities are; or all are `guard`, if that is given.
    """
    builder = rows.builder
    with builder.loop(count, name="row") as row:
        block = rows.block(row, keys)
        total = builder.name(rows.exponentials(block, rows.maximum(block)))
        rows.put(rows.factors, row, tirx.const(1, rows.dtype) / total)
        if guard is not None:
            with builder.when(tirx.isnan(total)):
                _fill_row(rows, block, row, keys, guard)


def _fill_row(rows: Rows, block: Block, row: Expr, keys: int, value: float) -> None:
    """All probabilities of a row are one value."""
    builder, element = rows.builder, tirx.const(value, rows.dtype)
    rows.put(rows.factors, row, tirx.const(1, rows.dtype))
    block.each_of_row((keys,), lambda _, offset: builder.store(rows.scores.buffer, offset, element))


def weigh_rows(rows: Rows, count: Expr, keys: int, weigh: Weigh) -> None:
    """What `weigh` makes of the probabilities, in place of the exponentials of `count` rows."""
    builder, scores = rows.builder, rows.scores.buffer
    with builder.loop(count, name="row") as row:
        factor = builder.name(rows.factors[row])

        def element(key: Index, offset: Expr, row: Expr = row, factor: Expr = factor) -> None:
            builder.store(scores, offset, weigh(row, key[0], builder.name(scores[offset] * factor)))

        rows.block(row, keys).each_of_row((keys,), element)


def start_rows(rows: Rows, count: Expr, width: int) -> None:
    """The state of rows that have seen no key."""
    assert rows.state is not None
    builder, (tops, sums, results) = rows.builder, rows.state
    with builder.loop(count, name="row") as row:
        rows.put(tops, row, tirx.const(-np.inf, rows.dtype))
        rows.put(sums, row, tirx.const(0, rows.dtype))
        base = builder.bind(row * width)
        builder.vector_loop(width, rows.lanes, lambda i: rows.put(results, base + i, tirx.const(0, rows.dtype)))


def running_softmax(rows: Rows, first: Expr, count: Expr, keys: int) -> None:
    """Exponentials in place of the scores of `count` rows, of which the first is `first` of the state, by more keys.

    The factors are what results so far must be multiplied by. While a row has seen nothing but minus infinity, its exponentials
    are 0, and so is their sum, by which it is divided in the end: NaN, as of the whole row.
    """
    assert rows.state is not None
    builder, (tops, sums, _) = rows.builder, rows.state
    with builder.loop(count, name="row") as row:
        block, at = rows.block(row, keys), builder.bind(first + row)
        before = builder.name(tops[at])
        top = builder.name(math.maximum(before, rows.maximum(block)))
        shift = builder.name(tirx.Select(tirx.EQ(top, tirx.const(-np.inf, rows.dtype)), tirx.const(0, rows.dtype), top))
        factor = builder.name(rows.exponential(before - shift))
        total = rows.exponentials(block, shift)
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
