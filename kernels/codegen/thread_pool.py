"""What announces the tasks of a parallel region, and what runs them: functions of every library, in LLVM's IR.

The protocol is that of `runtime/threads/pool.py`, whose words these functions read and write. A region has a number, and a task
is begun by whoever changes its word from the number before to this one: so a thread that comes late begins no task of a later
region by the closure of an earlier one. Who has begun a task may read the closure, which stays until that task is done.
LAUNCH stands for TVM's function of the same arguments (`TVMBackendParallelLaunch` of tvm/runtime/c_backend_api.h); tasks of ours
cannot fail.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.ir import PrimType

from ...runtime.hardware.machine import LINE_BYTES
from ...runtime.threads.pool import (
    BEGUN,
    CLOSURE,
    DONE,
    FUNCTION,
    FUTEX_WAIT,
    FUTEX_WAKE,
    LAUNCH,
    NUMBER,
    POOL,
    REGION,
    ROUNDING,
    SLEEPERS,
    STOP,
    SYS_FUTEX,
    TASKS,
    THREADS,
    USE_POOL,
    WORK,
)

_POOL, _RUN_TASKS = "prefuse_pool", "prefuse_run_tasks"
_PAUSES = 2000  # looks with a pause between, about 40 microseconds, before a thread offers its core to others (sched_yield)
_YIELDS = 2000  # and so many looks more, about a millisecond, before a worker sleeps
_ENVIRONMENT = "{ ptr, i32 }"  # TVMParallelGroupEnv, which tells a task the number of tasks


def pool_functions() -> dict[str, Any]:
    """The functions, by their C names, as PrimFuncs that call those of LLVM_FUNCTIONS, which LLVM inlines."""
    return {
        LAUNCH: _function(LAUNCH, ("function", "handle"), ("closure", "handle"), ("tasks", "int32")),
        USE_POOL: _function(USE_POOL, ("pool", "handle")),
        WORK: _function(WORK, ("pool", "handle")),
    }


def _function(name: str, *parameters: tuple[str, str]) -> Any:
    variables = [tirx.Var(*parameter) for parameter in parameters]
    call = tirx.Evaluate(tirx.call_extern("int32", f"{name}_inlined", *variables))
    body = tirx.SeqStmt([call, tirx.Return(tirx.const(0, "int32"))])
    return tirx.PrimFunc(variables, body, ret_type=PrimType("int32"))


def _at(name: str, offset: int, base: str = "pool") -> str:
    return f"  %{name} = getelementptr inbounds i8, ptr %{base}, i64 {offset}"


LLVM_FUNCTIONS = f"""
@{_POOL} = weak_odr hidden thread_local global ptr null

declare i64 @syscall(i64, ...)
declare i32 @sched_yield()
declare void @llvm.x86.sse2.pause()
declare void @llvm.x86.sse.stmxcsr(ptr)
declare void @llvm.x86.sse.ldmxcsr(ptr)

define i32 @{USE_POOL}_inlined(ptr %pool) nounwind {{
  store ptr %pool, ptr @{_POOL}
  ret i32 0
}}

; Run the tasks of a region that nobody has begun, from one on.
define i32 @{_RUN_TASKS}(ptr %pool, i32 %region, i32 %first) nounwind {{
  %environment = alloca {_ENVIRONMENT}
{_at("threads.at", THREADS)}
{_at("function.at", FUNCTION)}
{_at("closure.at", CLOSURE)}
{_at("done.at", DONE)}
{_at("number.at", 8, "environment")}
  %threads = load i32, ptr %threads.at
  %before = sub i32 %region, 1
  store ptr null, ptr %environment
  store i32 %threads, ptr %number.at
  br label %look
look:
  %distance = phi i32 [ 0, %0 ], [ %further, %next ]
  %sum = add i32 %first, %distance
  %wraps = icmp uge i32 %sum, %threads
  %wrapped = sub i32 %sum, %threads
  %task = select i1 %wraps, i32 %wrapped, i32 %sum
  %wide = zext i32 %task to i64
  %line.offset = mul i64 %wide, {LINE_BYTES}
  %begun.offset = add i64 %line.offset, {TASKS + BEGUN}
  %begun.at = getelementptr inbounds i8, ptr %pool, i64 %begun.offset
  %begun = load atomic i32, ptr %begun.at monotonic, align 4
  %is.left = icmp eq i32 %begun, %before
  br i1 %is.left, label %begin, label %next
begin:
  %exchange = cmpxchg ptr %begun.at, i32 %before, i32 %region acquire monotonic, align 4
  %is.mine = extractvalue {{ i32, i1 }} %exchange, 1
  br i1 %is.mine, label %run, label %next
run:
  %function = load ptr, ptr %function.at
  %closure = load ptr, ptr %closure.at
  %result = call i32 %function(i32 %task, ptr %environment, ptr %closure)
  %others = atomicrmw add ptr %done.at, i32 1 release
  %done = add i32 %others, 1
  %are.done = icmp eq i32 %done, %threads
  br i1 %are.done, label %end, label %next
next:
  %further = add i32 %distance, 1
  %is.more = icmp ult i32 %further, %threads
  br i1 %is.more, label %look, label %end
end:
  ret i32 0
}}

