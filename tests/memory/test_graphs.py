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


def test_the_limit_that_an_error_names_would_do() -> None:
    """It was that of the whole, whose weights lie elsewhere without a limit: 40 bytes less."""
    verdict = judge_graph((7, 189))
    assert not verdict.fault, verdict.fault
