"""8 bits by all engines: ours by tensors (plain, and with scales moved) and by rows, against OpenVINO's and ONNX Runtime's tools.

All are shown the same calibration data, and run interleaved; errors are those against float64. Peers that are quantized are
compared with the fastest of ours whose error is at most 1.1 times theirs.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click
from prefuse.runtime.target import Target, host_cpu_flags
from rich.console import Console
from rich.table import Table

from .engines import ENGINES, INT8_ENGINES
from .harness import Measurement, Result, Settings, measure, ratio

MODELS = ("resnet50", "bert-base", "gpt2", "vit-b16", "vgg16", "unet", "bigru-linear")
_ENGINES = ("prefuse", "prefuse-bf16", "openvino", "openvino-bf16", *INT8_ENGINES)
_WITHIN = "prefuse-int8-within"
_OURS = tuple(name for name in INT8_ENGINES if name.startswith("prefuse"))
_WORST_ERROR = 1.1  # of ours, in units of the winner's
_FEATURES = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8")


@dataclass(frozen=True, slots=True)
class Verdict:
    """How ours stands on one model: times as fast as the best quantized peer, and its error in units of that one's."""

    model: str
    ours: str
    peer: str
    speed: float
    error: float
    speed_over_bf16: float


def verdict(model: str, one: Measurement) -> Verdict | None:
    """The fastest quantized peer against the fastest of ours that is about as exact; None where either is missing."""
    rows = {row.engine: row for row in one.results if not row.failure and row.round_ms}
    peers = [row for name, row in rows.items() if name in INT8_ENGINES and name not in _OURS]
    if not peers:
        return None
    best = min(peers, key=lambda row: row.median_ms)
    ours = [rows[name] for name in _OURS if name in rows and rows[name].error <= _WORST_ERROR * best.error]
    if not ours:
        return None
    mine = min(ours, key=lambda row: row.median_ms)
    over = ratio(rows["prefuse-bf16"], mine) if "prefuse-bf16" in rows else float("nan")
    return Verdict(model, mine.engine, best.engine, ratio(best, mine), mine.error / best.error, over)


@click.command()
@click.argument("models", nargs=-1, metavar="[MODEL...]")
@click.option("--engines", default=",".join(_ENGINES), show_default=True, help="Engines to compare, separated by commas.")
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
    engines: str,
    threads: int,
    seconds: float,
    within: float,
    small: bool,
    folder: Path | None,
    json_path: Path | None,
) -> None:
    """Quantize MODELs (all seven if none is named) by all tools, and compare speed and error."""
    chosen = tuple(name for name in engines.split(",") if name)
    if unknown := [name for name in chosen if name not in ENGINES]:
        raise click.BadParameter(f"unknown engine {unknown[0]!r}; use {', '.join(ENGINES)}")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    if within == float("inf"):
        chosen = tuple(name for name in chosen if name != _WITHIN)
    settings = Settings(chosen, threads, small, seconds=seconds, max_error=within, folder=folder)
    console = Console(width=120)
    for model in models or MODELS:
        with console.status(model) as status:
            found = measure(model, settings, lambda text, model=model: status.update(f"{model}: {text}"))  # type: ignore[misc]
        console.print(_table(model, found.results))
        for row in found.results:
            if row.failure:
                console.print(f"{row.engine} failed: {row.failure[:300]}", style="red", markup=False)
        said = verdict(model, found)
        if said is not None:
            console.print(_sentence(said), markup=False)
        if json_path is not None:
            _add(json_path, model, found, said, settings)


def _table(model: str, rows: list[Result]) -> Table:
    table = Table(title=model, title_justify="left")
    for heading in ("engine", "median ms", "p10", "p90", "error"):
        table.add_column(heading, justify="left" if heading == "engine" else "right", no_wrap=True)
    for row in rows:
        times = ["failed"] * 3 if row.failure else [f"{value:.3f}" for value in (row.median_ms, row.p10_ms, row.p90_ms)]
        table.add_row(row.engine, *times, f"{row.error:.1e}")
    return table


def _sentence(said: Verdict) -> str:
    return (
        f"{said.model}: {said.ours} is {said.speed:.2f} times as fast as {said.peer}, with {said.error:.2f} of its error, and "
        f"{said.speed_over_bf16:.2f} times as fast as prefuse-bf16"
    )


def _add(path: Path, model: str, found: Measurement, said: Verdict | None, settings: Settings) -> None:
    """Put one model's results into a file, in the place of older ones."""
    document = json.loads(path.read_text()) if path.exists() else {"models": {}}
    flags = host_cpu_flags()
    document["machine"] = {
        "cores": os.cpu_count(),
        "target": str(Target.parse("cpu", settings.threads)),
        "features": [name for name in _FEATURES if name in flags],
        "python": platform.python_version(),
    }
    document["versions"] = {engine: _version(ENGINES[engine].distribution) for engine in settings.engines}
    document["settings"] = {**asdict(replace(settings, folder=None))}
    document["models"][model] = {
        "verdict": None if said is None else asdict(said),
        "rounds": {"gflops": found.gflops, "counted": found.counted},
        "results": [asdict(row) for row in found.results],
    }
    path.write_text(json.dumps(document, indent=2) + "\n")


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    main()
