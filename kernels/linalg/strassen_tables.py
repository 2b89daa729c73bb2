"""Algorithms for products of matrices with fewer multiplications than rows times depth times columns, as three tables.

<m, k, n; r>: with A cut into m x k blocks, B into k x n and C into m x n, C_ij is the sum over r products of result[p][ij] times
(sum of left[p][il] A_il) (sum of right[p][lj] B_lj). They nest: the blocks of one are multiplied by another.
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
    """An algorithm. Rows of `left` run over the blocks of A, row after row, those of `right` over B's, of `result` over C's."""

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
    """The algorithm that makes each product of `outer` by `inner`: Kronecker products of their tables."""

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


_STRASSEN = Bilinear(  # V. Strassen, Gaussian elimination is not optimal, 1969
    2,
    2,
    2,
    ((1, 0, 0, 1), (0, 0, 1, 1), (1, 0, 0, 0), (0, 0, 0, 1), (1, 1, 0, 0), (-1, 0, 1, 0), (0, 1, 0, -1)),
    ((1, 0, 0, 1), (1, 0, 0, 0), (0, 1, 0, -1), (-1, 0, 1, 0), (0, 0, 0, 1), (1, 1, 0, 0), (0, 0, 1, 1)),
    ((1, 0, 0, 1), (0, 0, 1, -1), (0, 1, 0, 1), (1, 0, 1, 0), (-1, 1, 0, 0), (0, 0, 0, 1), (1, 0, 0, 0)),
)


@cache
def strassen(levels: int) -> Bilinear:
    """Strassen's algorithm, in each of whose products it is used again `levels` - 1 times."""
    return _STRASSEN if levels == 1 else nest(_STRASSEN, strassen(levels - 1))


def combine(factors: Sequence[int], values: Mapping[int, Expr]) -> Expr:
    """The sum of factors times values; values that are not there are zero."""
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
    """The sums of blocks of B that an algorithm multiplies, as tiles load them: [panels, products, depth, tile].

    B is [depth, columns], or the transpose of that without `lines_last`. `block` are the depth and columns of its blocks; what
    the last ones lack is zero. Sums are made in float64 and rounded once.
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
