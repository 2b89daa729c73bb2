"""Runs engines in turns. Only ratios inside one run mean anything: a shared machine's memory bandwidth varies by the minute."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from .reference import make_task, worst_error
from .worker import Failure, Worker

_BLOCK_SECONDS = 0.5
_PAUSE_SECONDS = 0.2  # until the spinning threads of the engine before sleep: those of TVM spin for 0.15 s


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


@dataclass(frozen=True, slots=True)
class Settings:
    """How a model is measured; `seconds` is the time each engine gets, in blocks of half a second."""

    engines: tuple[str, ...]
    threads: int = 2
    small: bool = False
    seconds: float = 3.0


def measure(model: str, settings: Settings, progress: Callable[[str], None]) -> list[Result]:
    """Every engine on one model, in the order of `settings.engines`; `progress` is told what is being done."""
    with TemporaryDirectory(prefix="prefuse-benchmark-") as folder:
        progress("export and float64 reference")
        task, exact = make_task(model, settings.small, settings.threads, Path(folder))
        results: dict[str, Result] = {}
        workers: dict[str, Worker] = {}
        for engine in settings.engines:
            progress(f"{engine} compiles")
            worker = Worker(engine, task)
            ready = worker.wait_ready()
            if isinstance(ready, Failure):
                worker.stop()
                results[engine] = Result(model, engine, ready.reason)
                continue
            workers[engine] = worker
            error = worst_error(ready.outputs, exact)
            results[engine] = Result(
                model, engine, error=error, compile_seconds=ready.compile_seconds, imported_bytes=ready.imported_bytes
            )
        times = _take_turns(workers, settings.seconds, progress)
        for engine, worker in workers.items():
            results[engine] = _with_times(results[engine], times[engine], worker.stop())
    return [results[engine] for engine in settings.engines]


def _take_turns(
    workers: dict[str, Worker], seconds: float, progress: Callable[[str], None]
) -> dict[str, Sequence[float] | Failure]:
    """Call times of each engine, from as many rounds of blocks as fill `seconds` each; each round begins with another engine."""
    times: dict[str, list[float]] = {engine: [] for engine in workers}
    failures: dict[str, Failure] = {}
    rounds = ceil(seconds / _BLOCK_SECONDS)
    for index in range(rounds):
        progress(f"round {index + 1} of {rounds}")
        order = list(workers)
        for engine in order[index % len(order) :] + order[: index % len(order)]:
            if engine in failures:
                continue
            time.sleep(_PAUSE_SECONDS)
            block = workers[engine].run_block(_BLOCK_SECONDS)
            if isinstance(block, Failure):
                failures[engine] = block
            else:
                times[engine] += block
    return {**times, **failures}


def _with_times(result: Result, times: Sequence[float] | Failure, peak_bytes: int) -> Result:
    if isinstance(times, Failure):
        return replace(result, failure=times.reason)
    p10, median, p90 = (1e3 * float(value) for value in np.percentile(times, (10, 50, 90)))
    return replace(result, calls=len(times), median_ms=median, p10_ms=p10, p90_ms=p90, peak_bytes=peak_bytes)
