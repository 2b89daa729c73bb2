"""Transposed convolutions of values that lie channels-last; against torch in float64."""

from __future__ import annotations

from typing import Any

import pytest

from ..harness import LEVELS, Case, check_in_turn
from .channels_last_cases import transposed


def transposed_plain() -> list[Case]:
    """Kernels that are as long as their stride, shorter and longer; phases that read alike, and such that do not."""
    return [
        transposed((1, 64, 7, 7), 64, 2, 2),
        transposed((2, 17, 6, 5), 33, 2, 2),
        transposed((1, 8, 5, 6), 20, 4, 2, 1),
        transposed((2, 5, 5, 4), 3, 3, 2, 1, extra=1),
        transposed((1, 16, 9, 9), 40, 3),
        transposed((1, 6, 4, 5), 9, (2, 3), (3, 2), (0, 1), extra=(2, 1)),
        transposed((1, 4, 6, 7), 6, 3, 2, 2, (2, 3)),
        transposed((1, 4, 5, 5), 18, 3, 3, 1, 2),
        transposed((1, 3, 4, 4), 2, 16, 8, 4),
        transposed((1, 7, 3, 3), 4, 1, 5),
        transposed((1, 8, 2, 3), 5, (1, 3), (2, 1), 1),  # a row that no window reaches
        transposed((3, 8, 1, 1), 24, 4),
        transposed((2, 8, 1, 5), 32, 2, 2),
        transposed((1, 3, 2, 2), 5, 2, 2, 1),
        transposed((0, 2, 4, 4), 3, 2, 2),
        transposed((1, 300, 5, 5), 70, 2, 2),
    ]


def transposed_others() -> list[Case]:
    """Groups, other formats, inputs that lie channels-first and weights of a run."""
    return [
        transposed((2, 6, 5, 6), 9, 3, 2, 1, group=3),
        transposed((1, 64, 6, 6), 68, 2, 2, group=4),
        transposed((1, 12, 5, 5), 12, 4, 2, 1, group=12),
        transposed((1, 17, 9, 9), 24, 2, 2, dtype="float64"),
        transposed((1, 16, 8, 8), 6, 3, 2, 1, dtype="float16"),
        transposed((2, 16, 6, 7), 40, 2, 2, keep_first=("x",)),
        transposed((2, 16, 6, 7), 40, 4, 2, 1, keep_first=("x",)),
        transposed((1, 16, 6, 7), 24, 3, 2, 1, is_constant=False),
        transposed((2, 8, 4, 5), 20, 4, 4, group=2, is_constant=False),
        transposed((1, 1024, 2, 5), 9, (2, 4), 2, (0, 1)),
    ]


def transposed_signals() -> list[Case]:
    """The same: phases of one dimension."""
    return [
        transposed((1, 64, 13), 40, 16, 8, 4),
        transposed((2, 17, 9), 33, 4, 2, 1),
        transposed((2, 5, 6), 3, 3, 2, 1, extra=1),
        transposed((1, 6, 7), 9, 3, 1, 2, 2),
        transposed((1, 12, 5), 12, 4, 2, 1, group=12),
        transposed((2, 16, 8), 24, 2, 2, keep_first=("x",)),
        transposed((1, 16, 7), 24, 3, 2, 1, is_constant=False),
        transposed((2, 8, 5), 20, 4, 2, 1, narrow="xw"),
        transposed((0, 2, 4), 3, 2, 2),
    ]


def transposed_volumes() -> list[Case]:
    """The same: phases of planes, too, and lines that lie in them."""
    return [
        transposed((1, 64, 3, 4, 5), 40, 2, 2),
        transposed((2, 17, 3, 2, 5), 33, 2, 2),
        transposed((1, 8, 2, 4, 3), 20, 4, 2, 1),
        transposed((2, 5, 3, 2, 4), 3, 3, 2, 1, extra=1),
        transposed((1, 16, 4, 3, 5), 40, 3),
        transposed((1, 6, 3, 4, 5), 9, (2, 3, 1), (3, 2, 1), (0, 1, 0), extra=(2, 1, 0)),
        transposed((1, 6, 3, 4, 5), 9, (1, 3, 4), (1, 1, 3), (0, 2, 1)),
        transposed((1, 4, 3, 6, 4), 6, 3, 2, 2, (2, 1, 3)),
        transposed((1, 4, 2, 5, 3), 18, 2, 1, 0, (1, 2, 3)),
        transposed((1, 7, 2, 3, 2), 4, 1, (4, 1, 2)),
        transposed((3, 8, 1, 1, 1), 24, (2, 4, 3)),
        transposed((2, 8, 2, 1, 5), 32, 2, 2),
        transposed((2, 6, 3, 2, 4), 9, 3, 2, 1, group=3),
        transposed((1, 8, 2, 3, 4), 8, 2, 2, group=8),
        transposed((2, 16, 3, 2, 7), 40, 2, 2, keep_first=("x",)),
        transposed((1, 16, 3, 2, 7), 24, 4, 2, 1, keep_first=("x",)),
        transposed((1, 12, 2, 3, 5), 24, 3, 2, 1, is_constant=False),
        transposed((2, 8, 2, 2, 3), 20, (1, 4, 2), (1, 4, 2), group=2, is_constant=False),
        transposed((1, 9, 3, 2, 4), 24, 2, 2, dtype="float64"),
        transposed((1, 16, 2, 3, 4), 6, 3, 2, 1, dtype="float16"),
        transposed((0, 2, 2, 3, 4), 3, 2, 2),
    ]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("cases", [transposed_plain, transposed_others, transposed_signals, transposed_volumes])
def test_transposed_convolutions(cases: Any, level: str) -> None:
    check_in_turn(cases(), level)
