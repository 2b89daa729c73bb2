"""Dot products of 8-bit integers. A "word" is a 32-bit lane with four of them, the first in its lowest byte (VNNI layout).

A multiply-add of words is s + a0 * b0 + ... + a3 * b3 in 32 bits, modulo 2^32, `a` unsigned and `b` signed: one instruction where
the CPU has AVX512_VNNI or AVX_VNNI (VPDPBUSD). Elsewhere bytes are widened to 16 bits, even ones and odd ones, and VPMADDWD adds
up the products of each in 32 bits. Both are exact. VPMADDUBSW, which takes bytes, saturates sums of 16 bits: it is exact where
neighbours in `b` are small enough (`pairs`).

TVM cannot write these instructions, so they are called through functions of LLVM IR, which are inlined.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from tvm import tirx
from tvm.ir import Call, Op, PrimType, _ffi_api, register_op_attr

from ...runtime.target import BFLOAT16_EMULATED, VNNI, VNNI_EMULATED, Target

Expr: TypeAlias = Any  # as in builder

_DOT = "tirx.prefuse_int8_dot"
_DOT_FUNCTION, _DOT_LANES = "prefuse_int8_dot", (8, 16)
_MADD = "tirx.prefuse_int8_madd"
_MADD_FUNCTION, _MADD_LANES = "prefuse_int8_madd", (8, 16)
_PAIRS = "tirx.prefuse_int8_pairs"
_PAIRS_FUNCTION = "prefuse_int8_pairs"
_WORD_FUNCTION = "prefuse_int8_word"
_PURE = 1  # TVM's CallEffectKind of an operator without side effects
_BYTES = 4  # of a word
_SIGN_BITS = -0x7F7F7F80  # the highest bit of each byte of a word


def llvm_functions(target: Target) -> str:
    """The functions that kernels for a target call. Where its instructions are only imitated, so are they."""
    is_emulated = target.level in (BFLOAT16_EMULATED, VNNI_EMULATED)
    has_words = target.has("avx512bw") and not is_emulated
    madds = [
        _WORD_LOAD,
        _madd_function(8, "avx2.pmadd.wd"),
        _madd_function(16, "avx512.pmaddw.d.512") if has_words else _loose_madd(16),
        _pairs_function(8, "avx2.pmadd.ub.sw", "avx2.pmadd.wd"),
        _pairs_function(16, "avx512.pmaddubs.w.512", "avx512.pmaddw.d.512")
        if has_words
        else _loose_function(f"{_PAIRS_FUNCTION}_16", 16),
    ]
    if not target.has(VNNI):
        return "".join(madds)
    widest = 0 if is_emulated else target.vector_lanes  # levels with AVX512_VNNI have AVX512VL, and so both
    made = {lanes: _dot_function if lanes <= widest else _loose_dot for lanes in _DOT_LANES}
    return "".join((*madds, *(make(lanes) for lanes, make in made.items())))


_WORD_LOAD = f"""
define i32 @{_WORD_FUNCTION}(ptr %p) alwaysinline {{
  %r = load i32, ptr %p, align 1
  ret i32 %r
}}"""


def _dot_function(lanes: int) -> str:
    """One VPDPBUSD: LLVM calls that of AVX_VNNI by the name of AVX512_VNNI's."""
    words, bytes_, instruction = f"<{lanes} x i32>", f"<{4 * lanes} x i8>", f"@llvm.x86.avx512.vpdpbusd.{32 * lanes}"
    return f"""
declare {words} {instruction}({words}, {bytes_}, {bytes_})
define {words} @{_DOT_FUNCTION}_{lanes}({words} %sums, {words} %a, {words} %b) alwaysinline {{
  %x = bitcast {words} %a to {bytes_}
  %y = bitcast {words} %b to {bytes_}
  %r = call {words} {instruction}({words} %sums, {bytes_} %x, {bytes_} %y)
  ret {words} %r
}}"""


def _splat(kind: str, value: int, lanes: int) -> str:
    """A constant with this value in all its lanes."""
    return "<" + ", ".join([f"{kind} {value}"] * lanes) + ">"


def _madd_function(lanes: int, instruction: str) -> str:
    """Two VPMADDWD, of the even bytes of words and of the odd ones."""
    halves, eight = f"<{2 * lanes} x i16>", _splat("i16", 8, 2 * lanes)
    result = f"<{lanes} x i32>"
    return f"""
declare {result} @llvm.x86.{instruction}({halves}, {halves})
define {result} @{_MADD_FUNCTION}_{lanes}({result} %sums, {result} %a, {result} %b) alwaysinline {{
  %x = bitcast {result} %a to {halves}
  %y = bitcast {result} %b to {halves}
  %xeven = and {halves} %x, {_splat("i16", 255, 2 * lanes)}
  %xodd = lshr {halves} %x, {eight}
  %yhigh = shl {halves} %y, {eight}
  %yeven = ashr {halves} %yhigh, {eight}
  %yodd = ashr {halves} %y, {eight}
  %even = call {result} @llvm.x86.{instruction}({halves} %xeven, {halves} %yeven)
  %odd = call {result} @llvm.x86.{instruction}({halves} %xodd, {halves} %yodd)
  %both = add {result} %even, %odd
  %r = add {result} %sums, %both
  ret {result} %r
}}"""


