"""Sums of constant operands, as products of integers begin with them."""

from __future__ import annotations

import numpy as np
from prefuse.kernels.microkernels.packing import PackSums
from prefuse.runtime.plan import TensorType


def test_sums_fill_tiles() -> None:
    """Of each group, with zeros for the columns of a tile that are not there."""
    weights = np.random.default_rng(3).integers(-128, 128, (2, 5, 3, 4), np.int8)
    pack = PackSums(weights.shape, (0, 1, 2, 3), 1, 1, 4)
    packed = pack(weights)
    assert pack.packed_type(TensorType(weights.shape, "int8")) == TensorType((2, 8), "int32")
    assert packed.dtype == np.int32
    np.testing.assert_array_equal(packed[:, :5], weights.astype(np.int64).sum((2, 3)))
    assert packed.shape == (2, 8)
    assert not packed[:, 5:].any()


def test_sums_of_columns() -> None:
    """A right operand has columns last."""
    weights = np.random.default_rng(4).integers(-128, 128, (6, 3), np.int8)
    np.testing.assert_array_equal(PackSums((6, 3), (1, 0), 0, 1)(weights), weights.astype(np.int64).sum(0)[None])
