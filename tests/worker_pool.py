"""Processes of their own for work that may crash, hang or eat all memory: each such end costs one task and is told."""

from __future__ import annotations

import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, Literal, TypeVar

from prefuse.compiler.pipeline.pass_table import PASSES

T = TypeVar("T")
R = TypeVar("R")

_FORK = multiprocessing.get_context("fork")  # a new process has what its parent has imported in memory at once
_COMPILER = (  # with what it imports only when it is due
    "prefuse.compiler.driver",
    "prefuse.compiler.frontend.importer",
    "prefuse.compiler.frontend.shaping",
    "prefuse.compiler.staging.build",
    *(place.partition(":")[0] for place in PASSES.values()),
)


@dataclass(frozen=True)
class Lost:
    """Work that gave no answer."""

    how: Literal["crash", "hang"]
    detail: str


@dataclass(frozen=True)
class Done(Generic[T, R]):
    """A task, its result or how it was lost, and the seconds that it took."""

    task: T
    result: R | Lost
    seconds: float


def run_apart(
    tasks: Sequence[T], work: Callable[[T], R], *, processes: int, timeout_s: float, memory_bytes: int | None = None
) -> Iterator[Done[T, R]]:
    """`work` on every task in a process of its own, which has the compiler in memory, in the order in which they end.

    Results must be picklable.

    Args:
        memory_bytes: of address space that a task may take beyond what its process has at the start.
    """
    for module in _COMPILER:
        import_module(module)
    pending = list(reversed(tasks))
    running: dict[Connection[Any, Any], tuple[T, BaseProcess, float]] = {}
    while pending or running:
        while pending and len(running) < processes:
            task = pending.pop()
            pipe, process = _start(task, work, memory_bytes)
            running[pipe] = task, process, time.monotonic()
        ready = wait(list(running), timeout=0.2)
        for pipe, (task, process, begin) in list(running.items()):
            seconds = time.monotonic() - begin
            if pipe in ready or seconds > timeout_s:
                del running[pipe]
                yield Done(task, _result(pipe if pipe in ready else None, process, timeout_s), round(seconds, 3))


def _start(task: T, work: Callable[[T], R], memory_bytes: int | None) -> tuple[Connection[Any, Any], BaseProcess]:
    ours, theirs = _FORK.Pipe()
    process = _FORK.Process(target=_work, args=(theirs, task, work, memory_bytes), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def _result(pipe: Connection[Any, Any] | None, process: BaseProcess, timeout_s: float) -> Any:
    """What a process says; it is gone afterwards."""
    try:
        return Lost("hang", f"no answer in {timeout_s:.0f} s") if pipe is None else pipe.recv()
    except EOFError:
        process.join()
        return Lost("crash", f"exit code {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _work(pipe: Connection[Any, Any], task: T, work: Callable[[T], R], memory_bytes: int | None) -> None:
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    if memory_bytes is not None:
        with open("/proc/self/statm") as file:
            taken = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + memory_bytes, taken + memory_bytes))
    pipe.send(work(task))
