"""From a planned Plan and its kernels to one native library with one host function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import Call, GlobalVar, PrimType

from ...runtime.cpu_device import MAIN
from ...runtime.plan import Copy, Launch, Plan, Region, Role
from ...runtime.target import Target
from .gpu.device_code import build_device_code
from .native import compile_module, link_library

_STEPS_PER_FUNCTION = 256  # LLVM's time on one straight-line function grows faster than its length


def build_library(plan: Plan, functions: Mapping[str, Any], target: Target) -> bytes:
    """Compile the kernels, and `prefuse_main(arena, constants, *plan.parameters)` of int64 addresses, which calls them in order.

    For a GPU, a binary of the kernels alone: its device launches them.

    Args:
        functions: the PrimFunc of each kernel symbol in the plan, a DeviceFunction for a GPU.
    """
    if target.is_gpu:
        return build_device_code(functions, target)
    kernels = {symbol: GlobalVar(symbol) for symbol in functions}
    module = {kernels[symbol]: function for symbol, function in functions.items()}
    names = ["arena", "constants", *plan.parameters]
    main_parameters = [tirx.Var(f"a{i}", "int64") for i in range(len(names))]
    calls: list[Any] = []
    for part, begin in enumerate(range(0, max(len(plan.steps), 1), _STEPS_PER_FUNCTION)):
        parameters = [tirx.Var(f"a{i}", "int64") for i in range(len(names))]
        addresses = _Addresses(plan, dict(zip(names, parameters, strict=True)))
        steps = plan.steps[begin : begin + _STEPS_PER_FUNCTION]
        body = [tirx.Evaluate(tirx.const(0, "int32")), *(_statement(step, addresses, kernels, functions) for step in steps)]
        name = GlobalVar(f"prefuse_part{part}")
        function = tirx.PrimFunc(
            parameters, tirx.SeqStmt([*body, tirx.Return(tirx.const(0, "int32"))]), ret_type=PrimType("int32")
        )
        module[name] = function.with_attr("s_tir", True)
        calls.append(tirx.Evaluate(Call(name, main_parameters, ret_ty=PrimType("int32"))))
    main = tirx.PrimFunc(main_parameters, calls[0] if len(calls) == 1 else tirx.SeqStmt(calls))
    module[GlobalVar(MAIN)] = main.with_attr("global_symbol", MAIN).with_attr("s_tir", True)
    return link_library(compile_module(tvm.IRModule(module), target))


class _Addresses:
    """Where each region of the plan begins, as an expression over the host function's parameters."""

    def __init__(self, plan: Plan, parameters: Mapping[str, Any]) -> None:
        self.buffers = {buffer.name: buffer for buffer in plan.buffers}
        self.parameters = parameters

    def of(self, region: Region) -> Any:
        buffer = self.buffers[region.buffer]
        if buffer.role in (Role.INPUT, Role.OUTPUT):
            return self.parameters[buffer.name] + tirx.const(region.offset, "int64")
        assert buffer.offset is not None, f"buffer {buffer.name} has no place"
        return self.parameters[buffer.space] + tirx.const(buffer.offset + region.offset, "int64")


def _statement(step: object, addresses: _Addresses, kernels: Mapping[str, Any], functions: Mapping[str, Any]) -> Any:
    match step:
        case Launch():
            pointers = functions[step.kernel].params
            regions = (*step.reads, *step.writes, *step.scratch)
            arguments = [tirx.reinterpret(p.ty, addresses.of(r)) for p, r in zip(pointers, regions, strict=True)]
            return tirx.Evaluate(Call(kernels[step.kernel], arguments, ret_ty=PrimType("int32")))
        case Copy():
            pair = [tirx.reinterpret("handle", addresses.of(region)) for region in (step.destination, step.source)]
            return tirx.Evaluate(tirx.call_extern("handle", "memcpy", *pair, tirx.const(step.source.size_bytes, "int64")))
        case _:
            raise AssertionError(f"a program for the CPU has no step {type(step).__name__}")
