"""Command line: policies beside each other on traces, in simulated time. A table for people, JSON for machines."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import click
import numpy as np
from prefuse.passes.plan.prefetch.bounds import ceiling
from prefuse.passes.plan.prefetch.problem import Problem
from prefuse.passes.plan.prefetch.replay import replay
from prefuse.passes.plan.prefetch.schedule import Schedule
from prefuse.passes.plan.prefetch.scheduler import schedule
from rich.console import Console
from rich.table import Table

from ..record import record
from .baselines import POLICIES, on_demand, unrolled
from .cases import small_cases, streamed, training
from .exact import Exact
from .traces import g10_tiers, gpt2, read_g10

GPT2 = ((1, 15), (4, 15), (4, 60), (8, 60))  # batch, TFLOP/s
_CALLS = 2  # of policies, of which the last one is timed
G10_SOURCE = "https://github.com/platformxlab/G10"  # whose artifact has the traces
_NAMES = {"lru": "LRU", "belady": "Belady", "size": "size x distance"}


@dataclass(frozen=True, slots=True)
class Row:
    """A policy on a trace. `seconds` and bytes: of a call, when calls have followed each other; `took`: to make the schedule.
    `digest`: of the file of a trace that is not ours."""

    trace: str
    policy: str
    seconds: float
    of_ideal: float  # the share of the steps' own time
    of_ceiling: float  # the time over that of the ceiling
    bytes_in: int
    bytes_out: int
    took: float
    digest: str = ""


@click.command()
@click.option("--data", type=click.Path(path_type=Path, file_okay=False), help="Folder with G10's traces, tensors_*.txt.")
@click.option("--only", default="", help="Traces whose name has this in it.")
@click.option("--small", "count", default=500, show_default=True, help="Small cases to compare with the exact optimum.")
@click.option("--large", "steps", multiple=True, type=int, help="Also time schedules of so many steps.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the results to this file.")
def main(data: Path | None, only: str, count: int, steps: tuple[int, ...], json_path: Path | None) -> None:
    """Schedules of copies on training steps: paging on demand, ours, and the ceiling."""
    console = Console(width=None if sys.stdout.isatty() else 110)
    settings = {"small": count, "large": steps, "traces": G10_SOURCE}
    kept = record(json_path, 1, settings, key=("trace", "policy"))
    for name, problem, digest in _problems(data, only):
        found = [replace(row, digest=digest) for row in _rows(name, problem)]
        kept.add(*found)
        console.print(_table(found))
    ratios = optimum_ratios(count)
    if ratios:
        console.print(f"{count} small cases over their optimum: mean {np.mean(ratios):.4f}, worst {max(ratios):.3f}")
        kept.add({"trace": "small cases", "policy": "prefuse", "over_optimum": ratios})
    for size in steps:
        took = _seconds(streamed(size)), _seconds(training(size))
        console.print(f"{size} steps: {took[0]:.1f} s for streamed weights, {took[1]:.1f} s for a training")
        kept.add({"trace": f"{size} steps", "policy": "prefuse", "took_streamed": took[0], "took_training": took[1]})


def _problems(data: Path | None, only: str) -> Iterator[tuple[str, Problem, str]]:
    """Traces by name, and of a file its digest."""
    for path in sorted(data.glob("tensors_*.txt")) if data else ():
        for has_ssd in (False, True):
            name = f"{path.stem.removeprefix('tensors_')}, host {'128 GiB and SSD' if has_ssd else 'without end'}"
            if only in name:
                yield name, read_g10(path, g10_tiers(has_ssd)), hashlib.sha256(path.read_bytes()).hexdigest()
    for batch, tflops in GPT2:
        name = f"GPT-2 774M, batch {batch}, {tflops} TFLOP/s"
        if only in name:
            yield name, gpt2(batch, tflops * 1e12), ""


def _rows(name: str, problem: Problem) -> Iterator[Row]:
    least = ceiling(problem).seconds
    if len(problem.tiers) == 1:
        calls = unrolled(problem, _CALLS)
        for policy in POLICIES:
            for is_serial in (True, False):
                label = f"{_NAMES[policy]}, {'serial' if is_serial else 'ahead'}"
                begin = time.perf_counter()
                found = on_demand(calls, policy, is_serial=is_serial)
                yield _row(name, label, problem, calls, found, least, time.perf_counter() - begin)
    begin = time.perf_counter()
    found = schedule(problem)
    yield _row(name, "prefuse", problem, problem, found, least, time.perf_counter() - begin)


def _row(name: str, policy: str, problem: Problem, replayed: Problem, found: Schedule, least: float, took: float) -> Row:
    """The last call of what was replayed: the first one fetches all that a memory has not yet."""
    result = replay(replayed, found)
    assert not result.faults, (name, policy, result.faults[:3])
    count, calls = len(problem.steps), len(replayed.steps) // len(problem.steps)
    ideal = problem.compute_seconds
    seconds = sum(result.stalls[-count:]) + ideal
    moved = (result.bytes_in, result.bytes_out) if calls == 1 else last_call_bytes(replayed, found, count * (calls - 1))
    return Row(name, policy, seconds, ideal / seconds, seconds / least, *moved, took)


def last_call_bytes(problem: Problem, found: Schedule, first: int) -> tuple[int, int]:
    """Bytes that come in for steps from `first` on, and those that go out behind one of these."""
    sizes = [item.size_bytes for item in problem.objects]
    bytes_in = sum(sizes[copy.object] for copy in found.copies_in if copy.before_step >= first)
    return bytes_in, sum(sizes[copy.object] for copy in found.copies_out if copy.after_step >= first)


def _seconds(problem: Problem) -> float:
    """How long the scheduler takes."""
    begin = time.perf_counter()
    schedule(problem)
    return time.perf_counter() - begin


def optimum_ratios(count: int) -> list[float]:
    """Our time over the least possible, of small cases."""
    ratios = []
    for problem in small_cases(count):
        result = replay(problem, schedule(problem))
        assert not result.faults, (problem, result.faults)
        ratios.append(result.seconds / Exact(problem).seconds)
    return ratios


def _table(rows: list[Row]) -> Table:
    table = Table(title=rows[0].trace, title_justify="left")
    for column in ("policy", "ms", "% of ideal", "x ceiling", "x LRU serial", "GiB in", "GiB out", "s to make"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    base = rows[0].seconds if len(rows) > 1 else None
    for row in rows:
        table.add_row(
            row.policy,
            f"{1e3 * row.seconds:.1f}",
            f"{100 * row.of_ideal:.1f}",
            f"{row.of_ceiling:.3f}",
            "" if base is None else f"{row.seconds / base:.3f}",
            f"{row.bytes_in / 2**30:.1f}",
            f"{row.bytes_out / 2**30:.1f}",
            f"{row.took:.1f}",
        )
    return table


if __name__ == "__main__":
    main()
