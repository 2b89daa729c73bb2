"""Winograd's convolution: F(m x m, 3x3) makes m*m outputs of nine taps with (m+2)*(m+2) multiplications.

    Y = A^T [ (G w G^T) * (B^T d B) ] A     d: a tile of m+2 by m+2 inputs, w: 3 by 3 weights, Y: m by m outputs, *: by element

The matrices are those of the Toom-Cook algorithm with m+1 points and infinity (Lavin and Gray, "Fast Algorithms for Convolutional
Neural Networks", CVPR 2016). Points come in pairs a, -a, whose rows share their even and their odd part, and are sums of a few
powers of two, so that B^T and A^T are exact in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from math import ceil

import numpy as np

from ...runtime.plan import TensorType
from ..codegen.builder import Buffer, Expr, KernelBuilder

TAPS = 3
TYPE, HALF, NARROW = "float32", "float16", "bfloat16"  # of transformed inputs and products; of weights in memory
_HALF_EXPONENT, _MOST_EXPONENT = 15, 120  # binary exponents: of the greatest weight in float16, and of a scale at most
# The points of each m with the smallest errors of those tried: for m = 4 the usual 1 and 2 have errors half as large again. With
# infinity they are m + 2 points, so an odd m has no point 0.
_POINTS: dict[int, tuple[Fraction, ...]] = {
    2: (Fraction(1),),
    4: (Fraction(3, 4), Fraction(3, 2)),
    5: (Fraction(1, 4), Fraction(3, 4), Fraction(3, 2)),
    6: (Fraction(1, 2), Fraction(1), Fraction(2)),
    7: (Fraction(1, 4), Fraction(5, 8), Fraction(9, 8), Fraction(2)),
}
Row = tuple[float, ...]


@dataclass(frozen=True)
class Winograd:
    """F(m x m, 3x3) as matrices: `weights` is G; `data` is B^T and `result` A^T after a butterfly on each pair of points.

    Row 0 belongs to the point 0 (even m only), the next rows by twos to pairs a, -a, the last to infinity. In `data` the two rows
    of a pair are replaced by half their sum and half their difference, in `result` the two columns, so that a pair costs one
    addition and one subtraction.
    """

    outputs: int
    data: tuple[Row, ...]
    weights: tuple[Row, ...]
    result: tuple[Row, ...]

    @property
    def extent(self) -> int:
        """Rows (and columns) of an input tile: m + 2."""
        return self.outputs + TAPS - 1

    def transform_data(self, builder: KernelBuilder, values: Sequence[Expr]) -> list[Expr]:
        """B^T times a column of an input tile."""
        return self._split_pairs(builder, [_combine(builder, row, values) for row in self.data])

    def transform_result(self, builder: KernelBuilder, values: Sequence[Expr]) -> list[Expr]:
        """A^T times a column of products."""
        halves = self._split_pairs(builder, values)
        return [_combine(builder, row, halves) for row in self.result]

    def _split_pairs(self, builder: KernelBuilder, values: Sequence[Expr]) -> list[Expr]:
        """The butterfly: sum and difference of the two values of each pair, in their places."""
        made = list(values)
        for i in _pairs(self.extent):
            made[i], made[i + 1] = builder.name(values[i] + values[i + 1]), builder.name(values[i] - values[i + 1])
        return made


@cache
def winograd(outputs: int) -> Winograd:
    """The matrices of F(outputs x outputs, 3x3), computed in fractions and rounded once."""
    points = [*[Fraction(0)] * (outputs % 2 == 0), *(sign * point for point in _POINTS[outputs] for sign in (1, -1))]
    taps, powers = range(TAPS), range(outputs)
    scales = [_product_at(point, [other for other in points if other != point]) for point in points]
    weights = [[point**k / scale for k in taps] for point, scale in zip(points, scales, strict=True)]
    data = [[*_polynomial([other for other in points if other != point]), Fraction(0)] for point in points]
    result = [[*(point**k for point in points), Fraction(k == outputs - 1)] for k in powers]
    weights.append([Fraction(k == TAPS - 1) for k in taps])
    data.append(_polynomial(points))
    halved = [list(column) for column in zip(*_halve(list(map(list, zip(*result, strict=True)))), strict=True)]
    return Winograd(outputs, _rounded(_halve(data)), _rounded(weights), _rounded(halved))


@dataclass(frozen=True)
class PackWinograd:
    """Transform and pack weights [groups * outputs, inputs, 3, 3] into panels: [groups, panels, points, inputs, columns].

    They are transformed in float64 and rounded once: to float32; to float16, scaled by a power of two for each output channel
    (`PackScales`); or to bfloat16 in VNNI layout, [groups, panels, points, inputs / 2, columns, 2]. The last panel of a group is
    padded with zeros.
    """

    groups: int
    outputs: int  # of the tile: m
    columns: int  # of a panel
    dtype: str = TYPE

    def packed_type(self, source: TensorType) -> TensorType:
        *lead, inputs, columns = self._dimensions(source.shape)
        return TensorType((*lead, inputs // 2, columns, 2) if self.dtype == NARROW else (*lead, inputs, columns), self.dtype)

    def __call__(self, array: np.ndarray) -> np.ndarray:
        matrix = np.array(winograd(self.outputs).weights)
        both = np.kron(matrix, matrix)  # [points, taps]: G w G^T as one matrix
        packed = np.zeros(self._dimensions(array.shape), np.dtype(self.dtype))
        scales = 1.0 / _inverse_scales(array, self.outputs) if self.dtype == HALF else np.ones(len(array))
        grouped, scales = array.reshape(self.groups, -1, *array.shape[1:]), scales.reshape(self.groups, -1)
        for group, panel in np.ndindex(*packed.shape[:2]):
            part = grouped[group, panel * self.columns : (panel + 1) * self.columns].transpose(2, 3, 1, 0)  # [3, 3, inputs, n]
            scale = scales[group, panel * self.columns : (panel + 1) * self.columns]
            with np.errstate(invalid="ignore", over="ignore"):  # infinite weights make NaN, as the kernel does of infinite inputs
                products = both @ part.astype(np.float64).reshape(both.shape[1], -1)
                packed[group, panel, :, :, : part.shape[3]] = products.reshape(-1, *part.shape[2:]) * scale
        if self.dtype == NARROW:
            *lead, inputs, columns = packed.shape
            return np.ascontiguousarray(packed.reshape(*lead, inputs // 2, 2, columns).swapaxes(-1, -2))
        return packed

    def _dimensions(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        points = winograd(self.outputs).extent ** 2
        return self.groups, ceil(shape[0] // self.groups / self.columns), points, shape[1], self.columns

    def __str__(self) -> str:
        return f"winograd({self.groups},{self.outputs},{self.columns},{self.dtype})"


@dataclass(frozen=True)
class PackScales:
    """Pack the factors that undo the scales of float16 weights: float32[groups, panels, columns], 1 in the padding."""

    groups: int
    outputs: int
    columns: int

    def packed_type(self, source: TensorType) -> TensorType:
        channels = source.shape[0] // self.groups
        return TensorType((self.groups, ceil(channels / self.columns), self.columns), TYPE)

    def __call__(self, array: np.ndarray) -> np.ndarray:
        shape = self.packed_type(TensorType(array.shape, TYPE)).shape
        packed = np.ones((self.groups, shape[1] * self.columns), TYPE)
        packed[:, : len(array) // self.groups] = _inverse_scales(array, self.outputs).reshape(self.groups, -1)
        return packed.reshape(shape)

    def __str__(self) -> str:
        return f"winograd-scales({self.groups},{self.outputs},{self.columns})"


@dataclass(frozen=True)
class Matrices:
    """A matrix of `rows` x `pitch` for each point of a tile, from element `base` of a scratch buffer on."""

    buffer: Buffer
    base: Expr
    rows: int
    pitch: int
    line: int  # elements of a cache line

    @property
    def stride(self) -> int:
        """Elements from one matrix to the next: an odd number of cache lines, so that points do not conflict in sets."""
        lines = ceil(self.rows * self.pitch / self.line)
        return self.line * (lines + 1 - lines % 2)

    def offset(self, point: Expr, row: Expr, column: Expr) -> Expr:
        return self.base + point * self.stride + row * self.pitch + column


def _inverse_scales(array: np.ndarray, outputs: int) -> np.ndarray:
    """For each output channel a finite power of two, at least 2^-15 times its greatest transformed weight."""
    gain = np.abs(np.array(winograd(outputs).weights)).sum(axis=1).max() ** 2
    greatest = gain * np.abs(array.astype(np.float64)).max(axis=(1, 2, 3), initial=0.0)
    is_usual = np.isfinite(greatest) & (greatest > 0)
    exponents = np.ceil(np.log2(np.where(is_usual, greatest, 1.0))) - _HALF_EXPONENT
    return np.exp2(np.where(is_usual, exponents.clip(-_MOST_EXPONENT, _MOST_EXPONENT), 0.0))


def _combine(builder: KernelBuilder, row: Row, values: Sequence[Expr]) -> Expr:
    """The dot product of a row and values, without code for factors 0 and 1."""
    total: Expr | None = None
    for factor, value in sorted(zip(row, values, strict=True), key=lambda term: abs(term[0]) != 1):
        if factor:
            term = value if factor == 1 else value * np.float32(factor).item()
            total = term if total is None else total + term
    assert total is not None
    return builder.name(total)


def _pairs(extent: int) -> range:
    """The first row of each pair: they begin after the row of point 0, which only an even number of rows has."""
    return range(1 - extent % 2, extent - 1, 2)


def _halve(rows: list[list[Fraction]]) -> list[list[Fraction]]:
    """Half sum and half difference of the two rows of each pair."""
    made = list(rows)
    for i in _pairs(len(rows)):
        pair = list(zip(rows[i], rows[i + 1], strict=True))
        made[i], made[i + 1] = [(a + b) / 2 for a, b in pair], [(a - b) / 2 for a, b in pair]
    return made


def _rounded(rows: Sequence[Sequence[Fraction]]) -> tuple[Row, ...]:
    return tuple(tuple(map(float, row)) for row in rows)


def _product_at(point: Fraction, roots: Sequence[Fraction]) -> Fraction:
    product = Fraction(1)
    for root in roots:
        product *= point - root
    return product


def _polynomial(roots: Sequence[Fraction]) -> list[Fraction]:
    """Coefficients of the product of (x - root), from the lowest power."""
    coefficients = [Fraction(1)]
    for root in roots:
        shifted = [Fraction(0), *coefficients]
        coefficients = [a - root * b for a, b in zip(shifted, [*coefficients, Fraction(0)], strict=True)]
    return coefficients
