"""What a decode step of GPT-2 costs beside reading its weights: `python -m benchmarks.decode`.

One token a call; keys and values are states of the session, cached for 1,024 positions. In turns, in one process: a step, and
reading as many bytes as it reads weights, on as many threads. The ratio is that of the medians.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import click
import numpy as np
import onnx.parser
import prefuse
import torch
from prefuse.compiler.programs.specialize import SpecializedModel
from prefuse.examples.models.gpt2 import Config
from prefuse.examples.models.gpt2_decode import Decoder, gpt2_decoder
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.plan import Launch, Role
from rich.console import Console

_ITEM_BYTES = {"float32": 4, "bfloat16": 2}
_SMALL = Config(vocabulary=96, positions=64, width=32, layers=2, heads=4)


@dataclass(frozen=True, slots=True)
class Step:
    """Medians of one precision. `floor_ms` is the time of reading `weights_bytes` at the bandwidth of the same run."""

    precision: str
    tokens: int  # before the first step
    weights_bytes: int
    step_ms: float
    best_ms: float
    floor_ms: float
    gigabytes_per_second: float
    ratio: float
    written_bytes: int  # of states, a call
    copies: int  # of whole states, a call


def weights_bytes(decoder: Decoder, precision: str) -> int:
    """Bytes of the weights of products, each once, and of the rest in float32: what a token has to read."""
    products = {id(p): p.numel() for name, p in decoder.named_parameters() if p.ndim == 2 and "positions" not in name}
    rest = sum(p.numel() for p in decoder.parameters() if p.ndim == 1)
    return _ITEM_BYTES[precision] * sum(products.values()) + 4 * rest


def measure(decoder: Decoder, precision: str, threads: int, tokens: int, rounds: int, steps: int) -> Step:
    """Steps from position `tokens` on, in turns with reading."""
    net = prefuse.compile(decoder, precision=precision, threads=threads)
    assert isinstance(net, SpecializedModel)
    arguments = torch.tensor([[17]]), torch.tensor([0])
    program = net.specialize(*arguments)
    assert isinstance(program, CompiledModel)
    session, token = program.context(), arguments[0].numpy()
    rng = np.random.default_rng(0)
    for name in session.states:
        state = session.states[name]
        state[:, :, :tokens] = 0.5 * rng.standard_normal((*state.shape[:2], tokens, *state.shape[3:]))
        session.states[name] = state
    size_bytes = weights_bytes(decoder, precision)
    read, memory = reader(size_bytes, threads)
    positions = [np.array([tokens + step]) for step in range(steps)]
    step_times, read_times = list[float](), list[float]()
    for turn in range(rounds + 1):
        reads = [_seconds(partial(read, memory)) for _ in range(2)]
        calls = [_seconds(partial(session, token, position)) for position in positions]
        if turn:
            step_times += calls
            read_times.append(min(reads))
    floor, step = median(read_times), median(step_times)
    return Step(
        precision=precision,
        tokens=tokens,
        weights_bytes=size_bytes,
        step_ms=step * 1e3,
        best_ms=min(step_times) * 1e3,
        floor_ms=floor * 1e3,
        gigabytes_per_second=size_bytes / floor / 1e9,
        ratio=step / floor,
        written_bytes=written_bytes(program),
        copies=sum(not isinstance(one, Launch) for one in program.plan.steps),
    )


def reader(size_bytes: int, threads: int) -> tuple[CompiledModel, np.ndarray]:
    """A program that does nothing but read as many bytes on the threads of the step's own pool, and what it reads."""
    columns = max(size_bytes // (4 * threads), 1)
    text = f"""<ir_version: 10, opset_import: ["": 21]>
        read (float[{threads},{columns}] x) => (float[{threads}] y) {{
            axis = Constant<value_ints = [1]>()
            y = ReduceMax<keepdims = 0>(x, axis)
        }}"""
    net = prefuse.compile(onnx.parser.parse_model(text), threads=threads, cache=False)
    assert isinstance(net, CompiledModel)
    return net, np.ones((threads, columns), np.float32)


def written_bytes(program: CompiledModel) -> int:
    """Bytes that a call writes into states: of a scatter in place, those of the updates; of other kernels all they may write."""
    renewed = {buffer.name for buffer in program.plan.buffers if buffer.role is Role.STATE and buffer.renews is not None}
    templates = {kernel.symbol: kernel.template for kernel in program.plan.kernels}
    total = 0
    for step in program.plan.steps:
        if not isinstance(step, Launch):
            continue
        for number, write in enumerate(step.writes):
            if write.buffer in renewed:
                is_row = templates[step.kernel] == "scatter" and any(pair[0] == number for pair in step.inplace)
                total += step.reads[-1].size_bytes if is_row else write.size_bytes
    return total


def _seconds(call: Callable[[], object]) -> float:
    begin = perf_counter()
    call()
    return perf_counter() - begin


@click.command()
@click.option("--precision", "precisions", multiple=True, default=tuple(_ITEM_BYTES), type=click.Choice(tuple(_ITEM_BYTES)))
@click.option("--threads", default=2, show_default=True, type=click.IntRange(min=1), help="Of the program and of the reading.")
@click.option("--tokens", default=128, show_default=True, type=click.IntRange(min=0), help="Tokens before the first step.")
@click.option("--rounds", default=15, show_default=True, type=click.IntRange(min=1))
@click.option("--steps", default=4, show_default=True, type=click.IntRange(min=1), help="Of a round.")
@click.option("--small", is_flag=True, help="A small model: checks the benchmark, not the step.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the results to this file.")
def main(
    precisions: tuple[str, ...], threads: int, tokens: int, rounds: int, steps: int, small: bool, json_path: Path | None
) -> None:
    """Time a decode step against reading its weights."""
    console = Console(width=130)
    torch.manual_seed(0)
    decoder = gpt2_decoder(_SMALL if small else None).eval()
    results = []
    for precision in precisions:
        found = measure(decoder, precision, threads, min(tokens, decoder.config.positions - steps), rounds, steps)
        results.append(found)
        console.print(
            f"{precision}: a step {found.step_ms:.2f} ms (best {found.best_ms:.2f}), its {found.weights_bytes / 1e6:.0f} MB of "
            f"weights {found.floor_ms:.2f} ms at {found.gigabytes_per_second:.1f} GB/s: {found.ratio:.3f}; "
            f"{found.written_bytes} bytes of states written, {found.copies} copies"
        )
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(one) for one in results], indent=2) + "\n")


if __name__ == "__main__":
    main()
