"""Addresses of NumPy arrays are those that NumPy gives."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from prefuse.runtime.hardware.array_address import data_address

BASE = np.arange(120, dtype=np.float32).reshape(2, 3, 4, 5)
READ_ONLY = np.frombuffer(b"\0" * 64, np.float32)
ARRAYS = {
    "whole": BASE,
    "part": BASE[1, 1:, ::2],
    "reversed": BASE[::-1],
    "transposed": BASE.T,
    "empty": np.empty((3, 0)),
    "scalar": np.array(3, np.int8),
    "read-only": READ_ONLY,
    "unaligned": np.frombuffer(b"\0" * 65, np.uint8)[1:].view(np.float32),
    "bfloat16": np.zeros(3, ml_dtypes.bfloat16),
    "texts": np.array(["a", "b"], object),
    "records": np.zeros(2, [("a", "i4"), ("b", "f8")]),
    "masked": np.ma.masked_array(BASE, BASE > 3),
    "matrix": BASE[0, 0].view(np.matrix),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_it_is_the_address_that_numpy_says(kind: str) -> None:
    assert data_address(ARRAYS[kind]) == ARRAYS[kind].ctypes.data


def test_a_resized_array_has_moved() -> None:
    array = np.zeros(4, np.int64)
    array.resize(1 << 20, refcheck=False)
    assert data_address(array) == array.ctypes.data
