"""A peer that has expanded its weights is no peer of the bits that a row says."""

from __future__ import annotations

from collections import Counter

import pytest
from prefuse.benchmarks.engines.weight_bits import UNKNOWN, check_weights


def test_weights_of_most_products_have_the_bits() -> None:
    check_weights(Counter({"u8": 48, "f32": 1}), 8)
    check_weights(Counter({"i4": 154, "u8": 1}), 4)
    with pytest.raises(ValueError, match=r"weights of 1 of 155 products are read in 4 bits"):
        check_weights(Counter({"bf16": 154, "i4": 1}), 4)
    check_weights(Counter({UNKNOWN: 154}), 4)  # the row says that it is not known
