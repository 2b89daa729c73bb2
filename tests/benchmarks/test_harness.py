"""Engines in turns, with workers and a probe that say what the test says: what counts, what is compared, what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
from prefuse.benchmarks import harness
from prefuse.benchmarks.__main__ import times_of
from prefuse.benchmarks.engines import DEFAULT_ENGINES, ENGINES
from prefuse.benchmarks.engines.engine import Task
from prefuse.benchmarks.harness import Result, Rounds, Settings, best_peer, compared, measure_task, peers_of, right
from prefuse.benchmarks.reference import relative_error, worst_error
from prefuse.benchmarks.worker import Failure, Ready


class Probe:
    """Speeds of the machine, one after the other, then the last one."""

    speeds: Iterator[float] = iter(())

    def __init__(self, threads: int) -> None:
        pass

    def gflops(self) -> float:
        return next(self.speeds, 100.0)

    def stop(self) -> None:
        pass


class Worker:
    """An engine of known times: a block has as many calls as fit."""

    seconds: ClassVar[dict[str, float]] = {}
    answers: ClassVar[dict[str, Any]] = {}
    stopped: ClassVar[list[str]] = []

    def __init__(self, engine: str, task: Task) -> None:
        self.engine = engine

    def wait_ready(self) -> Ready | Failure:
        return cast("Ready | Failure", self.answers.get(self.engine, Ready(0.1, 1, [np.ones(2)])))

    def run_block(self, seconds: float) -> list[float] | Failure:
        if (one := self.seconds[self.engine]) < 0:
            return Failure("the process ended with code 9")
        return [one] * max(int(seconds / one), 1)

    def stop(self) -> int:
        self.stopped.append(self.engine)
        return 2


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "Probe", Probe)
    monkeypatch.setattr(harness, "Worker", Worker)
    monkeypatch.setattr(harness, "time", SimpleNamespace(sleep=lambda seconds: None))
    Worker.answers, Worker.stopped, Probe.speeds = {}, [], iter(())


def measured(settings: Settings) -> harness.Measurement:
    return measure_task(cast("Task", SimpleNamespace(model="net", threads=1)), [np.ones(2)], settings, lambda text: None)


def test_five_rounds_are_the_least() -> None:
    """However little time there is, and however long a call takes."""
    Worker.seconds = {"prefuse": 1.0, "onnxruntime": 1.5}
    found = measured(Settings(("prefuse", "onnxruntime"), seconds=0.1))
    ours, theirs = found.results
    assert len(ours.round_ms) == 5
    assert ours.calls == 5
    assert compared(theirs, ours).median == pytest.approx(1.5)
    assert sorted(Worker.stopped) == ["onnxruntime", "prefuse"]
    assert times_of(ours) == ("1000.000", "5 calls", "5 rounds")


def test_rounds_without_all_cores_do_not_count_unless_others_are_to_take_them() -> None:
    Worker.seconds = {"prefuse": 0.1}
    Probe.speeds = iter([100, 100, 60, 100, 100, 100])
    found = measured(Settings(("prefuse",), seconds=0.5))
    assert found.counted == [0, *range(2, 6)]
    assert len(found.results[0].every_round_ms) == 6
    assert Rounds({}, gflops=[100.0, 60.0, 61.0], counts_all=True).counted == [0, 1, 2]


def test_others_compute_only_while_engines_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the machine lost cores is asked while they rest: else rounds would be left out because of them."""
    told: list[str] = []
    monkeypatch.setattr(harness.Busy, "__init__", lambda self, count: None)
    monkeypatch.setattr(harness.Busy, "_tell", lambda self, number: told.append(number.name))
    monkeypatch.setattr(harness.Busy, "stop", lambda self: told.append("end"))

    def probed(self: Probe) -> float:
        told.append("probe")
        return 100.0

    def block(self: Worker, seconds: float) -> list[float]:
        told.append("block")
        return [0.1]

    monkeypatch.setattr(Probe, "gflops", probed)
    monkeypatch.setattr(Worker, "run_block", block)
    found = measured(Settings(("prefuse",), seconds=0.5, beside=2))
    one = ["SIGSTOP", "probe", "SIGCONT"]
    assert told == [*[*one, "block", *one] * 5, "end"]
    assert len(found.counted) == 5


