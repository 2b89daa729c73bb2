"""What a step of text generation costs beside reading its weights, and beside peers: `python -m benchmarks.generation`.

Models of `transformers` with random weights. In turns, in one process: steps of `generate` in one call, reading as many bytes as
the products of a step read of its weights (`reading.py`), and steps of OpenVINO and of llama.cpp with their own caches and
weights of as many bits. All go back to the same place before each of their turns, and make as many steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
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
from prefuse.compiler.programs.cache import compiler_version
from prefuse.runtime.generation.session import Session
from rich.console import Console

from .engines.engine import Text
from .language_models import MODELS, positions
from .reading import Floor, beside_reading, shown, text_block, weights_read
from .record import record
from .turns import LEAST_ROUNDS, Spread, compared

FORMATS: dict[str, dict[str, str]] = {  # options, by name
    "float32": {"precision": "float32"},
    "bfloat16": {"precision": "bfloat16"},
    "int8": {"weights": "int8"},
    "int4": {"weights": "int4"},
}
PEERS = {"openvino": "OpenVINO", "llama_cpp": "llama.cpp"}  # by the modules that they need
_PACKAGES = {"openvino": "openvino", "llama_cpp": "llama-cpp-python"}
_BITS = {"float32": None, "bfloat16": None, "int8": 8, "int4": 4}
_MAX_TOKENS = 1024
_STEPS = 8  # of a turn, the first of which does not count
_TRIAL_STEPS = 6


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer beside a step of ours: how many times as long one of its steps takes, round by round, and its settings."""

    step_ms: float
    over_ours: Spread
    facts: dict[str, str]


@dataclass(frozen=True, slots=True)
class Row:
    """One case: a step of ours beside reading its weights, and beside peers by name, or why one of these has no figure."""

    model: str
    format: str
    batch: int
    tokens: int  # before the first step
    tokens_per_second: float
    floor: Floor
    peers: dict[str, Peer]
    failures: dict[str, str]
    fault: str  # where the floor is none


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
        """Of the program, which another version or number of threads would compile otherwise."""
        return self.folder / f"{self._stem}-{self.format}-{self.batch}-{self.threads}t-{compiler_version()[:8]}.prefuse"

    @property
    def _stem(self) -> str:
        return f"{self.model}{'-small' * self.is_small}"

    def peer_paths(self, peer: str) -> list[Path]:
        """What a peer reads: of bfloat16 OpenVINO is offered weights of 4 bytes and of 2, as it computes in both."""
        if peer == "llama_cpp":
            return [self.folder / f"{self._stem}-{self.format}.gguf"]
        bits = _BITS[self.format]
        names = [str(bits)] if bits else ["float", "half"] if self.format == "bfloat16" else ["float"]
        return [self.folder / f"{self._stem}-{name}.xml" for name in names]

    def prepare(self, peers: Sequence[str]) -> None:
        """Write what is not in the folder yet."""
        missing = [(peer, path) for peer in peers for path in self.peer_paths(peer) if not path.exists()]
        if self.path.exists() and not missing:
            return
        model = MODELS[self.model](is_small=self.is_small)
        if not self.path.exists():
            options: dict[str, Any] = dict(FORMATS[self.format])
            most = min(_MAX_TOKENS, positions(model))
            generator = prefuse.compile_generation(
                model, max_tokens=most, prefill=(), batch=self.batch, threads=self.threads, **options
            )
            generator.save(self.path)
        for peer, path in missing:
            if peer == "openvino":
                self._write_openvino(model, path)
            else:
                from .engines.llama_cpp_decoder import write_gguf

                write_gguf(model, self.format, path)

    def _write_openvino(self, model: Any, path: Path) -> None:
        from .engines.openvino_cpu import save_whole
        from .engines.openvino_decoder import openvino_decoder

        bits = _BITS[self.format]
        decoder = openvino_decoder(model.float() if bits else model, bits)
        save_whole(decoder, path, is_half=path.stem.endswith("-half"))

    def measure(self, tokens: int, rounds: int, peers: Sequence[str]) -> Row:
        """Steps of texts that have `tokens` tokens, in turns with reading and with peers."""
        generator = prefuse.load_generator(self.path)
        tokens = min(tokens, generator.limits.max_tokens - _STEPS)
        texts, failures = dict[str, Text](), dict[str, str]()
        for peer in (one for one in peers if one != "llama_cpp" or self.batch == 1):
            try:
                texts[peer] = fastest(self._texts(peer, tokens, generator.limits.max_tokens))
            except (RuntimeError, ValueError) as error:
                failures[peer] = f"{type(error).__name__}: {error}"
        block = partial(_steps, generator.session(), self.batch, tokens)
        others = {peer: text_block(text.rewind, text.step, _STEPS) for peer, text in texts.items()}
        plan = generator.programs[1].plan
        floor = beside_reading(block, weights_read(plan), self.threads, rounds, others)
        raw = floor.rounds_ms
        found = {
            peer: Peer(median(map(median, raw[peer])), compared(raw[peer], raw["step"]), dict(text.facts))
            for peer, text in texts.items()
        }
        per_second = 1e3 * self.batch / floor.step_ms
        return Row(self.model, self.format, self.batch, tokens, per_second, floor, found, failures, floor.fault)

    def _texts(self, peer: str, tokens: int, most: int) -> list[Text]:
        """The peer in each way that it is offered."""
        if peer == "llama_cpp":
            from .engines.llama_cpp_decoder import LlamaCppText

            return [LlamaCppText(path, tokens, self.threads, most) for path in self.peer_paths(peer)]
        from .engines.openvino_cpu import hints
        from .engines.openvino_text import OpenvinoText

        offered = hints() if self.format == "bfloat16" else ("f32",)
        bits = _BITS[self.format]
        return [
            OpenvinoText(path, self.batch, tokens, self.threads, precision, bits)
            for path in self.peer_paths(peer)
            for precision in offered
        ]


