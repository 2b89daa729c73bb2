"""What is remembered of a tensor over all batches of a calibration: a histogram, and never the tensor."""

from __future__ import annotations

import math

import numpy as np

BINS = 4096  # the most that a histogram has; between a half of them and all cover its range
_SMALLEST_EXPONENT = -148  # bins of the smallest subnormal number of float32
_CHUNK = 1 << 20  # elements counted at a time


class Histogram:
    """Counts of the finite elements of a tensor, in bins of one width, which doubles where the range grows beyond `BINS` of them.

    The width is a power of two and 0 an edge of bins, so that bins are merged exactly, and histograms of several tensors are
    added up. `low` and `high` are the least and greatest finite element, and 0. `odd` counts NaN and infinities.
    """

    def __init__(self) -> None:
        self.low = self.high = 0.0
        self.odd = 0
        self._exponent = _SMALLEST_EXPONENT
        self._first = 0  # the number of the first bin: it begins at first * width
        self._counts = np.zeros(0, np.int64)

    @property
    def width(self) -> float:
        """Of a bin."""
        return math.ldexp(1.0, self._exponent)

    @property
    def counts(self) -> np.ndarray:
        """How many elements each bin has."""
        return self._counts

    @property
    def total(self) -> int:
        """Finite elements seen."""
        return int(self._counts.sum())

    @property
    def centres(self) -> np.ndarray:
        """The middles of the bins, as float64."""
        return (np.arange(self._first, self._first + len(self._counts)) + 0.5) * self.width

    def add(self, array: np.ndarray) -> None:
        """Count the elements of a tensor."""
        flat = array.reshape(-1)
        for start in range(0, len(flat), _CHUNK):
            part = flat[start : start + _CHUNK]
            is_finite = np.isfinite(part)
            if not is_finite.all():
                self.odd += int(len(part) - is_finite.sum())
                part = part[is_finite]
            if len(part):
                self._grow(float(part.min()), float(part.max()))
                places = np.floor(np.ldexp(part.astype(np.float64), -self._exponent)).astype(np.int64) - self._first
                self._counts += np.bincount(places, minlength=len(self._counts))

    def merge(self, other: Histogram) -> None:
        """Count what another histogram has counted."""
        self.odd += other.odd
        if not len(other._counts):
            return
        self._grow(other.low, other.high, other._exponent)
        places = np.arange(other._first, other._first + len(other._counts)) >> (self._exponent - other._exponent)
        np.add.at(self._counts, places - self._first, other._counts)

    def _grow(self, low: float, high: float, least_exponent: int = _SMALLEST_EXPONENT) -> None:
        """Let the bins, no narrower than 2 ** least_exponent, cover `low` to `high`, and all that was covered before."""
        self.low, self.high = min(self.low, low), max(self.high, high)
        exponent = max(self._exponent, least_exponent)
        while _place(self.high, exponent) - _place(self.low, exponent) >= BINS:
            exponent += max(1, math.frexp((self.high - self.low) / BINS)[1] - 1 - exponent)
        first, last = _place(self.low, exponent), _place(self.high, exponent)
        if (exponent, first, last + 1 - first) == (self._exponent, self._first, len(self._counts)):
            return
        counts = np.zeros(last + 1 - first, np.int64)
        places = np.arange(self._first, self._first + len(self._counts)) >> (exponent - self._exponent)
        np.add.at(counts, places - first, self._counts)
        self._exponent, self._first, self._counts = exponent, first, counts


def _place(number: float, exponent: int) -> int:
    """The bin of a number: an edge belongs to the bin that it begins."""
    return math.floor(math.ldexp(number, -exponent))


class ChannelMoments:
    """Of each index along a dimension of a tensor, over all batches: the least, the greatest, the mean square."""

    def __init__(self, channels: int, axis: int = -1) -> None:
        self._axis = axis
        self.low = np.zeros(channels)
        self.high = np.zeros(channels)
        self._squares = np.zeros(channels)
        self._count = 0

    def add(self, array: np.ndarray) -> None:
        """Count a tensor, whose elements are finite."""
        last = np.moveaxis(array, self._axis, -1)
        rows = last.reshape(-1, last.shape[-1])
        if len(rows):
            self.low = np.minimum(self.low, rows.min(0))
            self.high = np.maximum(self.high, rows.max(0))
            self._squares += np.einsum("rc,rc->c", rows, rows, dtype=np.float64)
            self._count += len(rows)

    @property
    def mean_square(self) -> np.ndarray:
        """Of each channel."""
        return self._squares / max(self._count, 1)
