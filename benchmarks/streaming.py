"""Programs within a memory limit, beside their ceilings: `python -m benchmarks.streaming bert-base gpt2 --limit 25% --limit 50%`.

In turns, in one process, in an order that changes from round to round: the program without a limit; the copies of the limited one
without its kernels; both once, begun at the same moment, until both have ended; the limited program; and one that copies each
weight only when its reader is next. The ceiling of a round is the third of these: no schedule can do the same work in less than
the same work does that nothing orders. What copies one after the other would take is there beside it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
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

from .nets import UnknownModelError, build
from .record import record
from .turns import (
    LEAST_ROUNDS,
    PAUSE_SECONDS,
    Block,
    Call,
    Spread,
    block_of,
    in_milliseconds,
    medians,
    ratios,
    spread,
    take_turns,
    together,
)

_COLUMNS = 170  # of the table
_ON_DEMAND = DEFAULT_PIPELINE.replace("schedule-prefetch", "schedule-prefetch{on-demand=true}")
_KEY = ("model", "precision", "limit")


@dataclass(frozen=True, slots=True)
class Streamed:
    """One model at one limit. Milliseconds are medians over rounds, all of which `rounds_ms` has; ratios are inside rounds."""

    model: str
    precision: str
    limit: str
    limit_bytes: int
    copied_bytes: int
    is_exact: bool  # the bits of the program without a limit
    compute_ms: float
    transfer_ms: float
    together_ms: float  # the ceiling: both once, side by side, until both have ended
    streamed_ms: float
    on_demand_ms: float
    predicted_ms: float | None  # None where the pass says none
    over_alone: Spread  # streamed over the longer of compute and transfer alone
    over_ceiling: Spread  # over both together
    over_serial: Spread  # over the sum of compute and transfer: from 1 on nothing is gained by copying beside kernels
    on_demand_over_streamed: Spread
    rounds_ms: Mapping[str, list[list[float]]]


@dataclass(frozen=True, slots=True)
class Unfit:
    """A model that has no program within a limit, and why."""

    model: str
    precision: str
    limit: str
    failure: str


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
    is_exact = all(map(np.array_equal, _tuple(free(*arrays)), _tuple(limited(*arrays))))
    blocks = blocks_of(lambda: free(*arrays), copies, lambda: limited(*arrays), lambda: late(*arrays))
    times = take_turns(blocks, rounds, PAUSE_SECONDS)
    one = {name: medians(found) for name, found in times.items()}
    middle = {name: 1e3 * median(found) for name, found in one.items()}
    return Streamed(
        model=model,
        precision=precision,
        limit=limit,
        limit_bytes=planned_bytes(limited.plan),
        copied_bytes=copies.size_bytes,
        is_exact=is_exact,
        compute_ms=middle["compute"],
        transfer_ms=middle["transfer"],
        together_ms=middle["together"],
        streamed_ms=middle["streamed"],
        on_demand_ms=middle["on demand"],
        predicted_ms=_predicted_ms(limited),
        **spreads(one),
        rounds_ms={name: in_milliseconds(found) for name, found in times.items()},
    )


def blocks_of(compute: Call, transfer: Call, streamed: Call, on_demand: Call) -> dict[str, Block]:
    """What has turns: each call behind one that does not count, as the one before had the caches; kernels and copies once
    together."""
    calls = {"compute": compute, "transfer": transfer, "streamed": streamed, "on demand": on_demand}

    def side_by_side() -> list[float]:
        compute()
        return [together(compute, transfer)]

    return {**{name: block_of(call, calls=1) for name, call in calls.items()}, "together": side_by_side}


def spreads(times: Mapping[str, list[float]]) -> dict[str, Spread]:
    """The ratios of a model, of seconds by round."""
    compute, transfer, streamed = times["compute"], times["transfer"], times["streamed"]
    longer = [max(pair) for pair in zip(compute, transfer, strict=True)]
    both = [one + other for one, other in zip(compute, transfer, strict=True)]
    wanted = {"over_alone": longer, "over_ceiling": times["together"], "over_serial": both}
    found = {name: spread(list(ratios(streamed, others))) for name, others in wanted.items()}
    return {**found, "on_demand_over_streamed": spread(list(ratios(times["on demand"], streamed)))}


def _predicted_ms(net: CompiledModel) -> float | None:
    """What schedule-prefetch expected of a call."""
    for text in net.remarks:
        number, found, _ = text.partition("; ")[2].partition(" ms are predicted")
        if text.startswith("schedule-prefetch") and found:
            return float(number)
    return None


def _tuple(results: object) -> tuple[np.ndarray, ...]:
    return tuple(map(np.asarray, results if isinstance(results, tuple) else (results,)))


@click.command()
@click.argument("models", nargs=-1, required=True)
@click.option("--limit", "limits", multiple=True, default=("50%", "25%"), show_default=True)
@click.option("--precision", "precisions", multiple=True, default=("float32", "bfloat16"), show_default=True)
@click.option("--threads", default=2, show_default=True, type=click.IntRange(min=1))
@click.option("--rounds", default=LEAST_ROUNDS, show_default=True, type=click.IntRange(min=1))
@click.option("--small", is_flag=True, help="Our own models in a small size.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Add all numbers to this file.")
def main(
    models: tuple[str, ...],
    limits: tuple[str, ...],
    precisions: tuple[str, ...],
    threads: int,
    rounds: int,
    small: bool,
    path: Path | None,
) -> None:
    """Time MODELS within memory limits. What does not fit is a row that says so; another fault of a model ends with status 1."""
    kept = record(path, threads, {"rounds": rounds, "small": small}, key=_KEY)
    console, has_failed = Console(width=_COLUMNS), False
    table = Table(title="ms, medians of rounds in turns; ratios with their quartiles")
    of_others = ("of alone", "of ceiling", "of sum", "on demand")
    columns = ("compute", "transfer", "together", "streamed", "predicted", *of_others, "exact")
    for column in ("model", "precision", "limit", "MB copied", *columns):
        table.add_column(column)
    for case in ((model, precision, limit) for model in models for precision in precisions for limit in limits):
        try:
            one = measure(*case, threads, rounds, small)
        except (CompileError, UnknownModelError) as error:
            has_failed |= getattr(error, "where", "") != "memory_limit"
            console.print(f"{' '.join(case)}: {error}", markup=False)
            table.add_row(*case, "none")
            kept.add(Unfit(*case, str(error)))
            continue
        table.add_row(*case, *_cells(one))
        console.print(f"{' '.join(case)}: {one.streamed_ms:.1f} ms, {one.over_ceiling} of the ceiling", markup=False)
        kept.add(one)
    console.print(table)
    if has_failed:
        raise SystemExit(1)


def _cells(one: Streamed) -> list[str]:
    times = (one.compute_ms, one.transfer_ms, one.together_ms, one.streamed_ms)
    predicted = "-" if one.predicted_ms is None else f"{one.predicted_ms:.1f}"
    found = (one.over_alone, one.over_ceiling, one.over_serial, one.on_demand_over_streamed)
    return [f"{one.copied_bytes / 1e6:.0f}", *(f"{time:.1f}" for time in times), predicted, *map(str, found), str(one.is_exact)]


if __name__ == "__main__":
    main()
