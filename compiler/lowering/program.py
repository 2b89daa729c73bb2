"""From a planned Plan and its kernels to one native library with one host function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import Call, GlobalVar, PrimType

from ...runtime.cpu_device import MAIN, PROFILE, STAMP_BYTES
from ...runtime.plan import Copy, Launch, Plan, Region, Role
from ...runtime.target import Target
from .gpu.device_code import build_device_code
from .native import compile_module, link_library

_STEPS_PER_FUNCTION = 256  # LLVM's time on one straight-line function grows faster than its length
_CLOCK_MONOTONIC = 1  # of Linux: the clock that Python's time.perf_counter_ns reads


def build_library(plan: Plan, functions: Mapping[str, Any], target: Target, *, profile: bool = False) -> bytes:
    """Compile the kernels, and `prefuse_main(arena, constants, *plan.parameters)` of int64 addresses, which calls them in order.

    With `profile`, also `prefuse_profile(arena, constants, *plan.parameters, stamps)`, which in addition stores the clock at the
    beginning and after each step: a timespec each, two int64 (seconds and nanoseconds). Without, there is no code for it.

    For a GPU, a binary of the kernels alone: its device launches them.

    Args:
        functions: the PrimFunc of each kernel symbol in the plan, a DeviceFunction for a GPU.
    """
    if target.is_gpu:
        return build_device_code(functions, target)
    kernels = {symbol: GlobalVar(symbol) for symbol in functions}
    module = {kernels[symbol]: function for symbol, function in functions.items()}
    names = ["arena", "constants", *plan.parameters]
    parts: list[Any] = []
    for begin in range(0, max(len(plan.steps), 1), _STEPS_PER_FUNCTION):
        parameters = _parameters(len(names) + profile)
        addresses = _Addresses(plan, dict(zip(names, parameters, strict=False)))
        body = [tirx.Evaluate(tirx.const(0, "int32"))]
        if profile and begin == 0:
            body.append(_stamp(parameters[-1], 0))
        for number, step in enumerate(plan.steps[begin : begin + _STEPS_PER_FUNCTION], begin):
            body.append(_statement(step, addresses, kernels, functions))
            if profile:
                body.append(_stamp(parameters[-1], number + 1))
        name = GlobalVar(f"prefuse_part{len(parts)}")
        function = tirx.PrimFunc(
            parameters, tirx.SeqStmt([*body, tirx.Return(tirx.const(0, "int32"))]), ret_type=PrimType("int32")
        )
        module[name] = function.with_attr("s_tir", True)
        parts.append(name)
    given = _parameters(len(names))
    no_stamps = [tirx.const(0, "int64")] if profile else []
    module[GlobalVar(MAIN)] = _entry(MAIN, given, parts, (*given, *no_stamps))
    if profile:
        given = _parameters(len(names) + 1)
        module[GlobalVar(PROFILE)] = _entry(PROFILE, given, parts, given)
    return link_library(compile_module(tvm.IRModule(module), target))


def _parameters(count: int) -> list[Any]:
    return [tirx.Var(f"a{i}", "int64") for i in range(count)]


def _entry(name: str, parameters: Sequence[Any], parts: Sequence[Any], arguments: Sequence[Any]) -> Any:
    """A public function that calls the parts of the host function one after the other."""
    calls = [tirx.Evaluate(Call(part, arguments, ret_ty=PrimType("int32"))) for part in parts]
    function = tirx.PrimFunc(parameters, calls[0] if len(calls) == 1 else tirx.SeqStmt(calls))
    return function.with_attr("global_symbol", name).with_attr("s_tir", True)


def _stamp(stamps: Any, number: int) -> Any:
    """Store the clock as the timespec of this number, where the caller wants any."""
    place = tirx.reinterpret("handle", stamps + tirx.const(number * STAMP_BYTES, "int64"))
    read = tirx.call_extern("int32", "clock_gettime", tirx.const(_CLOCK_MONOTONIC, "int32"), place)
    return tirx.IfThenElse(stamps != tirx.const(0, "int64"), tirx.Evaluate(read), None)


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
