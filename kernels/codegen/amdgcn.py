"""Instructions of AMD's matrix units (CDNA: v_mfma; RDNA 3: v_wmma), and what pins LLVM's schedule, as TIR.

A product of v_mfma adds SIZE x SIZE sums of a wavefront of 64 lanes. Of the first operand lane l has neighbours along k of row
l % SIZE, of
the second those of column l % SIZE; which k is for group l / SIZE of lanes is up to the program, as long as it is the same in
both. Sum r of a lane is column l % SIZE and row 256 / SIZE (r / 4) + 4 (l / SIZE) + r % 4 (CDNA3 ISA, "Matrix Arithmetic
Instructions").

One of v_wmma adds 16 x 16 sums of a wavefront of 32 lanes. Lanes l and l + 16 both have all 16 numbers along k of row l of the
first operand, and of column l of the second. Sum r of a lane is column l % 16 and row 2 r + l / 16 (RDNA3 ISA, "Wave Matrix
Multiply Accumulate").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import tvm
from tvm import tirx

from .builder import Expr

Number: TypeAlias = Literal["bf16", "f16", "f32", "i8"]  # what a matrix unit multiplies
WAVEFRONT = 64


@dataclass(frozen=True, slots=True)
class Mfma:
    """An instruction for `size` x `size` sums, 32 or 16; a lane has `numbers` of each operand, as `operand` type."""

    kind: Number
    size: int

    @property
    def k_groups(self) -> int:
        """Groups of lanes that have different k."""
        return WAVEFRONT // self.size

    @property
    def numbers(self) -> int:
        return {"f32": 1, "i8": 8}.get(self.kind, 4)

    @property
    def sums(self) -> int:
        """Registers of a lane."""
        return self.size * self.size // WAVEFRONT

    @property
    def sum_type(self) -> str:
        return "int32" if self.kind == "i8" else "float32"

    @property
    def intrinsic(self) -> str:
        """Its name in LLVM."""
        k = self.k_groups * self.numbers
        if self.kind == "i8":
            return f"llvm.amdgcn.mfma.i32.{self.size}x{self.size}x{k}.i8"
        return f"llvm.amdgcn.mfma.f32.{self.size}x{self.size}x{k}{self.kind}" + ".1k" * (self.kind == "bf16")

    def __call__(self, first: Expr, second: Expr, sums: Expr) -> Expr:
        """The sums, a vector of float32, or of int32 where bytes are multiplied, with the products added.

        Operands: bits of `numbers` numbers of 16, a float32, or signed bytes.
        """
        if operand := {"f16": "float16x4", "i8": "int64"}.get(self.kind):
            first, second = (tirx.reinterpret(operand, one) for one in (first, second))
        zero = tirx.const(0, "int32")  # no broadcast, no permutation
        return tirx.call_llvm_pure_intrin(
            f"{self.sum_type}x{self.sums}", _intrinsic(self.intrinsic), first, second, sums, zero, zero, zero
        )


@dataclass(frozen=True, slots=True)
class Wmma:
    """An instruction for 16 x 16 sums by 16 of k, all of which a lane has. Of bytes the second operand's may be unsigned."""

    kind: Number
    is_unsigned: bool = False

    k_groups = 1
    numbers = 16
    size = 16
    sums = 8

    @property
    def sum_type(self) -> str:
        return "int32" if self.kind == "i8" else "float32"

    @property
    def intrinsic(self) -> str:
        """Its name in LLVM, without types."""
        return "llvm.amdgcn.wmma." + ("i32.16x16x16.iu8" if self.kind == "i8" else f"f32.16x16x16.{self.kind}")

    def __call__(self, first: Expr, second: Expr, sums: Expr) -> Expr:
        """The sums, a vector of float32, or of int32 where bytes are multiplied, with the products added.

        Operands: bits of 16 numbers of 16 bits, or bytes.
        """
        operand = {"f16": "float16x16", "bf16": "int16x16", "i8": "int32x4"}[self.kind]
        first, second = (tirx.reinterpret(operand, one) for one in (first, second))
        arguments = [first, second, sums]
        if self.kind == "i8":
            is_signed, wraps = tirx.const(True, "bool"), tirx.const(False, "bool")
            arguments = [is_signed, first, tirx.const(not self.is_unsigned, "bool"), second, sums, wraps]
        return tirx.call_llvm_pure_intrin(f"{self.sum_type}x{self.sums}", _intrinsic(self.intrinsic), *arguments)


def pin() -> Expr:
    """LLVM moves no instruction over this place."""
    return tirx.call_llvm_intrin("void", "llvm.amdgcn.sched.barrier", tirx.const(0, "int32"))


def exp2(value: Expr) -> Expr:
    """Two to a float32 by one instruction (v_exp_f32), to one unit in the last place; 0 where that is no normal number."""
    return tirx.call_llvm_pure_intrin("float32", _intrinsic("llvm.amdgcn.exp2"), value)


def maximum(first: Expr, second: Expr) -> Expr:
    """The larger of two float32, that which is a number where one is none, by half an instruction (v_max3_f32) in a chain."""
    return tirx.call_llvm_pure_intrin("float32", _intrinsic("llvm.maxnum"), first, second)


def _intrinsic(name: str) -> int:
    """LLVM's number of an intrinsic."""
    number: int = tvm.get_global_func("target.llvm_lookup_intrinsic_id")(name)
    return number