def fastest(texts: Sequence[Text]) -> Text:
    """The one whose steps take least, by the best of a few of each."""
    return texts[0] if len(texts) == 1 else min(texts, key=lambda text: min(text_block(text.rewind, text.step, _TRIAL_STEPS)()))


def _steps(session: Session, batch: int, tokens: int) -> list[float]:
    """The times between new tokens, all made in one call."""
    ends: list[float] = []
    session.rewind(np.full(batch, tokens), [[5]] * batch)
    session.generate([[]] * batch, _STEPS, stop=(), stream=lambda _: ends.append(perf_counter()))
    found: list[float] = np.diff(ends).tolist()
    return found


@click.command()
@click.option("--model", "models", multiple=True, default=("gpt2",), show_default=True, type=click.Choice(tuple(MODELS)))
@click.option("--format", "formats", multiple=True, default=tuple(FORMATS), type=click.Choice(tuple(FORMATS)))
@click.option("--batch", "batches", multiple=True, default=(1, 8), show_default=True, type=click.IntRange(min=1))
@click.option("--tokens", "lengths", multiple=True, default=(128,), show_default=True, type=click.IntRange(min=1))
@click.option("--threads", default=2, show_default=True, type=click.IntRange(min=1))
@click.option("--rounds", default=2 * LEAST_ROUNDS, show_default=True, type=click.IntRange(min=1))
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

    OpenVINO needs nncf for weights of few bits; llama.cpp, which takes one text at a time, llama-cpp-python and gguf. Ends with
    status 1 where a peer failed or reading took longer than the step.
    """
    peers = () if has_none else peers
    for peer in peers:
        if find_spec(peer) is None:
            raise click.UsageError(f"{PEERS[peer]} is not installed: pip install {_PACKAGES[peer]}, or --no-peer")
    settings = {"rounds": rounds, "steps": _STEPS, "small": small}
    kept = record(json_path, threads, settings, ("transformers", "nncf", *map(_PACKAGES.__getitem__, peers)), key=_KEY)
    console, has_failed = Console(width=150), False
    torch.set_num_threads(threads)
    with TemporaryDirectory(prefix="prefuse-generation-") as temporary:
        where = folder or Path(temporary)
        where.mkdir(parents=True, exist_ok=True)
        cases = [Case(model, name, batch, threads, where, small) for model in models for name in formats for batch in batches]
        for case in cases:
            with console.status(f"{case.path.stem} is compiled"):
                case.prepare(peers)
            for tokens in () if prepare else lengths:
                row = case.measure(tokens, rounds, peers)
                console.print(sentence(row), markup=False)
                kept.add(row)
                has_failed |= bool(row.failures or row.fault)
    if has_failed and not small:  # what is small lies in caches
        raise SystemExit(1)


_KEY = ("model", "format", "batch", "tokens")


def sentence(row: Row) -> str:
    """A row for people."""
    peers = "".join(f"; {PEERS[name]} {one.step_ms:.2f} ms, {one.over_ours} times that" for name, one in row.peers.items())
    failures = "".join(f"; {PEERS[name]} failed: {why[:200]}" for name, why in row.failures.items())
    return (
        f"{row.model}, {row.format}, {row.batch} x {row.tokens} tokens: {row.floor.step_ms:.2f} ms, {row.tokens_per_second:.0f} "
        f"tokens a second; its {shown(row.floor)}{peers}{failures}{'; ' * bool(row.fault)}{row.fault}"
    )


if __name__ == "__main__":
    main()
