"""Texts of random lengths, one after the other: `python -m benchmarks.random_lengths bert_base`.

One program for a range of lengths in turns with ONNX Runtime and OpenVINO, which compile the same ONNX file with a dynamic
dimension. All engines are in one process, and get the same blocks of lengths, in an order that changes from block to block, with
pauses until the threads of the one before sleep. The first pass is the first time that an engine meets each length.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import click
import numpy as np
import onnx
import prefuse
import torch
from prefuse.compiler.programs.symbolic import SymbolicModel
from prefuse.examples.models import bert, gpt2
from rich.console import Console

from .nets import recipe
from .record import record
from .turns import PAUSE_SECONDS, Spread, ratios, seconds_of, spread

_BLOCK = 10  # lengths that an engine gets in a row
_SMALL_LENGTH = 32  # the longest text of small models
Inputs = Mapping[str, np.ndarray]
Engine = Callable[[Inputs], Sequence[np.ndarray]]
EXACT = "onnxruntime f32"  # whose results others are compared with


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds of all lengths, of one engine, pass by pass, and of their blocks; how many times as long each pass takes as
    prefuse's, block by block; the largest difference of its results from ONNX Runtime's."""

    model: str
    engine: str
    seconds: tuple[float, ...]
    block_seconds: tuple[tuple[float, ...], ...]
    over_prefuse: tuple[Spread, ...]
    difference: float
    new_length_ms: float | None = None  # median time of what a new length needs beside its run


def export(name: str, most: int, *, is_small: bool, path: Path) -> None:
    """Write a model with a dynamic length T to an ONNX file."""
    if name == "gpt2":
        module, example = (gpt2.gpt2_small if is_small else gpt2.gpt2)()
    else:
        module, example = bert.bert(bert.small(bert.BERT_BASE) if is_small else bert.BERT_BASE, 16)
    length = torch.export.Dim("T", min=2, max=most)
    program = torch.onnx.export(
        module.eval(), example, dynamo=True, optimize=False, verbose=False, dynamic_shapes=({1: length},) * len(example)
    )
    assert program is not None
    program.save(path, external_data=True)


def input_maker(path: Path, words: int) -> Callable[[int], Inputs]:
    """What makes inputs of a length: tokens, and where the model takes them, a mask that shows all and their segments."""
    names = [value.name for value in onnx.load(str(path), load_external_data=False).graph.input]

    def inputs(tokens: int) -> Inputs:
        ids = np.random.default_rng(tokens).integers(0, words, (1, tokens))
        others = [np.ones((1, tokens), np.int64), np.zeros((1, tokens), np.int64)]
        return dict(zip(names, [ids, *others][: len(names)], strict=True))

    return inputs


def compiled(path: Path, most: int, threads: int) -> SymbolicModel:
    """The model for any length up to `most`; the cache keeps its programs."""
    net = prefuse.compile(str(path), dims={"T": (1, most)}, threads=threads)
    assert isinstance(net, SymbolicModel)
    return net


def ours(net: SymbolicModel) -> Engine:
    """A model of ours, whose results are a list."""

    def call(inputs: Inputs) -> Sequence[np.ndarray]:
        found = net(**inputs)
        return found if isinstance(found, tuple) else (found,)

    return call


def exact_engine(path: Path, threads: int) -> Engine:
    """ONNX Runtime, which computes in float32."""
    from .engines.onnxruntime_cpu import session_of

    session = session_of(path, threads)

    def call(inputs: Inputs) -> Sequence[np.ndarray]:
        found: Sequence[np.ndarray] = session.run(None, dict(inputs))
        return found

    return call


def peers(path: Path, threads: int, precision: str) -> dict[str, Engine]:
    """OpenVINO in float32, and where programs of bfloat16 are compared and this CPU has it, in that."""
    if find_spec("openvino") is None:
        click.echo("OpenVINO is not installed, and has no row: pip install openvino", err=True)
        return {}
    from .engines.openvino_cpu import Compiled, hints

    wanted = ("f32", "bf16") if precision == "bfloat16" else ("f32",)
    return {f"openvino {hint}": Compiled(path, threads, hint) for hint in wanted if hint in hints()}


