"""Runs engines in turns. Only ratios inside one round mean anything: a shared machine's cores and memory vary by the minute.

A round gives each engine one block of calls, in an order of its own, for some engines leave threads spinning. The machine's speed
is measured before and after each block; rounds in which it had lost a core or two to others are kept in the result, but not
counted.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from math import ceil, isfinite
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from .engines import ENGINES, MOST_ERROR
from .engines.engine import Task
from .probe import Probe
from .reference import make_task, worst_error
from .turns import LEAST_ROUNDS, PAUSE_SECONDS, Spread, ratios, spread
from .worker import Failure, Worker

_BLOCK_SECONDS = 0.5
_SLOW = 0.8  # of the best speed of any round: below it the machine had not all of its cores
_USUAL_ERROR = 1e-5  # of float32: nets whose own is larger amplify roundings, those of other precisions, too
_NOTHING_RIGHT = 0.5  # an error that no result may have
_AS_EXACT = 1.1  # times our error: what a peer of a coarser precision may have to be compared with


@dataclass(frozen=True, slots=True)
class Result:
    """One engine on one model. Where it failed, `failure` says why and the numbers are those known until then, else 0.

    `median_ms` is the median of `round_ms`, so that each round counts as much; p10 and p90 are of all calls, weighed likewise.
    """

    model: str
    engine: str
    failure: str = ""
    calls: int = 0
    median_ms: float = 0.0
    p10_ms: float = 0.0
    p90_ms: float = 0.0
    error: float = 0.0  # against float64
    compile_seconds: float | None = 0.0  # None where what an earlier run has made was taken
    peak_bytes: int = 0  # of the whole process, compile and runs
    imported_bytes: int = 0  # of that, held by the imported libraries
    round_ms: tuple[float, ...] = ()  # the median of each round that counts
    every_round_ms: tuple[float, ...] = ()  # and of all rounds
    facts: Mapping[str, str] = field(default_factory=dict)  # what the engine says of its settings


@dataclass(frozen=True, slots=True)
class Rounds:
    """What one model's rounds gave: seconds of the calls of each engine, round by round, and the machine's speed then.

    `counts_all`: other processes were to take cores away.
    """

    seconds: dict[str, list[list[float]]]
    failures: dict[str, Failure] = field(default_factory=dict)
    gflops: list[float] = field(default_factory=list)
    counts_all: bool = False

    @property
    def counted(self) -> list[int]:
        """The rounds in which the machine was as fast as in others."""
        least = 0.0 if self.counts_all else _SLOW * max(self.gflops, default=0.0)
        return [index for index, speed in enumerate(self.gflops) if speed >= least]


@dataclass(frozen=True, slots=True)
class Measurement:
    """One model: a result for each engine, and the machine's speed in each round, in GFLOP/s of float32 products."""

    results: list[Result] = field(default_factory=list)
    gflops: list[float] = field(default_factory=list)
    counted: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Settings:
    """How a model is measured; `seconds` is the time each engine gets, in blocks of half a second or less, of which there are
    five at least; `beside` how many other processes compute all the time meanwhile."""

    engines: tuple[str, ...]
    threads: int = 2
    small: bool = False
    batch: int = 1
    seconds: float = 3.0
    beside: int = 0
    max_error: float = float("inf")  # of engines that are told how exact to be
    folder: Path | None = None  # where models and what engines make of them are kept for other runs
    wrong_error: float | None = None  # from which on a result is wrong; None: by what an engine computes in

    @property
    def block_seconds(self) -> float:
        return min(_BLOCK_SECONDS, self.seconds / LEAST_ROUNDS)


def measure(model: str, settings: Settings, progress: Callable[[str], None]) -> Measurement:
    """Every engine on one model, in the order of `settings.engines`; `progress` is told what is being done.

    Raises:
        UnknownModelError, NoReferenceError: as `make_task`.
    """
    with TemporaryDirectory(prefix="prefuse-benchmark-") if settings.folder is None else nullcontext(settings.folder) as folder:
        progress("export and float64 reference")
        task, exact = make_task(model, settings.small, settings.batch, settings.threads, Path(folder))
        return measure_task(replace(task, max_error=settings.max_error), exact, settings, progress)


def measure_task(task: Task, exact: Sequence[np.ndarray], settings: Settings, progress: Callable[[str], None]) -> Measurement:
    """Every engine on one task, whose errors are those against `exact`; one whose results are wrong has failed."""
    workers: dict[str, Worker] = {}
    try:
        results = right(_compiled(task, exact, settings, workers, progress), settings.wrong_error)
        for engine in [name for name in workers if results[name].failure]:
            workers.pop(engine).stop()
        with others(settings.beside) as busy:
            rounds = take_turns(workers, settings, progress, busy)
        peaks = {engine: workers.pop(engine).stop() for engine in list(workers)}
    finally:
        for worker in workers.values():
            worker.stop()
    found = {engine: _with_times(results[engine], rounds, peak) for engine, peak in peaks.items()}
    return Measurement([found.get(engine, results[engine]) for engine in settings.engines], rounds.gflops, rounds.counted)


