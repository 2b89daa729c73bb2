"""Instructions of AMD's matrix unit (CDNA: v_mfma), and what pins LLVM's schedule, as expressions and statements of TIR.

A product adds SIZE x SIZE sums of a wavefront of 64 lanes. Of the first operand lane l has neighbours along k of row l % SIZE, of
the second those of column l % SIZE; which k is for group l / SIZE of lanes is up to the program, as long as it is the same in
both. Sum r of a lane is column l % SIZE and row 256 / SIZE (r / 4) + 4 (l / SIZE) + r % 4 (CDNA3 ISA, "Matrix Arithmetic
Instructions").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import tvm
from tvm import tirx

from .builder import Expr

Number: TypeAlias = Literal["bf16", "f16", "f32"]  # what the matrix unit multiplies
WAVEFRONT = 64


@dataclass(frozen=True, slots=True)
class Mfma:
    """An instruction for `size` x `size` sums, 32 or 16; a lane has `numbers` of each operand, as `operand` type."""

    kind: Number
    size: int

    @property
    def numbers(self) -> int:
        return 1 if self.kind == "f32" else 4

    @property
    def sums(self) -> int:
        """Registers of a lane."""
        return self.size * self.size // WAVEFRONT

    @property
    def intrinsic(self) -> str:
        """Its name in LLVM."""
        k = WAVEFRONT // self.size * self.numbers
        return f"llvm.amdgcn.mfma.f32.{self.size}x{self.size}x{k}{self.kind}" + ".1k" * (self.kind == "bf16")

    def __call__(self, first: Expr, second: Expr, sums: Expr) -> Expr:
        """The sums, a vector of float32, with the products added. Operands: bits of `numbers` numbers of 16, or a float32."""
        if self.kind == "f16":
            first, second = (tirx.reinterpret("float16x4", one) for one in (first, second))
        zero = tirx.const(0, "int32")  # no broadcast, no permutation
        number = tvm.get_global_func("target.llvm_lookup_intrinsic_id")(self.intrinsic)
        return tirx.call_llvm_pure_intrin(f"float32x{self.sums}", number, first, second, sums, zero, zero, zero)


def pin() -> Expr:
    """LLVM moves no instruction over this place."""
    return tirx.call_llvm_intrin("void", "llvm.amdgcn.sched.barrier", tirx.const(0, "int32"))
