"""Operands of the matrix unit in shared memory: how a part of one lies there, who brings it, and how warps load it.

A part is `lines` (rows of A, columns of B) by `depth` of k, of numbers of 16 bits, `terms` of them for each element. Rows of
shared memory run along k, or along lines where the operand does in memory; they are made of chunks of 16 bytes, whose order
within a row depends on the row (a swizzle), so that the eight rows of a fragment lie in different banks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any, Protocol

import numpy as np
from tvm import tirx

from ...runtime.plan import TensorType
from ..codegen import ptx
from ..codegen.builder import Buffer, Expr
from ..codegen.gpu_builder import GpuBuilder
from .bf16_split import split_array
from .packing import PackPanels

CHUNK = 8  # numbers of 16 bits in 16 bytes
_LARGEST = float.fromhex("0x1.fep+127")  # of bfloat16
_BANK_CHUNKS = 8  # 16-byte chunks that all banks together give at once


@dataclass(frozen=True)
class PartLayout:
    """How a part of an operand lies in shared memory."""

    lines: int
    depth: int
    terms: int
    along_k: bool

    @property
    def rows(self) -> int:
        return self.lines if self.along_k else self.depth

    @property
    def row_chunks(self) -> int:
        return (self.depth if self.along_k else self.lines) // CHUNK

    @property
    def term_chunks(self) -> int:
        return self.rows * self.row_chunks

    @property
    def size_bytes(self) -> int:
        return self.terms * self.term_chunks * ptx.COPY_BYTES

    def swizzle(self, row: Any) -> Any:
        """What the number of a chunk of a row is combined with (exclusive or); it depends on the row modulo 8 alone."""
        share = max(_BANK_CHUNKS // self.row_chunks, 1)  # rows that lie beside each other in all banks
        return row % _BANK_CHUNKS // share if isinstance(row, int) else tirx.floordiv(tirx.floormod(row, _BANK_CHUNKS), share)

    def place(self, row: Any, chunk: Any) -> Any:
        """Number of a chunk in the part of a term."""
        return row * self.row_chunks + (chunk ^ self.swizzle(row))


@dataclass(frozen=True)
class PackParts:
    """Pack a constant operand as stages of shared memory hold it: [matrices, panels, parts, terms, numbers of a part], as bits.

    `panels` makes [matrices, panels, k, lines] of it, k a multiple of nothing; parts are filled with zeros. A float32 constant
    becomes `terms` bfloat16 terms, others are one. So each stage is one run of bytes.
    """

    panels: PackPanels
    layout: PartLayout

    def packed_type(self, source: TensorType) -> TensorType:
        matrices, panels, depth, lines = self.panels.packed_type(source).shape
        shape = matrices, panels, ceil(depth / self.layout.depth), self.layout.terms, lines * self.layout.depth
        return TensorType(shape, "uint16")

    def __call__(self, array: np.ndarray) -> np.ndarray:
        layout = self.layout
        packed = self.panels(array)
        terms = split_array(packed, layout.terms) if packed.dtype == np.float32 else packed.view(np.uint16)[None]
        matrices, panels, depth, lines = packed.shape
        parts = ceil(depth / layout.depth)
        padded = np.pad(terms, ((0, 0), (0, 0), (0, 0), (0, parts * layout.depth - depth), (0, 0)))
        cut = padded.reshape(layout.terms, matrices, panels, parts, layout.depth, lines)
        rows = cut.transpose(1, 2, 3, 0, 5, 4).reshape(matrices, panels, parts, layout.terms, lines, layout.row_chunks, CHUNK)
        number, chunk = np.arange(lines)[:, None], np.arange(layout.row_chunks)[None]
        order = chunk ^ np.array([layout.swizzle(row) for row in range(lines)])[:, None]
        swizzled = rows[..., number, order, :]  # the swizzle is its own inverse
        return np.ascontiguousarray(swizzled.reshape(matrices, panels, parts, layout.terms, lines * layout.depth))

    def __str__(self) -> str:
        return f"parts({self.panels},{self.layout.depth}*{self.layout.terms})"


class Source(Protocol):
    """What brings the parts of an operand to a stage: asynchronous copies, or loads whose results wait in registers.

    `fetch` begins to bring a part; `finish` stores to the stage what waits in registers. Both get the number of the part along k
    and the shared address of the operand's place in the stage.
    """

    layout: PartLayout

    def prepare(self, matrix: Expr, begin: Expr, thread: Expr) -> None:
        """Called once a block, before all else: its matrix and first line."""

    def fetch(self, part: Expr, address: Expr) -> None: ...
    def finish(self, address: Expr) -> None: ...


@dataclass
class _Chunks:
    """The chunks of a part that each thread brings: one of every `threads`."""

    builder: GpuBuilder
    layout: PartLayout
    threads: int

    def each(self, thread: Expr, body: Callable[[int, Expr], None], count: int) -> None:
        """`body(turn, number)` for the chunks of [0, count) that belong to the thread."""
        for turn in range(ceil(count / self.threads)):
            number = thread + turn * self.threads
            if (turn + 1) * self.threads <= count:
                body(turn, number)
            else:
                with self.builder.when(number < count):
                    body(turn, number)


@dataclass
class PackedSource:
    """A constant in the form of `PackParts`."""

    builder: GpuBuilder
    layout: PartLayout
    threads: int
    buffer: Buffer
    panels: int  # of a matrix
    parts: int

    def prepare(self, matrix: Expr, begin: Expr, thread: Expr) -> None:
        self._thread = thread
        panel = matrix * self.panels + tirx.floordiv(begin, self.layout.lines)
        self._origin = self.builder.bind(panel * (self.parts * self._numbers))

    @property
    def _numbers(self) -> int:
        return self.layout.terms * self.layout.term_chunks * CHUNK

    def fetch(self, part: Expr, address: Expr) -> None:
        origin = self.builder.bind(self._origin + part * self._numbers)

        def copy(_: int, number: Expr) -> None:
            self.builder.do(ptx.copy_async(address + _u32(number * ptx.COPY_BYTES), self.buffer[origin + number * CHUNK]))

        chunks = _Chunks(self.builder, self.layout, self.threads)
        chunks.each(self._thread, copy, self.layout.terms * self.layout.term_chunks)

    def finish(self, address: Expr) -> None:
        """Nothing waits in registers."""


@dataclass
class _InPlace:
    """An operand read where it lies: `offset(matrix, line, k)` tells its elements, of which it has `extent` lines by `k`."""

    builder: GpuBuilder
    layout: PartLayout
    threads: int
    buffer: Buffer
    offset: Callable[[Expr, Expr, Expr], Expr]
    extent: int
    k: int

    def prepare(self, matrix: Expr, begin: Expr, thread: Expr) -> None:
        self._matrix, self._begin, self._thread = matrix, begin, thread

    def _first(self, part: Expr, number: Expr) -> tuple[Expr, Expr, Expr, Expr]:
        """Row and chunk of a chunk's number in the part, and line and k of its first element."""
        layout, builder = self.layout, self.builder
        row = builder.bind(tirx.floordiv(number, layout.row_chunks))
        chunk = builder.bind(tirx.floormod(number, layout.row_chunks))
        across, down = chunk * CHUNK, row
        line, k = (down, across) if layout.along_k else (across, down)
        return row, chunk, builder.bind(self._begin + line), builder.bind(part * layout.depth + k)

    @property
    def _has_edge(self) -> bool:
        return self.extent % self.layout.lines > 0 or self.k % self.layout.depth > 0


