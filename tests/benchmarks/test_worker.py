"""An engine's process that dies, hangs or raises is a failure with a reason, and never the end of the harness."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prefuse.benchmarks import worker
from prefuse.benchmarks.engines.engine import Ready, Task
from prefuse.benchmarks.worker import Failure, Worker, _serve

TASK = Task("net", True, 1, Path("net.onnx"), {}, 1)


class Connection:
    """The far end of a pipe that asks for two blocks."""

    def __init__(self, *questions: object) -> None:
        self.questions, self.sent = list(questions), list[Any]()

    def recv(self) -> object:
        return self.questions.pop(0)

    def send(self, answer: object) -> None:
        self.sent.append(answer)


def serve(monkeypatch: pytest.MonkeyPatch, prepare: object, *questions: object) -> list[Any]:
    connection = Connection(*questions)
    monkeypatch.setattr(worker, "ENGINES", {"one": SimpleNamespace(load=lambda: prepare)})
    _serve("one", TASK, connection)  # type: ignore[arg-type]
    return connection.sent


def test_what_an_engine_raises_in_a_block_is_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter([np.ones(1)])
    ready, failure = serve(monkeypatch, lambda task: lambda: [next(calls)], 0.01, None)
    assert isinstance(ready, worker.Ready)
    assert failure == Failure("StopIteration: ")


def test_building_a_module_and_loading_what_is_kept_are_no_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    (built, _) = serve(monkeypatch, lambda task: Ready(lambda: [1], build_seconds=1e3), None)
    assert built.compile_seconds < 0
    (kept, _) = serve(monkeypatch, lambda task: Ready(lambda: [1], is_kept=True, facts={"threads": "1"}), None)
    assert kept.compile_seconds is None
    assert kept.facts == {"threads": "1"}


def test_a_process_that_has_died_or_hangs_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """It died in the pause before its turn; another one never answers."""
    monkeypatch.setattr(worker, "_serve", _die)
    died = Worker("prefuse", TASK)
    died._process.join(60)
    assert died.run_block(0.1) == Failure("the process ended with code 3")
    assert died.stop() == 0
    monkeypatch.setattr(worker, "_serve", _hang)
    monkeypatch.setattr(worker, "_BLOCK_SECONDS", 0.2)
    hangs = Worker("prefuse", TASK)
    assert hangs.run_block(0.0) == Failure("no answer in 0 seconds")
    assert hangs.stop() == 0


def _die(*_given: object) -> None:
    os._exit(3)


def _hang(*_given: object) -> None:
    time.sleep(600)