def test_an_engine_that_dies_between_rounds_is_a_line_of_the_table() -> None:
    Worker.seconds = {"prefuse": 0.1, "openvino": -1}
    ours, theirs = measured(Settings(("prefuse", "openvino"), seconds=0.5)).results
    assert ours.median_ms == pytest.approx(100)
    assert theirs.failure == "the process ended with code 9"


def test_wrong_results_do_not_win() -> None:
    """Neither ours nor a peer's; with NaN the error is infinite."""
    Worker.answers = {"prefuse": Ready(0.1, 1, [np.array([1.0, np.nan])]), "openvino": Ready(0.1, 1, [np.zeros(2)])}
    Worker.seconds = {"onnxruntime": 0.1}
    found = {row.engine: row for row in measured(Settings(("prefuse", "openvino", "onnxruntime"), seconds=0.5)).results}
    assert "wrong results" in found["prefuse"].failure
    assert "wrong results: error 1.0e+00" in found["openvino"].failure
    assert found["onnxruntime"].failure == ""
    assert best_peer(found["onnxruntime"], list(found.values())) == found["onnxruntime"]


def test_nets_that_amplify_roundings_are_not_wrong() -> None:
    """By how much, the engines of float32 tell."""

    def failures(**errors: float) -> list[str]:
        rows = {name.replace("_", "-"): Result("net", name.replace("_", "-"), error=error) for name, error in errors.items()}
        return [name for name, row in right(rows).items() if row.failure]

    assert failures(onnxruntime=1e-6, prefuse=2e-4) == ["prefuse"]
    assert failures(onnxruntime=1e-3, prefuse=2e-3, prefuse_fast=2e-2) == []
    assert failures(onnxruntime=1e-6, prefuse_bf16=0.06) == ["prefuse-bf16"]
    assert failures(prefuse=float("inf"), onnxruntime=float("inf")) == ["prefuse", "onnxruntime"]


def test_errors_of_what_is_not_finite() -> None:
    exact = np.array([1.0, 2.0])
    assert worst_error([exact, np.array([np.nan, 2.0])], [exact, exact]) == float("inf")
    assert relative_error(np.array([1.0]), exact) == float("inf")
    assert relative_error(np.zeros(2), np.zeros(2)) == 0
    assert relative_error(np.ones(2), np.zeros(2)) == float("inf")


def row(engine: str, *round_ms: float, error: float = 1e-6) -> Result:
    return Result("net", engine, round_ms=round_ms, error=error)


def test_the_best_peer_is_the_fastest_round_by_round() -> None:
    """And not the one of the least median of all calls, in which fast rounds have more."""
    ours = row("prefuse", 1.0, 2.0, 4.0)
    steady, lucky = row("openvino", 1.2, 2.4, 4.8), row("onnxruntime", 1.9, 2.0, 8.0)
    assert best_peer(ours, [steady, lucky, ours]) == steady
    assert compared(steady, ours).median == pytest.approx(1.2)


def test_peers_are_as_exact_as_ours() -> None:
    """float32 is not compared with bfloat16; bfloat16 is with the float32 of peers, which may be faster."""
    rows = [row("onnxruntime", 2.0), row("openvino-bf16", 1.0, error=1e-2), row("openvino-int8", 0.5, error=2e-3)]

    def names(mine: Result) -> list[str]:
        return [one.engine for one in peers_of(mine, rows)]

    assert names(row("prefuse", 1.0)) == ["onnxruntime"]
    assert names(row("prefuse-bf16", 1.0, error=1e-3)) == ["onnxruntime", "openvino-bf16"]
    assert names(row("prefuse-bf16", 1.0, error=2e-3)) == ["onnxruntime", "openvino-bf16", "openvino-int8"]


def test_engines_that_are_the_default() -> None:
    assert DEFAULT_ENGINES == ("prefuse", "onnxruntime", "openvino", "torch", "torch.compile")
    assert ENGINES["openvino-int8"].beside == ("nncf",)