def measure(
    model: str, lengths: Sequence[int], passes: int, ready: Mapping[str, Engine], make: Callable[[int], Inputs]
) -> list[Row]:
    """Passes over all lengths, in blocks for each engine in turn."""
    shuffle = random.Random(0)
    seconds = {name: [list[float]() for _ in range(passes)] for name in ready}
    for number in range(passes):
        for start in range(0, len(lengths), _BLOCK):
            inputs = [make(length) for length in lengths[start : start + _BLOCK]]
            for name in shuffle.sample(list(ready), len(ready)):
                time.sleep(PAUSE_SECONDS)
                seconds[name][number].append(seconds_of(lambda: [ready[name](one) for one in inputs]))  # noqa: B023 - called here
    differences = dict.fromkeys(ready, 0.0)
    for length in lengths[:3]:
        wanted = ready[EXACT](make(length))
        for name, engine in ready.items():
            for got, right in zip(engine(make(length)), wanted, strict=True):
                differences[name] = max(differences[name], float(np.abs(got - right).max() / np.abs(right).max()))
    return [
        Row(
            model,
            name,
            tuple(map(sum, seconds[name])),
            tuple(map(tuple, seconds[name])),
            tuple(spread(list(ratios(*pair))) for pair in zip(seconds[name], seconds["prefuse"], strict=True)),
            differences[name],
        )
        for name in ready
    ]


def new_length_ms(net: SymbolicModel, lengths: Sequence[int], make: Callable[[int], Inputs]) -> float:
    """What each length that no call has had costs beside its run: finding its program and binding it. The median."""
    found = []
    for length in lengths:
        inputs = make(length)
        begin = time.perf_counter()
        net.specialize(**inputs)
        found.append(1e3 * (time.perf_counter() - begin))
    return median(found)


@click.command()
@click.argument("model", type=click.Choice(("bert_base", "gpt2")))
@click.option("--lengths", "count", default=40, show_default=True, type=click.IntRange(min=3), help="Drawn from 1 to --most.")
@click.option("--most", default=512, show_default=True, type=click.IntRange(min=16))
@click.option("--passes", default=2, show_default=True, type=click.IntRange(min=1), help="The first is of lengths that are new.")
@click.option("--threads", default=2, show_default=True, type=click.IntRange(min=1))
@click.option("--small", is_flag=True, help="Small models: checks the benchmark.")
@click.option("--prepare", is_flag=True, help="Only export and compile; programs are kept for a later run.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where the ONNX file is kept for other runs.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Add the results to this file.")
def main(
    model: str,
    count: int,
    most: int,
    passes: int,
    threads: int,
    small: bool,
    prepare: bool,
    folder: Path | None,
    json_path: Path | None,
) -> None:
    """Time texts of random lengths in one program for all of them, and in other engines."""
    console = Console(width=150)
    most = _SMALL_LENGTH if small else most
    drawn = random.Random(1).choices(range(1, most + 1), k=count)
    kept = record(json_path, threads, {"lengths": drawn, "small": small}, ("onnxruntime", "openvino"), key=("model", "engine"))
    torch.manual_seed(0)
    with TemporaryDirectory(prefix="prefuse-lengths-") as temporary:
        where = folder or Path(temporary)
        where.mkdir(parents=True, exist_ok=True)
        path = where / f"{model}{'-small' * small}-{most}-{recipe()}.onnx"
        if not path.exists():
            export(model, most, is_small=small, path=path)
        make = input_maker(path, 96 if small else 30_000)
        net = compiled(path, most, threads)
        if prepare:
            return
        ready = {"prefuse": ours(net), EXACT: exact_engine(path, threads), **peers(path, threads, "float32")}
        rows = measure(model, drawn, passes, ready, make)
        new_ms = new_length_ms(net, [length for length in range(1, most + 1) if length not in drawn][::7], make)
    rows = [replace(row, new_length_ms=new_ms) if row.engine == "prefuse" else row for row in rows]
    for row in rows:
        listed = ", ".join(f"{one:.2f}" for one in row.seconds)
        over = ", ".join(map(str, row.over_prefuse))
        console.print(f"{model} {row.engine}: {listed} s; {over} times prefuse's; results differ by {row.difference:.1e}")
    console.print(f"a new length: {new_ms:.2f} ms beside its run")
    kept.add(*rows)


if __name__ == "__main__":
    main()
