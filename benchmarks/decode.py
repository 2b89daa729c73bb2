"""What a decode step of GPT-2 costs beside reading its weights: `python -m benchmarks.decode`.

One token a call; keys and values are states of the session, cached for 1,024 positions. In turns, in one process: steps, and
reading as many bytes as the products of a step read of its weights (`reading.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path

import click
import numpy as np
import prefuse
import torch
from prefuse.compiler.programs.specialize import SpecializedModel
from prefuse.examples.models.gpt2 import Config
from prefuse.examples.models.gpt2_decode import Decoder, gpt2_decoder
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.plan import Launch, Role
from rich.console import Console

from .reading import Floor, beside_reading, shown, weights_read
from .record import record
from .turns import LEAST_ROUNDS, block_of

_PRECISIONS = ("float32", "bfloat16")
_SMALL = Config(vocabulary=96, positions=64, width=32, layers=2, heads=4)


@dataclass(frozen=True, slots=True)
class Step:
    """One precision: a step beside reading its weights."""

    precision: str
    tokens: int  # before the first step
    floor: Floor
    written_bytes: int  # of states, a call
    copies: int  # of whole states, a call
    fault: str  # where the floor is none


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
    positions = cycle([np.array([tokens + step]) for step in range(steps + 1)])
    block = block_of(lambda: session(token, next(positions)), steps)
    floor = beside_reading(block, weights_read(program.plan), threads, rounds)
    copies = sum(not isinstance(one, Launch) for one in program.plan.steps)
    return Step(precision, tokens, floor, written_bytes(program), copies, floor.fault)


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


@click.command()
@click.option("--precision", "precisions", multiple=True, default=_PRECISIONS, type=click.Choice(_PRECISIONS))
@click.option("--threads", default=2, show_default=True, type=click.IntRange(min=1), help="Of the program and of the reading.")
@click.option("--tokens", default=128, show_default=True, type=click.IntRange(min=0), help="Tokens before the first step.")
@click.option("--rounds", default=3 * LEAST_ROUNDS, show_default=True, type=click.IntRange(min=1))
@click.option("--steps", default=4, show_default=True, type=click.IntRange(min=1), help="Of a round.")
@click.option("--small", is_flag=True, help="A small model: checks the benchmark, not the step.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Add the results to this file.")
def main(
    precisions: tuple[str, ...], threads: int, tokens: int, rounds: int, steps: int, small: bool, json_path: Path | None
) -> None:
    """Time a decode step against reading its weights. Ends with status 1 where reading took longer than the step."""
    console, faults = Console(width=130), list[str]()
    kept = record(json_path, threads, {"rounds": rounds, "steps": steps, "small": small}, key=("precision", "tokens"))
    torch.manual_seed(0)
    decoder = gpt2_decoder(_SMALL if small else None).eval()
    tokens = min(tokens, decoder.config.positions - steps - 1)
    for found in map(partial(measure, decoder, threads=threads, tokens=tokens, rounds=rounds, steps=steps), precisions):
        console.print(
            f"{found.precision}: a step {found.floor.step_ms:.2f} ms, its {shown(found.floor)}; "
            f"{found.written_bytes} bytes of states written, {found.copies} copies",
            markup=False,
        )
        kept.add(found)
        if found.fault:
            console.print(found.fault, style="red", markup=False)
            faults.append(found.fault)
    if faults and not small:  # what is small lies in caches
        raise SystemExit(1)


if __name__ == "__main__":
    main()
