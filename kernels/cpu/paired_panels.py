"""Products in scratch of one thread, of float32 numbers rounded to bfloat16: two neighbouring k at a time, sums in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil

from tvm import tirx

from ..builder import Expr, KernelBuilder
from ..formats.bfloat16 import MultiplyAdd, instruction_word, neighbour_words
from .panel_product import Element, Panels, Scratch
from .strided_copy import transposed


@dataclass(frozen=True)
class PairedPanels(Panels):
    """`Panels` of words: row k holds, for each column, the elements 2 k and 2 k + 1; what is beyond an odd depth is zero.

    Rows of A are words, too.
    """

    combine: MultiplyAdd

    @property
    def multiply_add(self) -> MultiplyAdd:
        return self.combine

    @property
    def rows(self) -> int:
        return ceil(self.depth / 2)

    def _numbers(self, panels: Scratch) -> str:
        return "float32"

    def _line(self, element: Element, k: Expr) -> Callable[[Expr], Expr]:
        first = self.builder.bind(k * 2)
        second = self.builder.bind(tirx.min(first + 1, self.depth - 1))

        def word(column: Expr) -> Expr:
            high = element(second, column)
            if self.depth % 2:
                high = self.builder.masked(second > first, high, tirx.const(0, "float32"))
            return instruction_word(element(first, column), high)

        return word

    def _pack_square(self, to: Scratch, element: Element, side: int, k: Expr, first: Expr, column: Expr, width: int) -> None:
        """As for numbers, of words: of an even depth."""
        builder = self.builder
        rows = builder.local(side * side, "int32", "square")
        for r in range(side):
            source = builder.bind(tirx.min(first + column + r, self.columns - 1))
            store_words(builder, Scratch(rows, 0), r * side, side, partial(_element, element, k, source))
        start = builder.bind(to.base + first * self.rows + column)
        self._store_square(to, transposed(builder, rows, side), side, k, start, width)


def _element(element: Element, k: Expr, column: Expr, i: Expr) -> Expr:
    """The element `i` of those that word `k` of a column begins with."""
    return element(k * 2 + i, column)


def store_words(builder: KernelBuilder, to: Scratch, first: Expr, lanes: int, element: Callable[[Expr], Expr]) -> None:
    """`lanes` words, from the one with the number `first` on, of so many pairs of neighbours, whose elements are given."""
    at = to.base + first
    if lanes == 1:
        builder.store(to.buffer, at, instruction_word(element(0), element(1)))
        return
    numbers = builder.local(2 * lanes, "float32", "numbers")
    for half in (0, lanes):
        with builder.loop(lanes, "vectorized", "lane") as lane:
            builder.store(numbers, half + lane, element(half + lane))
    halves = (numbers[tirx.Ramp(half, 1, lanes)] for half in (0, lanes))
    builder.store(to.buffer, tirx.Ramp(at, 1, lanes), neighbour_words(*halves))


def store_line(builder: KernelBuilder, to: Scratch, count: int, lanes: int, element: Callable[[Expr], Expr]) -> None:
    """The words of a row of `count` elements, the last of which is beside a zero if their number is odd.

    The last vector of words may overlap the one before.
    """
    words = count // 2
    lanes = min(lanes, 1 << max(words, 1).bit_length() - 1)
    if words:
        with builder.loop(ceil(words / lanes), name="words") as number:
            first = builder.bind(tirx.min(number * lanes, words - lanes))
            store_words(builder, to, first, lanes, lambda i: element(first * 2 + i))
    if count % 2:
        builder.store(to.buffer, to.base + words, instruction_word(element(2 * words), tirx.const(0, "float32")))
