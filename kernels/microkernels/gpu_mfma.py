"""AMD's matrix unit (v_mfma of CDNA, from gfx90a on): 32 x 32 or 16 x 16 sums, of bfloat16, float16 or float32 itself, or bytes.

Bytes are signed: unsigned ones of A are multiplied less 128, their upper bit turned where fragments are loaded from LDS. (On the
way to LDS LLVM turns it where they are loaded from memory, and waits for them before the products that should hide that.)

Chunks are loaded to registers early and stored to LDS late: there are no asynchronous copies. Addresses are numbers of chunks. A
lane loads a chunk of its line at once where lines run along k, which is several instructions' k; else number by number, of which
neighbouring lanes have neighbours. Operands change places, so that a lane has neighbours of a row of C.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product as nest
from math import log

from tvm import tirx

from ..codegen import amdgcn
from ..codegen.builder import Buffer, Expr
from ..codegen.gpu_builder import GpuBuilder
from .bf16_split import split
from .gpu_matrix_unit import Fragments, SumFragments
from .gpu_part_layout import CHUNK_BYTES, PartLayout

_NEIGHBOURS = 4
_WORDS = 4  # of 32 bits in a chunk
_UPPER_BITS = 0x80808080  # of the bytes of a word
_DTYPES = {"f32": "float32", "i8": "int8"}


@dataclass
class MfmaUnit:
    """The unit for numbers of a kind, by instructions for `size` x `size` sums. Of bytes A's may be unsigned in memory."""

    builder: GpuBuilder
    kind: amdgcn.Number
    size: int
    is_unsigned: bool = False

    lanes = amdgcn.WAVEFRONT
    neighbours = _NEIGHBOURS
    copies_wait_in_registers = True
    swizzles_lines = False
    stages: Buffer = field(init=False)

    @property
    def instruction(self) -> amdgcn.Mfma | amdgcn.Wmma:
        return amdgcn.Mfma(self.kind, self.size)

    @property
    def dtype(self) -> str:
        """Of numbers in shared memory: bits, float32, or int8."""
        return _DTYPES.get(self.kind, "uint16")

    @property
    def chunk(self) -> int:
        return CHUNK_BYTES // {"f32": 4, "i8": 1}.get(self.kind, 2)

    @property
    def sum_type(self) -> str:
        return self.instruction.sum_type

    @property
    def register_type(self) -> str:
        return self.sum_type

    @property
    def rows(self) -> int:
        return self.size

    @property
    def columns(self) -> int:
        return self.size

    @property
    def turns_signs(self) -> bool:
        """Whether unsigned bytes become signed ones that are 128 less."""
        return self.is_unsigned

    @property
    def lane_chunks(self) -> int:
        """Chunks along k that a lane has of a line, for each step."""
        return 1

    @property
    def depth(self) -> int:
        return self.instruction.k_groups * self.lane_chunks * self.chunk

    def line_of(self, lane: Expr, *, is_a: bool) -> Expr:
        """The line of a block that a lane has."""
        return tirx.floormod(lane, self.size)

    @property
    def sums(self) -> int:
        return self.instruction.sums

    @property
    def groups(self) -> Sequence[tuple[int, int]]:
        return [(0, first * self.instruction.k_groups) for first in range(0, self.sums, _NEIGHBOURS)]

    @property
    def row_lanes(self) -> Sequence[int]:
        return [self.size << bit for bit in range((self.lanes // self.size).bit_length() - 1)]

    def place(self, lane: Expr) -> tuple[Expr, Expr]:
        return tirx.floormod(lane, self.size), tirx.floordiv(lane, self.size) * _NEIGHBOURS

    def allocate(self, chunks: int) -> Expr:
        self.stages = self.builder.shared(chunks * self.chunk, self.dtype, "stages")
        return tirx.const(0, "int32")

    def offset(self, chunks: Expr | int) -> Expr:
        return tirx.const(chunks, "int32") if isinstance(chunks, int) else chunks

    def copies(self, turns: int) -> RegisterCopies:
        return RegisterCopies(self, turns)

    def convert(self, numbers: Sequence[Expr], terms: int) -> list[list[Expr]]:
        assert terms == 1
        return [[self._converted(number) for number in numbers]]

    def _converted(self, number: Expr) -> Expr:
        """A float32, the bits of a number of 16, or a byte of A as it lies in LDS. What becomes float32 is bfloat16."""
        if self.kind == "i8":
            return tirx.reinterpret("int8", number) if str(number.ty) == "uint8" else number
        if str(number.ty) == self.dtype:
            return number
        if self.kind == "f32":
            return tirx.reinterpret("float32", tirx.Cast("uint32", number) << tirx.const(16, "uint32"))
        if self.kind == "f16":
            return tirx.reinterpret("uint16", tirx.Cast("float16", number))
        return split(self.builder, number, 1)[0]

    def put(self, to: Expr, content: Sequence[Expr]) -> None:
        values = self.builder.local(self.chunk, self.dtype, "content")
        for i, one in enumerate(content):
            self.builder.store(values, i, one)
        self.put_vector(to, values[_run(0, self.chunk)])

    def put_vector(self, to: Expr, content: Expr) -> None:
        self.builder.emit(tirx.BufferStore(self.stages, content, [_run(to * self.chunk, self.chunk)]))

    def commit(self) -> None:
        """Copies end one by one."""

    def wait(self, left: int) -> None:
        """What a thread stores to LDS the barrier waits for."""

    def pin(self) -> None:
        self.builder.do(amdgcn.pin())

    def fragments(
        self, layout: PartLayout, begin: Expr, lines: int, lane: Expr, *, is_a: bool, with_sums: bool = False
    ) -> LaneFragments:
        run = _NEIGHBOURS if with_sums else self.chunk
        return LaneFragments(self, layout, is_a, begin, lines, lane, run)

    def sums_as_fragments(self, sums: Buffer, terms: int, lane: Expr) -> SumNumbers:
        assert terms == 1
        return SumNumbers(self, sums)

    def maximum(self, first: Expr, second: Expr) -> Expr:
        return amdgcn.maximum(first, second)

    def exponential(self, value: Expr) -> Expr:
        """What rounding makes of a large exponent is lost in a result that is as small."""
        return amdgcn.exp2(value * tirx.const(1 / log(2), "float32"))

    def multiply(self, sums: Buffer, a: Fragments | SumFragments, b: Fragments, slot: int, terms: tuple[int, int]) -> None:
        assert isinstance(a, LaneFragments | SumNumbers)
        assert isinstance(b, LaneFragments)
        row_blocks, column_blocks, instruction = a.lines // self.size, b.lines // self.size, self.instruction
        for part in range(self.lane_chunks * self.chunk // instruction.numbers):
            for i, j in nest(range(row_blocks), range(column_blocks)):
                cells = _run((i * column_blocks + j) * self.sums, self.sums)
                result = instruction(b.numbers(slot, j, part), a.numbers(slot, i, part), sums[cells])
                self.builder.emit(tirx.BufferStore(sums, result, [cells]))


class RegisterCopies:
    """Chunks that wait in registers. Beyond edges another place is read, whose numbers become zeros when they are stored.

    Where a chunk has fewer numbers than 16 bytes those behind them are read, too, and become zeros.
    """

    def __init__(self, unit: MfmaUnit, turns: int) -> None:
        self._unit, builder = unit, unit.builder
        self._waiting = builder.local(turns * unit.chunk, unit.dtype, "waiting")
        self._masks = builder.local(turns, "uint32", "masks")  # of all bits, or of none
        self._counts = builder.local(turns, "int32", "counts")
        self._has_edge = self._has_counts = False

    def begin(
        self, turn: int, to: Expr, buffer: Buffer, index: Expr, is_inside: Expr | None = None, count: Expr | None = None
    ) -> None:
        unit = self._unit
        if is_inside is not None:
            self._has_edge = True
            unit.builder.store(self._masks, turn, tirx.Select(is_inside, _u32(0xFFFFFFFF), _u32(0)))
            index = tirx.Select(is_inside, index, 0)
        if count is not None:
            self._has_counts = True
            unit.builder.store(self._counts, turn, count)
        loaded = buffer[_run(index, unit.chunk)]
        if str(buffer.dtype) != unit.dtype:  # numbers of 16 bits, whose bits are wanted
            loaded = tirx.reinterpret(f"{unit.dtype}x{unit.chunk}", loaded)
        unit.builder.emit(tirx.BufferStore(self._waiting, loaded, [_run(turn * unit.chunk, unit.chunk)]))

    def end(self, turn: int, to: Expr) -> None:
        unit, at = self._unit, tirx.const(turn, "int32")
        content, kind = self._waiting[_run(turn * unit.chunk, unit.chunk)], f"{unit.dtype}x{unit.chunk}"
        if self._has_edge:
            words = tirx.reinterpret(f"uint32x{_WORDS}", content)
            content = tirx.reinterpret(kind, words & tirx.Broadcast(self._masks[at], _WORDS))
        if self._has_counts:
            is_number = _run(0, unit.chunk) < tirx.Broadcast(self._counts[at], unit.chunk)
            content = tirx.Select(is_number, content, tirx.Broadcast(tirx.const(0, unit.dtype), unit.chunk))
        unit.put_vector(to, content)


class LaneFragments:
    """A lane has, of every block of SIZE lines, chunks along k of one line: for v_mfma lane l chunk l / SIZE of line l % SIZE.

    Where rows run along lines the chunk may be made of runs of k, one of each group of lanes after the other.
    """

    def __init__(self, unit: MfmaUnit, layout: PartLayout, is_a: bool, begin: Expr, lines: int, lane: Expr, run: int) -> None:
        self.unit, self.layout, self.lines, builder = unit, layout, lines, unit.builder
        self._run, self._numbers = run, unit.lane_chunks * unit.chunk
        self._turns_signs = is_a and unit.turns_signs
        assert layout.along_k or not self._turns_signs
        assert layout.is_swizzled == layout.along_k
        assert run == unit.chunk or not layout.along_k
        groups = unit.instruction.k_groups
        group = builder.bind(tirx.floordiv(lane, unit.size)) if groups > 1 else tirx.const(0, "int32")
        line = builder.bind(unit.line_of(lane, is_a=is_a))
        if layout.along_k:
            self._swizzle = builder.bind(layout.swizzle(line))
            self._first = builder.bind((begin + line) * layout.row_chunks)
            count, own = layout.depth // unit.chunk, range(unit.lane_chunks)
            steps = range(0, count, groups * unit.lane_chunks)
            self._chunks = [[self._chunk(step + group * unit.lane_chunks + c) for c in own] for step in steps]
        else:
            self._first = builder.bind(group * (run * layout.lines) + begin + line)
        self._registers = builder.local(2 * lines // unit.size * self._numbers, unit.dtype, "a" if is_a else "b")

    def _chunk(self, number: Expr) -> Expr:
        """Where a chunk of the lane's rows lies in them."""
        return self.unit.builder.bind(number ^ self._swizzle)

    def load(self, slot: int, address: Expr, step: int, term: int) -> None:
        assert term == 0
        for block in range(self.lines // self.unit.size):
            if self.layout.along_k:
                self._load_chunk(slot, address, step, block)
            else:
                self._load_numbers(slot, address, step, block)

    def _load_chunk(self, slot: int, address: Expr, step: int, block: int) -> None:
        unit, layout = self.unit, self.layout
        for c, chunk in enumerate(self._chunks[step]):
            number = address + self._first + chunk + block * unit.size * layout.row_chunks
            loaded = unit.stages[_run(number * unit.chunk, unit.chunk)]
            if self._turns_signs:
                words = tirx.reinterpret(f"uint32x{_WORDS}", loaded) ^ tirx.Broadcast(_u32(_UPPER_BITS), _WORDS)
                loaded = tirx.reinterpret(f"{unit.dtype}x{unit.chunk}", words)
            place = _run(self._place(slot, block) + c * unit.chunk, unit.chunk)
            unit.builder.emit(tirx.BufferStore(self._registers, loaded, [place]))

    def _load_numbers(self, slot: int, address: Expr, step: int, block: int) -> None:
        unit, layout = self.unit, self.layout
        for e in range(self._numbers):
            k = step * unit.depth + e // self._run * (self._run * unit.instruction.k_groups) + e % self._run
            number = self._first + (k * layout.lines + block * unit.size)
            unit.builder.store(self._registers, self._place(slot, block) + e, unit.stages[address * unit.chunk + number])

    def _place(self, slot: int, block: int) -> int:
        return (slot * (self.lines // self.unit.size) + block) * self._numbers

    def numbers(self, slot: int, block: int, part: int) -> Expr:
        """What an instruction takes of a block, `part` telling which of the chunk's numbers."""
        count = self.unit.instruction.numbers
        first = self._place(slot, block) + part * count
        return self._registers[tirx.const(first, "int32") if count == 1 else _run(first, count)]


class SumNumbers:
    """Sums as A's fragments: of each group of neighbours of a row that a lane has, four numbers of k."""

    def __init__(self, unit: MfmaUnit, sums: Buffer) -> None:
        self.unit, self.lines, self._sums = unit, unit.size, sums
        self._registers = unit.builder.local(unit.chunk, unit.dtype, "weights")

    def take(self, step: int) -> None:
        unit = self.unit
        for i in range(unit.chunk):
            number = self._sums[tirx.const(step * unit.chunk + i, "int32")]
            content = self._rounded(number) if unit.kind == "bf16" else unit.convert([number], 1)[0][0]
            unit.builder.store(self._registers, i, content)

    def _rounded(self, number: Expr) -> Expr:
        """To bfloat16, to even, without the care for NaN that takes as many instructions again."""
        bits = self.unit.builder.name(tirx.reinterpret("uint32", number))
        is_odd = (bits >> _u32(16)) & _u32(1)
        return tirx.Cast("uint16", (bits + is_odd + _u32(0x7FFF)) >> _u32(16))

    def numbers(self, slot: int, block: int, part: int) -> Expr:
        """What an instruction takes, `part` telling which of the step's numbers; there is one slot and one block."""
        count = self.unit.instruction.numbers
        return self._registers[tirx.const(part, "int32") if count == 1 else _run(part * count, count)]


def _u32(value: int) -> Expr:
    return tirx.const(value, "uint32")


def _run(first: Expr | int, count: int) -> Expr:
    """Indices of `count` neighbours."""
    begin = tirx.const(first, "int32") if isinstance(first, int) else first
    return tirx.Ramp(begin, tirx.const(1, "int32"), count)
