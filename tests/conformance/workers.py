"""Worker processes that judge cases, so that a crash or a hang costs one case and is counted."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from ..worker_pool import in_new_thread
from .cases import Outcome, case_of, judge, operator_of
from .means import Account

_FORK = multiprocessing.get_context("fork")  # a new worker has the cases and the compiler in memory at once


@dataclass(frozen=True)
class Result:
    """How one case went."""

    name: str
    operator: str
    outcome: Outcome
    detail: str
    seconds: float
    account: Account | None = None  # of what passed


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection[Any, Any]
    name: str = ""
    begin: float = 0.0

    def give(self, name: str) -> None:
        self.name, self.begin = name, time.monotonic()
        self.pipe.send(name)

    def result(self, outcome: Outcome, detail: str, account: Account | None = None) -> Result:
        seconds = time.monotonic() - self.begin
        return Result(self.name, operator_of(case_of(self.name)), outcome, detail, round(seconds, 3), account)


def run_cases(names: Sequence[str], processes: int, timeout_s: float) -> Iterator[Result]:
    """Results in the order in which they come."""
    import prefuse.compiler.driver  # noqa: F401  (loads the compiler once, before the forks)

    pending = deque(names)
    workers = [_start() for _ in range(min(processes, len(names)))]
    for worker in workers:
        worker.give(pending.popleft())
    while workers:
        for index, worker in reversed(list(enumerate(workers))):
            result = _poll(worker, timeout_s)
            if result is None:
                continue
            yield result
            if not worker.process.is_alive():
                workers[index] = worker = _start()
            if pending:
                worker.give(pending.popleft())
            else:
                worker.process.kill()
                del workers[index]
        wait([worker.pipe for worker in workers], timeout=0.5)


def _poll(worker: _Worker, timeout_s: float) -> Result | None:
    """What has become of a worker's case; None while it runs."""
    try:
        if worker.pipe.poll():
            return worker.result(*worker.pipe.recv())
    except EOFError:
        worker.process.join()
        return worker.result("crash", f"exit code {worker.process.exitcode}")
    if time.monotonic() - worker.begin <= timeout_s:
        return None
    worker.process.kill()
    worker.process.join()
    return worker.result("hang", f"no answer in {timeout_s:.0f} s")


def _start() -> _Worker:
    ours, theirs = _FORK.Pipe()
    process = _FORK.Process(target=_work, args=(theirs, ours), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _work(pipe: Connection[Any, Any], parents_end: Connection[Any, Any]) -> None:
    parents_end.close()
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 2)
    try:
        while True:
            pipe.send(in_new_thread(judge, case_of(pipe.recv())))
    except EOFError:
        return
