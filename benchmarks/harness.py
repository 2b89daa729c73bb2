"""Runs engines in turns. Only ratios inside one round mean anything: a shared machine's cores and memory vary by the minute.

A round gives each engine one block of calls, in an order of its own, for some engines leave threads spinning. The machine's speed
is measured around each round; rounds in which it had lost a core or two to others are kept in the result, but not counted.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from .engines.engine import Task
from .probe import Probe
from .reference import make_task, worst_error
from .worker import Failure, Worker

_BLOCK_SECONDS = 0.5
_PAUSE_SECONDS = 0.25  # until the spinning threads of the engine before sleep
_SLOW = 0.8  # of the best speed of any round: below it the machine had not all of its cores


@dataclass(frozen=True, slots=True)
class Result:
    """One engine on one model. Where it failed, `failure` says why and the numbers are those known until then, else 0."""

    model: str
    engine: str
    failure: str = ""
    calls: int = 0
    median_ms: float = 0.0
    p10_ms: float = 0.0
    p90_ms: float = 0.0
    error: float = 0.0  # against float64
    compile_seconds: float = 0.0
    peak_bytes: int = 0  # of the whole process, compile and runs
    imported_bytes: int = 0  # of that, held by the imported libraries
    round_ms: tuple[float, ...] = ()  # the median of each round that counts


@dataclass(frozen=True, slots=True)
class Rounds:
    """What one model's rounds gave: seconds of the calls of each engine, round by round, and the machine's speed then."""

    seconds: dict[str, list[list[float]]]
    failures: dict[str, Failure]
    gflops: list[float]

    @property
    def counted(self) -> list[int]:
        """The rounds in which the machine was as fast as in others."""
        return [index for index, speed in enumerate(self.gflops) if speed >= _SLOW * max(self.gflops)]


@dataclass(frozen=True, slots=True)
class Measurement:
    """One model: a result for each engine, and the machine's speed in each round, in GFLOP/s of float32 products."""

    results: list[Result] = field(default_factory=list)
    gflops: list[float] = field(default_factory=list)
    counted: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Settings:
    """How a model is measured; `seconds` is the time each engine gets, in blocks of half a second, `beside` how many other
    processes compute all the time meanwhile."""

    engines: tuple[str, ...]
    threads: int = 2
    small: bool = False
    batch: int = 1
    seconds: float = 3.0
    beside: int = 0
    max_error: float = float("inf")  # of engines that are told how exact to be
    folder: Path | None = None  # where models and what engines make of them are kept for other runs


def measure(model: str, settings: Settings, progress: Callable[[str], None]) -> Measurement:
    """Every engine on one model, in the order of `settings.engines`; `progress` is told what is being done."""
    with TemporaryDirectory(prefix="prefuse-benchmark-") if settings.folder is None else nullcontext(settings.folder) as folder:
        progress("export and float64 reference")
        task, exact = make_task(model, settings.small, settings.batch, settings.threads, Path(folder))
        return measure_task(replace(task, max_error=settings.max_error), exact, settings, progress)


def measure_task(task: Task, exact: Sequence[np.ndarray], settings: Settings, progress: Callable[[str], None]) -> Measurement:
    """Every engine on one task, whose errors are those against `exact`."""
    results: dict[str, Result] = {}
    workers: dict[str, Worker] = {}
    for engine in settings.engines:
        progress(f"{engine} compiles")
        worker = Worker(engine, task)
        ready = worker.wait_ready()
        if isinstance(ready, Failure):
            worker.stop()
            results[engine] = Result(task.model, engine, ready.reason)
            continue
        workers[engine] = worker
        error = worst_error(ready.outputs, exact)
        results[engine] = Result(
            task.model, engine, error=error, compile_seconds=ready.compile_seconds, imported_bytes=ready.imported_bytes
        )
    with _others(settings.beside):
        rounds = _take_turns(workers, settings, progress)
    for engine, worker in workers.items():
        results[engine] = _with_times(results[engine], rounds, worker.stop())
    return Measurement([results[engine] for engine in settings.engines], rounds.gflops, rounds.counted)


@contextmanager
def _others(count: int) -> Iterator[None]:
    """Processes that compute all the time."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def ratio(slower: Result, faster: Result) -> float:
    """How many times as long a call of the one takes as one of the other: the median over the rounds of both."""
    pairs = zip(slower.round_ms, faster.round_ms, strict=True)
    return float(np.median([one / other for one, other in pairs]))


def _take_turns(workers: dict[str, Worker], settings: Settings, progress: Callable[[str], None]) -> Rounds:
    """Rounds of a block for each engine, until those that count fill `settings.seconds`, or twice as many ran."""
    needed = ceil(settings.seconds / _BLOCK_SECONDS)
    rounds = Rounds({engine: [] for engine in workers}, {}, [])
    shuffle = random.Random(0)
    probe = Probe(settings.threads)
    while len(rounds.counted) < needed and len(rounds.gflops) < 2 * needed:
        progress(f"round {len(rounds.gflops) + 1}, {len(rounds.counted)} of {needed} count")
        time.sleep(_PAUSE_SECONDS)
        before = probe.gflops()
        for engine in shuffle.sample(list(workers), len(workers)):
            if engine in rounds.failures:
                continue
            time.sleep(_PAUSE_SECONDS)
            block = workers[engine].run_block(_BLOCK_SECONDS)
            if isinstance(block, Failure):
                rounds.failures[engine] = block
            else:
                rounds.seconds[engine].append(block)
        time.sleep(_PAUSE_SECONDS)
        rounds.gflops.append(min(before, probe.gflops()))
    probe.stop()
    return rounds


def _with_times(result: Result, rounds: Rounds, peak_bytes: int) -> Result:
    if result.engine in rounds.failures:
        return replace(result, failure=rounds.failures[result.engine].reason)
    blocks = [rounds.seconds[result.engine][index] for index in rounds.counted]
    times = [second for block in blocks for second in block]
    p10, median, p90 = (1e3 * float(value) for value in np.percentile(times, (10, 50, 90)))
    medians = tuple(1e3 * float(np.median(block)) for block in blocks)
    return replace(result, calls=len(times), median_ms=median, p10_ms=p10, p90_ms=p90, peak_bytes=peak_bytes, round_ms=medians)
