"""AMX: eight tile registers of 16 rows of 64 bytes, and the product of two of them added to a third.

Operand tiles hold words: 32-bit lanes of neighbours along k, two bfloat16 numbers or four bytes, the first in the lowest bits
(VNNI layout). A is 16 rows by 16 words, B 16 words by 16 columns. An accumulator tile holds 16 x 16 sums of 32 bits: float32 of
bfloat16, int32 of bytes. The instructions are LDTILECFG, TILELOADD, TILELOADDT1, TDPBF16PS, TDPBUSD, TDPBSSD and TDPBSUD (Intel
64 and IA-32 Architectures Software Developer's Manual, volume 2). `EmulatedTiles` computes what the manual says that they
compute, on local arrays, so that kernels run and are tested on machines without AMX.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from tvm import tirx

from ...runtime.target import Target
from ..codegen.builder import Buffer, Expr, KernelBuilder
from ..formats.format import S8_TILE, U8_TILE, Format

ROWS = 16  # of a tile
DEPTH = 32  # values of k of a product of two tiles of bfloat16
COLUMNS = 16  # of an accumulator tile
WORDS = 16  # in a row of a tile
TILE_WORDS = ROWS * WORDS  # 1 KiB
REGISTERS = 8


@dataclass(frozen=True, slots=True)
class TileDot:
    """A product of two operand tiles: its instruction, the bits of an operand's number, and the type of the sums.

    Numbers of `bits` are read and packed as unsigned integers; the instruction says what they mean.
    """

    instruction: str
    bits: int
    sums: str

    @property
    def k_pack(self) -> int:
        """Numbers in a word."""
        return 32 // self.bits

    @property
    def depth(self) -> int:
        """Values of k of a product of two tiles, which are the numbers in a row of a tile of A."""
        return WORDS * self.k_pack

    @property
    def numbers(self) -> str:
        """The type of an operand's number, as bits."""
        return f"uint{self.bits}"


BF16_TILES = TileDot("tdpbf16ps", 16, "float32")
U8_TILES = TileDot("tdpbusd", 8, "int32")
S8_TILES = TileDot("tdpbssd", 8, "int32")
S8U8_TILES = TileDot("tdpbsud", 8, "int32")


def tile_dot_of(number_format: Format) -> TileDot:
    """The product of tiles by which a format of the tile unit multiplies."""
    return {U8_TILE: U8_TILES, S8_TILE: S8_TILES}.get(number_format, BF16_TILES)


class TileUnit(Protocol):
    """The instructions of AMX that kernels use. Tiles are numbered from 0; one that is not loaded is undefined."""

    product: TileDot

    def configure(self) -> None:
        """Set the shape of all tiles (LDTILECFG); first in every thread, and outside of all loops of the thread."""

    def release(self) -> None:
        """Give the tiles back (TILERELEASE); last in every thread."""

    def zero(self, tile: int) -> None:
        """Make an accumulator tile zero."""

    def begin(self, tile: int, source: Buffer, offset: Expr) -> None:
        """Make all rows of an accumulator tile the 16 sums of the source from `offset` on."""

    def load(self, tile: int, source: Buffer, offset: Expr, stride: int, *, is_streamed: bool = False) -> None:
        """Load a tile of A or B, the first element at `offset`, rows `stride` elements apart: a row is 16 words, as so many
        elements of the source's type. What `is_streamed` is evicted from L1 before anything else (TILELOADDT1)."""

    def prefetch(self, source: Buffer, offset: Expr, stride: int) -> None:
        """Prefetch into L1 a tile that is loaded soon; arguments as of `load`."""

    def prefetch_line(self, source: Buffer, offset: Expr) -> None:
        """Prefetch into L2 the cache line of an element that is loaded later."""

    def dot(self, sums: int, a: int, b: int) -> None:
        """Add the product of two operand tiles to an accumulator tile (TDPBF16PS; of bytes TDPBUSD, TDPBSUD,
        TDPBSSD: unsigned or signed ones of A, then of B).

        Of bfloat16, products of even and of odd k have accumulators of their own, which start at zero; their sum is then added to
        the tile. Subnormal operands and results count as zero. Sums of integers are exact, modulo 2^32.
        """

    def store(self, tile: int, target: Buffer, offset: Expr, stride: int) -> None:
        """Store an accumulator tile: 16 sums a row, the first at `offset`, rows `stride` elements apart."""


def tile_unit(builder: KernelBuilder, target: Target, product: TileDot = BF16_TILES) -> TileUnit:
    """AMX of the target, as instructions or emulated."""
    assert target.has_tiles, f"{target} has no tiles"
    return AmxTiles(builder, product) if target.level == "amx" else EmulatedTiles(builder, product)


