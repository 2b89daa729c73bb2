"""Random graphs within memory limits: a few of `python -m tests.memory graphs`, others each day, and those once wrong."""

from __future__ import annotations

import pytest

from ..sample import sample_number
from .judge import judge_graph

_SEED = 18


@pytest.mark.parametrize("turn", range(2))
def test_random_graphs_keep_within_their_limits(turn: int) -> None:
    verdict = judge_graph((_SEED, 2 * sample_number() + turn))
    assert not verdict.fault, f"{verdict.name}: {verdict.fault}"


@pytest.mark.parametrize("graph", [(7, 189), (7, 439), (53, 78), (53, 362)])
def test_graphs_that_were_wrong(graph: tuple[int, int]) -> None:
    """The limit that an error named was that of the whole, whose weights lie elsewhere without one, 40 bytes apart; a product by
    Strassen's algorithm was cut; a product was rounded with a sum only where both were in one kernel; a kernel read one part of a
    joined value and wrote another."""
    verdict = judge_graph(graph)
    assert not verdict.fault, verdict.fault
