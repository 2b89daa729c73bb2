"""Indices and weights of a dimension of ONNX's Resize, as tables computed at compile time.

Every output of a dimension reads the same number of elements (taps). Where fewer have a weight, at the border or where the
coordinate is an integer, the last one is repeated with its weight halved: halves add up exactly, whereas a weight of 0 would turn
an infinite element into NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from ...runtime.plan import TensorType

Column = Literal["index", "weight", "outside"]
_BLOCK = 1 << 12  # outputs whose weights are computed together, in cache


@dataclass(frozen=True)
class Resampling:
    """One dimension of a Resize: `inputs` elements become `outputs`. The names are those of ONNX's attributes.

    `scale` is the factor that coordinates are mapped with, the quotient of the sizes where they are given; `roi` the part of the
    dimension, of tf_crop_and_resize.
    """

    inputs: int
    outputs: int
    scale: float
    mode: str = "nearest"
    coordinates: str = "half_pixel"
    nearest: str = "round_prefer_floor"
    cubic_a: float = -0.75
    antialias: bool = False
    exclude_outside: bool = False
    roi: tuple[float, float] = (0.0, 1.0)

    @property
    def is_identity(self) -> bool:
        """Whether each output is the input at the same index."""
        if self.inputs != self.outputs or self.scale != 1:
            return False
        if self.mode == "nearest" and self.coordinates == "asymmetric":
            return True
        if len(self.indices) != 1 or self.overhangs:
            return False
        return bool(np.array_equal(self.indices[0], np.arange(self.outputs)))

    @property
    def taps(self) -> int:
        return len(self.indices)

    @property
    def overhangs(self) -> bool:
        """Whether some outputs get the extrapolation value."""
        return self.coordinates == "tf_crop_and_resize" and bool(self.outside.any())

    @property
    def indices(self) -> np.ndarray:
        """Indices of the taps, int32[taps, outputs], all in bounds."""
        return _tables(self)[0]

    @property
    def weights(self) -> np.ndarray:
        """Weights of the taps, float64[taps, outputs]."""
        return _tables(self)[1]

    @property
    def outside(self) -> np.ndarray:
        """bool[outputs]: outputs that get the extrapolation value instead."""
        return _tables(self)[2]

    def positions(self) -> np.ndarray:
        """float64[outputs]: the coordinate of each output in the input (ONNX Resize, coordinate_transformation_mode).

        Corners and the ends of a region are those of the result, as ONNX's text has it, whatever the scale makes of the input's
        length; onnx.reference takes that, which may be no whole number.
        """
        x = np.arange(self.outputs, dtype=np.float64)
        if not self.outputs:
            return x
        if self.coordinates == "align_corners":
            return np.zeros_like(x) if self.outputs == 1 else x * (self.inputs - 1) / (self.outputs - 1)
        if self.coordinates == "asymmetric":
            return self._unscaled(x)
        if self.coordinates == "tf_half_pixel_for_nn":
            return self._unscaled(x + 0.5)
        if self.coordinates == "tf_crop_and_resize":
            begin, end = self.roi
            first = begin * (self.inputs - 1)
            if self.outputs == 1:
                return np.full_like(x, (end - begin) * (self.inputs - 1) / 2 + first)
            return x * (end - begin) * (self.inputs - 1) / (self.outputs - 1) + first
        if self.coordinates == "pytorch_half_pixel" and self.outputs == 1:
            return np.zeros_like(x)
        width = self.outputs if self._is_quotient else self.scale * self.inputs
        shift = self.inputs / 2 * (1 - self.outputs / width) if self.coordinates == "half_pixel_symmetric" else 0.0
        return shift + self._unscaled(x + 0.5) - 0.5

    @property
    def _is_quotient(self) -> bool:
        """Whether the factor is outputs / inputs, which floats may only be near to."""
        return self.scale == self.outputs / self.inputs

    def _unscaled(self, x: np.ndarray) -> np.ndarray:
        """x / scale, rounded once: floor and ceil take a whole number for what it is."""
        return x * self.inputs / self.outputs if self._is_quotient else x / self.scale

    def elements(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The input's elements at coordinates, in order, and their weights, [most, coordinates]: those that are not 0 first."""
        if self.mode == "nearest":
            places = np.clip(_ROUNDINGS[self.nearest](x), 0, self.inputs - 1)
            return places[None].astype(np.int32), np.ones((1, len(x)))
        shrink = min(self.scale, 1.0) if self.antialias else 1.0
        reach, kernel = (1, _linear) if self.mode == "linear" else (2, self._cubic)
        first = np.floor(x - reach / shrink)
        most = int((np.ceil(x + reach / shrink) - first).max()) + 1
        around = first + np.arange(most)[:, None]
        weights = kernel(np.abs(around - x) * shrink)
        if self.exclude_outside:
            inside = np.where((around >= 0) & (around < self.inputs), weights, 0)
            weights = np.where(inside.any(0), inside, weights)
        if self.exclude_outside or self.antialias:
            weights = weights / sum(weights)  # in order, so that the same sums are rounded in the same way
        places = np.clip(around, 0, self.inputs - 1).astype(np.int32)
        for i in range(1, most):  # an element counts once: those beyond the border are the one at it
            again = places[i] == places[i - 1]
            weights[i] += np.where(again, weights[i - 1], 0)
            weights[i - 1][again] = 0
        kept, which = np.nonzero(weights)
        slots = (np.cumsum(weights != 0, axis=0) - 1)[kept, which]
        shape = (int(slots.max(initial=0)) + 1, len(x))
        elements, shares = np.zeros(shape, np.int32), np.zeros(shape)
        elements[slots, which], shares[slots, which] = places[kept, which], weights[kept, which]
        return elements, shares

    def _cubic(self, x: np.ndarray) -> np.ndarray:
        """The kernel of R. Keys, Cubic convolution interpolation for digital image processing (1981)."""
        a = self.cubic_a
        near = ((a + 2) * x - (a + 3)) * x * x + 1
        far = np.where(x < 2, ((a * x - 5 * a) * x + 8 * a) * x - 4 * a, 0.0)
        return np.where(x <= 1, near, far)


