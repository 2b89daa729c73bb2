"""From a planned Plan and its kernels to one native library with one host function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import Call, GlobalVar, PointerType, PrimType

from ...runtime.cpu_device import CLOCK_WORDS, MAIN, PROFILE
from ...runtime.plan import Copy, Launch, Plan, Region, Role
from ...runtime.target import Target
from .gpu.device_code import build_device_code
from .native import compile_module, link_library

_STEPS_PER_FUNCTION = 256  # LLVM's time on one straight-line function grows faster than its length
_CLOCK_MONOTONIC = 1  # of Linux: the clock that Python's time.perf_counter_ns reads


def build_library(plan: Plan, functions: Mapping[str, Any], target: Target, *, profile: bool = False) -> bytes:
    """Compile the kernels, and `prefuse_main(arena, constants, *plan.parameters)` of int64 addresses, which calls them in order.

    With `profile`, also `prefuse_profile(arena, constants, *plan.parameters, stamps)`, which in addition fills an int64 array:
    the clock at the beginning (seconds and nanoseconds), then the processor's time stamp counter there and after each step.
    Reading the counter takes a few nanoseconds, the clock several times that. Without `profile`, there is no code for it.

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
        steps = [_statement(step, addresses, kernels, functions) for step in plan.steps[begin : begin + _STEPS_PER_FUNCTION]]
        body = _Stamps(parameters[-1]).between(steps, begin) if profile else steps
        name = GlobalVar(f"prefuse_part{len(parts)}")
        function = tirx.PrimFunc(
            parameters,
            tirx.SeqStmt([tirx.Evaluate(tirx.const(0, "int32")), *body, tirx.Return(tirx.const(0, "int32"))]),
            ret_type=PrimType("int32"),
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


class _Stamps:
    """Statements that store the time into the array at an address, where that is not 0."""

    def __init__(self, address: Any) -> None:
        self._is_wanted = address != tirx.const(0, "int64")
        self._pointer = tirx.Var("stamps", PointerType(PrimType("int64")))
        self._array = tirx.decl_buffer((1,), "int64", name="times", layout=None)
        self._head = [
            tirx.Bind(self._pointer, tirx.reinterpret(self._pointer.ty, address)),
            tirx.DeclBuffer(self._array, data=self._pointer),
        ]

    def between(self, steps: Sequence[Any], begin: int) -> list[Any]:
        """The steps from number `begin` on, each with the counter after it; before the first of all, clock and counter."""
        body = [*self._head]
        if begin == 0:
            clock = tirx.const(_CLOCK_MONOTONIC, "int32")
            read = tirx.call_extern("int32", "clock_gettime", clock, tirx.reinterpret("handle", self._pointer))
            body += [tirx.IfThenElse(self._is_wanted, tirx.Evaluate(read), None), self._count(0)]
        for number, step in enumerate(steps, begin + 1):
            body += [step, self._count(number)]
        return body

    def _count(self, number: int) -> Any:
        counter = tirx.call_llvm_intrin("int64", "llvm.readcyclecounter")
        store = tirx.BufferStore(self._array, counter, [tirx.const(CLOCK_WORDS + number, "int32")])
        return tirx.IfThenElse(self._is_wanted, store, None)


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
