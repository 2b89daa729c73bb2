"""Comparison masks of vectors as integers (movmskps), to visit only the lanes that are set.

TVM cannot turn a vector of booleans into an integer, so functions of LLVM IR do; they are inlined.
"""

from __future__ import annotations

from tvm import tirx

from .builder import Buffer, Expr, KernelBuilder

_FIRST_BIT = "prefuse_first_bit"


def _not_above(lanes: int, bits: int) -> str:
    return f"""
define linkonce_odr i32 @prefuse_not_above_{lanes}_{bits}(ptr %p, i{bits} %bound) alwaysinline {{
  %keys = load <{lanes} x i{bits}>, ptr %p, align {bits // 8}
  %one = insertelement <{lanes} x i{bits}> poison, i{bits} %bound, i32 0
  %all = shufflevector <{lanes} x i{bits}> %one, <{lanes} x i{bits}> poison, <{lanes} x i32> zeroinitializer
  %wanted = icmp sle <{lanes} x i{bits}> %keys, %all
  %mask = bitcast <{lanes} x i1> %wanted to i{lanes}
  %r = zext i{lanes} %mask to i32
  ret i32 %r
}}"""


LLVM_FUNCTIONS = f"""
declare i32 @llvm.cttz.i32(i32, i1)
define linkonce_odr i32 @{_FIRST_BIT}(i32 %mask) alwaysinline {{
  %r = call i32 @llvm.cttz.i32(i32 %mask, i1 true)
  ret i32 %r
}}
{"".join(_not_above(lanes, bits) for lanes, bits in ((4, 64), (8, 64), (8, 32), (16, 32)))}
"""


def lanes_not_above(builder: KernelBuilder, keys: Buffer, bound: Expr) -> Expr:
    """The bits, an int32, of the lanes of `keys`, one vector of int32 or int64, that are not above `bound`; lane 0 is bit 0."""
    kind = str(keys.dtype)
    name = f"prefuse_not_above_{builder.lanes(kind)}_{kind.removeprefix('int')}"
    return tirx.call_extern("int32", name, tirx.address_of(keys[0]), bound)


def first_lane(mask: Expr) -> Expr:
    """The least lane in a mask that has one."""
    return tirx.call_pure_extern("int32", _FIRST_BIT, mask)
