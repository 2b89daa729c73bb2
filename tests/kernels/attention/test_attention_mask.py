"""Attention whose masks hide keys from whole blocks of queries, which are left out; against float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from prefuse.kernels.attention import attention
from prefuse.kernels.attention.mask import may_hide_keys
from prefuse.kernels.attention.pattern import Attention, attention_of
from prefuse.tests.sample import dealt, every

from ..harness import LEVELS, Case, check, check_in_turn, run, target_of
from .attention_cases import Step, Tape, attend, chosen, guarded, guarded_by, hidden, masked
from .test_paired_attention import LEVEL as PAIRS
from .test_paired_attention import paired

LEAST = float(np.finfo(np.float32).min)


def causal(queries: int, keys: int) -> np.ndarray:
    return np.tri(queries, keys, keys - queries, dtype=bool)


def cases() -> list[Case]:
    """Lengths that divide no step; queries at the end of longer keys; a window; a gap; lengths of a batch, one of them 0; rows
    that see nothing, whose probabilities are equal where the mask is finite; what no score outweighs for sure stays; NaN among
    hidden keys, and at the first one after a row that sees nothing."""
    window, gap = causal(90, 90) & ~np.tri(90, k=-20, dtype=bool), np.ones((40, 100), bool)
    gap[:, 30:95], gap[:20, 95:] = False, False
    lengths = np.arange(70) < np.array([70, 33, 1]).reshape(3, 1, 1, 1)
    blind = causal(50, 70)
    blind[[3, 49]] = False
    odd = np.where(blind, 0.0, LEAST)
    odd[5, 69], odd[10, 0] = np.nan, np.nan
    return [
        attend((1, 2, 100, 100, 16, 24), score_step=chosen(causal(100, 100), -np.inf)),
        attend((1, 2, 64, 64, 20, 16), score_step=chosen(causal(64, 64), LEAST)),
        attend((1, 1, 33, 97, 16, 8), score_step=hidden(causal(33, 97), LEAST)),
        attend((1, 1, 90, 90, 8, 16), score_step=hidden(window)),
        attend((1, 1, 40, 100, 8, 16), score_step=hidden(gap)),
        attend((3, 2, 30, 70, 8, 8), score_step=hidden(lengths)),
        attend((1, 1, 50, 70, 8, 8), score_step=chosen(blind, LEAST)),
        attend((1, 1, 50, 70, 8, 8), score_step=chosen(blind, -np.inf), weight_step=guarded),
        attend((1, 1, 50, 70, 8, 8), score_step=chosen(blind, -np.inf), weight_step=guarded_by(0.25)),
        attend((1, 1, 50, 70, 8, 8), score_step=chosen(causal(50, 70), -1e9)),
        attend((1, 1, 50, 70, 8, 8), score_step=masked(odd)),
    ]


def cases_of_few() -> list[Case]:
    """Up to 8 queries, which read keys where they lie: of a cache that is full, begun, or seen in part; a query that sees no
    key; one that is hidden between others; NaN among hidden keys; keys in no whole steps, or none of one chain."""
    gap, blind = causal(4, 192), causal(3, 128)
    gap[:, 60:150], blind[1] = False, False
    odd = np.where(np.arange(128) < 70, 0.0, -np.inf)
    odd[100] = np.nan
    return [
        attend((1, 2, 1, 128, 16, 24), score_step=hidden(np.arange(128) < 1)),
        attend((1, 2, 1, 1024, 16, 16), score_step=hidden(np.arange(1024) < 130)),
        attend((1, 2, 2, 1280, 16, 16), score_step=hidden(np.arange(1280) < 300)),
        attend((1, 2, 1, 1088, 16, 16), score_step=hidden(np.arange(1088) < 300)),
        attend((1, 1, 1, 2144, 16, 16), score_step=hidden(np.arange(2144) < 2000)),
        attend((1, 1, 4, 192, 16, 8), score_step=chosen(gap, LEAST)),
        attend((1, 1, 8, 64, 16, 8), score_step=chosen(causal(8, 64), -np.inf)),
        attend((1, 1, 3, 128, 16, 8), score_step=chosen(blind, LEAST)),
        attend((1, 1, 1, 128, 16, 8), score_step=masked(odd)),
        attend((1, 1, 1, 100, 16, 8), score_step=hidden(np.arange(100) < 30)),
    ]


@pytest.mark.parametrize("level", LEVELS)
def test_masks_of_few_queries(level: str) -> None:
    check_in_turn(cases_of_few(), level)


def test_masks_of_few_queries_in_pairs() -> None:
    """A half of them today, the other one tomorrow."""
    check([paired(case) for case in every(2, cases_of_few())], target_of(PAIRS))


@pytest.mark.parametrize("level", LEVELS)
def test_keys_hidden_from_few_queries_are_left_out(level: str) -> None:
    """Keys and values that no query sees are NaN, as is the rest of a cache that nobody has written; many of them in steps of
    one chain of a sum."""
    extent, seen = ((256, 64), (1088, 544))[level == LEVELS[0]]
    case = attend((1, 1, 1, extent, 16, 16), score_step=hidden(np.arange(extent) < seen - 4))
    *_, keys, values = (name for name, array in case.arrays.items() if array.ndim == 3)
    case.arrays[values][0, seen:] = np.nan
    case.arrays[keys][0, seen:] = np.nan
    run([case], target_of(level))
    assert np.isfinite(case.got[0]).all()


@pytest.mark.parametrize("level", LEVELS)
def test_masks(level: str) -> None:
    check_in_turn(cases(), level)


def test_masks_in_pairs() -> None:
    """A half of them today, the other one tomorrow."""
    check([paired(case) for case in every(2, cases())], target_of(PAIRS))


@pytest.mark.parametrize("in_pairs", [False, True])
def test_keys_in_blocks(monkeypatch: pytest.MonkeyPatch, in_pairs: bool) -> None:
    """Each case with or without pairs, tomorrow the other way."""
    monkeypatch.setattr(attention, "_CACHE_SHARE", 1 / 128)
    chosen = dealt(cases(), [case.label for case in cases()], in_pairs, (False, True))
    check([paired(case) if in_pairs else case for case in chosen], target_of(PAIRS))


def test_threads_give_the_same_bits() -> None:
    alone, shared = (attend((1, 3, 150, 150, 16, 16), score_step=chosen(causal(150, 150), -np.inf)) for _ in range(2))
    run([alone], target_of("avx2", 1))
    run([shared], target_of("avx2", 2))
    np.testing.assert_array_equal(alone.got[0], shared.got[0])


@pytest.mark.parametrize("level", LEVELS)
def test_hidden_keys_are_left_out(level: str) -> None:
    """Values of the last keys are NaN, which is not multiplied by 0 for the first queries."""
    case = attend((1, 1, 128, 128, 16, 16), score_step=chosen(causal(128, 128), -np.inf))
    *_, values = (name for name, array in case.arrays.items() if array.ndim == 3)
    case.arrays[values][0, 100:] = np.nan
    run([case], target_of(level))
    assert np.isfinite(case.got[0][0, :40]).all()
    assert np.isnan(case.got[0][0, 100:]).all()


def form_of(case: Case) -> Attention:
    form = attention_of(case.group)
    assert isinstance(form, Attention)
    return form


def inverted(tape: Tape, x: str) -> str:
    """1 / scores is infinite where they are 0, and nowhere else."""
    one = tape.input(np.ones((17, 21)))
    return tape.binary("Div", one, x)


def nonzero(tape: Tape, x: str) -> str:
    """Minus infinity where a score and a bias add up to 0, as with a score of 0 they do for all keys but the first."""
    bias = tape.input(np.eye(1, 21) * np.ones((17, 1)))
    total = tape.binary("Add", x, bias)
    decided = tape.add("Cast", [total], tape.values[total] != 0)
    result = np.where(tape.values[decided], tape.values[x], -np.inf)
    return tape.add("Where", [decided, x, tape.literal(np.float64(-np.inf))], result)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (hidden(causal(17, 21)), True),
        (chosen(causal(17, 21), -np.inf), True),
        (hidden(np.ones((2, 1, 1, 21), bool)), True),
        (masked(np.zeros((2, 3, 17, 21))), False),  # a bias of each head
        (masked(np.zeros((17, 1))), False),
        (None, False),
        (inverted, False),
        (nonzero, False),
    ],
)
def test_choice(step: Step | None, expected: bool) -> None:
    assert may_hide_keys(form_of(attend((2, 3, 17, 21, 8, 8), score_step=step))) is expected


def test_scores_in_double_precision_are_all_computed() -> None:
    case = attend((1, 2, 40, 70, 8, 8), "float64", chosen(causal(40, 70), -np.inf))
    assert not may_hide_keys(form_of(case))
    check([replace(case)], target_of("avx2"))
