"""The native code of text generation beside the model's programs: the choice of tokens, and the loop over steps."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import Call, GlobalVar, PointerType, PrimType

from ...kernels.generation.token_sampler import PARAMETERS, scratch_elements, token_sampler
from ...runtime.generation.loop import FIELDS, REPEAT, SAMPLE
from ...runtime.target import Target
from .native import compile_module, link_library

_C_CONVENTION = 1  # of tvm's CallingConv: other than its default, so that the function is left as it is
_PLACES = {name: 8 * number for number, name in enumerate(FIELDS)}  # in bytes

# Calls functions by their addresses, which TIR cannot. All fields of a control are 64 bits; see `runtime.generation.loop`.
_LOOP = f"""
define linkonce_odr i32 @prefuse_steps(ptr %control) alwaysinline {{
entry:
  %steps_place = getelementptr i8, ptr %control, i64 {_PLACES["steps"]}
  %made_place = getelementptr i8, ptr %control, i64 {_PLACES["made"]}
  %step_place = getelementptr i8, ptr %control, i64 {_PLACES["step"]}
  %step_table_place = getelementptr i8, ptr %control, i64 {_PLACES["step_table"]}
  %step_token_place = getelementptr i8, ptr %control, i64 {_PLACES["step_token"]}
  %sample_table_place = getelementptr i8, ptr %control, i64 {_PLACES["sample_table"]}
  %sample_token_place = getelementptr i8, ptr %control, i64 {_PLACES["sample_token"]}
  %sample_place = getelementptr i8, ptr %control, i64 {_PLACES["sample"]}
  %stride_place = getelementptr i8, ptr %control, i64 {_PLACES["stride"]}
  %alive_place = getelementptr i8, ptr %control, i64 {_PLACES["alive"]}
  %callback_place = getelementptr i8, ptr %control, i64 {_PLACES["callback"]}
  %cancelled_place = getelementptr i8, ptr %control, i64 {_PLACES["cancelled"]}
  %next_told_place = getelementptr i8, ptr %control, i64 {_PLACES["next_told"]}
  %calls_place = getelementptr i8, ptr %control, i64 {_PLACES["calls"]}
  %steps = load i64, ptr %steps_place
  %step = load ptr, ptr %step_place
  %step_table = load ptr, ptr %step_table_place
  %step_token = load ptr, ptr %step_token_place
  %sample = load ptr, ptr %sample_place
  %sample_table = load ptr, ptr %sample_table_place
  %sample_token = load ptr, ptr %sample_token_place
  %stride = load i64, ptr %stride_place
  %alive = load ptr, ptr %alive_place
  %callback = load ptr, ptr %callback_place
  %cancelled = load ptr, ptr %cancelled_place
  %is_silent = icmp eq ptr %callback, null
  %is_empty = icmp sle i64 %steps, 0
  br i1 %is_empty, label %end, label %next
next:
  %number = phi i64 [ 0, %entry ], [ %made, %moved ]
  call void %step(ptr %step_table)
  call void %sample(ptr %sample_table)
  %made = add i64 %number, 1
  store volatile i64 %made, ptr %made_place
  br i1 %is_silent, label %told, label %ask
ask:
  %next_told = load volatile i64, ptr %next_told_place
  %is_early = icmp slt i64 %number, %next_told
  br i1 %is_early, label %told, label %tell
tell:
  %calls_before = load volatile i64, ptr %calls_place
  %calls = add i64 %calls_before, 1
  store volatile i64 %calls, ptr %calls_place
  %answer = call i32 %callback(i64 %number)
  %is_ended = icmp eq i32 %answer, 0
  br i1 %is_ended, label %end, label %told
told:
  %running = load volatile i64, ptr %alive
  %is_over = icmp sle i64 %running, 0
  %is_last = icmp sge i64 %made, %steps
  %asked_to_end = load volatile i64, ptr %cancelled
  %is_cancelled = icmp ne i64 %asked_to_end, 0
  %is_ready = or i1 %is_over, %is_last
  %is_done = or i1 %is_ready, %is_cancelled
  br i1 %is_done, label %end, label %moved
moved:
  %read = load volatile i64, ptr %step_token
  %read_next = add i64 %read, %stride
  store volatile i64 %read_next, ptr %step_token
  %written = load volatile i64, ptr %sample_token
  %written_next = add i64 %written, %stride
  store volatile i64 %written_next, ptr %sample_token
  br label %next
end:
  ret i32 0
}}
"""


@lru_cache(maxsize=8)  # programs of the same tokens, such as variants of one model, have the same
def build_generation_library(batch: int, vocabulary: int, target: Target) -> tuple[bytes, int]:
    """A library of two C functions: `void prefuse_sample(const int64_t *addresses)`, those of the sampler's parameters in order,
    and `void prefuse_repeat(int64_t *control)`, which runs steps until one of its ends; and how many numbers of
    scratch the sampler wants.
    """
    kernel, symbol = token_sampler(batch, vocabulary, target), GlobalVar("token_sampler")
    pointer = tirx.Var("addresses", PointerType(PrimType("int64")))
    table = tirx.decl_buffer((len(PARAMETERS),), "int64", name="table", layout=None)
    arguments = [
        tirx.reinterpret(parameter.ty, tirx.BufferLoad(table, [tirx.const(number, "int32")]))
        for number, parameter in enumerate(kernel.params)
    ]
    call = tirx.Evaluate(Call(symbol, arguments, ret_ty=PrimType("int32")))
    sample = _entry(SAMPLE, pointer, [tirx.DeclBuffer(table, data=pointer), call])
    control = tirx.Var("control", PointerType(PrimType("int64")))
    steps = tirx.Evaluate(tirx.call_extern("int32", "prefuse_steps", tirx.reinterpret("handle", control)))
    text = tvm.ir.StringImm
    imported = tirx.AttrStmt(text("default"), "pragma_import_llvm", text(_LOOP), steps)
    module = {symbol: kernel, GlobalVar(SAMPLE): sample, GlobalVar(REPEAT): _entry(REPEAT, control, [imported])}
    return link_library(compile_module(tvm.IRModule(module), target), target), scratch_elements(batch, vocabulary, target.threads)


def _entry(name: str, pointer: Any, body: list[Any]) -> Any:
    """A public C function without a result."""
    function = tirx.PrimFunc([pointer], tirx.SeqStmt(body) if len(body) > 1 else body[0])
    return function.with_attr("global_symbol", name).with_attr("calling_conv", _C_CONVENTION).with_attr("s_tir", True)
