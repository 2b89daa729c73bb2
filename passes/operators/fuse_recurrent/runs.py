"""Runs: consecutive steps whose states are chained and whose inputs are consecutive elements of sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from .columns import Columns, Place
from .steps import Step


@dataclass(frozen=True, slots=True)
class Run:
    """Steps of one recurrence; with more than one, `places` has for each input the place of the first step's.

    `direction` is the distance in the sequences from one step to the next: 1 or -1.
    """

    steps: tuple[Step, ...]
    places: tuple[Place, ...] = ()
    direction: int = 1


def chains_of(steps: Iterable[Step]) -> list[list[Step]]:
    """Steps, each the next of the one before: it starts from its states, with the same weights."""
    open_chains: dict[ir.Value, list[Step]] = {}
    chains = []
    for step in steps:
        before = None if step.hidden is None else open_chains.get(step.hidden.value)
        if before is not None and _continues(step, before[-1]):
            open_chains.pop(before[-1].hidden_out)
        else:
            before = []
            chains.append(before)
        before.append(step)
        open_chains[step.hidden_out] = before
    return chains


def runs_of(chain: Sequence[Step], place: Callable[[Columns], Place | None]) -> Iterator[Run]:
    """The chain as runs as long as can be; `place` finds an input in a sequence.

    It is asked for a run when that is wanted: the run before may have made the sequence.
    """
    begin = 0
    while begin < len(chain):
        run = _longest(chain, begin, place)
        begin += len(run.steps)
        yield run


def _continues(step: Step, before: Step) -> bool:
    """Whether a step starts from all states of the one before and is of the same kernel."""
    states = (step.hidden,) if step.cell_out is None else (step.hidden, step.cell)
    return (
        step.kernel == before.kernel
        and len(states) == len(before.outputs)
        and all(old is not None and old.is_whole and old.value is out for old, out in zip(states, before.outputs, strict=True))
    )


def _longest(chain: Sequence[Step], begin: int, place: Callable[[Columns], Place | None]) -> Run:
    """The longest run of a chain that begins at one of its steps."""
    found = [place(one) for one in chain[begin].inputs]
    places = tuple(one for one in found if one is not None)
    end, direction = begin + 1, 0
    while len(places) == len(found) and end < len(chain) and not _is_cell_read(chain[end - 1], chain[end]):
        there = [place(one) for one in chain[end].inputs]
        if direction == 0 and there[0] is not None:
            direction = there[0].index - places[0].index
        if direction not in (1, -1) or there != [replace(one, index=one.index + (end - begin) * direction) for one in places]:
            break
        end += 1
    return Run(tuple(chain[begin:end]), places, direction) if end - begin > 1 else Run((chain[begin],))


def _is_cell_read(before: Step, step: Step) -> bool:
    """Whether others than the two steps read the cell state between them, of which a recurrent operator shows the last one."""
    if before.cell_out is None:
        return False
    own = {*before.body, *step.body}
    return before.cell_out.is_graph_output() or any(reader not in own for reader in before.cell_out.consumers())
