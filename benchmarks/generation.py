"""What a step of text generation costs beside reading its weights, and beside OpenVINO: `python -m benchmarks.generation`.

Models of `transformers` with random weights. In turns, in one process: steps of `generate` in one call, reading as many bytes as
the weights have, on as many threads, and steps of OpenVINO with its own caches and weights of as many bits. Ratios are those of
medians.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import click
import numpy as np
import prefuse
import torch
from prefuse.runtime.generation.session import Session
from rich.console import Console

from .decode import reader
from .language_models import MODELS, positions, read_elements

FORMATS: dict[str, tuple[dict[str, str], float]] = {  # options, and bytes of a weight with its scales
    "float32": ({"precision": "float32"}, 4),
    "bfloat16": ({"precision": "bfloat16"}, 2),
    "int8": ({"weights": "int8"}, 1 + 4 / 128),
    "int4": ({"weights": "int4"}, 1 / 2 + 2 / 32),
}
_PEER_BITS = {"float32": None, "bfloat16": None, "int8": 8, "int4": 4}
_HINTS = {"float32": "f32", "bfloat16": "bf16", "int8": "f32", "int4": "f32"}  # precisions that OpenVINO computes in
_MAX_TOKENS = 1024
_STEPS = 8  # of a turn
_PAUSE_SECONDS = 0.05  # until the threads of the engine before sleep


@dataclass(frozen=True, slots=True)
class Row:
    """Medians. `floor_ms` is the time of reading `weights_bytes` in the same run, `peer_ms` that of a step of OpenVINO."""

    model: str
    format: str
    batch: int
    tokens: int  # before the first step
    weights_bytes: int
    step_ms: float
    floor_ms: float
    peer_ms: float | None
    tokens_per_second: float
    gigabytes_per_second: float
    floor_share: float  # the floor over the step


@dataclass(frozen=True, slots=True)
class Case:
    """A model in a format, for a number of sequences; `folder` keeps what is compiled."""

    model: str
    format: str
    batch: int
    threads: int
    folder: Path
    is_small: bool

    @property
    def path(self) -> Path:
        return self.folder / f"{self.model}-{self.format}-{self.batch}.prefuse"

    @property
    def peer_path(self) -> Path:
        return self.folder / f"{self.model}-{_PEER_BITS[self.format] or 'float'}.xml"

    @property
    def size_path(self) -> Path:
        return self.folder / f"{self.model}.json"

    def prepare(self, has_peer: bool) -> None:
        """Write what is not in the folder yet."""
        if self.path.exists() and self.size_path.exists() and (self.peer_path.exists() or not has_peer):
            return
        model = MODELS[self.model](is_small=self.is_small)
        most = min(_MAX_TOKENS, positions(model))
        self.size_path.write_text(json.dumps({"elements": read_elements(model), "max_tokens": most}))
        if not self.path.exists():
            options: dict[str, Any] = FORMATS[self.format][0]
            generator = prefuse.compile_generation(
                model, max_tokens=most, prefill=(), batch=self.batch, threads=self.threads, **options
            )
            generator.save(self.path)
        if has_peer and not self.peer_path.exists():
            import openvino

            from .engines.openvino_decoder import openvino_decoder

            decoder = openvino_decoder(model, _PEER_BITS[self.format])
            openvino.save_model(decoder, str(self.peer_path), compress_to_fp16=False)

    def measure(self, tokens: int, rounds: int, has_peer: bool) -> Row:
        """Steps of texts that have `tokens` tokens, in turns with reading and with OpenVINO."""
        size = json.loads(self.size_path.read_text())
        tokens = min(tokens, size["max_tokens"] - _STEPS)
        session = prefuse.load_generator(self.path).session()
        size_bytes = int(FORMATS[self.format][1] * size["elements"])
        read, memory = reader(size_bytes, self.threads)
        peer = self._peer(tokens) if has_peer else None
        steps, reads, others = list[float](), list[float](), list[float]()
        for turn in range(rounds + 1):
            time.sleep(_PAUSE_SECONDS)
            made = _steps(session, self.batch, tokens)
            floor = min(_seconds(lambda: read(memory)) for _ in range(2))
            time.sleep(_PAUSE_SECONDS)
            other = [_seconds(peer) for _ in range(_STEPS)] if peer else []
            if turn:
                steps, others = steps + made, others + other[1:]
                reads.append(floor)
        step, floor = median(steps), median(reads)
        return Row(
            self.model, self.format, self.batch, tokens, size_bytes, step * 1e3, floor * 1e3,
            median(others) * 1e3 if others else None, self.batch / step, size_bytes / floor / 1e9, floor / step,
        )  # fmt: skip

    def _peer(self, tokens: int) -> Callable[[], object]:
        from .engines.openvino_decoder import openvino_step

        return openvino_step(str(self.peer_path), self.batch, tokens, self.threads, _HINTS[self.format])


def _steps(session: Session, batch: int, tokens: int) -> list[float]:
    """The times between new tokens, all made in one call."""
    ends: list[float] = []
    session.rewind(np.full(batch, tokens), [[5]] * batch)
    session.generate([[]] * batch, _STEPS, stream=lambda _: ends.append(perf_counter()))
    return np.diff(ends).tolist()


def _seconds(call: Callable[[], object]) -> float:
    begin = perf_counter()
    call()
    return perf_counter() - begin


@click.command()
@click.option("--model", "models", multiple=True, default=("gpt2",), show_default=True, type=click.Choice(tuple(MODELS)))
@click.option("--format", "formats", multiple=True, default=tuple(FORMATS), type=click.Choice(tuple(FORMATS)))
@click.option("--batch", "batches", multiple=True, default=(1, 8), show_default=True, type=click.IntRange(min=1))
@click.option("--tokens", "lengths", multiple=True, default=(128,), show_default=True, type=click.IntRange(min=1))
@click.option("--threads", default=2, show_default=True, type=click.IntRange(min=1))
@click.option("--rounds", default=10, show_default=True, type=click.IntRange(min=1))
@click.option("--peer/--no-peer", "has_peer", default=True, help="OpenVINO beside it, which needs nncf for weights of few bits.")
@click.option("--small", is_flag=True, help="Small models: checks the benchmark, not the step.")
@click.option("--prepare", is_flag=True, help="Only compile, into --folder.")
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), help="Where compiled models are kept for other runs.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Add the results to this file.")
def main(
    models: tuple[str, ...],
    formats: tuple[str, ...],
    batches: tuple[int, ...],
    lengths: tuple[int, ...],
    threads: int,
    rounds: int,
    has_peer: bool,
    small: bool,
    prepare: bool,
    folder: Path | None,
    json_path: Path | None,
) -> None:
    """Time steps of text generation against reading the weights, and against OpenVINO."""
    if has_peer and find_spec("openvino") is None:
        raise click.UsageError("OpenVINO is not installed: pip install 'prefuse[bench]', or --no-peer")
    console = Console(width=150)
    torch.set_num_threads(threads)
    with TemporaryDirectory(prefix="prefuse-generation-") as temporary:
        kept = folder or Path(temporary)
        kept.mkdir(parents=True, exist_ok=True)
        cases = [Case(model, name, batch, threads, kept, small) for model in models for name in formats for batch in batches]
        for case in cases:
            case.prepare(has_peer)
            for tokens in () if prepare else lengths:
                row = case.measure(tokens, rounds, has_peer)
                console.print(_sentence(row))
                if json_path is not None:
                    known = json.loads(json_path.read_text()) if json_path.exists() else []
                    json_path.write_text(json.dumps([*known, asdict(row)], indent=2) + "\n")


def _sentence(row: Row) -> str:
    peer = "" if row.peer_ms is None else f"; OpenVINO {row.peer_ms:.2f} ms, {row.peer_ms / row.step_ms:.2f} times that"
    return (
        f"{row.model}, {row.format}, {row.batch} x {row.tokens} tokens: {row.step_ms:.2f} ms, {row.tokens_per_second:.0f} tokens "
        f"a second; its {row.weights_bytes / 1e6:.0f} MB {row.floor_ms:.2f} ms at {row.gigabytes_per_second:.1f} GB/s: "
        f"{row.floor_share:.2f} of the floor{peer}"
    )


if __name__ == "__main__":
    main()
