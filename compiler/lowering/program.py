"""From a planned Plan and its kernels to one native library with one host function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import Call, GlobalVar, PointerType, PrimType

from ...runtime.cpu_device import CLOCK_WORDS, MAIN, PROFILE
from ...runtime.plan import COMPUTE, EVENTS, SHARED, Copy, Launch, Plan, Record, Region, Role, Wait
from ...runtime.streaming.events import EVENT_BYTES
from ...runtime.streams import waits_of
from ...runtime.target import Target
from .gpu.device_code import build_device_code
from .kernel_objects import KernelObjects
from .native import C_CONVENTION, compile_module, link_library

_STEPS_PER_FUNCTION = 256  # LLVM's time on one straight-line function grows faster than its length
_CLOCK_MONOTONIC = 1  # of Linux: the clock that Python's time.perf_counter_ns reads


def build_library(
    plan: Plan,
    functions: Mapping[str, Any],
    target: Target,
    *,
    profile: bool = False,
    objects: KernelObjects | None = None,
) -> bytes:
    """Compile the kernels, and the host function that calls them in order: in C, `void prefuse_main(const int64_t *addresses)`.

    The addresses are those of `plan.memories`, `plan.shared` and `plan.parameters`. It runs the kernels' stream; what other
    streams do, the device sees to, and the two meet in semaphores. With `profile`, there is also `prefuse_profile`,
    which takes the address of an int64 array after them and fills that: the clock at the beginning (seconds and nanoseconds),
    then the processor's time stamp counter there and after each step. Reading the counter takes a few nanoseconds, the clock
    several times that. Without `profile`, there is no code for it.

    For a GPU, a binary of the kernels alone: its device launches them.

    Args:
        functions: the PrimFunc of each kernel symbol in the plan, a DeviceFunction for a GPU.
        objects: who has the code of kernels that were compiled before; without, all are compiled together.
    """
    if target.is_gpu:
        return build_device_code(functions, target)
    apart, linked = ({}, []) if objects is None else objects.find(functions, target)
    kernels = {symbol: GlobalVar(symbol) for symbol in functions if symbol not in apart}
    module = {variable: functions[symbol] for symbol, variable in kernels.items()}
    callees = {**kernels, **apart}
    parts: list[Any] = []
    for begin in range(0, max(len(plan.steps), 1), _STEPS_PER_FUNCTION):
        table, stamps = _Table(), tirx.Var("stamps", "int64")
        addresses = _Addresses(plan, table)
        chosen = range(begin, min(begin + _STEPS_PER_FUNCTION, len(plan.steps)))
        steps = [_statement(plan, number, addresses, callees, functions) for number in chosen]
        body = _Stamps(stamps).between(steps, begin) if profile else steps
        name = GlobalVar(f"prefuse_part{len(parts)}")
        function = tirx.PrimFunc(
            [table.pointer, stamps],
            tirx.SeqStmt([table.declaration, *addresses.loads, *body, tirx.Return(tirx.const(0, "int32"))]),
            ret_type=PrimType("int32"),
        )
        module[name] = function.with_attr("s_tir", True)
        parts.append(name)
    module[GlobalVar(MAIN)] = _entry(MAIN, parts)
    if profile:
        behind = len(plan.memories) + len(plan.shared) + len(plan.parameters)
        module[GlobalVar(PROFILE)] = _entry(PROFILE, parts, behind)
    return link_library(compile_module(tvm.IRModule(module), target), target, linked)


class _Table:
    """The array of addresses that the host function is given."""

    def __init__(self) -> None:
        self.pointer = tirx.Var("addresses", PointerType(PrimType("int64")))
        self._array = tirx.decl_buffer((1,), "int64", name="table", layout=None)
        self.declaration = tirx.DeclBuffer(self._array, data=self.pointer)

    def __getitem__(self, number: int) -> Any:
        return tirx.BufferLoad(self._array, [tirx.const(number, "int32")])


def _entry(name: str, parts: Sequence[Any], stamps: int | None = None) -> Any:
    """A public C function that calls the parts of the host function one after the other; `stamps` is a place in its table."""
    table = _Table()
    arguments = [table.pointer, tirx.const(0, "int64") if stamps is None else table[stamps]]
    calls = [tirx.Evaluate(Call(part, arguments, ret_ty=PrimType("int32"))) for part in parts]
    function = tirx.PrimFunc([table.pointer], tirx.SeqStmt([table.declaration, *calls]))
    return function.with_attr("global_symbol", name).with_attr("calling_conv", C_CONVENTION).with_attr("s_tir", True)


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
    """Where each region of the plan begins, as an expression over what `loads` take from the host function's table."""

    def __init__(self, plan: Plan, table: _Table) -> None:
        self.buffers = {buffer.name: buffer for buffer in plan.buffers}
        first = len(plan.memories)
        behind = first + len(plan.shared)
        self.shared = {name: table[number] for number, name in enumerate(plan.shared, first)}  # loaded where they are needed
        numbers = [*range(first), *range(behind, behind + len(plan.parameters))]
        addresses = [tirx.Var(f"a{number}", "int64") for number in numbers]
        self.spaces = dict(zip(plan.memories, addresses, strict=False))
        self.parameters = dict(zip(plan.parameters, addresses[first:], strict=True))
        self.waits = waits_of(plan)
        self.loads = [tirx.Bind(variable, table[number]) for number, variable in zip(numbers, addresses, strict=True)]

    def of(self, region: Region) -> Any:
        buffer = self.buffers[region.buffer]
        if buffer.role in (Role.INPUT, Role.OUTPUT):
            return self.parameters[buffer.name] + tirx.const(region.offset, "int64")
        if buffer.space == SHARED:
            return self.shared[buffer.name] + tirx.const(region.offset, "int64")
        assert buffer.offset is not None, f"buffer {buffer.name} has no place"
        return self.spaces[buffer.space] + tirx.const(buffer.offset + region.offset, "int64")

    def event(self, number: int) -> Any:
        """The semaphore of a wait."""
        return tirx.reinterpret("handle", self.spaces[EVENTS] + tirx.const(number * EVENT_BYTES, "int64"))


