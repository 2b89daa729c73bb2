"""NVIDIA's matrix unit by mma.sync (from sm_80 on): 16 x 8 sums, of 16 of k with numbers of 16 bits, or of 32 with bytes.

Chunks come by asynchronous copies (cp.async); addresses are those of the shared window, fragments are loaded by ldmatrix.
float32 numbers become sums of bfloat16 terms on their way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product as nest

from tvm import tirx

from ..codegen import ptx
from ..codegen.builder import Buffer, Expr
from ..codegen.gpu_builder import GpuBuilder
from .gpu_matrix_unit import Fragments, SumFragments
from .gpu_part_layout import CHUNK_BYTES, PartLayout

_LARGEST = float.fromhex("0x1.fep+127")  # of bfloat16
_ROWS = 8  # of a fragment
_A_WORDS, _B_WORDS, _SUMS = 4, 2, 4  # registers of a lane for a block


@dataclass(frozen=True)
class MmaSync:
    """`kind` is what it multiplies, of A; bytes of B are signed. A fragment is 8 chunks: two of B and four of A are a block's."""

    builder: GpuBuilder
    kind: ptx.Half | ptx.Byte

    lanes = 32
    rows, columns = 16, 8
    sums, neighbours = _SUMS, 2
    groups = ((0, 0), (8, 0))
    row_lanes = (1, 2)
    copies_wait_in_registers = False
    swizzles_lines = True

    @property
    def item_bytes(self) -> int:
        return 1 if self.kind in ("u8", "s8") else 2

    @property
    def chunk(self) -> int:
        return CHUNK_BYTES // self.item_bytes

    @property
    def depth(self) -> int:
        return 2 * self.chunk

    @property
    def sum_type(self) -> str:
        return "int32" if self.item_bytes == 1 else "float32"

    @property
    def register_type(self) -> str:
        return "uint32" if self.item_bytes == 1 else "float32"

    def allocate(self, chunks: int) -> Expr:
        return ptx.shared_address(self.builder.dynamic_shared(chunks * ptx.COPY_BYTES, "uint8"))

    def offset(self, chunks: Expr | int) -> Expr:
        return _u32(chunks * ptx.COPY_BYTES)

    def copies(self, turns: int) -> MmaSync:
        return self

    def begin(
        self, turn: int, to: Expr, buffer: Buffer, index: Expr, is_inside: Expr | None = None, count: Expr | None = None
    ) -> None:
        """Of a chunk that is not inside no byte is read, whatever its address is."""
        valid = None if count is None else _u32(count * self.item_bytes)
        if is_inside is not None:
            valid = tirx.Select(is_inside, _u32(ptx.COPY_BYTES) if valid is None else valid, _u32(0))
        self.builder.do(ptx.copy_async(to, buffer[self.builder.bind(index)], valid))

    def end(self, turn: int, to: Expr) -> None:
        """It ends by itself."""

    def convert(self, numbers: Sequence[Expr], terms: int) -> list[list[Expr]]:
        if self.item_bytes == 1:
            return [[joined_bytes(numbers[first : first + 4]) for first in range(0, self.chunk, 4)]]
        pairs = [self._words(low, high, terms) for low, high in zip(numbers[::2], numbers[1::2], strict=True)]
        return [[pair[term] for pair in pairs] for term in range(terms)]

    def _words(self, low: Expr, high: Expr, terms: int) -> list[Expr]:
        """The terms of two neighbours, each a word."""
        if str(low.ty) == "float32":
            return split_pair(self.builder, low, high, terms)
        return [tirx.Cast("uint32", low) | (tirx.Cast("uint32", high) << tirx.const(16, "uint32"))]

    def put(self, to: Expr, content: Sequence[Expr]) -> None:
        self.builder.do(ptx.store_shared(to, content))

    def commit(self) -> None:
        self.builder.do(ptx.commit_copies())

    def wait(self, left: int) -> None:
        self.builder.do(ptx.wait_for_copies(left))

    def pin(self) -> None:
        """ptxas keeps loads early by itself."""

    def fragments(
        self, layout: PartLayout, begin: Expr, lines: int, lane: Expr, *, is_a: bool, with_sums: bool = False
    ) -> FragmentReader:
        return FragmentReader(self.builder, layout, is_a, begin, lines, lane)

    def sums_as_fragments(self, sums: Buffer, terms: int, lane: Expr) -> SumWords:
        return SumWords(self, sums, terms)

    def multiply(self, sums: Buffer, a: Fragments | SumFragments, b: Fragments, slot: int, terms: tuple[int, int]) -> None:
        assert isinstance(a, FragmentReader | SumWords)
        assert isinstance(b, FragmentReader)
        row_blocks, column_blocks = a.lines // self.rows, b.lines // self.columns
        a_first, b_first = a.first(slot, terms[0]), b.first(slot, terms[1])
        for i, j in nest(range(row_blocks), range(column_blocks)):
            cells = [sums[_i32((i * column_blocks + j) * _SUMS + r)] for r in range(_SUMS)]
            of_a = [a.registers[_i32(a_first + i * _A_WORDS + r)] for r in range(_A_WORDS)]
            of_b = [b.registers[_i32(b_first + j * _B_WORDS + r)] for r in range(_B_WORDS)]
            if self.kind == "u8" or self.kind == "s8":
                self.builder.do(ptx.multiply_bytes(cells, of_a, of_b, self.kind))
            else:
                self.builder.do(ptx.multiply(cells, of_a, of_b, self.kind))

    def maximum(self, first: Expr, second: Expr) -> Expr:
        return tirx.max(first, second)

    def exponential(self, value: Expr) -> Expr:
        return tirx.exp(value)

    def place(self, lane: Expr) -> tuple[Expr, Expr]:
        return tirx.floordiv(lane, 4), tirx.floormod(lane, 4) * 2


