"""The functions of `bfloat16.LLVM_FUNCTIONS` without AVX512_BF16, bit for bit as Intel's manual has its instructions.

VDPBF16PS adds the product of the high halves to the sum, then that of the low ones, each by one fused multiply-add; denormal
operands and results are zeros of their sign. Which of several NaNs comes out is not imitated: their order is that of the machine.
VCVTNEPS2BF16 rounds to the nearest, ties to even, makes zeros of denormal numbers, and NaN quiet.
"""

from __future__ import annotations


def _vector(value: int, lanes: int) -> str:
    """A constant with this value in all its lanes."""
    return "<" + ", ".join([f"i32 {value}"] * lanes) + ">"


def _lanes(*order: int) -> str:
    return "<" + ", ".join(f"i32 {lane}" for lane in order) + ">"


_SIGN, _EXPONENT, _MAGNITUDE = -(2**31), 0x7F800000, 0x7FFFFFFF  # masks of the bits of a float32


def _round_function(lanes: int) -> str:
    vector = f"<{lanes} x i32>"
    return f"""
define <{lanes} x i16> @prefuse_bfloat16_round_{lanes}(<{lanes} x float> %x) alwaysinline {{
  %bits = bitcast <{lanes} x float> %x to {vector}
  %high = lshr {vector} %bits, {_vector(16, lanes)}
  %odd = and {vector} %high, {_vector(1, lanes)}
  %half = add {vector} %bits, {_vector(0x7FFF, lanes)}
  %up = add {vector} %half, %odd
  %nearest = lshr {vector} %up, {_vector(16, lanes)}
  %magnitude = and {vector} %bits, {_vector(_MAGNITUDE, lanes)}
  %isdenormal = icmp ult {vector} %magnitude, {_vector(0x00800000, lanes)}
  %zero = and {vector} %high, {_vector(0x8000, lanes)}
  %finite = select <{lanes} x i1> %isdenormal, {vector} %zero, {vector} %nearest
  %isnan = icmp ugt {vector} %magnitude, {_vector(_EXPONENT, lanes)}
  %quiet = or {vector} %high, {_vector(0x40, lanes)}
  %code = select <{lanes} x i1> %isnan, {vector} %quiet, {vector} %finite
  %r = trunc {vector} %code to <{lanes} x i16>
  ret <{lanes} x i16> %r
}}"""


def _two_vectors_function(name: str, order: tuple[int, ...]) -> str:
    """A function that rounds two vectors and puts the numbers in this order."""
    return f"""
define <16 x i32> @{name}(<16 x float> %first, <16 x float> %second) alwaysinline {{
  %x = call <16 x i16> @prefuse_bfloat16_round_16(<16 x float> %first)
  %y = call <16 x i16> @prefuse_bfloat16_round_16(<16 x float> %second)
  %z = shufflevector <16 x i16> %x, <16 x i16> %y, <32 x i32> {_lanes(*order)}
  %r = bitcast <32 x i16> %z to <16 x i32>
  ret <16 x i32> %r
}}"""


def _multiply_add(sums: str, half: str, result: str) -> str:
    """A fused multiply-add of the halves of words, whose operands and result are flushed."""
    shift = "and <16 x i32> %{0}, " + _vector(-0x10000, 16) if half == "high" else "shl <16 x i32> %{0}, " + _vector(16, 16)
    return f"""
  %a{half}bits = {shift.format("a")}
  %b{half}bits = {shift.format("b")}
  %a{half} = call <16 x float> @prefuse_bfloat16_flushed(<16 x i32> %a{half}bits)
  %b{half} = call <16 x float> @prefuse_bfloat16_flushed(<16 x i32> %b{half}bits)
  %{half} = call <16 x float> @llvm.fma.v16f32(<16 x float> %a{half}, <16 x float> %b{half}, <16 x float> {sums})
  %{half}bits = bitcast <16 x float> %{half} to <16 x i32>
  {result} = call <16 x float> @prefuse_bfloat16_flushed(<16 x i32> %{half}bits)"""


LLVM_FUNCTIONS = f"""
define <16 x float> @prefuse_bfloat16_flushed(<16 x i32> %bits) alwaysinline {{
  %exponent = and <16 x i32> %bits, {_vector(_EXPONENT, 16)}
  %isdenormal = icmp eq <16 x i32> %exponent, zeroinitializer
  %zero = and <16 x i32> %bits, {_vector(_SIGN, 16)}
  %flushed = select <16 x i1> %isdenormal, <16 x i32> %zero, <16 x i32> %bits
  %r = bitcast <16 x i32> %flushed to <16 x float>
  ret <16 x float> %r
}}
define <16 x float> @prefuse_bfloat16_dot(<16 x float> %sums, <16 x i32> %a, <16 x i32> %b) alwaysinline {{
  %sumbits = bitcast <16 x float> %sums to <16 x i32>
  %before = call <16 x float> @prefuse_bfloat16_flushed(<16 x i32> %sumbits)
{_multiply_add("%before", "high", "%between")}
{_multiply_add("%between", "low", "%r")}
  ret <16 x float> %r
}}
{"".join(map(_round_function, (8, 16, 32)))}
{_two_vectors_function("prefuse_bfloat16_pair", tuple(i // 2 + i % 2 * 16 for i in range(32)))}
{_two_vectors_function("prefuse_bfloat16_words", tuple(range(32)))}
define i32 @prefuse_bfloat16_load(ptr %p) alwaysinline {{
  %r = load i32, ptr %p, align 2
  ret i32 %r
}}
"""
