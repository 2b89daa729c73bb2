"""Command line of the benchmarks: a table for people, JSON for machines."""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click
from prefuse.examples.models import MODELS
from rich.console import Console
from rich.table import Table

from .engines import DEFAULT_ENGINES, ENGINES
from .harness import Measurement, Result, Settings, measure, ratio

_WIDTH = 110  # columns of a table that is written to a file or a pipe


def _engine_names(_context: click.Context, _option: click.Parameter, value: str) -> tuple[str, ...]:
    """Names separated by commas, each once."""
    names = tuple(dict.fromkeys(value.split(",")))
    if unknown := [name for name in names if name not in ENGINES]:
        raise click.BadParameter(f"unknown engine {unknown[0]!r}; use {', '.join(ENGINES)}")
    return names


@click.command()
@click.argument("models", nargs=-1, required=True, metavar="MODEL...", type=click.Choice([*MODELS, "all"]))
@click.option(
    "--engines",
    callback=_engine_names,
    metavar="ENGINE,...",
    default=",".join(DEFAULT_ENGINES),
    show_default=True,
    help="Engines to compare.",
)
@click.option("--threads", default=2, show_default=True, type=click.IntRange(min=1), help="Threads that each engine may use.")
@click.option("--small", is_flag=True, help="Small variants of the models: checks the benchmark, not the engines.")
@click.option("--seconds", default=3.0, show_default=True, type=click.FloatRange(min=0.1), help="Time for each engine and model.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the results to this file.")
def main(
    models: tuple[str, ...], engines: tuple[str, ...], threads: int, small: bool, seconds: float, json_path: Path | None
) -> None:
    """Run MODELs ("all" for every one) through prefuse and its peers, interleaved, and compare."""
    settings = Settings(engines, threads, small, seconds)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    measured: dict[str, Measurement] = {}
    for model in MODELS if "all" in models else dict.fromkeys(models):
        measured[model] = _measure(model, settings, console)
        console.print(_table(model, measured[model].results))
        console.print(_speeds(measured[model]), markup=False)
        for row in measured[model].results:
            if row.failure:
                console.print(f"{row.engine} failed: {row.failure}", style="red", markup=False)
        if json_path is not None:  # after each model: a long run that is interrupted leaves what it has
            json_path.write_text(json.dumps(_document(settings, measured), indent=2) + "\n")


def _measure(model: str, settings: Settings, console: Console) -> Measurement:
    with console.status(model) as status:

        def progress(text: str) -> None:
            status.update(f"{model}: {text}")

        return measure(model, settings, progress)


def _table(model: str, rows: list[Result]) -> Table:
    """`x best` is the time over that of the fastest engine other than prefuse, round by round."""
    peers = [row for row in rows if not row.engine.startswith("prefuse") and not row.failure]
    best = min(peers, key=lambda row: row.median_ms, default=None)
    table = Table(title=model, title_justify="left")
    table.add_column("engine", no_wrap=True)
    for heading in ("median ms", "p10", "p90", "x best", "error", "MiB", "compile s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        if row.failure:
            table.add_row(row.engine, "failed")
            continue
        times = [f"{value:.3f}" for value in (row.median_ms, row.p10_ms, row.p90_ms)]
        compared = f"{ratio(row, best):.2f}" if best else "-"
        size, seconds = f"{row.peak_bytes / 2**20:.0f}", f"{row.compile_seconds:.2f}"
        table.add_row(row.engine, *times, compared, f"{row.error:.1e}", size, seconds)
    return table


def _speeds(one: Measurement) -> str:
    """What the machine could do while the model was measured."""
    speeds = [one.gflops[index] for index in one.counted]
    text = f"{len(speeds)} rounds at {min(speeds):.0f} to {max(speeds):.0f} GFLOP/s of small products on all threads"
    if left_out := sorted(set(one.gflops) - set(speeds)):
        text += f"; {len(one.gflops) - len(speeds)} left out at {left_out[0]:.0f} to {left_out[-1]:.0f}: cores were taken away"
    return text


def _document(settings: Settings, measured: dict[str, Measurement]) -> dict[str, object]:
    machine = {"cpu": _cpu_name(), "python": platform.python_version()}
    versions = {engine: _version(ENGINES[engine].distribution) for engine in settings.engines}
    return {
        "machine": machine,
        "versions": versions,
        "settings": asdict(settings),
        "rounds": {model: {"gflops": one.gflops, "counted": one.counted} for model, one in measured.items()},
        "results": [asdict(row) for one in measured.values() for row in one.results],
    }


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    main()
