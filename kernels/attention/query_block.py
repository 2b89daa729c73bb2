"""What is done for a block of queries of a head, whichever kernel makes its two products."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from ..codegen.builder import Expr, Index, KernelBuilder
from ..formats.format import Format
from ..microkernels.packed_gemm import Element, Scratch, ScratchMatrix, Span, store_line
from .mask import Looks
from .online_softmax import round_rows, softmax, weigh_rows
from .operands import Elements
from .pattern import Attention
from .scratch import Head, Keys, QueryBlock


@dataclass(frozen=True)
class QueryBlocks:
    """Rows of a block are the queries of `shared` neighbouring heads, the first of which `Head` names. Products take operands of
    the `format`: rows of numbers, or of 32-bit pairs where its k-pack is 2."""

    builder: KernelBuilder
    form: Attention
    elements: Elements
    format: Format
    shared: int

    @property
    def weighs(self) -> bool:
        """Whether each probability is computed, in place of scaling the rows of the result in the end."""
        return self.form.weighs_probabilities and self.form.guard is None

    def place(self, head: Head, block: QueryBlock, row: Expr) -> tuple[Index, Expr]:
        """A row's index in the batch dimensions, and its query."""
        if self.shared == 1:
            return head.batch, block.first + row
        number = head.batch[-1] + tirx.floordiv(row, self.form.queries)
        return (*head.batch[:-1], number), tirx.floormod(row, self.form.queries)

    def queries(self, head: Head) -> ScratchMatrix:
        """The queries of a block, as the product reads its A."""
        return ScratchMatrix(head.queries.buffer, head.queries.base, self.form.depth // self.format.k_pack)

    def pack_query(self, head: Head, block: QueryBlock, row: Expr) -> None:
        builder, form, to, lanes = self.builder, self.form, self.queries(head), self.builder.lanes(self.form.dtype)
        base, (batch, query) = builder.bind(to.base + row * to.pitch), self.place(head, block, row)

        def element(k: Expr) -> Expr:
            return self.elements.query(batch, query, k)

        if self.format.k_pack > 1:
            store_line(builder, Scratch(to.buffer, base), form.depth, lanes, element)
        else:
            builder.vector_loop(form.depth, lanes, lambda k: builder.store(to.buffer, base + k, element(k)))

    def key_of(self, head: Head, keys: Keys) -> Element:
        return lambda k, j: self.elements.key(head.batch, keys.first + j, k)

    def value_of(self, head: Head, keys: Keys) -> Element:
        return lambda j, column: self.elements.value(head.batch, keys.first + j, column)

    def visible_keys(self, head: Head, keys: Keys, block: QueryBlock, step: int, each_sees: Expr | None = None) -> Span:
        """Which of a block's keys its queries see: multiples of `step`, or all; as `Looks.visible`."""
        return self._looks(head, keys, block, step).visible(head.rows.extent(keys.count), each_sees)

    def each_sees(self, head: Head, block: QueryBlock, step: int) -> Expr:
        """Whether each query sees one of all keys."""
        keys = self.form.keys
        return self._looks(head, Keys(0, keys), block, step).each_sees(tirx.const(0, "int32"), self.builder.bind(keys))

    def _looks(self, head: Head, keys: Keys, block: QueryBlock, step: int) -> Looks:
        def score(row: Expr, key: Expr) -> Expr:
            return self.elements.score(*self.place(head, block, row), key, tirx.const(0, self.form.dtype))

        return Looks(self.builder, score, block.count, keys.first, keys.count, step)

    def store_score(self, head: Head, keys: Keys, block: QueryBlock, row: Expr, column: Expr, value: Expr) -> None:
        scores = head.rows.line(keys.count)
        element = self.elements.score(*self.place(head, block, row), keys.first + column, value)
        self.builder.store(scores.buffer, scores.base + row * scores.pitch + column, element)

    def softmax(self, head: Head, block: QueryBlock, keys: int, span: Span | None) -> ScratchMatrix:
        """Softmax of whole rows of scores; returns A of the product with V. `span`: the keys that have scores; None: all."""
        rows = head.rows
        rows.end_rows(block.count, keys)
        softmax(rows, block.count, keys, span or (0, rows.extent(keys)), self.form.guard)
        return self.probabilities(head, block, keys)

    def probabilities(self, head: Head, block: QueryBlock, keys: int) -> ScratchMatrix:
        """A of the product with V, of rows of exponentials."""
        rows = head.rows
        if not self.weighs:
            return rows.exponential_rows(keys)
        weigh_rows(rows, block.count, keys, lambda row, *at: self.elements.weight(*self.place(head, block, row), *at))
        return round_rows(rows, head.words, block.count, keys) if self.format.k_pack > 1 else rows.line(keys)

    def scale_result(self, head: Head, block: QueryBlock, row: Expr, column: Expr, value: Expr) -> None:
        """Store an element of the result, given its sum over all keys."""
        factor = 1 if self.weighs else head.rows.factors[row]
        self.elements.store_result(*self.place(head, block, row), column, value * factor)
