"""The matrix unit of a GPU, as products see it: operands in shared memory, their fragments, and blocks of sums in registers.

Implementations: gpu_mma_sync.py (NVIDIA), gpu_mfma.py (AMD). A "warp" is what executes the unit's instructions together, a
wavefront on AMD's GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..codegen.builder import Buffer, Expr
from ..codegen.gpu_builder import GpuBuilder
from .gpu_part_layout import PartLayout


class Fragments(Protocol):
    """Fragments of one operand in a warp's registers, for two steps of k: one is loaded while the other is multiplied."""

    def load(self, slot: int, address: Expr, step: int, term: int) -> None:
        """All of the warp's lines for a step of k of the part that lies at `address`, to slot 0 or 1."""


class SumFragments(Protocol):
    """Sums of one block of rows, which are fragments of a product behind them as they lie."""

    def take(self, step: int) -> None:
        """Make fragments, all terms of them, of the sums that are a step of k."""


class Copies(Protocol):
    """Chunks of 16 bytes on their way from memory to shared memory, by the number of the thread's turn.

    They are asynchronous, or loaded to registers when they begin and stored when they end.
    """

    def begin(
        self, turn: int, to: Expr, buffer: Buffer, index: Expr, is_inside: Expr | None = None, count: Expr | None = None
    ) -> None:
        """Copy from the element `index` on, or zeros where it is not `is_inside`; of the chunk's numbers the first `count`."""

    def end(self, turn: int, to: Expr) -> None: ...


class MatrixUnit(Protocol):
    """A unit that adds products of `depth` of k to blocks of `rows` x `columns` sums.

    A thread has `sums` of a block, in groups of `neighbours` of a row: of the block's place that `place` tells, group g lies
    `groups[g]` rows and columns further. Shared memory has addresses of the unit's own kind; `offset` makes one of chunks.
    """

    @property
    def builder(self) -> GpuBuilder: ...
    @property
    def lanes(self) -> int:
        """Threads of a warp."""

    @property
    def chunk(self) -> int:
        """Numbers that it multiplies in 16 bytes."""

    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def depth(self) -> int: ...
    @property
    def sums(self) -> int: ...
    @property
    def sum_type(self) -> str:
        """int32 where bytes are multiplied, else float32."""

    @property
    def register_type(self) -> str:
        """That of the registers that hold sums: theirs, or words."""

    @property
    def groups(self) -> Sequence[tuple[int, int]]: ...
    @property
    def neighbours(self) -> int: ...
    @property
    def row_lanes(self) -> Sequence[int]:
        """Bits in which the numbers of lanes differ that have sums of the same rows."""

    @property
    def copies_wait_in_registers(self) -> bool:
        """Whether copies have an end."""

    @property
    def swizzles_lines(self) -> bool:
        """Whether parts whose rows run along lines are swizzled."""

    def allocate(self, chunks: int) -> Expr:
        """Shared memory of a block; the address of its first chunk."""

    def offset(self, chunks: Expr | int) -> Expr: ...
    def copies(self, turns: int) -> Copies:
        """Of an operand as it lies, or of a constant that is packed."""

    def convert(self, numbers: Sequence[Expr], terms: int) -> list[list[Expr]]:
        """The terms of a chunk's numbers, which are float32, bits of 16, or bytes of A, each term as `put` takes it."""

    def put(self, to: Expr, content: Sequence[Expr]) -> None:
        """Store a chunk to shared memory."""

    def commit(self) -> None:
        """Copies that began since the last call belong together."""

    def wait(self, left: int) -> None:
        """Wait for all copies of this thread but those of the last `left` commits."""

    def pin(self) -> None:
        """The compiler moves no instruction over this place, so that loads stay ahead of what hides their latency."""

    def fragments(
        self, layout: PartLayout, begin: Expr, lines: int, lane: Expr, *, is_a: bool, with_sums: bool = False
    ) -> Fragments:
        """Those of the lines [begin, begin + lines) of a part; of B also such as are multiplied with `sums_as_fragments`."""

    def sums_as_fragments(self, sums: Buffer, terms: int, lane: Expr) -> SumFragments:
        """Of A, `rows` lines of it, whose columns are k of another product: float32 sums as numbers, or terms, of the unit.

        What is NaN may become another number.
        """

    def maximum(self, first: Expr, second: Expr) -> Expr:
        """Of two float32, of which NaN is none, or either."""

    def exponential(self, value: Expr) -> Expr:
        """That of a float32 that is not positive, to a few units of 2^-24."""

    def multiply(self, sums: Buffer, a: Fragments | SumFragments, b: Fragments, slot: int, terms: tuple[int, int]) -> None:
        """Add the products of the fragments in a slot, of one term of A by one of B, to all sums of the warp."""

    def place(self, lane: Expr) -> tuple[Expr, Expr]:
        """Row and column in a block of a thread's first sum."""
