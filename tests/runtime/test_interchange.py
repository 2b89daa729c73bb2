"""Tensors that stages take: those whose bytes NumPy can see, and those that have none."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from prefuse.runtime.errors import InputError
from prefuse.runtime.interchange import as_array


def test_a_dense_tensor_is_seen_in_place() -> None:
    tensor = torch.arange(6.0)
    array = as_array(tensor, "input 'x'")
    tensor += 1
    np.testing.assert_array_equal(array, np.arange(1, 7))


@pytest.mark.parametrize("shape", [(6,), (2, 3)])
def test_a_tensor_without_memory_is_refused(shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape)
    tensor = tensor.t() if len(shape) == 2 else tensor
    tensor.untyped_storage().resize_(0)
    with pytest.raises(InputError, match="input 'x': a Tensor without memory"):
        as_array(tensor, "input 'x'")
