"""8 bits by all engines: ours by tensors (plain, and with scales moved) and by rows, against OpenVINO's and ONNX Runtime's tools.

All are shown the same calibration data, and run interleaved; errors are those against float64. Peers that are quantized are
compared with the fastest of ours whose error is at most 1.1 times theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from .__main__ import failures, times_of
from .engines import INT8_ENGINES, distributions, engine_names
from .harness import Measurement, Result, Settings, compared, measure
from .nets import UnknownModelError, model_names
from .record import record
from .reference import NoReferenceError
from .turns import Spread

MODELS = ("resnet50", "bert-base", "gpt2", "vit-b16", "vgg16", "unet", "bigru-linear")
_ENGINES = ("prefuse", "prefuse-bf16", "openvino", "openvino-bf16", *INT8_ENGINES)
_WITHIN = "prefuse-int8-within"
_OURS = tuple(name for name in INT8_ENGINES if name.startswith("prefuse"))
_WORST_ERROR = 1.1  # of ours, in units of the winner's


@dataclass(frozen=True, slots=True)
class Verdict:
    """How ours stands on one model: times as fast as the best quantized peer, round by round, and its error in units of that
    one's. `failed` are quantized peers without a figure, one of which might have been the best."""

    model: str
    ours: str
    peer: str
    speed: Spread
    error: float
    speed_over_bf16: Spread | None  # None where bfloat16 was not run
    failed: tuple[str, ...] = ()


def verdict(model: str, one: Measurement) -> Verdict | None:
    """The fastest quantized peer against the fastest of ours that is about as exact; None where either is missing."""
    rows = {row.engine: row for row in one.results if not row.failure and row.round_ms}
    peers = [row for name, row in rows.items() if name in INT8_ENGINES and name not in _OURS]
    any_of_ours = next((rows[name] for name in _OURS if name in rows), None)
    if not peers or any_of_ours is None:
        return None
    best = min(peers, key=lambda row: compared(row, any_of_ours).median)
    ours = [rows[name] for name in _OURS if name in rows and rows[name].error <= _WORST_ERROR * best.error]
    if not ours:
        return None
    mine = min(ours, key=lambda row: compared(row, best).median)
    over = compared(rows["prefuse-bf16"], mine) if "prefuse-bf16" in rows else None
    failed = tuple(row.engine for row in one.results if row.failure and row.engine in INT8_ENGINES and row.engine not in _OURS)
    return Verdict(model, mine.engine, best.engine, compared(best, mine), mine.error / best.error, over, failed)


@click.command()
@click.argument("models", nargs=-1, metavar="[MODEL...]", callback=model_names)
@click.option(
    "--engines",
    callback=engine_names,
    default=",".join(_ENGINES),
    show_default=True,
    help="Engines to compare, separated by commas.",
)
@click.option("--threads", default=2, show_default=True, type=click.IntRange(min=1), help="Threads that each engine may use.")
@click.option("--seconds", default=3.0, show_default=True, type=click.FloatRange(min=0.1), help="Time for each engine and model.")
@click.option(
    "--within",
    default=float("inf"),
    type=click.FloatRange(min=0, min_open=True),
    help="Without the products that damage most, where the error of ours would be greater; the rest, in bfloat16, comes on top.",
)
@click.option("--small", is_flag=True, help="Small variants of the models: checks the benchmark, not the engines.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where quantized models are kept for later runs, which then only measure.",
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Add the results to this file.")
def main(
    models: tuple[str, ...],
    engines: tuple[str, ...],
    threads: int,
    seconds: float,
    within: float,
    small: bool,
    folder: Path | None,
    json_path: Path | None,
) -> None:
    """Quantize MODELs (all seven if none is named) by all tools, and compare speed and error. Ends with status 1 where a model or
    an engine failed."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    chosen = tuple(name for name in engines if name != _WITHIN or within < float("inf"))
    settings = Settings(chosen, threads, small, seconds=seconds, max_error=within, folder=folder)
    given = {"seconds": seconds, "small": small, "within": within, "keeps": folder is not None}
    kept, console, has_failed = record(json_path, threads, given, distributions(chosen)), Console(width=120), False
    for model in models or MODELS:
        with console.status(model) as status:
            try:
                found = measure(model, settings, lambda text, model=model: status.update(f"{model}: {text}"))  # type: ignore[misc]
            except (UnknownModelError, NoReferenceError) as error:
                console.print(f"{model}: {error}", style="red", markup=False)
                has_failed = True
                continue
        console.print(_table(model, found.results))
        for failure in failures(found):
            console.print(failure, style="red", markup=False)
            has_failed = True
        said = verdict(model, found)
        if said is not None:
            console.print(_sentence(said), markup=False)
        rounds = {"gflops": found.gflops, "counted": found.counted}
        kept.add({"model": model, "verdict": said, "rounds": rounds, "results": found.results})
    if has_failed:
        raise SystemExit(1)


def _table(model: str, rows: list[Result]) -> Table:
    table = Table(title=model, title_justify="left")
    for heading in ("engine", "median ms", "p10", "p90", "error"):
        table.add_column(heading, justify="left" if heading == "engine" else "right", no_wrap=True)
    for row in rows:
        table.add_row(row.engine, *(["failed"] * 3 if row.failure else times_of(row)), f"{row.error:.1e}")
    return table


def _sentence(said: Verdict) -> str:
    over = "" if said.speed_over_bf16 is None else f", and {said.speed_over_bf16} times as fast as prefuse-bf16"
    failed = f"; not compared with {', '.join(said.failed)}, which failed" if said.failed else ""
    beside = f"{said.speed} times as fast as {said.peer}, with {said.error:.2f} of its error"
    return f"{said.model}: {said.ours} is {beside}{over}{failed}"


if __name__ == "__main__":
    main()
