"""What a step of text generation costs beside reading its weights: `python -m benchmarks.generation`.

GPT-2 of 124M parameters with random weights, as `transformers` has it. In turns, in one process: steps of `generate` in one call,
reading as many bytes as the weights have, on as many threads, and a step of transformers' own in eager float32. Ratios are those
of medians.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import click
import numpy as np
import prefuse
import torch
from prefuse.runtime.generation.session import Session
from rich.console import Console

from .decode import reader

FORMATS: dict[str, tuple[dict[str, str], float]] = {  # options, and bytes of a weight with its scales
    "float32": ({"precision": "float32"}, 4),
    "bfloat16": ({"precision": "bfloat16"}, 2),
    "int8": ({"weights": "int8"}, 1 + 4 / 128),
    "int4": ({"weights": "int4"}, 1 / 2 + 2 / 32),
}
_STEPS = 8  # of a turn


@dataclass(frozen=True, slots=True)
class Row:
    """Medians. `floor_ms` is the time of reading `weights_bytes` in the same run, `eager_ms` that of a step of transformers."""

    format: str
    batch: int
    tokens: int  # before the first step
    weights_bytes: int
    step_ms: float
    floor_ms: float
    eager_ms: float
    tokens_per_second: float
    gigabytes_per_second: float
    floor_share: float  # the floor over the step


def language_model(*, is_small: bool) -> Any:
    """GPT-2 of transformers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 96, "n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 4, "bos_token_id": 0} if is_small else {}
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**sizes)).eval()


def measure(model: Any, name: str, batch: int, tokens: int, threads: int, rounds: int) -> Row:
    """Steps of texts that have `tokens` tokens, in turns with reading and with transformers."""
    options, item_bytes = FORMATS[name]
    most = model.config.n_positions
    generator = prefuse.compile_generation(model, max_tokens=most, prefill=(), batch=batch, threads=threads, **options)  # type: ignore[arg-type]
    session = generator.session()
    size_bytes = int(item_bytes * sum(p.numel() for p in model.parameters() if p.ndim == 2))
    read, memory = reader(size_bytes, threads)
    eager = _eager(model, batch, tokens)
    steps, reads, others = list[float](), list[float](), list[float]()
    for turn in range(rounds + 1):
        made = _steps(session, batch, tokens)
        floor = min(_seconds(lambda: read(memory)) for _ in range(2))
        other = _seconds(eager)
        if turn:
            steps += made
            reads.append(floor)
            others.append(other)
    step, floor = median(steps), median(reads)
    return Row(
        name, batch, tokens, size_bytes, step * 1e3, floor * 1e3, median(others) * 1e3, batch / step,
        size_bytes / floor / 1e9, floor / step,
    )  # fmt: skip


def _steps(session: Session, batch: int, tokens: int) -> list[float]:
    """The times between new tokens, all made in one call."""
    ends: list[float] = []
    session.rewind(np.full(batch, tokens), [[5]] * batch)
    session.generate([[]] * batch, _STEPS, stream=lambda _: ends.append(perf_counter()))
    return np.diff(ends).tolist()


def _eager(model: Any, batch: int, tokens: int) -> Callable[[], object]:
    """A step of transformers after `tokens` tokens, whose cache does not grow from call to call."""
    with torch.no_grad():
        cache = model(input_ids=torch.full((batch, tokens), 5), use_cache=True).past_key_values

    def step() -> None:
        with torch.no_grad():
            model(input_ids=torch.full((batch, 1), 5), past_key_values=cache, use_cache=True)
        cache.crop(-1)

    return step


def _seconds(call: Callable[[], object]) -> float:
    begin = perf_counter()
    call()
    return perf_counter() - begin


@click.command()
@click.option("--format", "formats", multiple=True, default=tuple(FORMATS), type=click.Choice(tuple(FORMATS)))
@click.option("--batch", "batches", multiple=True, default=(1, 8), show_default=True, type=click.IntRange(min=1))
@click.option("--tokens", "lengths", multiple=True, default=(128,), show_default=True, type=click.IntRange(min=1))
@click.option("--threads", default=2, show_default=True, type=click.IntRange(min=1))
@click.option("--rounds", default=10, show_default=True, type=click.IntRange(min=1))
@click.option("--small", is_flag=True, help="A small model: checks the benchmark, not the step.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the results to this file.")
def main(
    formats: tuple[str, ...],
    batches: tuple[int, ...],
    lengths: tuple[int, ...],
    threads: int,
    rounds: int,
    small: bool,
    json_path: Path | None,
) -> None:
    """Time steps of text generation against reading the weights."""
    console, rows = Console(width=130), list[Row]()
    torch.set_num_threads(threads)
    model = language_model(is_small=small)
    for name in formats:
        for batch in batches:
            for tokens in lengths:
                row = measure(model, name, batch, tokens, threads, rounds)
                rows.append(row)
                console.print(
                    f"{name}, {batch} x {tokens} tokens: {row.step_ms:.2f} ms, {row.tokens_per_second:.0f} tokens a second; "
                    f"its {row.weights_bytes / 1e6:.0f} MB {row.floor_ms:.2f} ms at {row.gigabytes_per_second:.1f} GB/s: "
                    f"{row.floor_share:.2f} of the floor; transformers {row.eager_ms:.1f} ms"
                )
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
