"""Programs within a memory limit, beside their ceilings: `python -m benchmarks.streaming bert-base gpt2 --limit 25% --limit 50%`.

In turns, in one process: the program without a limit; reading what the limited one copies, alone; both side by side, each timed;
the limited program; and one that copies each weight only when its reader is next. The ceiling of a round is the longer of the
kernels' time beside a reader that reads as many bytes, and of the copies' time beside the program without a limit.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from threading import Event, Thread
from time import perf_counter
from typing import Any

import click
import numpy as np
import prefuse
from prefuse.compiler.pipeline.pass_table import DEFAULT_PIPELINE
from prefuse.compiler.programs.specialize import SpecializedModel
from prefuse.runtime.cpu_device import CpuArena
from prefuse.runtime.errors import CompileError
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.plan import SCRATCH, planned_bytes
from prefuse.runtime.streaming.copier import Copier, Fetch, Leave, Return
from prefuse.runtime.streaming.scratch import Scratch
from prefuse.runtime.streams import copy_streams
from rich.console import Console
from rich.table import Table

from .nets import build

_COLUMNS = 150  # of the table
_ON_DEMAND = DEFAULT_PIPELINE.replace("schedule-prefetch", "schedule-prefetch{on-demand=true}")


@dataclass(frozen=True, slots=True)
class Streamed:
    """Medians of one model at one limit, in milliseconds."""

    model: str
    precision: str
    limit: str
    limit_bytes: int
    copied_bytes: int
    is_exact: bool  # the bits of the program without a limit
    compute_ms: float
    transfer_ms: float
    streamed_ms: float
    on_demand_ms: float
    predicted_ms: float
    over_alone: float  # over the longer of compute and transfer alone
    over_ceiling: float  # over the longer of each beside the other: medians of rounds
    on_demand_over_streamed: float


class Copies:
    """The copies of a program from its file, and those of activations that leave memory and return, without its kernels."""

    def __init__(self, net: CompiledModel) -> None:
        plan, streams = net.plan, copy_streams(net.plan)
        arena = CpuArena(plan.space("arena").size_bytes).memory
        scratch = Scratch([Path(tempfile.gettempdir())], sum(one.size_bytes for one in plan.spaces if one.name == SCRATCH))
        self._copier = Copier(streams, net.program.storage, arena, scratch)
        moves = [one for stream in streams.operations for one in stream if isinstance(one, Fetch | Leave | Return)]
        self._moves = sorted(moves, key=lambda move: move.step)
        self.size_bytes = sum(move.size_bytes for move in moves)

    def __call__(self) -> None:
        for move in self._moves:
            self._copier.move(move)


def measure(model: str, precision: str, limit: str, threads: int, rounds: int, small: bool) -> Streamed:
    """One model at one limit. Raises CompileError where no schedule fits."""
    module, inputs = build(model, small)

    def compiled(**options: Any) -> CompiledModel:
        net = prefuse.compile(module, inputs, precision=precision, threads=threads, **options)
        assert isinstance(net, SpecializedModel)
        program = net.specialize(*inputs)
        assert isinstance(program, CompiledModel)
        return program

    free, limited = compiled(), compiled(memory_limit=limit)
    late = compiled(memory_limit=limit, pipeline=_ON_DEMAND)
    copies, arrays = Copies(limited), [value.numpy() for value in inputs]
    calls: dict[str, Callable[[], object]] = {
        "compute": lambda: free(*arrays),
        "transfer": copies,
        "streamed": lambda: limited(*arrays),
        "on demand": lambda: late(*arrays),
    }
    is_exact = all(map(np.array_equal, _tuple(free(*arrays)), _tuple(limited(*arrays))))
    for call in calls.values():
        call()
    found: dict[str, list[float]] = {name: [] for name in (*calls, "ceiling")}
    for _ in range(rounds):
        for name, call in calls.items():
            found[name].append(_ms(call))
        found["ceiling"].append(max(_beside(calls["compute"], copies), _beside(copies, calls["compute"])))
    times = {name: median(values) for name, values in found.items()}
    ratios = [one / other for one, other in zip(found["streamed"], found["ceiling"], strict=True)]
    return Streamed(
        model=model,
        precision=precision,
        limit=limit,
        limit_bytes=planned_bytes(limited.plan),
        copied_bytes=copies.size_bytes,
        is_exact=is_exact,
        compute_ms=times["compute"],
        transfer_ms=times["transfer"],
        streamed_ms=times["streamed"],
        on_demand_ms=times["on demand"],
        predicted_ms=_predicted_ms(limited),
        over_alone=times["streamed"] / max(times["compute"], times["transfer"]),
        over_ceiling=median(ratios),
        on_demand_over_streamed=times["on demand"] / times["streamed"],
    )


def _predicted_ms(net: CompiledModel) -> float:
    """What schedule-prefetch expected of a call."""
    remark = next(text for text in net.remarks if text.startswith("schedule-prefetch"))
    return float(remark.partition("; ")[2].partition(" ms")[0])


def _beside(call: Callable[[], object], other: Callable[[], object]) -> float:
    """The time of a call while another thread makes other calls, one after the other."""
    is_over = Event()

    def repeat() -> None:
        while not is_over.is_set():
            other()

    thread = Thread(target=repeat)
    thread.start()
    try:
        return _ms(call)
    finally:
        is_over.set()
        thread.join()


def _ms(call: Callable[[], object]) -> float:
    begin = perf_counter()
    call()
    return 1e3 * (perf_counter() - begin)


def _tuple(results: object) -> tuple[np.ndarray, ...]:
    return tuple(map(np.asarray, results if isinstance(results, tuple) else (results,)))


@click.command()
@click.argument("models", nargs=-1, required=True)
@click.option("--limit", "limits", multiple=True, default=("50%", "25%"), show_default=True)
@click.option("--precision", "precisions", multiple=True, default=("float32", "bfloat16"), show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--small", is_flag=True, help="Our own models in a small size.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write all numbers here, too.")
def main(
    models: tuple[str, ...],
    limits: tuple[str, ...],
    precisions: tuple[str, ...],
    threads: int,
    rounds: int,
    small: bool,
    path: Path | None,
) -> None:
    """Time MODELS within memory limits."""
    table, found = Table(title="ms, medians of rounds in turns"), list[Streamed]()
    columns = ("compute", "transfer", "streamed", "predicted", "of alone", "of ceiling", "on demand", "exact")
    for column in ("model", "precision", "limit", "MB copied", *columns):
        table.add_column(column)
    for model in models:
        for precision in precisions:
            for limit in limits:
                try:
                    one = measure(model, precision, limit, threads, rounds, small)
                except CompileError:
                    table.add_row(model, precision, limit, "none")
                    continue
                found.append(one)
                times = (one.compute_ms, one.transfer_ms, one.streamed_ms, one.predicted_ms)
                ratios = (one.over_alone, one.over_ceiling, one.on_demand_over_streamed)
                numbers = [*(f"{time:.1f}" for time in times), *(f"{ratio:.2f}" for ratio in ratios), str(one.is_exact)]
                table.add_row(model, precision, limit, f"{one.copied_bytes / 1e6:.0f}", *numbers)
                if path is not None:
                    path.write_text(json.dumps([asdict(item) for item in found], indent=1) + "\n")
    Console(width=_COLUMNS).print(table)


if __name__ == "__main__":
    main()