def joined_bytes(numbers: Sequence[Expr]) -> Expr:
    """Four bytes as a word, the first in the lowest bits."""
    first, *others = (_u32(tirx.Cast("uint8", one)) for one in numbers)
    for place, one in enumerate(others, 1):
        first = first | (one << _u32(8 * place))
    return first


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
    """Loads the fragments of one operand for a warp, two blocks of 8 lines by two chunks of k at a time.

    Of the four fragments of a load, A's are: lines 0-7 and 8-15 of the first chunk, then of the second. B's: both chunks of
    lines 0-7, then of lines 8-15.
    """

    builder: GpuBuilder
    layout: PartLayout
    is_a: bool
    begin: Expr  # of the warp's lines in the part
    lines: int  # of the warp
    lane: Expr

    def __post_init__(self) -> None:
        builder, layout = self.builder, self.layout
        low, high = tirx.floormod(tirx.floordiv(self.lane, _ROWS), 2), tirx.floordiv(self.lane, 2 * _ROWS)
        self._of_lines, self._of_k = map(builder.bind, (low, high) if self.is_a else (high, low))
        row = builder.bind(tirx.floormod(self.lane, _ROWS))
        self._swizzle = builder.bind(layout.swizzle(row))
        if layout.along_k:
            first = (self.begin + self._of_lines * _ROWS + row) * layout.row_chunks
            self._chunks = [self._chunk(step * 2 + self._of_k) for step in range(layout.row_chunks // 2)]
        else:
            assert layout.chunk == _ROWS, "ldmatrix transposes numbers of 16 bits"
            first = (self._of_k * _ROWS + row) * layout.row_chunks
            numbers = [tirx.floordiv(self.begin, _ROWS) + pair * 2 + self._of_lines for pair in range(self.lines // 16)]
            self._chunks = [self._chunk(number) for number in numbers]
        self._first = builder.bind(_u32(first * ptx.COPY_BYTES))
        words = 2 * layout.terms * self.lines // 16 * 4
        self.registers = builder.local(words, "uint32", "a" if self.is_a else "b")

    def first(self, slot: int, term: int) -> int:
        """Number of the first register of a slot and a term."""
        return (slot * self.layout.terms + term) * self.lines // 16 * 4

    def _chunk(self, number: Expr) -> Expr:
        return self.builder.bind(_u32((number ^ self._swizzle) * ptx.COPY_BYTES))

    def load(self, slot: int, address: Expr, step: int, term: int) -> None:
        """All fragments of the warp's lines for the two chunks of k of a step: 4 registers for each 16 lines."""
        layout, place = self.layout, self.first(slot, term)
        for pair in range(self.lines // 16):
            chunk = self._chunks[step if layout.along_k else pair]
            row = (pair if layout.along_k else step) * 16 * layout.row_chunks
            fixed = (row + term * layout.term_chunks) * ptx.COPY_BYTES
            words = [self.registers[tirx.const(place + pair * 4 + i, "int32")] for i in range(4)]
            at = address + self._first + chunk + tirx.const(fixed, "uint32")
            self.builder.do(ptx.load_fragments(words, at, transposed=not layout.along_k))


@dataclass
class SumWords:
    """The sums of two blocks of 16 x 8 beside each other lie as those of A of 16 x 16: their neighbours become words."""

    unit: MmaSync
    sums: Buffer
    terms: int

    lines = 16

    def __post_init__(self) -> None:
        self.registers = self.unit.builder.local(self.terms * _A_WORDS, "uint32", "weights")

    def first(self, slot: int, term: int) -> int:
        """Number of the first register of a term; there is one slot."""
        return term * _A_WORDS

    def take(self, step: int) -> None:
        builder = self.unit.builder
        for block, row in nest(range(2), range(2)):
            cell = (step * 2 + block) * _SUMS + row * 2
            low, high = self.sums[_i32(cell)], self.sums[_i32(cell + 1)]
            place = block * 2 + row
            if self.terms == 1:
                assert self.unit.kind == "bf16" or self.unit.kind == "f16"
                builder.do(ptx.rounded_pair(self.registers[_i32(place)], low, high, self.unit.kind))
                continue
            for term, word in enumerate(split_pair(builder, low, high, self.terms)):
                builder.store(self.registers, self.first(0, term) + place, word)


def _u32(value: Expr | int) -> Expr:
    return tirx.const(value, "uint32") if isinstance(value, int) else tirx.Cast("uint32", value)


def _i32(value: int) -> Expr:
    return tirx.const(value, "int32")


def _f32(value: float) -> Expr:
    return tirx.const(value, "float32")
