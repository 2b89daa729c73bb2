"""Command line of the benchmarks: a table for people, JSON for machines."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from math import exp, log
from pathlib import Path

import click
from prefuse.examples.models import MODELS
from rich.console import Console
from rich.table import Table

from .engines import DEFAULT_ENGINES, distributions, engine_names
from .harness import Measurement, Result, Settings, best_peer, compared, measure
from .nets import UnknownModelError, model_names
from .record import record
from .reference import NoReferenceError
from .turns import LEAST_ROUNDS, Spread

_BEHIND = 0.95  # of the speed of the fastest peer
_FEW_CALLS = 10  # of which the tenth and the ninetieth percent say nothing
_WIDTH = 120  # columns of a table that is written to a file or a pipe
_OTHERS = (
    "bits_oracle, decode, generation, gpu.run, int8_kernels, int8_peers, lengths, mixed_gains, prediction, prefetch, "
    "quantized_files, random_lengths, sensitivity, sized_images, streaming, trained_int8"
)


@click.command(epilog=f"Other benchmarks are modules beside this one: {_OTHERS}; each says more with --help.")
@click.argument("models", nargs=-1, required=True, metavar="MODEL...", callback=model_names)
@click.option(
    "--engines",
    callback=engine_names,
    metavar="ENGINE,...",
    default=",".join(DEFAULT_ENGINES),
    show_default=True,
    help="Engines to compare.",
)
@click.option("--threads", default=2, show_default=True, type=click.IntRange(min=1), help="Threads that each engine may use.")
@click.option("--batch", default=1, show_default=True, type=click.IntRange(min=1), help="Images, or texts of gpt2@N.")
@click.option("--small", is_flag=True, help="Small variants of the models: checks the benchmark, not the engines.")
@click.option("--seconds", default=3.0, show_default=True, type=click.FloatRange(min=0.1), help="Time for each engine and model.")
@click.option(
    "--beside", default=0, show_default=True, type=click.IntRange(min=0), help="Other processes that compute meanwhile."
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also add the results to this file.")
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
    libraries as timm/NAME or torchvision/NAME. Ends with status 1 where a model or an engine failed."""
    if batch > 1 and (own := [name for name in models if name in MODELS]):
        raise click.UsageError(f"--batch is for models of libraries and gpt2@N, and the batch of {own[0]} is part of its recipe")
    settings = Settings(engines, threads, small, batch, seconds, beside)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    given = {"batch": batch, "small": small, "seconds": seconds, "beside": beside}
    kept = record(json_path, threads, given, distributions(engines), key=("model", "engine"))
    measured: dict[str, Measurement] = {}
    has_failed = False
    for model in models:
        try:
            measured[model] = one = _measure(model, settings, console)
        except (UnknownModelError, NoReferenceError) as error:
            console.print(f"{model}: {error}", style="red", markup=False)
            has_failed = True
            continue
        console.print(table(model, one.results))
        console.print(_speeds(one), markup=False)
        for failure in failures(one):
            console.print(failure, style="red", markup=False)
            has_failed = True
        kept.add(*rows(one))  # after each model: a long run that is interrupted leaves what it has
    if len(measured) > 1:
        console.print("\n".join(summary(measured, settings.engines)), markup=False)
    if has_failed:
        raise SystemExit(1)


def rows(one: Measurement) -> Iterator[dict[str, object]]:
    """A model's results as rows of a file, with the speed of the machine in each round."""
    fields = Result.__dataclass_fields__
    for row in one.results:
        yield {**{name: getattr(row, name) for name in fields}, "gflops": one.gflops, "counted": one.counted}


def failures(one: Measurement) -> Iterator[str]:
    """What went wrong, in a line each."""
    yield from (f"{row.engine} failed: {row.failure[:300]}" for row in one.results if row.failure)


def summary(measured: dict[str, Measurement], engines: tuple[str, ...]) -> Iterator[str]:
    """For each of our engines: how fast it is beside the fastest peer of each model, and where it is behind."""
    for engine in (name for name in engines if name.startswith("prefuse")):
        found = {model: speed for model, one in measured.items() if (speed := _beside_peers(one, engine)) is not None}
        if found:
            mean = exp(sum(log(one.median) for one in found.values()) / len(found))
            behind = ", ".join(f"{model} {one.median:.2f}" for model, one in found.items() if one.median < _BEHIND)
            open_ones = ", ".join(f"{model} {one}" for model, one in found.items() if not one.is_certain)
            yield f"{engine}: {mean:.2f} times as fast as the best peer (geometric mean of {len(found)} models)"
            yield f"{engine} is behind in {behind or 'none'}"
            if open_ones:
                yield f"{engine} is neither ahead nor behind for certain in {open_ones}"


def _beside_peers(one: Measurement, engine: str) -> Spread | None:
    """The time of the fastest peer over that of `engine`; None where either has none."""
    mine = next((row for row in one.results if row.engine == engine and not row.failure), None)
    best = None if mine is None else best_peer(mine, one.results)
    return None if mine is None or best is None else compared(best, mine)


def _measure(model: str, settings: Settings, console: Console) -> Measurement:
    with console.status(model) as status:

        def progress(text: str) -> None:
            status.update(f"{model}: {text}")

        return measure(model, settings, progress)


def table(model: str, results: list[Result]) -> Table:
    """`x best` is the time over that of the fastest peer that is as exact, round by round, with its quartiles."""
    found = Table(title=model, title_justify="left")
    found.add_column("engine", no_wrap=True)
    for heading in ("median ms", "p10", "p90", "x best", "error", "MiB", "compile s"):
        found.add_column(heading, justify="right", no_wrap=True)
    for row in results:
        if row.failure:
            found.add_row(row.engine, "failed")
            continue
        best = best_peer(row, results)
        ratio = str(compared(row, best)) if best else "-"
        seconds = "kept" if row.compile_seconds is None else f"{row.compile_seconds:.2f}"
        found.add_row(row.engine, *times_of(row), ratio, f"{row.error:.1e}", f"{row.peak_bytes / 2**20:.0f}", seconds)
    return found


def times_of(row: Result) -> tuple[str, str, str]:
    """Median, and the spread of calls; of few calls how many they are."""
    few = len(row.round_ms) < LEAST_ROUNDS or row.calls < _FEW_CALLS
    spread = (f"{row.calls} calls", f"{len(row.round_ms)} rounds") if few else (f"{row.p10_ms:.3f}", f"{row.p90_ms:.3f}")
    return f"{row.median_ms:.3f}", *spread


def _speeds(one: Measurement) -> str:
    """What the machine could do while the model was measured."""
    speeds = [one.gflops[index] for index in one.counted]
    if not speeds:
        return "no rounds"
    text = f"{len(speeds)} rounds at {min(speeds):.0f} to {max(speeds):.0f} GFLOP/s of small products on all threads"
    if left_out := sorted(set(one.gflops) - set(speeds)):
        text += f"; {len(one.gflops) - len(speeds)} left out at {left_out[0]:.0f} to {left_out[-1]:.0f}: cores were taken away"
    return text


if __name__ == "__main__":
    main()
