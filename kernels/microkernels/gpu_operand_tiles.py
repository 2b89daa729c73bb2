"""Operands of the matrix unit: who brings their parts to shared memory (gpu_part_layout.py says how they lie there).

Constants are packed as stages hold them; rows of numbers that the unit multiplies are copied a chunk at a time; all else is
loaded early, and converted on its way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Protocol

from tvm import tirx

from ..codegen.builder import Buffer, Expr
from ..codegen.gpu_builder import GpuBuilder
from .gpu_matrix_unit import MatrixUnit
from .gpu_part_layout import PartLayout


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
class Chunks:
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

    unit: MatrixUnit
    layout: PartLayout
    threads: int
    buffer: Buffer
    panels: int  # of a matrix
    parts: int

    def prepare(self, matrix: Expr, begin: Expr, thread: Expr) -> None:
        self._thread = thread
        panel = matrix * self.panels + tirx.floordiv(begin, self.layout.lines)
        self._origin = self.unit.builder.bind(panel * (self.parts * self._numbers) + thread * self.layout.chunk)
        self._copies = self.unit.copies(ceil(self.layout.chunks / self.threads))

    @property
    def _numbers(self) -> int:
        return self.layout.chunks * self.layout.chunk

    def fetch(self, part: Expr, address: Expr) -> None:
        origin = self.unit.builder.bind(self._origin + part * self._numbers)

        def copy(turn: int, number: Expr) -> None:
            source = origin + turn * self.threads * self.layout.chunk
            self._copies.begin(turn, address + self.unit.offset(number), self.buffer, source)

        self._each(copy)

    def finish(self, address: Expr) -> None:
        if self.unit.copies_wait_in_registers:
            self._each(lambda turn, number: self._copies.end(turn, address + self.unit.offset(number)))

    def _each(self, body: Callable[[int, Expr], None]) -> None:
        Chunks(self.unit.builder, self.layout, self.threads).each(self._thread, body, self.layout.chunks)


@dataclass
class _InPlace:
    """An operand read where it lies: `offset(matrix, line, k)` tells its elements, of which it has `extent` lines by `k`."""

    unit: MatrixUnit
    layout: PartLayout
    threads: int
    buffer: Buffer
    offset: Callable[[Expr, Expr, Expr], Expr]
    extent: int
    k: int

    def prepare(self, matrix: Expr, begin: Expr, thread: Expr) -> None:
        self._matrix, self._begin, self._thread = matrix, begin, thread

    @property
    def _turns(self) -> int:
        """Chunks that a thread brings of a part, at most."""
        return ceil(self.layout.term_chunks / self.threads)

    def _each(self, body: Callable[[int, Expr], None]) -> None:
        Chunks(self.unit.builder, self.layout, self.threads).each(self._thread, body, self.layout.term_chunks)

    def _place(self, number: Expr) -> tuple[Expr, Expr]:
        """Row and chunk of a chunk's number in the part."""
        layout, builder = self.layout, self.unit.builder
        row = builder.bind(tirx.floordiv(number, layout.row_chunks))
        return row, builder.bind(tirx.floormod(number, layout.row_chunks))

    def _first(self, part: Expr, row: Expr, chunk: Expr) -> tuple[Expr, Expr]:
        """Line and k of the first element of a chunk."""
        layout, builder = self.layout, self.unit.builder
        across, down = chunk * layout.chunk, row
        line, k = (down, across) if layout.along_k else (across, down)
        return builder.bind(self._begin + line), builder.bind(part * layout.depth + k)

    @property
    def _has_edge(self) -> bool:
        return self.extent % self.layout.lines > 0 or self.k % self.layout.depth > 0


@dataclass
class CopiedSource(_InPlace):
    """Numbers that the unit multiplies, copied 16 bytes at a time, what lies beyond an edge as zeros.

    The operand is contiguous along rows of the layout, whose length is a multiple of a chunk; elements of 16 bits
    are uint16, bytes uint8 or int8.
    """

    def prepare(self, matrix: Expr, begin: Expr, thread: Expr) -> None:
        super().prepare(matrix, begin, thread)
        self._copies = self.unit.copies(self._turns)

    def fetch(self, part: Expr, address: Expr) -> None:
        def copy(turn: int, number: Expr) -> None:
            row, chunk = self._place(number)
            line, k = self._first(part, row, chunk)
            to = address + self.unit.offset(self.layout.place(row, chunk))
            offset, is_inside = self.offset(self._matrix, line, k), None
            if self._has_edge:
                is_inside = self.unit.builder.bind(tirx.And(line < self.extent, k < self.k))
            self._copies.begin(turn, to, self.buffer, offset, is_inside)

        self._each(copy)

    def finish(self, address: Expr) -> None:
        def store(turn: int, number: Expr) -> None:
            self._copies.end(turn, address + self.unit.offset(self.layout.place(*self._place(number))))

        if self.unit.copies_wait_in_registers:
            self._each(store)


@dataclass
class ConvertedSource(_InPlace):
    """Any elements, loaded early and kept in registers while the block multiplies, then stored as the unit multiplies them.

    The buffer's elements are float32, uint16 (16-bit floats as they are), or bytes. `vector_lanes` neighbours along a row may be
    loaded at once.
    """

    vector_lanes: int = 1

    def prepare(self, matrix: Expr, begin: Expr, thread: Expr) -> None:
        super().prepare(matrix, begin, thread)
        self._dtype = str(self.buffer.dtype)
        self._waiting = self.unit.builder.local(self._turns * self.layout.chunk, self._dtype, "waiting")

    def fetch(self, part: Expr, address: Expr) -> None:
        builder, lanes, size = self.unit.builder, self.vector_lanes, self.layout.chunk

        def load(turn: int, number: Expr) -> None:
            line, k = self._first(part, *self._place(number))
            for first in range(0, size, lanes):
                along = (line, k + first) if self.layout.along_k else (line + first, k)
                is_inside = builder.bind(tirx.And(along[0] < self.extent, along[1] < self.k))
                origin = builder.bind(self.offset(self._matrix, *along))
                place = turn * size + first
                if self._has_edge:
                    for i in range(lanes):
                        builder.store(self._waiting, place + i, tirx.const(0, self._dtype))
                with builder.when(is_inside):
                    if lanes == 1:
                        builder.store(self._waiting, place, self.buffer[origin])
                        continue
                    with builder.vector(lanes) as lane:
                        builder.store(self._waiting, place + lane, self.buffer[origin + lane])

        self._each(load)

    def finish(self, address: Expr) -> None:
        store_terms(self.unit, self.layout, self.threads, self._thread, self._waiting, address)


def store_terms(unit: MatrixUnit, layout: PartLayout, threads: int, thread: Expr, waiting: Buffer, address: Expr) -> None:
    """Store the chunks that wait in a thread's registers to a stage, as the unit multiplies them."""

    def store(turn: int, number: Expr) -> None:
        row = unit.builder.bind(tirx.floordiv(number, layout.row_chunks))
        place = layout.place(row, tirx.floormod(number, layout.row_chunks))
        to = unit.builder.bind(address + unit.offset(place))
        numbers = [waiting[tirx.const(turn * layout.chunk + i, "int32")] for i in range(layout.chunk)]
        for term, content in enumerate(unit.convert(numbers, layout.terms)):
            unit.put(to + unit.offset(term * layout.term_chunks), content)

    Chunks(unit.builder, layout, threads).each(thread, store, layout.term_chunks)
