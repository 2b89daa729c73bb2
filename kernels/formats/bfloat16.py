"""Dot products of bfloat16 pairs. A "word" is a 32-bit lane with two bfloat16 numbers, the first in its low half (VNNI layout).

A multiply-add of words is s + a0 * b0 + a1 * b1 in float32: one instruction where the CPU has AVX512_BF16 (VDPBF16PS, which takes
denormal operands for zero), else shifts and two FMAs. Rounding has instructions there, too, of one vector or two (VCVTNEPS2BF16,
VCVTNE2PS2BF16, which flush denormal numbers to zero). TVM cannot write LLVM's type of their operands, so they are called through
functions of LLVM IR, which are inlined (`LLVM_FUNCTIONS`). So is an unaligned load of a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import tvm_ffi
from tvm import tirx
from tvm.ir import Call, Op, PrimType, _ffi_api, register_op_attr

Expr: TypeAlias = Any  # as in builder
Buffer: TypeAlias = Any


def _lanes(first: int) -> str:
    return ", ".join(f"i32 {first + lane}" for lane in range(16))


_DOT = "tirx.prefuse_bfloat16_dot"
_DOT_FUNCTION, _DOT_LANES = "prefuse_bfloat16_dot", 16
_ROUND = "tirx.prefuse_bfloat16_round"
_ROUND_FUNCTION, _ROUND_LANES = "prefuse_bfloat16_round", (8, 16, 32)
_PAIR = "tirx.prefuse_bfloat16_pair"
_PAIR_FUNCTION, _PAIR_LANES = "prefuse_bfloat16_pair", 16
_WORDS_FUNCTION = "prefuse_bfloat16_words"
_LOAD_FUNCTION = "prefuse_bfloat16_load"
_INTERLEAVED = ", ".join(f"i32 {i // 2 + i % 2 * _PAIR_LANES}" for i in range(2 * _PAIR_LANES))
LLVM_FUNCTIONS = f"""
define <16 x float> @{_DOT_FUNCTION}(<16 x float> %sums, <16 x i32> %a, <16 x i32> %b) alwaysinline {{
  %x = bitcast <16 x i32> %a to <32 x bfloat>
  %y = bitcast <16 x i32> %b to <32 x bfloat>
  %r = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float> %sums, <32 x bfloat> %x, <32 x bfloat> %y)
  ret <16 x float> %r
}}
define <8 x i16> @{_ROUND_FUNCTION}_8(<8 x float> %x) alwaysinline {{
  %y = call <8 x bfloat> @llvm.x86.avx512bf16.cvtneps2bf16.256(<8 x float> %x)
  %r = bitcast <8 x bfloat> %y to <8 x i16>
  ret <8 x i16> %r
}}
define <16 x i16> @{_ROUND_FUNCTION}_16(<16 x float> %x) alwaysinline {{
  %y = call <16 x bfloat> @llvm.x86.avx512bf16.cvtneps2bf16.512(<16 x float> %x)
  %r = bitcast <16 x bfloat> %y to <16 x i16>
  ret <16 x i16> %r
}}
define <32 x i16> @{_ROUND_FUNCTION}_32(<32 x float> %x) alwaysinline {{
  %low = shufflevector <32 x float> %x, <32 x float> poison, <16 x i32> <{_lanes(0)}>
  %high = shufflevector <32 x float> %x, <32 x float> poison, <16 x i32> <{_lanes(16)}>
  %y = call <32 x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.512(<16 x float> %high, <16 x float> %low)
  %r = bitcast <32 x bfloat> %y to <32 x i16>
  ret <32 x i16> %r
}}
define <16 x i32> @{_PAIR_FUNCTION}(<16 x float> %low, <16 x float> %high) alwaysinline {{
  %y = call <32 x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.512(<16 x float> %high, <16 x float> %low)
  %z = shufflevector <32 x bfloat> %y, <32 x bfloat> poison, <32 x i32> <{_INTERLEAVED}>
  %r = bitcast <32 x bfloat> %z to <16 x i32>
  ret <16 x i32> %r
}}
define <16 x i32> @{_WORDS_FUNCTION}(<16 x float> %first, <16 x float> %second) alwaysinline {{
  %y = call <32 x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.512(<16 x float> %second, <16 x float> %first)
  %r = bitcast <32 x bfloat> %y to <16 x i32>
  ret <16 x i32> %r
}}
define i32 @{_LOAD_FUNCTION}(ptr %p) alwaysinline {{
  %r = load i32, ptr %p, align 2
  ret i32 %r
}}
"""
_INFINITY, _QUIET_NAN, _LEAST_NORMAL = 0x7F800000, 0x7FC00000, 0x00800000  # bits of float32
_CODE_OF_ZERO = 0x7F81  # of `ordered_code`
_PURE = 1  # TVM's CallEffectKind of an operator without side effects


def dot(total: Expr, a: Expr, b: Expr) -> Expr:
    """total + a0 * b0 + a1 * b1 for words (int32) a and b, by VDPBF16PS."""
    return Call(Op.get(_DOT), [total, a, b], ret_ty=PrimType("float32"))


def multiply_add_words(total: Expr, a: Expr, b: Expr) -> Expr:
    """The same by shifts and two FMAs, on any target."""
    return total + low(a) * low(b) + high(a) * high(b)


def multiplies_words(function: Any) -> bool:
    """Whether a kernel has dot products of words by VDPBF16PS."""
    instruction = Op.get(_DOT)

    def visit(call: Any) -> Any:
        return tvm_ffi.VisitInterrupt(True) if call.op.same_as(instruction) else None

    return tvm_ffi.structural_walk(function.body, (Call, visit)) is not None


def multiply_add_halves(total: Expr, a: tuple[Expr, Expr], b: Expr) -> Expr:
    """total + a0 * b0 + a1 * b1 for two float32 numbers a and a word b."""
    return total + a[0] * low(b) + a[1] * high(b)


def low(word: Expr) -> Expr:
    """The first number of a word (int32), as float32."""
    return tirx.reinterpret("float32", word << tirx.const(16, "int32"))


def high(word: Expr) -> Expr:
    """The second number of a word (int32), as float32."""
    return tirx.reinterpret("float32", word & tirx.const(-0x10000, "int32"))


def word_at(buffer: Buffer, offset: Expr) -> Expr:
    """The word of the elements `offset` and `offset + 1` of a buffer of 16 bits each, on a target with AVX512_BF16."""
    return tirx.call_pure_extern("int32", _LOAD_FUNCTION, tirx.address_of(buffer[offset]))


def word(first: Expr, second: Expr, name: Callable[[Expr], Expr]) -> Expr:
    """The word (int32) of two float32 numbers, rounded as by `rounded`."""
    low_half, high_half = (_rounded_bits(number, name) for number in (first, second))
    return tirx.reinterpret("int32", (low_half >> _u32(16)) | (high_half & _u32(0xFFFF0000)))


def instruction_word(first: Expr, second: Expr) -> Expr:
    """The same of numbers or vectors, by the instructions of AVX512_BF16; denormal numbers become zero."""
    return Call(Op.get(_PAIR), [first, second], ret_ty=PrimType(str(first.ty).replace("float32", "int32")))


def neighbour_words(first: Expr, second: Expr) -> Expr:
    """The words of neighbouring numbers in the concatenation of two vectors, rounded as by `instruction_word`."""
    lanes = first.ty.dtype.lanes
    if lanes == _PAIR_LANES:
        return tirx.call_pure_extern(f"int32x{lanes}", _WORDS_FUNCTION, first, second)
    even, odd = (tirx.Shuffle([first, second], list(range(begin, 2 * lanes, 2))) for begin in range(2))
    return instruction_word(even, odd)


def _rounded_bits(x: Expr, name: Callable[[Expr], Expr]) -> Expr:
    """Bits (uint32) of a float32, of which the high half is the nearest bfloat16."""
    bits = name(tirx.reinterpret("uint32", name(x)))
    is_nan = (bits & _u32(0x7FFFFFFF)) > _u32(_INFINITY)
    return name(tirx.Select(is_nan, _u32(_QUIET_NAN), bits + _u32(0x7FFF) + ((bits >> _u32(16)) & _u32(1))))


def _u32(value: int) -> Expr:
    return tirx.const(value, "uint32")


def rounded(x: Expr, name: Callable[[Expr], Expr], *, has_instruction: bool) -> Expr:
    """A float32 as bfloat16, to the nearest, ties to even. NaN stays NaN, which TVM's own Cast may make zero or infinite."""
    if has_instruction and not isinstance(x, tirx.FloatImm):  # of a literal TVM makes one for all lanes, which it cannot store
        return tirx.reinterpret("bfloat16", Call(Op.get(_ROUND), [name(x)], ret_ty=PrimType("uint16")))
    bits = name(tirx.reinterpret("int32", name(x)))
    is_nan = (bits & tirx.const(0x7FFFFFFF, "int32")) > tirx.const(_INFINITY, "int32")
    return tirx.Cast("bfloat16", tirx.reinterpret("float32", tirx.Select(is_nan, tirx.const(_QUIET_NAN, "int32"), bits)))