class AmxTiles:
    """The instructions themselves. Tile numbers are immediates, so LLVM neither allocates nor moves tile registers."""

    def __init__(self, builder: KernelBuilder, product: TileDot) -> None:
        self._builder, self.product = builder, product

    def configure(self) -> None:
        form = self._builder.local(16, "uint32", "tiles")  # 64 bytes: palette, bytes of a row (16 bits a tile), rows (8 bits)
        words = {0: 1, **dict.fromkeys(range(4, 8), 64 << 16 | 64), **dict.fromkeys((12, 13), ROWS * 0x01010101)}
        for word in range(16):
            self._builder.store(form, word, tirx.const(words.get(word, 0), "uint32"))
        self._call("ldtilecfg", tirx.address_of(form[0]))

    def release(self) -> None:
        self._call("tilerelease")

    def zero(self, tile: int) -> None:
        self._call("tilezero", _number(tile))

    def begin(self, tile: int, source: Buffer, offset: Expr) -> None:
        self._call("tileloadd64", _number(tile), tirx.address_of(source[offset]), tirx.const(0, "int64"))

    def load(self, tile: int, source: Buffer, offset: Expr, stride: int, *, is_streamed: bool = False) -> None:
        pitch_bytes = tirx.const(_bytes(source) * stride, "int64")
        instruction = "tileloaddt164" if is_streamed else "tileloadd64"
        self._call(instruction, _number(tile), tirx.address_of(source[offset]), pitch_bytes)

    def prefetch(self, source: Buffer, offset: Expr, stride: int) -> None:
        for row in range(ROWS):
            self._builder.prefetch(source[offset + row * stride])

    def prefetch_line(self, source: Buffer, offset: Expr) -> None:
        self._builder.prefetch(source[offset], is_near=False)

    def dot(self, sums: int, a: int, b: int) -> None:
        self._call(self.product.instruction, _number(sums), _number(a), _number(b))

    def store(self, tile: int, target: Buffer, offset: Expr, stride: int) -> None:
        self._call("tilestored64", _number(tile), tirx.address_of(target[offset]), tirx.const(4 * stride, "int64"))

    def _call(self, instruction: str, *arguments: Any) -> None:
        self._builder.emit(tirx.Evaluate(tirx.call_llvm_intrin("int32", f"llvm.x86.{instruction}", *arguments)))


class EmulatedTiles:
    """The same bits with tiles on the thread's stack, products by functions of `amx_emulation`; NaNs may differ in sign and
    payload."""

    def __init__(self, builder: KernelBuilder, product: TileDot) -> None:
        self._builder, self.product = builder, product
        self._operands: list[Buffer] = []  # 16 x 16 words
        self._sums: list[Buffer] = []

    def configure(self) -> None:
        self._operands = [self._builder.local(ROWS * WORDS, "uint32", f"operand{i}") for i in range(REGISTERS)]
        self._sums = [self._builder.local(ROWS * COLUMNS, self.product.sums, f"sums{i}") for i in range(REGISTERS)]

    def release(self) -> None:
        self._operands, self._sums = [], []

    def zero(self, tile: int) -> None:
        with self._builder.loop(ROWS, name="row") as row, self._builder.loop(COLUMNS, "vectorized", "lane") as lane:
            self._builder.store(self._sums[tile], row * COLUMNS + lane, tirx.const(0, self.product.sums))

    def begin(self, tile: int, source: Buffer, offset: Expr) -> None:
        with self._builder.loop(ROWS, name="row") as row, self._builder.loop(COLUMNS, "vectorized", "lane") as lane:
            self._builder.store(self._sums[tile], row * COLUMNS + lane, source[offset + lane])

    def load(self, tile: int, source: Buffer, offset: Expr, stride: int, *, is_streamed: bool = False) -> None:
        self._call("tileloadd", self._operands[tile][0], source[offset], stride=_bytes(source) * stride)

    def prefetch(self, source: Buffer, offset: Expr, stride: int) -> None:
        pass

    def prefetch_line(self, source: Buffer, offset: Expr) -> None:
        pass

    def dot(self, sums: int, a: int, b: int) -> None:
        self._call(self.product.instruction, self._sums[sums][0], self._operands[a][0], self._operands[b][0])

    def store(self, tile: int, target: Buffer, offset: Expr, stride: int) -> None:
        with self._builder.loop(ROWS, name="row") as row, self._builder.loop(COLUMNS, "vectorized", "lane") as lane:
            self._builder.store(target, offset + row * stride + lane, self._sums[tile][row * COLUMNS + lane])

    def _call(self, instruction: str, *elements: Expr, stride: int | None = None) -> None:
        pointers = [tirx.address_of(element) for element in elements]
        strides = [] if stride is None else [tirx.const(stride, "int64")]
        self._builder.emit(tirx.Evaluate(tirx.call_extern("int32", f"prefuse_{instruction}", *pointers, *strides)))


def _bytes(buffer: Buffer) -> int:
    """Bytes of an element."""
    return int(np.dtype(str(buffer.dtype)).itemsize)


def _number(tile: int) -> Expr:
    return tirx.const(tile, "uint8")