@dataclass
class AsyncSource(_InPlace):
    """Numbers of 16 bits copied 16 bytes at a time, what lies beyond an edge as zeros.

    The buffer's elements are uint16; the operand is contiguous along rows of the layout, whose length is a multiple of 8.
    """

    def fetch(self, part: Expr, address: Expr) -> None:
        def copy(_: int, number: Expr) -> None:
            row, chunk, line, k = self._first(part, number)
            to = address + _u32(self.layout.place(row, chunk) * ptx.COPY_BYTES)
            offset, valid = self.offset(self._matrix, line, k), None
            if self._has_edge:
                is_inside = self.builder.bind(tirx.And(line < self.extent, k < self.k))
                valid = tirx.Select(is_inside, tirx.const(ptx.COPY_BYTES, "uint32"), tirx.const(0, "uint32"))
                offset = tirx.Select(is_inside, offset, 0)
            self.builder.do(ptx.copy_async(to, self.buffer[self.builder.bind(offset)], valid))

        _Chunks(self.builder, self.layout, self.threads).each(self._thread, copy, self.layout.term_chunks)

    def finish(self, address: Expr) -> None:
        """Nothing waits in registers."""


@dataclass
class ConvertedSource(_InPlace):
    """Any elements, loaded early and kept in registers while the block multiplies, then stored as terms of 16 bits.

    The buffer's elements are float32, of which bfloat16 terms are made, or uint16: 16-bit floats as they are. `vector_lanes`
    neighbours along a row may be loaded at once.
    """

    vector_lanes: int = 1

    def prepare(self, matrix: Expr, begin: Expr, thread: Expr) -> None:
        super().prepare(matrix, begin, thread)
        turns = ceil(self.layout.term_chunks / self.threads)
        self._dtype = str(self.buffer.dtype)
        self._waiting = self.builder.local(turns * CHUNK, self._dtype, "waiting")

    def fetch(self, part: Expr, address: Expr) -> None:
        builder, lanes = self.builder, self.vector_lanes

        def load(turn: int, number: Expr) -> None:
            _, _, line, k = self._first(part, number)
            for first in range(0, CHUNK, lanes):
                along = (line, k + first) if self.layout.along_k else (line + first, k)
                is_inside = builder.bind(tirx.And(along[0] < self.extent, along[1] < self.k))
                origin = builder.bind(self.offset(self._matrix, *along))
                place = turn * CHUNK + first
                if self._has_edge:
                    for i in range(lanes):
                        builder.store(self._waiting, place + i, tirx.const(0, self._dtype))
                with builder.when(is_inside):
                    if lanes == 1:
                        builder.store(self._waiting, place, self.buffer[origin])
                        continue
                    with builder.vector(lanes) as lane:
                        builder.store(self._waiting, place + lane, self.buffer[origin + lane])

        _Chunks(builder, self.layout, self.threads).each(self._thread, load, self.layout.term_chunks)

    def finish(self, address: Expr) -> None:
        builder, layout = self.builder, self.layout

        def store(turn: int, number: Expr) -> None:
            row = builder.bind(tirx.floordiv(number, layout.row_chunks))
            place = layout.place(row, tirx.floormod(number, layout.row_chunks))
            to = builder.bind(address + _u32(place * ptx.COPY_BYTES))
            pairs = [self._words(turn * CHUNK + i) for i in range(0, CHUNK, 2)]
            for term in range(layout.terms):
                words = [pair[term] for pair in pairs]
                builder.do(ptx.store_shared(to + _u32(term * layout.term_chunks * ptx.COPY_BYTES), words))

        _Chunks(builder, self.layout, self.threads).each(self._thread, store, self.layout.term_chunks)

    def _words(self, place: int) -> list[Expr]:
        """The terms of two neighbours that wait, each term a word."""
        low, high = (self._waiting[tirx.const(place + i, "int32")] for i in range(2))
        if self._dtype == "float32":
            return split_pair(self.builder, low, high, self.layout.terms)
        return [tirx.Cast("uint32", low) | (tirx.Cast("uint32", high) << tirx.const(16, "uint32"))]


