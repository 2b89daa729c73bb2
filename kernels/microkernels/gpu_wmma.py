"""RDNA 3's matrix unit (v_wmma): 16 x 16 sums of a wavefront of 32 lanes, of bfloat16 or float16, or bytes of either sign.

As `MfmaUnit` but for what lanes have. Both halves of a wavefront have the same operands, of which a lane has all 16 of k. The
instruction gives a lane every other row of a column; as operands change places, the columns of B are dealt to lanes so that it
has eight neighbours of a row of C. There is no product of float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx

from ..codegen import amdgcn
from ..codegen.builder import Buffer, Expr
from .gpu_mfma import MfmaUnit, SumNumbers

_LANES = 32
_SIDE = 16
_WORD_NUMBERS = 2  # of 16 bits in a word


@dataclass
class WmmaUnit(MfmaUnit):
    """The unit for numbers of a kind. Of bytes A's may be unsigned, which the instruction multiplies as they are."""

    lanes = _LANES

    @property
    def instruction(self) -> amdgcn.Wmma:
        return amdgcn.Wmma(self.kind, self.is_unsigned)

    @property
    def turns_signs(self) -> bool:
        return False

    @property
    def lane_chunks(self) -> int:
        return self.instruction.numbers // self.chunk

    def line_of(self, lane: Expr, *, is_a: bool) -> Expr:
        """Of B the lanes of even numbers have the first eight columns: their rows of the result go to the lower half."""
        number = tirx.floormod(lane, _SIDE)
        return number if is_a else tirx.floormod(number, 2) * (_SIDE // 2) + tirx.floordiv(number, 2)

    @property
    def groups(self) -> Sequence[tuple[int, int]]:
        return [(0, first) for first in range(0, self.sums, self.neighbours)]

    def place(self, lane: Expr) -> tuple[Expr, Expr]:
        return tirx.floormod(lane, _SIDE), tirx.floordiv(lane, _SIDE) * self.sums

    def sums_as_fragments(self, sums: Buffer, terms: int, lane: Expr) -> ExchangedSums:
        assert terms == 1
        return ExchangedSums(self, sums, lane)


class ExchangedSums(SumNumbers):
    """Sums as A's fragments: a lane has eight neighbours along k of its row, and the other eight from the other half."""

    def __init__(self, unit: WmmaUnit, sums: Buffer, lane: Expr) -> None:
        super().__init__(unit, sums)
        self._lane, builder = lane, unit.builder
        self._is_lower = builder.bind(lane < _SIDE)
        self._words = builder.local(unit.lane_chunks * unit.chunk // _WORD_NUMBERS, "uint32", "words")

    def take(self, step: int) -> None:
        super().take(step)
        builder, count = self.unit.builder, self.unit.chunk // _WORD_NUMBERS
        for word in range(count):
            pair = self._registers[tirx.Ramp(tirx.const(word * _WORD_NUMBERS, "int32"), tirx.const(1, "int32"), _WORD_NUMBERS)]
            own = builder.name(tirx.reinterpret("uint32", pair))
            other = self._other(own)
            builder.store(self._words, word, tirx.Select(self._is_lower, own, other))
            builder.store(self._words, count + word, tirx.Select(self._is_lower, other, own))

    def _other(self, own: Expr) -> Expr:
        """The word that the lane of the same row in the other half has."""
        return self.unit.builder.shuffle(own, self._lane ^ tirx.const(_SIDE, "int32"), _LANES)

    def numbers(self, slot: int, block: int, part: int) -> Expr:
        """All of the step's numbers; there is one slot, one block and one part."""
        words = self.unit.lane_chunks * self.unit.chunk // _WORD_NUMBERS
        content = self._words[tirx.Ramp(tirx.const(0, "int32"), tirx.const(1, "int32"), words)]
        return tirx.reinterpret(f"uint16x{words * _WORD_NUMBERS}", content)
