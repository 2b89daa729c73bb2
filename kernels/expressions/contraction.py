"""Values that LLVM takes into no FMA. It contracts a product and the sum that reads it where it sees both (-ffp-contract=fast):
micro-kernels rely on that. Between operators it would make results depend on which ones share a kernel.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from tvm import tirx
from tvm.ir import Call, Op, PrimType, _ffi_api, register_op_attr

Expr: TypeAlias = Any  # as in builder

_APART = "tirx.prefuse_rounded_apart"
_PURE = 1  # TVM's CallEffectKind of an operator without side effects
_FENCE = "llvm.arithmetic.fence"
CONTRACTED = ("float32", "float64")


def rounded_apart(value: Expr) -> Expr:
    """A value of a CPU's kernel, of a type in CONTRACTED, that is rounded by itself, not with a sum that it is added to.

    So the values of a group are the bits of its operators one by one, whatever they are fused with: where a memory limit cuts a
    weight, its program has other groups, and the same results. It costs no instruction but the one that an FMA saves.
    """
    return Call(Op.get(_APART), [value], ret_ty=PrimType(str(value.ty)))


def _lower(call: Any) -> Expr:
    """TVM asks this for each call when its loops are vectors; it would leave loops alone that have the intrinsic before."""
    return tirx.call_llvm_pure_intrin(call.ty, _FENCE, *call.args)


_ffi_api.RegisterOp(_APART, "x, not to be contracted")
register_op_attr(_APART, "TCallEffectKind", _PURE)
register_op_attr(_APART, "TVectorizable", True)
tirx.register_intrin_lowering(_APART, target="llvm", f=_lower)