def _pairs_function(lanes: int, of_bytes: str, of_halves: str) -> str:
    """VPMADDUBSW, whose pairs a VPMADDWD by ones adds; `_madd_function` declares the latter."""
    result, halves, bytes_ = f"<{lanes} x i32>", f"<{2 * lanes} x i16>", f"<{4 * lanes} x i8>"
    return f"""
declare {halves} @llvm.x86.{of_bytes}({bytes_}, {bytes_})
define {result} @{_PAIRS_FUNCTION}_{lanes}({result} %sums, {result} %a, {result} %b) alwaysinline {{
  %x = bitcast {result} %a to {bytes_}
  %y = bitcast {result} %b to {bytes_}
  %pairs = call {halves} @llvm.x86.{of_bytes}({bytes_} %x, {bytes_} %y)
  %both = call {result} @llvm.x86.{of_halves}({halves} %pairs, {halves} {_splat("i16", 1, 2 * lanes)})
  %r = add {result} %sums, %both
  ret {result} %r
}}"""


def _loose_function(name: str, lanes: int) -> str:
    """The same in arithmetic that any CPU has, byte by byte."""
    kind = f"<{lanes} x i32>"
    lines, total = [], "%sums"
    for byte in range(_BYTES):
        left, right = (_splat("i32", bits, lanes) for bits in (24 - 8 * byte, 24))
        lines += [
            f"%ahigh{byte} = shl {kind} %a, {left}",
            f"%a{byte} = lshr {kind} %ahigh{byte}, {right}",
            f"%bhigh{byte} = shl {kind} %b, {left}",
            f"%b{byte} = ashr {kind} %bhigh{byte}, {right}",
            f"%p{byte} = mul {kind} %a{byte}, %b{byte}",
            f"%s{byte} = add {kind} {total}, %p{byte}",
        ]
        total = f"%s{byte}"
    body = "\n  ".join(lines)
    return f"""
define {kind} @{name}({kind} %sums, {kind} %a, {kind} %b) alwaysinline {{
  {body}
  ret {kind} {total}
}}"""


def _loose_madd(lanes: int) -> str:
    return _loose_function(f"{_MADD_FUNCTION}_{lanes}", lanes)


def _loose_dot(lanes: int) -> str:
    return _loose_function(f"{_DOT_FUNCTION}_{lanes}", lanes)


def word_at(buffer: Any, offset: Expr) -> Expr:
    """The word of the four elements from `offset` on of a buffer of bytes, at any address."""
    return tirx.call_pure_extern("int32", _WORD_FUNCTION, tirx.address_of(buffer[offset]))


def dot(total: Expr, a: Expr, b: Expr) -> Expr:
    """total + the four products of the bytes of words (int32), those of a unsigned and those of b signed, by VPDPBUSD."""
    return Call(Op.get(_DOT), [total, a, b], ret_ty=PrimType("int32"))


def madd(total: Expr, a: Expr, b: Expr) -> Expr:
    """The same by VPMADDWD."""
    return Call(Op.get(_MADD), [total, a, b], ret_ty=PrimType("int32"))


def pairs(total: Expr, a: Expr, b: Expr) -> Expr:
    """The same by VPMADDUBSW, where the pairs of b are small enough."""
    return Call(Op.get(_PAIRS), [total, a, b], ret_ty=PrimType("int32"))


def signed_dot(total: Expr, a: Expr, b: Expr) -> Expr:
    """As `dot` with 128 more in each byte of a, which is signed: 128 times the sum of b's bytes too much."""
    return dot(total, a ^ tirx.const(_SIGN_BITS, "int32"), b)


def signed_madd(total: Expr, a: Expr, b: Expr) -> Expr:
    """As `madd`, with 128 more in each byte of a."""
    return madd(total, a ^ tirx.const(_SIGN_BITS, "int32"), b)


def signed_pairs(total: Expr, a: Expr, b: Expr) -> Expr:
    """As `pairs`, with 128 more in each byte of a."""
    return pairs(total, a ^ tirx.const(_SIGN_BITS, "int32"), b)


def _emulated(call: Any, lanes: int) -> Expr:
    """The same byte by byte, of few lanes."""
    total, a, b = call.args

    def number(value: int) -> Expr:
        one = tirx.const(value, "int32")
        return one if lanes == 1 else tirx.Broadcast(one, lanes)

    for byte in range(_BYTES):
        unsigned = (a >> number(8 * byte)) & number(255)
        total = total + unsigned * ((b << number(24 - 8 * byte)) >> number(24))
    return total


def _lower_dot(call: Any) -> Expr:
    """TVM asks this for each multiply-add when its loops are vectors: whole registers have the instruction."""
    lanes = call.ty.dtype.lanes
    if lanes not in _DOT_LANES:
        return _emulated(call, lanes)
    return tirx.call_pure_extern(call.ty, f"{_DOT_FUNCTION}_{lanes}", *call.args)


def _lower_madd(call: Any) -> Expr:
    lanes = call.ty.dtype.lanes
    if lanes not in _MADD_LANES:
        return _emulated(call, lanes)
    return tirx.call_pure_extern(call.ty, f"{_MADD_FUNCTION}_{lanes}", *call.args)


def _lower_pairs(call: Any) -> Expr:
    lanes = call.ty.dtype.lanes
    if lanes not in _MADD_LANES:
        return _emulated(call, lanes)
    return tirx.call_pure_extern(call.ty, f"{_PAIRS_FUNCTION}_{lanes}", *call.args)


for _name, _lower in ((_DOT, _lower_dot), (_MADD, _lower_madd), (_PAIRS, _lower_pairs)):
    _ffi_api.RegisterOp(_name, "s + a0 * b0 + a1 * b1 + a2 * b2 + a3 * b3, of words of four 8-bit integers")
    register_op_attr(_name, "TCallEffectKind", _PURE)
    register_op_attr(_name, "TVectorizable", True)
    tirx.register_intrin_lowering(_name, target="llvm", f=_lower)
