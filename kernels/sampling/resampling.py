"""Indices and weights of a dimension of ONNX's Resize, as tables computed at compile time.

Every output of a dimension reads the same number of elements (taps). Where fewer have a weight, at the border or where the
coordinate is an integer, the last one is repeated with its weight halved: halves add up exactly, whereas a weight of 0 would turn
an infinite element into NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, floor
from typing import Literal

import numpy as np

from ...runtime.plan import TensorType

Column = Literal["index", "weight", "outside"]


@dataclass(frozen=True)
class Resampling:
    """One dimension of a Resize: `inputs` elements become `outputs`. The names are those of ONNX's attributes.

    `scale` is the factor that coordinates are mapped with; `roi` the part of the dimension, of tf_crop_and_resize.
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
        if self.inputs != self.outputs or self.scale != 1 or len(self.indices) != 1 or self.overhangs:
            return False
        return bool(np.array_equal(self.indices[0], np.arange(self.outputs)))

    @property
    def taps(self) -> int:
        return len(self.indices)

    @property
    def overhangs(self) -> bool:
        """Whether some outputs get the extrapolation value."""
        return bool(self.outside.any())

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
        """float64[outputs]: the coordinate of each output in the input (ONNX Resize, coordinate_transformation_mode)."""
        x, width = np.arange(self.outputs, dtype=np.float64), self.scale * self.inputs
        if self.coordinates == "align_corners":
            return np.zeros_like(x) if width == 1 else x * (self.inputs - 1) / (width - 1)
        if self.coordinates == "asymmetric":
            return x / self.scale
        if self.coordinates == "tf_half_pixel_for_nn":
            return (x + 0.5) / self.scale
        if self.coordinates == "tf_crop_and_resize":
            begin, end = self.roi
            first = begin * (self.inputs - 1)
            if width == 1:
                return np.full_like(x, (end - begin) * (self.inputs - 1) / 2 + first)
            return x * (end - begin) * (self.inputs - 1) / (width - 1) + first
        if self.coordinates == "pytorch_half_pixel" and width == 1:
            return np.full_like(x, -0.5)
        shift = self.inputs / 2 * (1 - self.outputs / width) if self.coordinates == "half_pixel_symmetric" else 0.0
        return shift + (x + 0.5) / self.scale - 0.5

    def elements(self, x: float) -> dict[int, float]:
        """Weights, none of them 0, of the input's elements at a coordinate."""
        if self.mode == "nearest":
            return {min(max(_ROUNDINGS[self.nearest](x), 0), self.inputs - 1): 1.0}
        shrink = min(self.scale, 1.0) if self.antialias else 1.0
        reach, kernel = (1, _linear) if self.mode == "linear" else (2, self._cubic)
        around = range(floor(x - reach / shrink), ceil(x + reach / shrink) + 1)
        weights = {i: weight for i in around if (weight := kernel(abs(i - x) * shrink))}
        if self.exclude_outside:
            weights = {i: weight for i, weight in weights.items() if 0 <= i < self.inputs} or weights
        total = sum(weights.values()) if self.exclude_outside or self.antialias else 1.0
        clamped: dict[int, float] = {}
        for i, weight in weights.items():
            place = min(max(i, 0), self.inputs - 1)
            clamped[place] = clamped.get(place, 0.0) + weight / total
        return {i: weight for i, weight in clamped.items() if weight}

    def _cubic(self, x: float) -> float:
        """The kernel of R. Keys, Cubic convolution interpolation for digital image processing (1981)."""
        a = self.cubic_a
        if x <= 1:
            return ((a + 2) * x - (a + 3)) * x * x + 1
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a if x < 2 else 0.0


def _linear(x: float) -> float:
    return max(1 - x, 0.0)


_ROUNDINGS: dict[str, Callable[[float], int]] = {
    "ceil": ceil,
    "floor": floor,
    "round_prefer_ceil": lambda x: floor(x + 0.5),
    "round_prefer_floor": lambda x: ceil(x - 0.5),
}


@lru_cache(maxsize=64)
def _tables(axis: Resampling) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    positions = axis.positions()
    outside = np.zeros(axis.outputs, bool)
    if axis.coordinates == "tf_crop_and_resize":
        outside = (positions < 0) | (positions > axis.inputs - 1)
    rows = [axis.elements(0.0 if out else float(x)) for x, out in zip(positions, outside, strict=True)]
    taps = max(map(len, rows), default=1)
    indices, weights = np.zeros((taps, axis.outputs), np.int32), np.zeros((taps, axis.outputs))
    for output, row in enumerate(rows):
        places, parts = list(row), list(row.values())
        while len(places) < taps:
            parts[-1:] = [parts[-1] / 2] * 2
            places.append(places[-1])
        indices[:, output], weights[:, output] = places, parts
    return indices, weights, outside


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