def _compiled(
    task: Task, exact: Sequence[np.ndarray], settings: Settings, workers: dict[str, Worker], progress: Callable[[str], None]
) -> dict[str, Result]:
    """What is known of each engine when it has run once; those that have are among `workers`."""
    results: dict[str, Result] = {}
    for engine in settings.engines:
        progress(f"{engine} compiles")
        workers[engine] = worker = Worker(engine, task)
        ready = worker.wait_ready()
        if isinstance(ready, Failure):
            workers.pop(engine).stop()
            results[engine] = Result(task.model, engine, ready.reason)
            continue
        results[engine] = Result(
            task.model,
            engine,
            error=worst_error(ready.outputs, exact),
            compile_seconds=ready.compile_seconds,
            imported_bytes=ready.imported_bytes,
            facts=ready.facts,
        )
    return results


def right(results: Mapping[str, Result], wrong_error: float | None = None) -> dict[str, Result]:
    """The results, failed where an error is beyond what its precision explains, in a net that amplifies roundings as this one."""
    exact = [row.error for name, row in results.items() if not row.failure and ENGINES[name].computes == "float32"]
    factor = max(1.0, min(filter(isfinite, exact), default=0.0) / _USUAL_ERROR)
    found = {}
    for name, row in results.items():
        most = wrong_error or min(factor * MOST_ERROR[ENGINES[name].computes], _NOTHING_RIGHT)
        is_right = bool(row.failure) or row.error <= most
        found[name] = row if is_right else replace(row, failure=f"wrong results: error {row.error:.1e}, of {most:.1e} allowed")
    return found


class Busy:
    """Processes that compute all the time, but for moments in which the machine itself is measured."""

    def __init__(self, count: int) -> None:
        self._processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._tell(signal.SIGSTOP)
        try:
            yield
        finally:
            self._tell(signal.SIGCONT)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def _tell(self, number: signal.Signals) -> None:
        for process in self._processes:
            process.send_signal(number)


@contextmanager
def others(count: int) -> Iterator[Busy]:
    """So many other processes that compute."""
    busy = Busy(count)
    try:
        yield busy
    finally:
        busy.stop()


def compared(slower: Result, faster: Result) -> Spread:
    """How many times as long a call of the one takes as one of the other, over the rounds of both."""
    return spread(list(ratios(slower.round_ms, faster.round_ms)))


def peers_of(mine: Result, rows: Sequence[Result]) -> list[Result]:
    """The peers that one of ours is compared with: those that compute in what is as exact, and those whose error is."""
    spec = ENGINES[mine.engine]
    return [
        row
        for row in rows
        if not row.failure
        and not row.engine.startswith("prefuse")
        and (ENGINES[row.engine].is_as_exact_as(spec) or row.error <= _AS_EXACT * mine.error)
    ]


def best_peer(mine: Result, rows: Sequence[Result]) -> Result | None:
    """The fastest of these, by the rounds that it is compared in; None where there is none."""
    return min(peers_of(mine, rows), key=lambda row: compared(row, mine).median, default=None)


def take_turns(workers: Mapping[str, Worker], settings: Settings, progress: Callable[[str], None], busy: Busy) -> Rounds:
    """Rounds of a block for each engine, until those that count fill `settings.seconds`, or twice as many ran."""
    needed = max(ceil(settings.seconds / settings.block_seconds), LEAST_ROUNDS)
    rounds = Rounds({engine: [] for engine in workers}, counts_all=settings.beside > 0)
    shuffle, probe = random.Random(0), Probe(settings.threads)
    try:
        while len(rounds.counted) < needed and len(rounds.gflops) < 2 * needed and len(rounds.failures) < len(workers):
            progress(f"round {len(rounds.gflops) + 1}, {len(rounds.counted)} of {needed} count")
            speeds = []
            for engine in shuffle.sample(list(workers), len(workers)):
                if engine in rounds.failures:
                    continue
                speeds.append(_speed(probe, busy))
                block = workers[engine].run_block(settings.block_seconds)
                if isinstance(block, Failure):
                    rounds.failures[engine] = block
                else:
                    rounds.seconds[engine].append(block)
            rounds.gflops.append(min(*speeds, _speed(probe, busy)))
    finally:
        probe.stop()
    return rounds


def _speed(probe: Probe, busy: Busy) -> float:
    """The machine's speed when the threads of the engine before sleep."""
    with busy.paused():
        time.sleep(PAUSE_SECONDS)
        return probe.gflops()


def _with_times(result: Result, rounds: Rounds, peak_bytes: int) -> Result:
    if result.engine in rounds.failures:
        return replace(result, failure=rounds.failures[result.engine].reason)
    every, counted = rounds.seconds[result.engine], rounds.counted
    blocks = [every[index] for index in counted]
    medians = tuple(1e3 * float(np.median(block)) for block in every)
    round_ms = tuple(medians[index] for index in counted)
    times = np.concatenate(blocks)
    weights = np.concatenate([np.full(len(block), 1 / len(block)) for block in blocks])
    p10, p90 = (1e3 * float(one) for one in np.quantile(times, (0.1, 0.9), weights=weights, method="inverted_cdf"))
    return replace(
        result,
        calls=len(times),
        median_ms=float(np.median(round_ms)),
        p10_ms=p10,
        p90_ms=p90,
        peak_bytes=peak_bytes,
        round_ms=round_ms,
        every_round_ms=medians,
    )