def _linear(x: np.ndarray) -> np.ndarray:
    return np.where(x < 1, 1 - x, 0.0)


_ROUNDINGS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "ceil": np.ceil,
    "floor": np.floor,
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
}


@lru_cache(maxsize=64)
def _tables(axis: Resampling) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    positions = axis.positions()
    outside = np.zeros(axis.outputs, bool)
    if axis.coordinates == "tf_crop_and_resize":
        outside = (positions < 0) | (positions > axis.inputs - 1)
        positions = np.where(outside, 0.0, positions)
    blocks = [axis.elements(positions[begin : begin + _BLOCK]) for begin in range(0, axis.outputs, _BLOCK)]
    taps = max((len(weights) for _, weights in blocks), default=1)
    indices, weights = np.zeros((taps, axis.outputs), np.int32), np.zeros((taps, axis.outputs))
    for number, block in enumerate(blocks):
        part = slice(number * _BLOCK, (number + 1) * _BLOCK)
        indices[:, part], weights[:, part] = _repeated(*block, taps)
    return indices, weights, outside


def _repeated(places: np.ndarray, weights: np.ndarray, taps: int) -> tuple[np.ndarray, np.ndarray]:
    """As many elements for each coordinate: the last one with a weight is repeated, each time with half of what is left."""
    last = np.maximum(np.count_nonzero(weights, axis=0), 1) - 1
    tap = np.arange(taps)[:, None]
    source = np.minimum(tap, last)
    halvings = np.clip(tap - last + 1, 0, taps - 1 - last)
    return np.take_along_axis(places, source, 0), np.ldexp(np.take_along_axis(weights, source, 0), -halvings)


@dataclass(frozen=True)
class PackResampling:
    """Replace an operand (sizes or scales) by a table of a dimension that was computed from it."""

    axis: Resampling
    column: Column
    dtype: str

    def __call__(self, array: np.ndarray) -> np.ndarray:
        tables = {"index": self.axis.indices, "weight": self.axis.weights, "outside": self.axis.outside}
        return np.ascontiguousarray(tables[self.column].astype(self.dtype))

    def packed_type(self, source: TensorType) -> TensorType:
        shape = (self.axis.outputs,) if self.column == "outside" else (self.axis.taps, self.axis.outputs)
        return TensorType(shape, self.dtype)

    def __str__(self) -> str:
        axis = self.axis
        flags = f"{'a' * axis.antialias}{'x' * axis.exclude_outside}"
        kind = f"{axis.mode},{axis.coordinates},{axis.nearest},{axis.cubic_a!r},{flags},{axis.roi[0]!r},{axis.roi[1]!r}"
        return f"resample({axis.inputs},{axis.outputs},{axis.scale!r},{kind},{self.column},{self.dtype})"
