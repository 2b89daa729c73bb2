"""Multiply-adds of unsigned weights of few bits by signed digits of rows: which instructions a CPU has for them.

| unit | instruction | weights | digits |
|---|---|---|---|
| dot | VPDPBUSD: four bytes by four, added to 32 bits | 8 bits | 8 bits |
| pairs | VPMADDUBSW: two bytes by two, in 16 bits; VPMADDWD by ones brings them to 32 | 4 bits | 8 bits |
| wide | VPMADDWD: two numbers of 16 bits by two, in 32 bits, of the even and of the odd bytes | 8 bits | 16 bits |

All are exact here. VPMADDUBSW saturates; pairs of weights of 4 bits by digits come to 2 * 15 * 128 = 3840, so that eight of them
fit. (llama.cpp multiplies rows of int8 by it; here a row keeps 24 bits.) TVM cannot write these instructions, so they are
called through functions of LLVM IR, which are inlined.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from tvm import tirx
from tvm.ir import Call, Op, PrimType, _ffi_api, register_op_attr

from ...runtime.target import VNNI, Target
from . import int8

Expr: TypeAlias = Any  # as in builder

UnitName: TypeAlias = Literal["dot", "pairs", "wide"]

_PAIRS, _SUM, _MADD = "tirx.prefuse_byte_pairs", "tirx.prefuse_int16_sum", "tirx.prefuse_int16_madd"
_ODD = "tirx.prefuse_odd_bytes"
_FUNCTIONS = {_PAIRS: "prefuse_byte_pairs", _SUM: "prefuse_int16_sum", _MADD: "prefuse_int16_madd", _ODD: "prefuse_odd_bytes"}
_LANES = (8, 16)
_PURE = 1  # TVM's CallEffectKind of an operator without side effects
_NARROW_BITS = 4  # of weights, at most, whose pairs stay in 16 bits
_CHAIN = 4  # pairs that are added in 16 bits before they are brought to 32: half of what fits, and few registers
_EVEN = 0x00FF00FF  # the even bytes of a word
_ONES = 0x00010001  # 1 in both halves of a word


@dataclass(frozen=True)
class DigitUnit:
    """How words of weights, four numbers along k in 32 bits, meet digits of a row: vectors of `lanes` words.

    A word meets `planes` words of each digit: of 16-bit digits one has its even numbers, one its odd ones.
    """

    name: UnitName
    lanes: int

    @property
    def digit_bits(self) -> int:
        return 16 if self.name == "wide" else 8

    @property
    def planes(self) -> int:
        return 2 if self.name == "wide" else 1

    @property
    def chain(self) -> int:
        """Products that are added before they meet the sum of 32 bits."""
        return _CHAIN if self.name == "pairs" else 1

    @property
    def multiplies(self) -> float:
        """Instructions of a product of a vector of words by a digit that multiply."""
        return {"dot": 1.0, "pairs": 1.0 + 1.0 / _CHAIN, "wide": 2.0}[self.name]

    @property
    def operations(self) -> float:
        """All its instructions."""
        return {"dot": 1.0, "pairs": 2.0 + 1.0 / _CHAIN, "wide": 4.0}[self.name]

    @property
    def unpacking(self) -> int:
        """Instructions that make factors of a vector of bytes."""
        return 2 if self.name == "wide" else 0

    def digits(self, row_bytes: int) -> int:
        """Digits of a row's integers of so many bytes."""
        return -(-8 * row_bytes // self.digit_bits)

    def multiply(self, total: Expr, weights: list[Expr], digits: list[list[Expr]]) -> Expr:
        """total + the products of vectors of words by the words of a digit, a list of `planes` for each."""
        if self.name == "dot":
            for four, (digit,) in zip(weights, digits, strict=True):
                total = int8.dot(total, four, digit)
            return total
        if self.name == "wide":
            for four, (even, odd) in zip(weights, digits, strict=True):
                total = _call(_MADD, _call(_MADD, total, four & tirx.const(_EVEN, "int32"), even), _call(_ODD, four), odd)
            return total
        found = [_call(_PAIRS, four, digit) for four, (digit,) in zip(weights, digits, strict=True)]
        for begin in range(0, len(found), _CHAIN):
            whole, *others = found[begin : begin + _CHAIN]
            for one in others:
                whole = _call(_SUM, whole, one)
            total = _call(_MADD, total, whole, tirx.const(_ONES, "int32"))
        return total


def digit_unit(target: Target, bits: int) -> DigitUnit:
    """What a CPU multiplies weights of `bits` bits by digits with."""
    if target.has(VNNI):
        return DigitUnit("dot", target.vector_lanes)
    lanes = 16 if target.has("avx512bw") else 8
    return DigitUnit("pairs" if bits <= _NARROW_BITS else "wide", lanes)


def llvm_functions(target: Target) -> str:
    """The functions that kernels for a target call."""
    if target.has(VNNI):
        return ""
    wide = _functions(16, "avx512.pmaddubs.w.512", "avx512.pmaddw.d.512") if target.has("avx512bw") else ""
    return _functions(8, "avx2.pmadd.ub.sw", "avx2.pmadd.wd") + wide


def _functions(lanes: int, of_bytes: str, of_halves: str) -> str:
    """For vectors of so many words, by instructions that `int8` has declared."""
    words, halves, bytes_ = f"<{lanes} x i32>", f"<{2 * lanes} x i16>", f"<{4 * lanes} x i8>"
    eight = "<" + ", ".join(["i16 8"] * (2 * lanes)) + ">"
    return f"""
define {words} @{_FUNCTIONS[_PAIRS]}_{lanes}({words} %a, {words} %b) alwaysinline {{
  %x = bitcast {words} %a to {bytes_}
  %y = bitcast {words} %b to {bytes_}
  %p = call {halves} @llvm.x86.{of_bytes}({bytes_} %x, {bytes_} %y)
  %r = bitcast {halves} %p to {words}
  ret {words} %r
}}
define {words} @{_FUNCTIONS[_SUM]}_{lanes}({words} %a, {words} %b) alwaysinline {{
  %x = bitcast {words} %a to {halves}
  %y = bitcast {words} %b to {halves}
  %p = add {halves} %x, %y
  %r = bitcast {halves} %p to {words}
  ret {words} %r
}}
define {words} @{_FUNCTIONS[_MADD]}_{lanes}({words} %sums, {words} %a, {words} %b) alwaysinline {{
  %x = bitcast {words} %a to {halves}
  %y = bitcast {words} %b to {halves}
  %p = call {words} @llvm.x86.{of_halves}({halves} %x, {halves} %y)
  %r = add {words} %sums, %p
  ret {words} %r
}}
define {words} @{_FUNCTIONS[_ODD]}_{lanes}({words} %a) alwaysinline {{
  %x = bitcast {words} %a to {halves}
  %p = lshr {halves} %x, {eight}
  %r = bitcast {halves} %p to {words}
  ret {words} %r
}}"""


def _call(name: str, *operands: Expr) -> Expr:
    return Call(Op.get(name), list(operands), ret_ty=PrimType("int32"))


def _lower(call: Any) -> Expr:
    """TVM asks this when loops are vectors: kernels have whole ones."""
    lanes = call.ty.dtype.lanes
    assert lanes in _LANES, f"{call.op.name} of {lanes} lanes"
    return tirx.call_pure_extern(call.ty, f"{_FUNCTIONS[call.op.name]}_{lanes}", *call.args)


for _name, _what in (
    (_PAIRS, "a0 * b0 + a1 * b1 and a2 * b2 + a3 * b3 in 16 bits, of words of unsigned and signed bytes"),
    (_SUM, "the sums of the 16-bit halves of words"),
    (_MADD, "s + a0 * b0 + a1 * b1, of words of two signed 16-bit integers"),
    (_ODD, "the odd bytes of a word, each in 16 bits"),
):
    _ffi_api.RegisterOp(_name, _what)
    register_op_attr(_name, "TCallEffectKind", _PURE)
    register_op_attr(_name, "TVectorizable", True)
    tirx.register_intrin_lowering(_name, target="llvm", f=_lower)
