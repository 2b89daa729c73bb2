"""Which range of a tensor its 256 levels are spread over: pure functions of a histogram.

| method | range |
|---|---|
| minmax | all that was seen: no element saturates |
| percentile | all but 1 of 10,000 elements, half of these at either end |
| mse | that with the least mean squared error of the elements, rounding and saturation together |
| entropy | that with the least Kullback-Leibler divergence of the rounded distribution from the true one |

The last is that of Migacz, "8-bit inference with TensorRT", GTC 2017, here with both ends free.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

import numpy as np

from .formats import LEVELS, unsigned_affine
from .histogram import Histogram

RangeMethod: TypeAlias = Literal["minmax", "percentile", "mse", "entropy"]
RANGE_METHODS: tuple[RangeMethod, ...] = get_args(RangeMethod)
_CLIPPED = 1e-4  # share of elements that "percentile" leaves out
_SHARES = np.linspace(1.0, 0.05, 39)  # of the way from 0 to an end, tried for the range's end
_LEAST_BINS = 4 * LEVELS  # of a range whose divergence tells anything: each level is to be made of some
_SWEEPS = 2  # over both ends, one after the other

Range: TypeAlias = tuple[float, float]


def choose_range(histogram: Histogram, method: RangeMethod) -> Range:
    """The least and greatest element that need not saturate; both include 0. (0, 0) where nothing was seen."""
    low, high = histogram.low, histogram.high
    if method == "minmax" or low == high:
        return low, high
    if method == "percentile":
        return _percentile(histogram)
    return _search(low, high, _squared_error(histogram) if method == "mse" else _divergence(histogram))


def _percentile(histogram: Histogram) -> Range:
    shares = np.cumsum(histogram.counts) / histogram.total
    first = int(np.searchsorted(shares, _CLIPPED / 2, side="right"))
    last = int(np.searchsorted(shares, 1 - _CLIPPED / 2, side="left"))
    edges = histogram.centres
    half = histogram.width / 2
    return max(histogram.low, min(float(edges[first]) - half, 0.0)), min(histogram.high, max(float(edges[last]) + half, 0.0))


def _search(low: float, high: float, loss: Callable[[float, float], float]) -> Range:
    """The range within `low` to `high` of least loss, found by moving one end after the other."""
    best_low, best_high = low, high
    for _ in range(_SWEEPS):
        if high > 0:
            best_high = min((float(high * share) for share in _SHARES), key=lambda end: loss(best_low, end))
        if low < 0:
            best_low = min((float(low * share) for share in _SHARES), key=lambda end: loss(end, best_high))
    return best_low, best_high


def _squared_error(histogram: Histogram) -> Callable[[float, float], float]:
    numbers, counts = histogram.centres, histogram.counts

    def loss(low: float, high: float) -> float:
        affine = unsigned_affine(low, high)
        scale, zero = float(affine.scale), float(affine.zero)
        levels = np.clip(np.rint(numbers / scale) + zero, 0, LEVELS)
        return float(counts @ (numbers - (levels - zero) * scale) ** 2)

    return loss


def _divergence(histogram: Histogram) -> Callable[[float, float], float]:
    numbers, counts = histogram.centres, histogram.counts.astype(np.float64)
    origin = int(np.searchsorted(numbers, 0.0))  # the bin that begins at 0, which many activations are: it is exact in any range
    if 0 < origin + 1 < len(counts):
        counts[origin] = counts[origin + 1]
    is_filled = counts > 0

    def loss(low: float, high: float) -> float:
        """What was clipped stands at the ends of the true distribution, and is not in the rounded one, as Migacz has it."""
        inside = (numbers >= low) & (numbers <= high)
        places = np.flatnonzero(inside)
        if len(places) < min(_LEAST_BINS, len(numbers)):
            return float("inf")
        true = np.where(inside, counts, 0.0)
        true[places[0]] += counts[: places[0]].sum()
        true[places[-1]] += counts[places[-1] + 1 :].sum()
        affine = unsigned_affine(low, high)
        levels = np.clip(np.rint(numbers[inside] / float(affine.scale)) + float(affine.zero), 0, LEVELS).astype(np.int64)
        filled = is_filled[inside]
        mass = np.bincount(levels, counts[inside], LEVELS + 1)
        bins = np.bincount(levels, filled, LEVELS + 1)
        rounded = np.where(filled, (mass / np.maximum(bins, 1))[levels], 0.0)
        p = true[inside] / true.sum()
        q = np.maximum(rounded / max(rounded.sum(), 1.0), 1e-12)
        return float(np.sum(p * np.log(np.maximum(p, 1e-300) / q), where=p > 0))

    return loss