; Run all tasks of a region; without a pool, one task in this thread.
define i32 @{LAUNCH}_inlined(ptr %function, ptr %closure, i32 %ignored) nounwind {{
  %environment = alloca {_ENVIRONMENT}
  %pool = load ptr, ptr @{_POOL}
  %is.alone = icmp eq ptr %pool, null
  br i1 %is.alone, label %alone, label %announce
alone:
{_at("number.at", 8, "environment")}
  store ptr null, ptr %environment
  store i32 1, ptr %number.at
  %only = call i32 %function(i32 0, ptr %environment, ptr %closure)
  ret i32 0
announce:
{_at("region.at", REGION)}
{_at("done.at", DONE)}
{_at("sleepers.at", SLEEPERS)}
{_at("function.at", FUNCTION)}
{_at("closure.at", CLOSURE)}
{_at("threads.at", THREADS)}
{_at("rounding.at", ROUNDING)}
  %threads = load i32, ptr %threads.at
  store ptr %function, ptr %function.at
  store ptr %closure, ptr %closure.at
  store atomic i32 0, ptr %done.at monotonic, align 4
  call void @llvm.x86.sse.stmxcsr(ptr %rounding.at)
  %before = load atomic i32, ptr %region.at monotonic, align 4
  %region = add i32 %before, 1
  store atomic i32 %region, ptr %region.at release, align 4
  fence seq_cst
  %sleepers = load atomic i32, ptr %sleepers.at monotonic, align 4
  %is.asleep = icmp sgt i32 %sleepers, 0
  br i1 %is.asleep, label %wake, label %run
wake:
  %woken = call i64 (i64, ...) @syscall(i64 {SYS_FUTEX}, ptr %region.at, i32 {FUTEX_WAKE}, i32 %sleepers)
  br label %run
run:
  %ran = call i32 @{_RUN_TASKS}(ptr %pool, i32 %region, i32 0)
  br label %wait
wait:
  %looks = phi i32 [ 0, %run ], [ %further, %pause ], [ %looks, %yield ]
  %done = load atomic i32, ptr %done.at acquire, align 4
  %is.done = icmp eq i32 %done, %threads
  br i1 %is.done, label %end, label %look
look:
  %is.long = icmp uge i32 %looks, {_PAUSES}
  br i1 %is.long, label %yield, label %pause
pause:
  call void @llvm.x86.sse2.pause()
  %further = add i32 %looks, 1
  br label %wait
yield:
  %yielded = call i32 @sched_yield()
  br label %wait
end:
  ret i32 0
}}

; A worker, given the line of its own task: run tasks of one region after the other, until the pool is stopped.
define i32 @{WORK}_inlined(ptr %line) nounwind {{
{_at("number.at", NUMBER, "line")}
{_at("pool.at", POOL, "line")}
  %own = load i32, ptr %number.at
  %pool = load ptr, ptr %pool.at
{_at("region.at", REGION)}
{_at("sleepers.at", SLEEPERS)}
{_at("stop.at", STOP)}
{_at("rounding.at", ROUNDING)}
  br label %look
look:
  %seen = phi i32 [ 0, %0 ], [ %region, %run ], [ %seen, %pause ], [ %seen, %yield ], [ %seen, %woken ]
  %looks = phi i32 [ 0, %0 ], [ 0, %run ], [ %further, %pause ], [ %further, %yield ], [ 0, %woken ]
  %region = load atomic i32, ptr %region.at acquire, align 4
  %is.new = icmp ne i32 %region, %seen
  br i1 %is.new, label %run, label %idle
run:
  call void @llvm.x86.sse.ldmxcsr(ptr %rounding.at)
  %ran = call i32 @{_RUN_TASKS}(ptr %pool, i32 %region, i32 %own)
  br label %look
idle:
  %stop = load atomic i32, ptr %stop.at monotonic, align 4
  %is.stopped = icmp ne i32 %stop, 0
  br i1 %is.stopped, label %end, label %rest
rest:
  %further = add i32 %looks, 1
  %is.short = icmp ult i32 %looks, {_PAUSES}
  br i1 %is.short, label %pause, label %long
pause:
  call void @llvm.x86.sse2.pause()
  br label %look
long:
  %is.awake = icmp ult i32 %looks, {_PAUSES + _YIELDS}
  br i1 %is.awake, label %yield, label %lie
yield:
  %yielded = call i32 @sched_yield()
  br label %look
lie:
  %lying = atomicrmw add ptr %sleepers.at, i32 1 seq_cst
  %last = load atomic i32, ptr %region.at seq_cst, align 4
  %is.last = icmp eq i32 %last, %seen
  br i1 %is.last, label %sleep, label %woken
sleep:
  %slept = call i64 (i64, ...) @syscall(i64 {SYS_FUTEX}, ptr %region.at, i32 {FUTEX_WAIT}, i32 %seen, ptr null)
  br label %woken
woken:
  %standing = atomicrmw sub ptr %sleepers.at, i32 1 seq_cst
  br label %look
end:
  ret i32 0
}}
"""
