"""From the grids of a program's kernels to TIR that TVM's generators for GPUs take, and CUDA C."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import tirx
from tvm.ir import CallingConv

from ....kernels.codegen.grids import BLOCK_THREADS, GRID_BARRIER, SAME_ADDRESS, DeviceFunction
from ....runtime.target import Target

_KERNEL = 'extern "C" __global__'
# What NVRTC, which has no cuda.h, needs of it: a type of kernels' arguments.
_TENSOR_MAP = """#ifdef __CUDACC_RTC__
struct alignas(64) CUtensorMap { unsigned long long opaque[16]; };
#endif
"""
_BOUNDS = re.compile(r"( void __launch_bounds__\(\d+)\) (\w+)\(")
_DEALS = "setmaxnreg"
_CUDA_HELPER = Path(__file__).with_name("cuda_helper.cuh")
_SHARED_BYTES = {"cuda": 48 * 1024, "rocm": 64 * 1024}  # of one block, without asking for more


def function_symbol(kernel: str, number: int) -> str:
    """Name of one function of a kernel in the device code."""
    return f"{kernel}_{number}"


def device_target(target: Target) -> Any:
    """TVM's description of the GPU, which must not ask a driver for anything."""
    limits = {
        "max_num_threads": BLOCK_THREADS,
        "max_threads_per_block": BLOCK_THREADS,
        "max_shared_memory_per_block": _SHARED_BYTES[target.kind],
    }
    if target.kind == "cuda":
        return tvm.target.Target({"kind": "cuda", "arch": target.level, "thread_warp_size": 32, **limits})
    description = {
        "kind": "rocm",
        "mcpu": target.level,
        "mtriple": "amdgcn-amd-amdhsa-hcc",
        "thread_warp_size": wavefront_threads(target),
    }
    return tvm.target.Target({**description, **limits})


def wavefront_threads(target: Target) -> int:
    """Threads that run in lockstep: 32 on NVIDIA's GPUs and AMD's RDNA, 64 on AMD's GCN and CDNA."""
    return 64 if target.kind == "rocm" and not target.level.startswith(("gfx10", "gfx11", "gfx12")) else 32


def device_module(kernels: Mapping[str, DeviceFunction], target: Target) -> Any:
    """An IRModule of the kernels' functions, each a device kernel under its `function_symbol`, lowered for the code generator."""
    native = device_target(target)
    functions = {}
    for kernel, device in kernels.items():
        for number, function in enumerate(device.functions):
            symbol = function_symbol(kernel, number)
            attributes = {
                "global_symbol": symbol,
                "target": native,
                "calling_conv": int(CallingConv.DEVICE_KERNEL_LAUNCH),
                "tirx.is_global_func": True,
            }
            functions[symbol] = function.with_attr(attributes)
    passes = tirx.transform
    pipeline = [
        passes.FlattenBuffer(),
        passes.BF16ComputeLegalize(),
        passes.NarrowDataType(32),
        passes.VectorizeLoop(),
        passes.UnrollLoop(),
        passes.StmtSimplify(),
        passes.RemoveNoOp(),
        passes.FP8ComputeLegalize(),
        passes.FP8StorageLegalize(),
        passes.BF16StorageLegalize(),
        passes.LowerIntrin(),
    ]
    return tvm.ir.transform.Sequential(pipeline)(tvm.IRModule(functions))


def cuda_source(kernels: Mapping[str, DeviceFunction], target: Target) -> str:
    """The CUDA C of all kernels."""
    native = device_target(target)
    with native:
        module = tvm.get_global_func("target.build.cuda")(device_module(kernels, target), native)
    source = str(module.inspect_source())
    is_helped = GRID_BARRIER in source or SAME_ADDRESS in source
    source = _bounded(source.replace(_KERNEL, _CUDA_HELPER.read_text() + _KERNEL, 1) if is_helped else source)
    return _TENSOR_MAP + source if "CUtensorMap" in source else source


def _bounded(source: str) -> str:
    """Kernels that deal registers to their warpgroups begin with what one block a multiprocessor leaves each thread, as ptxas
    must know."""
    kernels = (one for one in source.split(_KERNEL)[1:] if _DEALS in one)
    names = {found[2] for one in kernels if (found := _BOUNDS.match(one))}
    return _BOUNDS.sub(lambda found: f"{found[1]}, 1) {found[2]}(" if found[2] in names else found[0], source)


def _lower_reinterpret(call: Any) -> Any:
    """The bits of a literal as the number that they are: TVM's C code would take the address of the literal.

    Of 32 bits alone; what is wider or narrower TVM gives a name first. The passes that would compute with the number are over.
    """
    (bits,) = call.args
    if not isinstance(bits, tirx.IntImm) or call.ty.dtype != "float32":
        return call
    return tirx.const(np.array(bits.value & 0xFFFFFFFF, np.uint32).view(np.float32).item(), "float32")


tirx.register_intrin_lowering("tirx.reinterpret", target="cuda", f=_lower_reinterpret)