def ordered_code(x: Expr, name: Callable[[Expr], Expr]) -> Expr:
    """A bfloat16 as uint16 whose order is that of the numbers: -infinity is 0, and NaN of either sign are above all others."""
    bits = name(tirx.reinterpret("int16", x))
    ordered = name(tirx.reinterpret("uint16", bits ^ ((bits >> _i16(15)) & _i16(0x7FFF))))
    return name(ordered + tirx.const(_CODE_OF_ZERO, "uint16"))


def decoded(code: Expr, name: Callable[[Expr], Expr]) -> Expr:
    """The number (float32) of a code of `ordered_code`."""
    bits = name(tirx.reinterpret("int16", name(code - tirx.const(_CODE_OF_ZERO, "uint16"))))
    narrow = name(tirx.reinterpret("uint16", bits ^ ((bits >> _i16(15)) & _i16(0x7FFF))))
    return tirx.reinterpret("float32", name(tirx.Cast("uint32", narrow) << _u32(16)))


def _i16(value: int) -> Expr:
    return tirx.const(value, "int16")


def is_rounding(value: Expr) -> bool:
    """Whether a value is a Cast of a float32 to bfloat16 that knows nothing of NaN."""
    if not isinstance(value, tirx.Cast) or str(value.ty) != "bfloat16" or str(value.value.ty) != "float32":
        return False
    return not (isinstance(value.value, Call) and value.value.op.same_as(Op.get("tirx.reinterpret")))


