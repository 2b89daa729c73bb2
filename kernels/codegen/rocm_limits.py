"""What AMD GPUs do not run: grids of too many threads, and functions that TVM's code generator for them lacks.

The functions were found by compiling every pointwise operator in every type. The LLVM of the wheel comes without AMD's device
library. Some end in an undefined symbol, those of float64 abort the process, so kernels that need them are refused before they
are compiled.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm.ir import Call

from .grids import GRID_BARRIER, SAME_ADDRESS, DeviceFunction

_IN_FLOAT32 = frozenset(["cos", "erf", "exp", "exp2", "log", "log10", "log2", "pow", "sigmoid", "sin", "tanh"])
_INVERSE = frozenset(["acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh"])
_NOWHERE = _INVERSE | {"copysign", "cosh", "exp10", "fmod", "hypot", "ldexp", "log1p", "nextafter", "sinh", "tan"}
_EXTERNAL = ("call_extern", "call_pure_extern")
_GRID_THREADS = 2**32  # that a dispatch cannot count


def rocm_obstacle(device: DeviceFunction) -> str:
    """Why AMD GPUs cannot run a kernel: the size of a grid, or the functions that it calls and they lack; empty if they can."""
    if large := [one for one in device.launches if one.blocks * one.threads >= _GRID_THREADS]:
        return f"AMD GPUs run no {large[0].blocks} blocks of {large[0].threads} threads"
    missing = _missing_functions(device)
    return f"AMD GPUs have no {', '.join(missing)} in TVM" if missing else ""


def _missing_functions(device: DeviceFunction) -> dict[str, None]:
    missing: dict[str, None] = {}

    def visit(call: Any) -> None:
        name = str(getattr(call.op, "name", "")).removeprefix("tirx.")
        dtype = str(call.ty)
        if name in _EXTERNAL and call.args[0].value in (GRID_BARRIER, SAME_ADDRESS):
            return  # of the helper that is linked into every module
        if name in _EXTERNAL:
            missing[f"{call.args[0].value} of {dtype}"] = None
        elif name in _NOWHERE or (name in _IN_FLOAT32 and dtype != "float32"):
            missing[f"{name} of {dtype}"] = None

    for function in device.functions:
        tvm_ffi.structural_walk(function.body, (Call, visit))
    return missing