def _statement(plan: Plan, number: int, addresses: _Addresses, kernels: Mapping[str, Any], functions: Mapping[str, Any]) -> Any:
    step, nothing = plan.steps[number], tirx.Evaluate(tirx.const(0, "int32"))
    if step.stream != COMPUTE:
        return nothing
    match step:
        case Launch():
            pointers = functions[step.kernel].params
            regions = (*step.reads, *step.writes, *step.scratch)
            arguments = [tirx.reinterpret(p.ty, addresses.of(r)) for p, r in zip(pointers, regions, strict=True)]
            callee = kernels[step.kernel]
            if isinstance(callee, str):
                return tirx.Evaluate(tirx.call_extern("int32", callee, *arguments))
            return tirx.Evaluate(Call(callee, arguments, ret_ty=PrimType("int32")))
        case Copy():
            pair = [tirx.reinterpret("handle", addresses.of(region)) for region in (step.destination, step.source)]
            return tirx.Evaluate(tirx.call_extern("handle", "memcpy", *pair, tirx.const(step.source.size_bytes, "int64")))
        case Wait():
            waiting = tirx.call_extern("int32", "sem_wait", addresses.event(addresses.waits.number(number)))
            return tirx.While(waiting != tirx.const(0, "int32"), nothing)  # a signal ends a wait
        case Record():
            events = map(addresses.event, addresses.waits.of_event(step.event))
            posts = [tirx.Evaluate(tirx.call_extern("int32", "sem_post", event)) for event in events]
            return tirx.SeqStmt([*posts, nothing, nothing])
        case _:
            raise AssertionError(f"a program for the CPU has no step {type(step).__name__}")
