"""Products in scratch of one thread, of float32 numbers rounded to bfloat16: two neighbouring k at a time, sums in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from tvm import tirx

from ..bfloat16 import MultiplyAdd, instruction_word
from ..builder import Buffer, Expr
from .panel_product import Element, Panels, Scratch


@dataclass(frozen=True)
class PairedPanels(Panels):
    """`Panels` of words: row k holds, for each column, the elements 2 k and 2 k + 1; what is beyond an odd depth is zero.

    `near` is for the words of the rows of A that are multiplied at once, those of a tile more than there are included.
    """

    combine: MultiplyAdd
    near: Scratch

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

    def _store_square(self, to: Scratch, square: Buffer, side: int, k: Expr, start: Expr, width: int) -> None:
        builder = self.builder
        for row in range(0, side, 2):
            base = builder.bind(start + (tirx.floordiv(k, 2) + row // 2) * width)
            with builder.loop(side, "vectorized", "lane") as lane:
                low, high = (square[(row + i) * side + lane] for i in range(2))
                builder.store(to.buffer, base + lane, instruction_word(low, high))

    def multiply(self, a: Scratch, b: Scratch, rows: Expr, store: Callable[[Expr, Expr, Expr], None]) -> None:
        with self.builder.loop(rows, name="row") as row:
            self._round_row(a, row)
        super().multiply(self.near, b, rows, store)

    def _round_row(self, a: Scratch, row: Expr) -> None:
        """The words of a row: two vectors of numbers are one of words; the last of them may overlap the one before."""
        builder, lanes, whole = self.builder, self.tile.lanes, self.depth // 2 * 2
        source, target = builder.bind(a.base + row * self.depth), builder.bind(self.near.base + row * self.rows)
        if whole >= 2 * lanes:
            with builder.loop(ceil(whole / (2 * lanes)), name="words") as number:
                k = builder.bind(tirx.min(number * (2 * lanes), whole - 2 * lanes))
                vectors = [a.buffer[tirx.Ramp(source + k + i * lanes, 1, lanes)] for i in range(2)]
                even, odd = (tirx.Shuffle(vectors, list(range(first, 2 * lanes, 2))) for first in range(2))
                at = tirx.Ramp(target + tirx.floordiv(k, 2), 1, lanes)
                builder.store(self.near.buffer, at, instruction_word(even, odd))
        else:
            with builder.loop(whole // 2, name="word") as k:
                word = instruction_word(*(a.buffer[source + k * 2 + i] for i in range(2)))
                builder.store(self.near.buffer, target + k, word)
        if self.depth % 2:
            last = instruction_word(a.buffer[source + whole], tirx.const(0, "float32"))
            builder.store(self.near.buffer, target + whole // 2, last)
