"""Command line: policies beside each other on traces, in simulated time. A table for people, JSON for machines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
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

from .baselines import POLICIES, on_demand, unrolled
from .cases import small_cases, streamed, training
from .exact import Exact
from .traces import g10_tiers, gpt2, read_g10

GPT2 = ((1, 15), (4, 15), (4, 60), (8, 60))  # batch, TFLOP/s
_CALLS = 2  # of policies, of which the last one is timed
_NAMES = {"lru": "LRU", "belady": "Belady", "size": "size x distance"}


@dataclass(frozen=True, slots=True)
class Row:
    """A policy on a trace. `seconds`: of a call, when calls have followed each other; `took`: to make the schedule."""

    trace: str
    policy: str
    seconds: float
    of_ideal: float  # the share of the steps' own time
    of_ceiling: float  # the time over that of the ceiling
    bytes_in: int
    bytes_out: int
    took: float


@click.command()
@click.option("--data", type=click.Path(path_type=Path, file_okay=False), help="Folder with G10's traces, tensors_*.txt.")
@click.option("--only", default="", help="Traces whose name has this in it.")
@click.option("--small", "count", default=500, show_default=True, help="Small cases to compare with the exact optimum.")
@click.option("--large", "steps", multiple=True, type=int, help="Also time schedules of so many steps.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the results to this file.")
def main(data: Path | None, only: str, count: int, steps: tuple[int, ...], json_path: Path | None) -> None:
    """Schedules of copies on training steps: paging on demand, ours, and the ceiling."""
    console = Console(width=None if sys.stdout.isatty() else 110)
    rows: list[Row] = []
    for name, problem in _problems(data, only):
        found = list(_rows(name, problem))
        rows += found
        console.print(_table(found))
    ratios = optimum_ratios(count)
    if ratios:
        console.print(f"{count} small cases over their optimum: mean {np.mean(ratios):.4f}, worst {max(ratios):.3f}")
    for size in steps:
        took = _seconds(streamed(size)), _seconds(training(size))
        console.print(f"{size} steps: {took[0]:.1f} s for streamed weights, {took[1]:.1f} s for a training")
    if json_path:
        result = {"rows": [asdict(row) for row in rows], "optimum": {"count": count, "ratios": ratios}}
        json_path.write_text(json.dumps(result, indent=1) + "\n")


def _problems(data: Path | None, only: str) -> Iterator[tuple[str, Problem]]:
    for path in sorted(data.glob("tensors_*.txt")) if data else ():
        for has_ssd in (False, True):
            name = f"{path.stem.removeprefix('tensors_')}, host {'128 GiB and SSD' if has_ssd else 'without end'}"
            if only in name:
                yield name, read_g10(path, g10_tiers(has_ssd))
    for batch, tflops in GPT2:
        name = f"GPT-2 774M, batch {batch}, {tflops} TFLOP/s"
        if only in name:
            yield name, gpt2(batch, tflops * 1e12)


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
    """The last call of what was replayed. Bytes are those of all its calls on average."""
    result = replay(replayed, found)
    assert not result.faults, (name, policy, result.faults[:3])
    count, calls = len(problem.steps), len(replayed.steps) // len(problem.steps)
    ideal = problem.compute_seconds
    seconds = sum(result.stalls[-count:]) + ideal
    return Row(name, policy, seconds, ideal / seconds, seconds / least, result.bytes_in // calls, result.bytes_out // calls, took)


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
