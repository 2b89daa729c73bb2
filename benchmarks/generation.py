"""What a step of text generation costs beside reading its weights, and beside peers: `python -m benchmarks.generation`.

Models of `transformers` with random weights. In turns, in one process: steps of `generate` in one call, reading as many bytes as
the weights have, on as many threads, and steps of OpenVINO and of llama.cpp with their own caches and weights of as many bits.
Ratios are those of medians.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
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
PEERS = {"openvino": "OpenVINO", "llama_cpp": "llama.cpp"}  # by the modules that they need
_PEER_BITS = {"float32": None, "bfloat16": None, "int8": 8, "int4": 4}
_HINTS = {"float32": "f32", "bfloat16": "bf16", "int8": "f32", "int4": "f32"}  # precisions that OpenVINO computes in
_MAX_TOKENS = 1024
_STEPS = 8  # of a turn
_PAUSE_SECONDS = 0.05  # until the threads of the engine before sleep


@dataclass(frozen=True, slots=True)
class Row:
    """Medians. `floor_ms` is the time of reading `weights_bytes` in the same run, `peers_ms` those of steps of peers by name."""

    model: str
    format: str
    batch: int
    tokens: int  # before the first step
    weights_bytes: int
    step_ms: float
    floor_ms: float
    peers_ms: dict[str, float]
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

    def peer_path(self, peer: str) -> Path:
        if peer == "llama_cpp":
            return self.folder / f"{self.model}-{self.format}.gguf"
        return self.folder / f"{self.model}-{_PEER_BITS[self.format] or 'float'}.xml"

    @property
    def size_path(self) -> Path:
        return self.folder / f"{self.model}.json"

    def prepare(self, peers: Sequence[str]) -> None:
        """Write what is not in the folder yet."""
        missing = [peer for peer in peers if not self.peer_path(peer).exists()]
        if self.path.exists() and self.size_path.exists() and not missing:
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
        if "openvino" in missing:
            import openvino

            from .engines.openvino_decoder import openvino_decoder

            decoder = openvino_decoder(model, _PEER_BITS[self.format])
            openvino.save_model(decoder, str(self.peer_path("openvino")), compress_to_fp16=False)
        if "llama_cpp" in missing:
            from .engines.llama_cpp_decoder import write_gguf

            write_gguf(model, self.format, self.peer_path("llama_cpp"))

    def measure(self, tokens: int, rounds: int, peers: Sequence[str]) -> Row:
        """Steps of texts that have `tokens` tokens, in turns with reading and with peers."""
        size = json.loads(self.size_path.read_text())
        tokens = min(tokens, size["max_tokens"] - _STEPS)
        session = prefuse.load_generator(self.path).session()
        size_bytes = int(FORMATS[self.format][1] * size["elements"])
        read, memory = reader(size_bytes, self.threads)
        turns = {peer: self._peer(peer, tokens, size["max_tokens"]) for peer in peers if peer != "llama_cpp" or self.batch == 1}
        steps, reads = list[float](), list[float]()
        others: dict[str, list[float]] = {peer: [] for peer in turns}
        for turn in range(rounds + 1):
            time.sleep(_PAUSE_SECONDS)
            made = _steps(session, self.batch, tokens)
            read(memory)  # the pages of another engine's weights are in the TLB
            passes = [_seconds(lambda: read(memory)) for _ in range(3)]
            if turn:
                steps += made
                reads += passes
            for peer, call in turns.items():
                time.sleep(_PAUSE_SECONDS)
                times = [_seconds(call) for _ in range(_STEPS)]
                others[peer] += times[1:] if turn else []
        step, floor = median(steps), median(reads)
        return Row(
            self.model, self.format, self.batch, tokens, size_bytes, step * 1e3, floor * 1e3,
            {peer: median(times) * 1e3 for peer, times in others.items()},
            self.batch / step, size_bytes / floor / 1e9, floor / step,
        )  # fmt: skip

    def _peer(self, peer: str, tokens: int, most: int) -> Callable[[], object]:
        if peer == "llama_cpp":
            from .engines.llama_cpp_decoder import llama_cpp_step

            return llama_cpp_step(self.peer_path(peer), tokens, self.threads, most)
        from .engines.openvino_decoder import openvino_step

        return openvino_step(str(self.peer_path(peer)), self.batch, tokens, self.threads, _HINTS[self.format])


def _steps(session: Session, batch: int, tokens: int) -> list[float]:
    """The times between new tokens, all made in one call."""
    ends: list[float] = []
    session.rewind(np.full(batch, tokens), [[5]] * batch)
    session.generate([[]] * batch, _STEPS, stop=(), stream=lambda _: ends.append(perf_counter()))
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
@click.option("--peer", "peers", multiple=True, default=("openvino",), show_default=True, type=click.Choice(tuple(PEERS)))
@click.option("--no-peer", "has_none", is_flag=True, help="No peer beside it.")
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
    peers: tuple[str, ...],
    has_none: bool,
    small: bool,
    prepare: bool,
    folder: Path | None,
    json_path: Path | None,
) -> None:
    """Time steps of text generation against reading the weights, and against peers.

    OpenVINO needs nncf for weights of few bits; llama.cpp, which takes one text at a time, llama-cpp-python and gguf.
    """
    peers = () if has_none else peers
    for peer in peers:
        if find_spec(peer) is None:
            raise click.UsageError(
                f"{PEERS[peer]} is not installed: pip install {peer.replace('_cpp', '-cpp-python')}, or --no-peer"
            )
    console = Console(width=150)
    torch.set_num_threads(threads)
    with TemporaryDirectory(prefix="prefuse-generation-") as temporary:
        kept = folder or Path(temporary)
        kept.mkdir(parents=True, exist_ok=True)
        cases = [Case(model, name, batch, threads, kept, small) for model in models for name in formats for batch in batches]
        for case in cases:
            case.prepare(peers)
            for tokens in () if prepare else lengths:
                row = case.measure(tokens, rounds, peers)
                console.print(_sentence(row))
                if json_path is not None:
                    known = json.loads(json_path.read_text()) if json_path.exists() else []
                    json_path.write_text(json.dumps([*known, asdict(row)], indent=2) + "\n")


def _sentence(row: Row) -> str:
    peers = "".join(f"; {PEERS[name]} {ms:.2f} ms, {ms / row.step_ms:.2f} times that" for name, ms in row.peers_ms.items())
    return (
        f"{row.model}, {row.format}, {row.batch} x {row.tokens} tokens: {row.step_ms:.2f} ms, {row.tokens_per_second:.0f} tokens "
        f"a second; its {row.weights_bytes / 1e6:.0f} MB {row.floor_ms:.2f} ms at {row.gigabytes_per_second:.1f} GB/s: "
        f"{row.floor_share:.2f} of the floor{peers}"
    )


if __name__ == "__main__":
    main()
