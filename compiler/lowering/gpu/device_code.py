"""All kernels of a program as one binary for a GPU, made on a machine that needs none."""

from __future__ import annotations

from collections.abc import Mapping

from ....kernels.codegen.grids import DeviceFunction
from ....kernels.template.contract import BuiltKernel
from ....runtime.plan import Grid
from ....runtime.target import Target
from .cuda_compiler import architecture_for, compile_cuda
from .device_module import cuda_source, function_symbol, wavefront_threads
from .rocm_compiler import compile_rocm, rocm_ir
from .simulator.library import simulated_library, simulated_rocm_library

_OPERATIONS_PER_THREAD = 20_000  # some 20 microseconds of one thread, if nothing else waits


def build_device_code(kernels: Mapping[str, DeviceFunction], target: Target) -> bytes:
    """A cubin or a code object with every function of the kernels, or a library of the simulator.

    Raises:
        CompileError: this machine has no compiler or linker for the target, or it failed.
    """
    if target.kind == "cuda":
        source = cuda_source(kernels, target)
        return simulated_library(source) if target.is_simulated else compile_cuda(source, architecture_for(source, target.level))
    if target.is_simulated:
        return simulated_rocm_library(rocm_ir(kernels, target), wavefront_threads(target))
    return compile_rocm(kernels, target).code_object


def few_threads(kernel: BuiltKernel) -> str:
    """What is slow about a kernel on a GPU: so few threads that each has much to do. Empty where nothing is."""
    if not isinstance(kernel.function, DeviceFunction):
        return ""
    threads = max((one.blocks * one.threads for one in kernel.function.launches), default=1)
    if kernel.flops <= _OPERATIONS_PER_THREAD * threads:
        return ""
    return f"{kernel.template} for {kernel.flops / 1e6:.1f} MFLOP in grids of at most {threads} threads"


def grids_of(symbol: str, function: object) -> tuple[Grid, ...]:
    """The launches of a kernel as the Plan tells them; none where it is a function of the host."""
    if not isinstance(function, DeviceFunction):
        return ()
    return tuple(
        Grid(
            function_symbol(symbol, one.function),
            one.blocks,
            one.threads,
            one.scalars,
            one.shared_bytes,
            one.maps,
            one.is_cooperative,
        )
        for one in function.launches
    )
