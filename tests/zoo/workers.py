"""One process for each architecture, so that a crash or a hang costs one row of the table."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from ..worker_pool import in_new_thread
from .judge import Result, judge

_FORK = multiprocessing.get_context("fork")  # a new process has torch, transformers and the compiler in memory at once


def judge_apart(names: Sequence[str], processes: int, timeout_s: float) -> Iterator[Result]:
    """The results of all architectures, as they come."""
    import prefuse.compiler.driver  # noqa: F401  (loads the compiler once, before the forks)
    import transformers

    transformers.logging.set_verbosity_error()
    pending = list(reversed(names))
    running: dict[Connection[Any, Any], tuple[str, BaseProcess, float]] = {}
    while pending or running:
        while pending and len(running) < processes:
            name = pending.pop()
            pipe, process = _start(name)
            running[pipe] = name, process, time.monotonic() + timeout_s
        ready = wait(list(running), timeout=0.5)
        for pipe, (name, process, end) in list(running.items()):
            if pipe in ready or time.monotonic() > end:
                del running[pipe]
                yield _result(name, pipe if pipe in ready else None, process, timeout_s)


def _start(name: str) -> tuple[Connection[Any, Any], BaseProcess]:
    ours, theirs = _FORK.Pipe()
    process = _FORK.Process(target=_work, args=(theirs, name), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def _result(name: str, pipe: Connection[Any, Any] | None, process: BaseProcess, timeout_s: float) -> Result:
    """What a process says; it is gone afterwards."""
    try:
        if pipe is None:
            return Result(name, "hang", f"no answer in {timeout_s:.0f} s")
        result = pipe.recv()
        assert isinstance(result, Result)
        return result
    except EOFError:
        process.join()
        return Result(name, "crash", f"exit code {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _work(pipe: Connection[Any, Any], name: str) -> None:
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    torch.set_num_threads(1)  # processes are dealt to the cores, not threads
    pipe.send(in_new_thread(judge, name))
