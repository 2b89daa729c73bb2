"""Ranges from histograms: what each method leaves out."""

from __future__ import annotations

import numpy as np
import pytest
from prefuse.compiler.quantization.formats import unsigned_affine
from prefuse.compiler.quantization.histogram import Histogram
from prefuse.compiler.quantization.ranges import RANGE_METHODS, RangeMethod, choose_range


def histogram_of(x: np.ndarray) -> Histogram:
    found = Histogram()
    found.add(x.astype(np.float32))
    return found


def heavy(seed: int = 0) -> np.ndarray:
    """A normal distribution with three elements far outside."""
    x = np.random.default_rng(seed).normal(size=100_000)
    x[:3] = (60.0, -45.0, 58.0)
    return x.astype(np.float32)


def squared_error(x: np.ndarray, low: float, high: float) -> float:
    return float(np.sum((unsigned_affine(low, high).rounded(x).astype(np.float64) - x) ** 2))


@pytest.mark.parametrize("method", RANGE_METHODS)
@pytest.mark.parametrize("x", [np.zeros(9), np.zeros(0), np.array([3.0]), np.array([-2.0, -2.0]), np.full(3, 1e-44)])
def test_ranges_of_few_numbers(x: np.ndarray, method: RangeMethod) -> None:
    """Nothing, zeros, and one number alone, which stays within half a step."""
    low, high = choose_range(histogram_of(x), method)
    assert low <= 0 <= high
    affine = unsigned_affine(low, high)
    assert (np.abs(affine.rounded(x) - x) <= 0.51 * affine.scale).all()


def test_minmax_saturates_nothing() -> None:
    x = heavy()
    assert choose_range(histogram_of(x), "minmax") == (float(x.min()), float(x.max()))


def test_percentile() -> None:
    x = heavy()
    low, high = choose_range(histogram_of(x), "percentile")
    assert 0 < np.sum(x < low) <= 6  # half of 1e-4 of them at either end
    assert 0 < np.sum(x > high) <= 6
    assert high < 6


def test_mse_is_least() -> None:
    """No range that is clearly narrower or wider has less error, and outliers cost resolution."""
    x = heavy()
    low, high = choose_range(histogram_of(x), "mse")
    best = squared_error(x, low, high)
    assert best < 0.9 * squared_error(x, float(x.min()), float(x.max()))
    for share in (0.7, 0.85, 1.2, 1.4):
        assert squared_error(x, low * share, high * share) > 0.98 * best


def test_mse_of_a_light_tail_keeps_nearly_all() -> None:
    x = np.random.default_rng(1).uniform(-1, 3, 50_000)
    low, high = choose_range(histogram_of(x), "mse")
    assert low < -0.95
    assert high > 2.9


def test_entropy_leaves_outliers_out() -> None:
    x = heavy()
    low, high = choose_range(histogram_of(x), "entropy")
    assert 2.0 < high < 40.0
    assert -40.0 < low < -2.0


def test_entropy_of_rectified_activations() -> None:
    """Most are exactly 0, which no range costs anything: the others keep their range."""
    x = np.maximum(np.random.default_rng(3).normal(size=100_000), 0)
    x[::3] = 0
    assert choose_range(histogram_of(x), "entropy")[1] > 2.5


def test_positive_numbers_keep_zero_at_the_end() -> None:
    x = np.abs(heavy(2))
    for method in RANGE_METHODS:
        assert choose_range(histogram_of(x), method)[0] == 0.0
