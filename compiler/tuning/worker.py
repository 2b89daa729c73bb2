"""Measuring in a process of its own: a kernel that crashes, hangs or takes all memory costs one trial and no more.

`python -m prefuse.compiler.tuning.worker READ WRITE` answers the pickled questions of one pipe on another.
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
from typing import Protocol, TypeVar

from ...runtime.errors import OptionError
from .measuring import Trial

_START_SECONDS = 120.0  # to import TVM, on a busy machine

Times = tuple[float | None, ...]
Answer = TypeVar("Answer", covariant=True)


class Question(Protocol[Answer]):
    """What a process of its own is to find out; it and its answer can be pickled."""

    @property
    def limit_seconds(self) -> float:
        """After which the process counts as lost."""
        ...

    def answer(self) -> Answer:
        """In that process."""
        ...


@dataclass
class _Process:
    """A running worker and the pipes to and from it."""

    process: subprocess.Popen[bytes]
    questions: Connection
    answers: Connection

    def stop(self) -> None:
        self.questions.close()
        self.answers.close()
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
        return measure_apart(trial, self.ask)

    def ask(self, question: Question[Answer]) -> Answer | None:
        """What a question answers in the process, or None if that was lost.

        Raises:
            OptionError: another one cannot be started.
        """
        if self._running is None:
            self._running = _start()
        try:
            self._running.questions.send(question)
            if self._running.answers.poll(question.limit_seconds):
                answer: Answer = self._running.answers.recv()
                return answer
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
    """A new worker, which has imported what it needs. It inherits two ends of pipes, which are closed here.

    Raises:
        OptionError: it ends before that, or takes too long.
    """
    (read_questions, write_questions), (read_answers, write_answers) = os.pipe(), os.pipe()
    command = [sys.executable, "-m", __name__, str(read_questions), str(write_answers)]
    try:
        null = subprocess.DEVNULL
        pipes = (
            read_questions,
            write_answers,
        )  # in a session of its own, Ctrl-C is for this process alone, which then ends that one
        process = subprocess.Popen(command, stdin=null, stdout=null, pass_fds=pipes, start_new_session=True)
    finally:
        os.close(read_questions)
        os.close(write_answers)
    running = _Process(process, Connection(write_questions, readable=False), Connection(read_answers, writable=False))
    try:
        if running.answers.poll(_START_SECONDS):
            running.answers.recv()
            return running
    except EOFError:
        pass
    except BaseException:
        running.stop()
        raise
    running.stop()
    fix = f"see what it says: {sys.executable} -c 'import {__name__}'"
    raise OptionError("measure", "the process that measures kernels does not start", fix)


def serve(questions: Connection, answers: Connection) -> None:
    """Say that all is there, then answer question after question until nobody asks any more."""
    answers.send(None)
    with suppress(EOFError):
        while True:
            answers.send(questions.recv().answer())


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1]), writable=False), Connection(int(sys.argv[2]), readable=False))
