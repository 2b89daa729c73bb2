"""compiler/ir/constants.py: constants as arrays."""

import ml_dtypes
import numpy as np
import pytest
from prefuse.compiler.ir.constants import contiguous


@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (300, 257), (1, 70000), (70000, 1)])
@pytest.mark.parametrize("dtype", [np.float32, np.int8, ml_dtypes.bfloat16])
def test_transposed_matrices_become_contiguous(shape: tuple[int, int], dtype: type) -> None:
    array: np.ndarray = np.arange(shape[0] * shape[1]).reshape(shape).astype(dtype)
    for view in (array.T, array[::2], array.T[::-1], array):
        found = contiguous(view)
        assert found.flags.c_contiguous
        assert found.dtype == view.dtype
        assert found.tobytes() == view.tobytes()


def test_what_is_contiguous_is_not_copied() -> None:
    array = np.zeros((300, 300), np.float32)
    assert contiguous(array) is array
    assert contiguous(array[0]).base is array


def test_arrays_of_other_ranks() -> None:
    array = np.arange(24 * 4096, dtype=np.float32).reshape(24, 64, 64)
    assert contiguous(array.transpose(2, 0, 1)).tobytes() == array.transpose(2, 0, 1).tobytes()
    assert contiguous(np.array(3, np.float32)).tobytes() == np.float32(3).tobytes()
