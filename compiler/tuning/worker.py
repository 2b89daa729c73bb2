"""Measuring in a process of its own: a kernel that crashes, hangs or takes all memory costs one trial and no more.

`python -m prefuse.compiler.tuning.worker READ WRITE` answers the pickled trials of one pipe with pickled times on another.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from types import TracebackType

from .measuring import Trial, measure

_START_SECONDS = 120.0  # to import TVM, on a busy machine
_CONFIGURATION_SECONDS = 30.0  # to compile a kernel and run it for the first time

Times = tuple[float | None, ...]


@dataclass
class _Process:
    """A running worker and the pipes to and from it."""

    process: subprocess.Popen[bytes]
    trials: Connection
    times: Connection

    def stop(self) -> None:
        self.trials.close()
        self.times.close()
        self.process.kill()
        self.process.wait()


class Worker:
    """A process that measures, started again after it has been lost."""

    def __init__(self) -> None:
        self._running: _Process | None = None

    def __enter__(self) -> Worker:
        self._running = _start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()

    def measure(self, trial: Trial) -> Times:
        """As `measuring.measure`. Where the process is lost, each configuration is tried beside the first one alone; those
        that lose it again get None."""
        return measure_apart(trial, self._try)

    def _try(self, trial: Trial) -> Times | None:
        """The times, or None if the process was lost."""
        if self._running is None:
            self._running = _start()
        limit = len(trial.configurations) * _CONFIGURATION_SECONDS + 2 * trial.seconds
        try:
            self._running.trials.send(trial)
            if self._running.times.poll(limit):
                times: Times = self._running.times.recv()
                return times
        except (EOFError, OSError):
            pass
        except BaseException:
            self._stop()
            raise
        self._stop()
        return None

    def _stop(self) -> None:
        if self._running is not None:
            self._running.stop()
            self._running = None


def measure_apart(trial: Trial, attempt: Callable[[Trial], Times | None]) -> Times:
    """The times of all configurations by attempts that may be lost, which costs only the configuration that is to blame."""
    times = attempt(trial)
    first, *others = trial.configurations
    if times is None and others:
        pairs = [attempt(replace(trial, configurations=(first, other))) or (None, None) for other in others]
        times = (next((one for one, _ in pairs if one is not None), None), *(other for _, other in pairs))
    return times or (None,)


def _start() -> _Process:
    """A new worker, which has imported what it needs unless that failed. It inherits two ends of pipes, which are closed here."""
    (read_trials, write_trials), (read_times, write_times) = os.pipe(), os.pipe()
    command = [sys.executable, "-m", __name__, str(read_trials), str(write_times)]
    try:
        null = subprocess.DEVNULL
        pipes = (read_trials, write_times)  # in a session of its own, Ctrl-C is for this process alone, which then ends that one
        process = subprocess.Popen(command, stdin=null, stdout=null, pass_fds=pipes, start_new_session=True)
    finally:
        os.close(read_trials)
        os.close(write_times)
    running = _Process(process, Connection(write_trials, readable=False), Connection(read_times, writable=False))
    with suppress(EOFError):
        if running.times.poll(_START_SECONDS):
            running.times.recv()
    return running


def serve(trials: Connection, times: Connection) -> None:
    """Say that all is there, then measure trial after trial until nobody asks any more."""
    times.send(None)
    with suppress(EOFError):
        while True:
            times.send(measure(trials.recv()))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1]), writable=False), Connection(int(sys.argv[2]), readable=False))