def split_pair(builder: GpuBuilder, low: Expr, high: Expr, terms: int) -> list[Expr]:
    """The bfloat16 terms of two float32 numbers, each pair of terms a word: what `bf16_split.split_array` makes of them.

    A finite number that would round to infinity has the largest of bfloat16 as its first term, so that all are finite. Of
    infinity and NaN some term is not finite.
    """
    words = []
    for term in range(terms):
        rounded = (low, high)
        if term == 0 and terms > 1:
            rounded = tuple(tirx.max(tirx.min(one, _f32(_LARGEST)), _f32(-_LARGEST)) for one in rounded)
        word = builder.local(1, "uint32", "word")[0]
        builder.do(ptx.rounded_pair(word, *rounded, "bf16"))
        words.append(word)
        if term + 1 < terms:
            low = builder.name(low - tirx.reinterpret("float32", word << tirx.const(16, "uint32")))
            high = builder.name(high - tirx.reinterpret("float32", word & tirx.const(0xFFFF0000, "uint32")))
    return words


@dataclass
class FragmentReader:
    """Loads the fragments of one operand for a warp, two blocks of 8 lines by 16 of k at a time.

    Of the four fragments of a load, A's are: lines 0-7 and 8-15 of k 0-7, then of k 8-15. B's: k 0-7 and 8-15 of lines 0-7, then
    of lines 8-15.
    """

    builder: GpuBuilder
    layout: PartLayout
    is_a: bool
    begin: Expr  # of the warp's lines in the part
    lines: int  # of the warp
    lane: Expr

    def __post_init__(self) -> None:
        builder, layout = self.builder, self.layout
        low, high = tirx.floormod(tirx.floordiv(self.lane, CHUNK), 2), tirx.floordiv(self.lane, 2 * CHUNK)
        self._of_lines, self._of_k = map(builder.bind, (low, high) if self.is_a else (high, low))
        row = builder.bind(tirx.floormod(self.lane, CHUNK))
        self._swizzle = builder.bind(layout.swizzle(row))
        if layout.along_k:
            first = (self.begin + self._of_lines * CHUNK + row) * layout.row_chunks
            self._chunks = [self._chunk(step * 2 + self._of_k) for step in range(layout.depth // 16)]
        else:
            first = (self._of_k * CHUNK + row) * layout.row_chunks
            numbers = [tirx.floordiv(self.begin, CHUNK) + pair * 2 + self._of_lines for pair in range(self.lines // 16)]
            self._chunks = [self._chunk(number) for number in numbers]
        self._first = builder.bind(_u32(first * ptx.COPY_BYTES))

    def _chunk(self, number: Expr) -> Expr:
        return self.builder.bind(_u32((number ^ self._swizzle) * ptx.COPY_BYTES))

    def load(self, registers: Buffer, place: int, address: Expr, step: int, term: int) -> None:
        """All fragments of the warp's lines for k in [16 step, 16 step + 16): 4 registers for each 16 lines."""
        layout = self.layout
        for pair in range(self.lines // 16):
            chunk = self._chunks[step if layout.along_k else pair]
            row = (pair if layout.along_k else step) * 16 * layout.row_chunks
            fixed = (row + term * layout.term_chunks) * ptx.COPY_BYTES
            words = [registers[tirx.const(place + pair * 4 + i, "int32")] for i in range(4)]
            at = address + self._first + chunk + tirx.const(fixed, "uint32")
            self.builder.do(ptx.load_fragments(words, at, transposed=not layout.along_k))


def _u32(value: Expr) -> Expr:
    return tirx.const(value, "uint32") if isinstance(value, int) else tirx.Cast("uint32", value)


def _f32(value: float) -> Expr:
    return tirx.const(value, "float32")
