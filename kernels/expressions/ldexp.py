"""ldexp: numbers times powers of two. One instruction of AVX-512 (VSCALEFPS), which rounds once where results are denormal.

TVM has no such operator: it is one of ours, lowered once loops are vectors (`LLVM_FUNCTIONS`).
"""

from __future__ import annotations

from typing import Any, TypeAlias

from tvm import tirx
from tvm.ir import Call, Op, PrimType, _ffi_api, register_op_attr
from tvm.target import Target

Expr: TypeAlias = Any  # as in builder

_SCALE, _SCALE_NORMAL = "tirx.prefuse_scale", "tirx.prefuse_scale_normal"
_FUNCTION, _LANES_OF_FUNCTIONS = "prefuse_scale", (8, 16, 32)
_PURE = 1  # TVM's CallEffectKind of an operator without side effects


def scaled(number: Expr, exponent: Expr) -> Expr:
    """number * 2**exponent of float32: |number| in [1/2, 2) or NaN, the exponent a whole number from -150 to 128 or NaN."""
    return Call(Op.get(_SCALE), [number, exponent], ret_ty=PrimType("float32"))


def scaled_normal(number: Expr, exponent: Expr) -> Expr:
    """The same in fewer steps where there is no instruction for it: the result is a normal number, or the exponent 0."""
    return Call(Op.get(_SCALE_NORMAL), [number, exponent], ret_ty=PrimType("float32"))


def _vector_function(bits: int) -> str:
    lanes = bits // 32
    vector, mask = f"<{lanes} x float>", f"i{lanes}"
    rounding = ", i32 4" if bits == 512 else ""  # the rounding mode of MXCSR
    return f"""
define linkonce_odr {vector} @{_FUNCTION}_{lanes}({vector} %x, {vector} %n) alwaysinline {{
  %r = call {vector} @llvm.x86.avx512.mask.scalef.ps.{bits}({vector} %x, {vector} %n, {vector} poison, {mask} -1{rounding})
  ret {vector} %r
}}"""


def _half(operand: str, half: int) -> str:
    lanes = ", ".join(f"i32 {lane}" for lane in range(16 * half, 16 * half + 16))
    return f"%{operand}{half} = shufflevector <32 x float> %{operand}, <32 x float> poison, <16 x i32> <{lanes}>"


LLVM_FUNCTIONS = f"""{_vector_function(256)}{_vector_function(512)}
define linkonce_odr <32 x float> @{_FUNCTION}_32(<32 x float> %x, <32 x float> %n) alwaysinline {{
  {_half("x", 0)}
  {_half("x", 1)}
  {_half("n", 0)}
  {_half("n", 1)}
  %low = call <16 x float> @{_FUNCTION}_16(<16 x float> %x0, <16 x float> %n0)
  %high = call <16 x float> @{_FUNCTION}_16(<16 x float> %x1, <16 x float> %n1)
  %r = shufflevector <16 x float> %low, <16 x float> %high, <32 x i32> <{", ".join(f"i32 {lane}" for lane in range(32))}>
  ret <32 x float> %r
}}
"""


def _lower(call: Any) -> Expr:
    """TVM asks this for each call when its loops are vectors: whole registers of AVX-512 have the instruction."""
    target = Target.current(allow_none=True)
    lanes = call.ty.dtype.lanes
    if target is not None and target.attrs.get("mcpu") == "x86-64-v4" and lanes in _LANES_OF_FUNCTIONS:
        return tirx.call_pure_extern(call.ty, f"{_FUNCTION}_{lanes}", *call.args)
    integers = "int32" if lanes == 1 else f"int32x{lanes}"

    def number(value: int) -> Expr:
        return tirx.const(value, "int32") if lanes == 1 else tirx.Broadcast(tirx.const(value, "int32"), lanes)

    def with_exponent(x: Expr, n: Expr) -> Expr:
        return tirx.reinterpret(call.ty, tirx.reinterpret(integers, x) + (n << number(23)))

    x, exponent = call.args[0], tirx.Cast(integers, call.args[1])
    if call.op.same_as(Op.get(_SCALE_NORMAL)):
        return with_exponent(x, exponent)
    half = exponent >> number(1)  # 2**exponent itself may be no normal number
    power = tirx.reinterpret(call.ty, (exponent - half + number(127)) << number(23))
    return tirx.Select(tirx.isnan(x), x, with_exponent(x, half) * power)


def _lower_for_cuda(call: Any) -> Expr:
    """By CUDA's ldexpf: TVM's C code reinterprets integers by their address, which the expressions above do not have."""
    x, exponent = call.args
    return tirx.call_pure_extern("float32", "ldexpf", x, tirx.Cast("int32", exponent))


for _name in (_SCALE, _SCALE_NORMAL):
    _ffi_api.RegisterOp(_name, "x * 2**n")
    register_op_attr(_name, "TCallEffectKind", _PURE)
    register_op_attr(_name, "TVectorizable", True)
    for _kind in ("llvm", "rocm"):
        tirx.register_intrin_lowering(_name, target=_kind, f=_lower)
    tirx.register_intrin_lowering(_name, target="cuda", f=_lower_for_cuda)
