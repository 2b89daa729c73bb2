"""Texts of random lengths, one after the other: `python -m prefuse.benchmarks.random_lengths bert_base`.

One program for a range of lengths in turns with ONNX Runtime and OpenVINO, which compile the same ONNX file with a dynamic
dimension. All engines are in one process, and get the same blocks of lengths, in an order that changes from block to block, with
pauses until the threads of the one before sleep. The first pass is the first time that an engine meets each length.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import click
import numpy as np
import onnx
import onnxruntime
import openvino
import prefuse
import torch
from prefuse.compiler.programs.symbolic import SymbolicModel
from prefuse.examples.models import bert, gpt2
from rich.console import Console

_BLOCK = 10  # lengths that an engine gets in a row
_PAUSE_SECONDS = 0.25  # until the threads of the engine before sleep
_SMALL_LENGTH = 32  # the longest text of small models
Inputs = Mapping[str, np.ndarray]
Engine = Callable[[Inputs], Sequence[np.ndarray]]


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds of all lengths, of one engine, pass by pass; the largest difference of its results from ONNX Runtime's."""

    model: str
    engine: str
    seconds: tuple[float, ...]
    difference: float
    new_length_ms: float = 0.0  # median time of what a new length needs beside its run


def export(name: str, most: int, *, is_small: bool, path: Path) -> None:
    """Write a model with a dynamic length T to an ONNX file."""
    if name == "gpt2":
        module, example = (gpt2.gpt2_small if is_small else gpt2.gpt2)()
    else:
        module, example = bert._bert(bert._small(bert.BERT_BASE) if is_small else bert.BERT_BASE, 16)
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


def engines(net: SymbolicModel, path: Path, threads: int) -> dict[str, Engine]:
    """Each engine, ready for any length."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    how = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    request = openvino.Core().compile_model(str(path), "CPU", how).create_infer_request()

    def ours(inputs: Inputs) -> Sequence[np.ndarray]:
        found = net(**inputs)
        return found if isinstance(found, tuple) else (found,)

    return {
        "prefuse": ours,
        "onnxruntime": lambda inputs: session.run(None, dict(inputs)),
        "openvino": lambda inputs: list(request.infer(dict(inputs), share_inputs=True).values()),
    }


def measure(
    model: str, lengths: Sequence[int], passes: int, ready: Mapping[str, Engine], make: Callable[[int], Inputs]
) -> list[Row]:
    """Passes over all lengths, in blocks for each engine in turn."""
    shuffle = random.Random(0)
    seconds = {name: [0.0] * passes for name in ready}
    for number in range(passes):
        for start in range(0, len(lengths), _BLOCK):
            inputs = [make(length) for length in lengths[start : start + _BLOCK]]
            for name in shuffle.sample(list(ready), len(ready)):
                time.sleep(_PAUSE_SECONDS)
                begin = time.perf_counter()
                for one in inputs:
                    ready[name](one)
                seconds[name][number] += time.perf_counter() - begin
    differences = dict.fromkeys(ready, 0.0)
    for length in lengths[:3]:
        wanted = ready["onnxruntime"](make(length))
        for name, engine in ready.items():
            for got, right in zip(engine(make(length)), wanted, strict=True):
                differences[name] = max(differences[name], float(np.abs(got - right).max() / np.abs(right).max()))
    return [Row(model, name, tuple(seconds[name]), differences[name]) for name in ready]


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
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the results to this file.")
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
    console = Console(width=130)
    most = _SMALL_LENGTH if small else most
    torch.manual_seed(0)
    with TemporaryDirectory(prefix="prefuse-lengths-") as temporary:
        path = Path(folder or temporary) / f"{model}.onnx"
        if not path.exists():
            export(model, most, is_small=small, path=path)
        make = input_maker(path, 96 if small else 30_000)
        net = compiled(path, most, threads)
        if prepare:
            return
        drawn = random.Random(1).choices(range(1, most + 1), k=count)
        new_ms = new_length_ms(net, [length for length in range(1, most + 1) if length not in drawn][::7], make)
        ready = engines(net, path, threads)
        rows = measure(model, drawn, passes, ready, make)
    rows = [replace(row, new_length_ms=new_ms) if row.engine == "prefuse" else row for row in rows]
    first = rows[0]
    for row in rows:
        ratios = ", ".join(f"{theirs / ours:.2f}" for theirs, ours in zip(row.seconds, first.seconds, strict=True))
        listed = ", ".join(f"{one:.2f}" for one in row.seconds)
        console.print(f"{model} {row.engine}: {listed} s; {ratios} times prefuse's; results differ by {row.difference:.1e}")
    console.print(f"a new length: {new_ms:.2f} ms beside its run")
    if json_path is not None:
        json_path.write_text(json.dumps({"lengths": drawn, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
