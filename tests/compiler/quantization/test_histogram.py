"""Streaming histograms: the same whatever the batches, exact counts, bounded bins."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from prefuse.compiler.quantization.histogram import BINS, ChannelMoments, Histogram

_FLOATS = arrays.arrays(np.float32, st.integers(0, 40), elements=st.floats(width=32, allow_nan=False, allow_infinity=False))


def histogram_of(*parts: np.ndarray) -> Histogram:
    found = Histogram()
    for part in parts:
        found.add(part)
    return found


@given(_FLOATS, _FLOATS)
@settings(max_examples=150, deadline=None)
def test_as_counted_at_once(first: np.ndarray, second: np.ndarray) -> None:
    """Batches, one after the other or each in a histogram of its own, leave what all elements at once do."""
    whole = np.concatenate([first, second])
    together, apart, merged = histogram_of(whole), histogram_of(first, second), histogram_of(first)
    merged.merge(histogram_of(second))
    for found in (apart, merged):
        assert (found.low, found.high, found.total) == (together.low, together.high, len(whole))
        assert found.width == together.width
        assert np.array_equal(found.centres, together.centres)
        assert np.array_equal(found.counts, together.counts)
    assert len(together.counts) <= BINS


@given(_FLOATS)
@settings(max_examples=150, deadline=None)
def test_each_element_is_in_its_bin(x: np.ndarray) -> None:
    found = histogram_of(x)
    edges = found.centres - found.width / 2
    for number in np.unique(x):
        place = int(np.searchsorted(edges, float(number), side="right")) - 1
        expected = np.sum((x.astype(np.float64) >= edges[place]) & (x.astype(np.float64) < edges[place] + found.width))
        assert found.counts[place] == expected


def test_the_range_grows() -> None:
    """At least half of the bins cover the range, so that a level of 255 has several."""
    found = Histogram()
    for power in range(-40, 40, 7):
        found.add(np.float32(2.0**power) * np.linspace(-1, 1, 1000, dtype=np.float32))
        assert len(found.counts) + 1 >= BINS / 2
        assert len(found.counts) <= BINS
    assert found.total == 12_000
    assert (found.low, found.high) == (-(2.0**37), 2.0**37)


def test_what_is_not_finite_is_counted_apart() -> None:
    found = histogram_of(np.array([1.0, np.nan, np.inf, -np.inf, 2.0], np.float32))
    assert (found.odd, found.total, found.low, found.high) == (3, 2, 0.0, 2.0)


def test_large_tensors_are_counted_in_parts() -> None:
    x = np.random.default_rng(0).normal(size=(3, (1 << 20) + 5)).astype(np.float32)
    assert histogram_of(x).total == x.size


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_moments(rows: int) -> None:
    x = np.random.default_rng(1).normal(2.0, 1.0, size=(2, rows, 5)).astype(np.float32)
    found = ChannelMoments(5)
    for part in x:
        found.add(part)
    flat = x.reshape(-1, 5).astype(np.float64)
    assert np.array_equal(found.low, flat.min(0, initial=0.0))
    assert np.array_equal(found.high, flat.max(0, initial=0.0))
    np.testing.assert_allclose(found.mean_square, np.sum(flat**2, 0) / max(2 * rows, 1), rtol=1e-12)
