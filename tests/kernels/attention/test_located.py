"""Where the operands of attention lie in memory: what vectors may be read of them."""

from __future__ import annotations

from itertools import product

import pytest
from prefuse.kernels.attention.located import Located, locate
from prefuse.kernels.attention.pattern import Attention, attention_of

from ..harness import Case
from .attention_cases import parts_of_wider_rows


def values_of(case: Case) -> Located:
    form = attention_of(case.group)
    assert isinstance(form, Attention)
    found = locate(form, form.product, 1)
    assert isinstance(found, Located)
    return found


@pytest.mark.parametrize(("tokens", "batch"), [(1, 1), (1, 5), (2, 1), (5, 1), (9, 1), (9, 2), (12, 1), (17, 3)])
def test_runs_are_those_of_every_line(tokens: int, batch: int) -> None:
    """Also where they begin at multiples of their length in the middle and in the last line, as 4 and 8 lines of 52 do."""
    for beside, length in product((0, 2, 4, 8), (2, 4, 8)):
        values = values_of(parts_of_wider_rows(beside, tokens, batch=batch))
        begins = [int(values.offset((head,), line, 0)) for head in range(2 * batch) for line in range(tokens)]
        assert values.has_runs(length, along_rows=True) == all(begin % length == 0 for begin in begins), (beside, length)
        assert not values.has_runs(length, along_rows=False)
