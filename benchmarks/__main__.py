"""Command line of the benchmarks: a table for people, JSON for machines."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from math import exp, log
from pathlib import Path

import click
from prefuse.examples.models import MODELS
from rich.console import Console
from rich.table import Table

from .engines import DEFAULT_ENGINES, ENGINES
from .harness import Measurement, Result, Settings, measure, ratio
from .nets import LIBRARIES

_BEHIND = 0.95  # of the speed of the fastest peer
_WIDTH = 110  # columns of a table that is written to a file or a pipe


def _engine_names(_context: click.Context, _option: click.Parameter, value: str) -> tuple[str, ...]:
    """Names separated by commas, each once."""
    names = tuple(dict.fromkeys(value.split(",")))
    if unknown := [name for name in names if name not in ENGINES]:
        raise click.BadParameter(f"unknown engine {unknown[0]!r}; use {', '.join(ENGINES)}")
    return names


def _models(_context: click.Context, _argument: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    """Names, each once; "all" is every one of ours."""
    unknown = [name for name in names if name not in (*MODELS, "all") and name.partition("/")[0] not in LIBRARIES]
    if unknown:
        raise click.BadParameter(f"unknown model {unknown[0]!r}; use all, {', '.join(MODELS)}, timm/NAME or torchvision/NAME")
    return tuple(dict.fromkeys(one for name in names for one in (MODELS if name == "all" else [name])))


@click.command()
@click.argument("models", nargs=-1, required=True, metavar="MODEL...", callback=_models)
@click.option(
    "--engines",
    callback=_engine_names,
    metavar="ENGINE,...",
    default=",".join(DEFAULT_ENGINES),
    show_default=True,
    help="Engines to compare.",
)
@click.option("--threads", default=2, show_default=True, type=click.IntRange(min=1), help="Threads that each engine may use.")
@click.option("--batch", default=1, show_default=True, type=click.IntRange(min=1), help="Images, of models of a library.")
@click.option("--small", is_flag=True, help="Small variants of the models: checks the benchmark, not the engines.")
@click.option("--seconds", default=3.0, show_default=True, type=click.FloatRange(min=0.1), help="Time for each engine and model.")
@click.option(
    "--beside", default=0, show_default=True, type=click.IntRange(min=0), help="Other processes that compute meanwhile."
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the results to this file.")
def main(
    models: tuple[str, ...],
    engines: tuple[str, ...],
    threads: int,
    batch: int,
    small: bool,
    seconds: float,
    beside: int,
    json_path: Path | None,
) -> None:
    """Run MODELs through prefuse and its peers, interleaved, and compare: ours by name ("all" for every one), and those of
    libraries as timm/NAME or torchvision/NAME."""
    settings = Settings(engines, threads, small, batch, seconds, beside)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    measured: dict[str, Measurement] = {}
    for model in models:
        try:
            measured[model] = _measure(model, settings, console)
        except ValueError as error:  # there is no such model in its library
            console.print(f"{model}: {error}", style="red", markup=False)
            continue
        console.print(_table(model, measured[model].results))
        console.print(_speeds(measured[model]), markup=False)
        for row in measured[model].results:
            if row.failure:
                console.print(f"{row.engine} failed: {row.failure}", style="red", markup=False)
        if json_path is not None:  # after each model: a long run that is interrupted leaves what it has
            json_path.write_text(json.dumps(_document(settings, measured), indent=2) + "\n")
    if len(measured) > 1:
        console.print("\n".join(summary(measured, settings.engines)), markup=False)


def summary(measured: dict[str, Measurement], engines: tuple[str, ...]) -> Iterator[str]:
    """For each of our engines: how fast it is beside the fastest peer of each model, and where it is behind."""
    for engine in (name for name in engines if name.startswith("prefuse")):
        speeds = {model: speed for model, one in measured.items() if (speed := _speed_beside_peers(one, engine)) is not None}
        if speeds:
            mean = exp(sum(map(log, speeds.values())) / len(speeds))
            behind = ", ".join(f"{model} {speed:.2f}" for model, speed in speeds.items() if speed < _BEHIND)
            yield f"{engine}: {mean:.2f} times as fast as the best peer (geometric mean of {len(speeds)} models)"
            yield f"{engine} is behind in {behind or 'none'}"


def _speed_beside_peers(one: Measurement, engine: str) -> float | None:
    """The time of the fastest peer over that of `engine`; None where either has none."""
    rows = {row.engine: row for row in one.results if not row.failure}
    peers = [row for name, row in rows.items() if not name.startswith("prefuse")]
    if engine not in rows or not peers:
        return None
    return ratio(min(peers, key=lambda row: row.median_ms), rows[engine])


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
