"""That the judge of random results finds what no generator could have given."""

from __future__ import annotations

import numpy as np

from .chance import chance_difference, is_chance

X, RATIO, YES = np.linspace(1, 2, 60, dtype=np.float32), np.float32(0.75), np.bool_(True)


def dropout(y: np.ndarray, mask: np.ndarray) -> str:
    expected = [np.zeros(60, np.float32), np.zeros(60, bool)]
    return chance_difference("test_training_dropout_mask", [X, RATIO, YES], expected, [y, mask])


def test_dropout() -> None:
    mask = np.arange(60) % 4 == 0
    assert dropout(np.where(mask, 4 * X, 0), mask) == ""
    assert "neither dropped nor scaled" in dropout(np.where(mask, X, 0), mask)
    assert "neither dropped nor scaled" in dropout(np.where(mask, 4 * X, 0), ~mask)
    assert "60 of 60" in dropout(4 * X, np.ones(60, bool))
    assert "differ" in dropout(np.where(mask, 4 * X, 0).astype(np.float64), mask)


def test_bernoulli() -> None:
    chances, ones = np.linspace(0, 0.4, 100, dtype=np.float32), np.ones(100, np.float32)
    assert chance_difference("test_bernoulli", [chances], [ones], [(np.arange(100) > 80).astype(np.float32)]) == ""
    assert "neither 0 nor 1" in chance_difference("test_bernoulli", [chances], [ones], [ones / 2])
    assert "100 of 100" in chance_difference("test_bernoulli", [chances], [ones], [ones])


def test_what_is_random() -> None:
    assert is_chance("test_bernoulli_seed_expanded")
    assert not is_chance("test_training_dropout_zero_ratio")
    assert not is_chance("test_dropout_default")
