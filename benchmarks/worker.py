"""One engine in a process of its own, which the harness asks for blocks of calls.

Engines share no thread pool, no allocator and no library that way, and the peak of memory is the engine's own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from .engines import ENGINES
from .engines.engine import Run, Task

_WARM_UP_CALLS = 2  # a block: another engine had the caches and cores before


@dataclass(frozen=True, slots=True)
class Ready:
    """An engine that has run the model once. `compile_seconds` is from the imported libraries to that first result."""

    compile_seconds: float
    imported_bytes: int  # resident before compiling
    outputs: list[np.ndarray]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an engine has no result."""

    reason: str


class Worker:
    """The harness's end of an engine's process."""

    def __init__(self, engine: str, task: Task) -> None:
        context = get_context("spawn")
        self._connection, far_end = context.Pipe()
        with _environment(task.threads):
            self._process = context.Process(target=_serve, args=(engine, task, far_end), daemon=True)
            self._process.start()
        far_end.close()

    def wait_ready(self) -> Ready | Failure:
        """Wait until the engine has compiled the model and run it once."""
        answer = self._receive()
        assert isinstance(answer, Ready | Failure)
        return answer

    def run_block(self, seconds: float) -> list[float] | Failure:
        """Seconds of each call of one block: as many as fit into `seconds`, one at least."""
        self._connection.send(seconds)
        answer = self._receive()
        assert isinstance(answer, list | Failure)
        return answer

    def stop(self) -> int:
        """End the process; returns the peak of its resident bytes, 0 if it died before."""
        try:
            self._connection.send(None)
            peak = self._receive()
        except OSError:
            peak = 0
        self._process.join(timeout=10)
        self._process.kill()
        return peak if isinstance(peak, int) else 0

    def _receive(self) -> object:
        try:
            return self._connection.recv()
        except EOFError:
            self._process.join()
            return Failure(f"the process ended with code {self._process.exitcode}")


@contextmanager
def _environment(threads: int) -> Iterator[None]:
    """For processes started inside: what libraries read when they are loaded. No engine may reuse code compiled before."""
    before = dict(os.environ)
    os.environ |= {"OMP_NUM_THREADS": str(threads), "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _serve(engine: str, task: Task, connection: Connection) -> None:
    """The engine's end: a `Ready`, then the times of a block for every number received, and at None the peak of memory."""
    try:
        prepare = ENGINES[engine].load()
        imported_bytes = _status_bytes("VmRSS")
        begin = time.perf_counter()
        run = prepare(task)
        outputs = run()
        seconds = time.perf_counter() - begin
        connection.send(Ready(seconds, imported_bytes, [np.array(output) for output in outputs]))
    except Exception as error:  # whatever an engine cannot do is a line of the table
        connection.send(Failure(f"{type(error).__name__}: {error}"))
        return
    while (block_seconds := connection.recv()) is not None:
        connection.send(_time_block(run, block_seconds))
    connection.send(_status_bytes("VmHWM"))


def _time_block(run: Run, seconds: float) -> list[float]:
    for _ in range(_WARM_UP_CALLS):
        run()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return times


def _status_bytes(field: str) -> int:
    """A size of this process as Linux counts it. (getrusage's peak is no use: it starts at that of the parent process.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
