"""Bilinear algorithms for matrix products, <m, k, n; r> with r < m k n multiplications of blocks, as three coefficient tables.

With A cut into m x k blocks, B into k x n and C into m x n, C_ij is the sum over p in [0, r) of result[p][ij] times
(sum over il of left[p][il] A_il) (sum over lj of right[p][lj] B_lj). Algorithms nest: blocks of one are multiplied by another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil

import numpy as np
from tvm import tirx

from ...runtime.plan import TensorType
from ..codegen.builder import Expr

Table = tuple[tuple[int, ...], ...]  # a row of coefficients for each product


@dataclass(frozen=True)
class Bilinear:
    """An algorithm <rows, depth, columns; products>. A row of a table has a product's coefficients: of the blocks of A in `left`,
    of B in `right`, of C in `result`, in row-major order."""

    rows: int
    depth: int
    columns: int
    left: Table
    right: Table
    result: Table

    @property
    def products(self) -> int:
        return len(self.left)

    def __str__(self) -> str:
        return f"<{self.rows},{self.depth},{self.columns};{self.products}>"


def nest(outer: Bilinear, inner: Bilinear) -> Bilinear:
    """The algorithm that computes each product of `outer` by `inner`: Kronecker products of their tables."""

    def table(a: Table, b: Table, a_shape: tuple[int, int], b_shape: tuple[int, int]) -> Table:
        blocks, parts = np.reshape(a, (-1, *a_shape)), np.reshape(b, (-1, *b_shape))
        made = np.einsum("pij,qkl->pqikjl", blocks, parts).reshape(len(a) * len(b), -1)
        return tuple(tuple(map(int, row)) for row in made)

    return Bilinear(
        outer.rows * inner.rows,
        outer.depth * inner.depth,
        outer.columns * inner.columns,
        table(outer.left, inner.left, (outer.rows, outer.depth), (inner.rows, inner.depth)),
        table(outer.right, inner.right, (outer.depth, outer.columns), (inner.depth, inner.columns)),
        table(outer.result, inner.result, (outer.rows, outer.columns), (inner.rows, inner.columns)),
    )


_STRASSEN = Bilinear(  # V. Strassen: Gaussian Elimination is not Optimal, Numerische Mathematik 13, 1969
    2,
    2,
    2,
    ((1, 0, 0, 1), (0, 0, 1, 1), (1, 0, 0, 0), (0, 0, 0, 1), (1, 1, 0, 0), (-1, 0, 1, 0), (0, 1, 0, -1)),
    ((1, 0, 0, 1), (1, 0, 0, 0), (0, 1, 0, -1), (-1, 0, 1, 0), (0, 0, 0, 1), (1, 1, 0, 0), (0, 0, 1, 1)),
    ((1, 0, 0, 1), (0, 0, 1, -1), (0, 1, 0, 1), (1, 0, 1, 0), (-1, 1, 0, 0), (0, 0, 0, 1), (1, 0, 0, 0)),
)


@cache
def strassen(levels: int) -> Bilinear:
    """Strassen's algorithm applied recursively `levels` times: <2**levels, 2**levels, 2**levels; 7**levels>."""
    return _STRASSEN if levels == 1 else nest(_STRASSEN, strassen(levels - 1))


def combine(factors: Sequence[int], values: Mapping[int, Expr]) -> Expr:
    """The sum of factors times values; missing values are zero."""
    terms = [
        (value if abs(factors[at]) == 1 else value * abs(factors[at]), factors[at] > 0)
        for at, value in values.items()
        if factors[at]
    ]
    if not terms:
        return tirx.const(0, "float32")
    (total, is_added), *rest = terms
    total = total if is_added else -total
    for term, is_added in rest:
        total = total + term if is_added else total - term
    return total


@dataclass(frozen=True)
class PackBilinear:
    """Pack the sums of blocks of B that an algorithm multiplies: [panels, products, depth, tile].

    B is [depth, columns], or [columns, depth] without `lines_last`. `block`: depth and columns of its blocks, the last of which
    are padded with zeros. Sums are made in float64 and rounded once.
    """

    algorithm: Bilinear
    depth: int
    columns: int
    lines_last: bool
    block: tuple[int, int]
    tile: int

    def packed_type(self, source: TensorType) -> TensorType:
        return TensorType(self._shape(), source.dtype)

    def __call__(self, array: np.ndarray) -> np.ndarray:
        one, (depth, columns) = self.algorithm, self.block
        matrix = array.reshape((self.depth, self.columns) if self.lines_last else (self.columns, self.depth))
        matrix = matrix if self.lines_last else matrix.T
        packed = np.zeros(self._shape(), array.dtype)
        for panel, product in np.ndindex(*packed.shape[:2]):
            total = np.zeros((depth, self.tile))
            for at, factor in enumerate(one.right[product]):
                if factor:
                    top, left = at // one.columns * depth, at % one.columns * columns
                    first = left + panel * self.tile
                    part = matrix[top : top + depth, first : min(first + self.tile, left + columns)]
                    with np.errstate(invalid="ignore"):  # infinities of both signs: their sum is NaN
                        total[: part.shape[0], : part.shape[1]] += factor * part.astype(np.float64)
            with np.errstate(over="ignore"):
                packed[panel, product] = total
        return packed

    def _shape(self) -> tuple[int, int, int, int]:
        return ceil(self.block[1] / self.tile), self.algorithm.products, self.block[0], self.tile

    def __str__(self) -> str:
        shape = self.depth, self.columns, self.lines_last, *self.block, self.tile
        return f"bilinear({self.algorithm},{','.join(map(str, shape))})"