def _lower_dot(call: Any) -> Expr:
    """TVM asks this for each multiply-add when its loops are vectors: whole registers have the instruction."""
    if call.ty.dtype.lanes != _DOT_LANES:
        return _emulated_vector(call)
    return tirx.call_pure_extern(call.ty, _DOT_FUNCTION, *call.args)


def _emulated_vector(call: Any) -> Expr:
    total, a, b = call.args
    number = _integers(call.ty.dtype.lanes)

    def halves(word: Expr) -> tuple[Expr, Expr]:
        return tirx.reinterpret(call.ty, word << number(16)), tirx.reinterpret(call.ty, word & number(-0x10000))

    (a_low, a_high), (b_low, b_high) = halves(a), halves(b)
    return total + a_low * b_low + a_high * b_high


def _lower_round(call: Any) -> Expr:
    """Whole registers have the instruction; other extents, of which there are few, do the same in integers."""
    (x,) = call.args
    lanes = call.ty.dtype.lanes
    if lanes in _ROUND_LANES:
        return tirx.call_pure_extern(call.ty, f"{_ROUND_FUNCTION}_{lanes}", x)
    return tirx.Cast(call.ty, _nearest(x, lanes))


def _lower_pair(call: Any) -> Expr:
    """As for rounding."""
    lanes = call.ty.dtype.lanes
    if lanes == _PAIR_LANES:
        return tirx.call_pure_extern(call.ty, _PAIR_FUNCTION, *call.args)
    first, second = (_nearest(x, lanes) for x in call.args)
    return first | (second << _integers(lanes)(16))


def _nearest(x: Expr, lanes: int) -> Expr:
    """The bits of the bfloat16 numbers nearest to float32, as int32, and as the instructions do it: zero for denormal numbers."""
    number = _integers(lanes)
    bits = tirx.reinterpret("int32" if lanes == 1 else f"int32x{lanes}", x)
    size = bits & number(0x7FFFFFFF)
    nearest = ((bits + number(0x7FFF) + ((bits >> number(16)) & number(1))) >> number(16)) & number(0xFFFF)
    signed_zero, quiet_nan = (bits >> number(16)) & number(0x8000), number(_QUIET_NAN >> 16)
    finite = tirx.Select(size < number(_LEAST_NORMAL), signed_zero, nearest)
    return tirx.Select(size > number(_INFINITY), quiet_nan, finite)


def _integers(lanes: int) -> Callable[[int], Expr]:
    """A function that makes int32 constants of so many lanes."""

    def number(value: int) -> Expr:
        return tirx.const(value, "int32") if lanes == 1 else tirx.Broadcast(tirx.const(value, "int32"), lanes)

    return number


_ffi_api.RegisterOp(_ROUND, "the bits of the bfloat16 number nearest to a float32")
register_op_attr(_ROUND, "TCallEffectKind", _PURE)
register_op_attr(_ROUND, "TVectorizable", True)
tirx.register_intrin_lowering(_ROUND, target="llvm", f=_lower_round)

_ffi_api.RegisterOp(_DOT, "s + a0 * b0 + a1 * b1, of words of two bfloat16 numbers")
register_op_attr(_DOT, "TCallEffectKind", _PURE)
register_op_attr(_DOT, "TVectorizable", True)
tirx.register_intrin_lowering(_DOT, target="llvm", f=_lower_dot)

_ffi_api.RegisterOp(_PAIR, "the word of the bfloat16 numbers nearest to two float32")
register_op_attr(_PAIR, "TCallEffectKind", _PURE)
register_op_attr(_PAIR, "TVectorizable", True)
tirx.register_intrin_lowering(_PAIR, target="llvm", f=_lower_pair)
