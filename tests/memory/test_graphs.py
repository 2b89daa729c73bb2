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


@pytest.mark.parametrize("number", [189, 439])
def test_graphs_that_were_wrong(number: int) -> None:
    """The limit that an error named was that of the whole, whose weights lie elsewhere without one, 40 bytes apart; a product by
    Strassen's algorithm was cut."""
    verdict = judge_graph((7, number))
    assert not verdict.fault, verdict.fault
