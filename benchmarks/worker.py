"""One engine in a process of its own, which the harness asks for blocks of calls.

Engines share no thread pool, no allocator and no library that way, and the peak of memory is the engine's own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from .engines import ENGINES
from .engines.engine import Ready as Prepared
from .engines.engine import Run, Task

_WARM_UP_CALLS = 2  # a block: another engine had the caches and cores before
_READY_SECONDS, _BLOCK_SECONDS, _STOP_SECONDS = 1800.0, 600.0, 20.0  # after which an engine hangs


@dataclass(frozen=True, slots=True)
class Ready:
    """An engine that has run the model once. `compile_seconds` is from the imported libraries, and a module of torch where it
    runs one, to that first result; None where what an earlier run has made was taken."""

    compile_seconds: float | None
    imported_bytes: int  # resident before compiling
    outputs: list[np.ndarray]
    facts: dict[str, str] = field(default_factory=dict)  # what it chose, and settings that count


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
        answer = self._receive(_READY_SECONDS)
        assert isinstance(answer, Ready | Failure)
        return answer

    def run_block(self, seconds: float) -> list[float] | Failure:
        """Seconds of each call of one block: as many as fit into `seconds`, one at least."""
        answer = self._asked(seconds, seconds + _BLOCK_SECONDS)
        assert isinstance(answer, list | Failure)
        return answer

    def stop(self) -> int:
        """End the process; returns the peak of its resident bytes, 0 if it died before."""
        peak = self._asked(None, _STOP_SECONDS) if self._process.is_alive() else 0
        self._process.join(timeout=10)
        self._process.kill()
        return peak if isinstance(peak, int) else 0

    def _asked(self, question: object, seconds: float) -> object:
        try:
            self._connection.send(question)
        except OSError:
            return self._ended()
        return self._receive(seconds)

    def _receive(self, seconds: float) -> object:
        try:
            if not self._connection.poll(seconds):
                self._process.kill()
                return Failure(f"no answer in {seconds:.0f} seconds")
            return self._connection.recv()
        except (EOFError, OSError):
            return self._ended()

    def _ended(self) -> Failure:
        self._process.join(timeout=10)
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
    """The engine's end: a `Ready`, then the times of a block for every number received, and at None the peak of memory. What it
    cannot do is a line of the table."""
    try:
        run = _prepared(engine, task, connection)
        while (block_seconds := connection.recv()) is not None:
            connection.send(_time_block(run, block_seconds))
        connection.send(resident_bytes("VmHWM"))
    except Exception as error:
        connection.send(Failure(f"{type(error).__name__}: {error}"))


def _prepared(engine: str, task: Task, connection: Connection) -> Run:
    """Have an engine make the model ready, run it, and tell."""
    prepare = ENGINES[engine].load()
    imported_bytes = resident_bytes("VmRSS")
    begin = time.perf_counter()
    found = prepare(task)
    ready = found if isinstance(found, Prepared) else Prepared(found)
    outputs = ready.run()
    seconds = None if ready.is_kept else time.perf_counter() - begin - ready.build_seconds
    arrays = [np.array(output) for output in outputs]
    connection.send(Ready(seconds, imported_bytes, arrays, dict(ready.facts)))
    return ready.run


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


def resident_bytes(field_name: str) -> int:
    """VmRSS or VmHWM of this process. (getrusage's peak is no use: it starts at that of the parent process.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field_name}:"))
