"""Modules that take and give complex numbers: programs have their real and imaginary parts, callers do not see that."""

from __future__ import annotations

import numpy as np
import prefuse
import pytest
import torch
from prefuse.runtime.errors import UnsupportedModelError
from torch import Tensor

from .applied import Applied, check


def test_results_of_transforms() -> None:
    x = torch.randn(2, 64)
    check(torch.fft.rfft, x)
    check(lambda x: (torch.fft.fft(x).abs(), torch.fft.fft(x, dim=0)), x)
    check(lambda x: {"spectrum": torch.stft(x, 16, window=torch.hann_window(16), return_complex=True), "x": x * 2}, x)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_inputs(dtype: torch.dtype) -> None:
    x = torch.randn(3, 4, dtype=dtype)
    net = check(lambda x: (x * x, x.real, x.abs(), torch.view_as_real(x)), x)
    for other in (x * 3, x.conj(), x.T.contiguous().T, x[:, :1].expand(3, 4)):
        torch.testing.assert_close(net(other)[0], other * other)
    found = net(x.numpy())[0]
    assert isinstance(found, np.ndarray)
    assert found.dtype == np.dtype(str(dtype).removeprefix("torch."))
    check(lambda x: x * x, torch.randn((), dtype=dtype))


def test_any_length() -> None:
    net = check(lambda x: x * 2j, torch.randn(3, 8, dtype=torch.complex64), dims={"inputs_0": {1: "T"}, "T": (2, 40)})
    for length in (2, 17, 40):
        x = torch.randn(3, length, dtype=torch.complex64)
        torch.testing.assert_close(net(x), x * 2j)


def test_an_exported_program_is_refused() -> None:
    """Its inputs would have another type than those it was exported for."""

    def doubled(x: Tensor) -> Tensor:
        return x * 2

    program = torch.export.export(Applied(doubled), (torch.randn(3, dtype=torch.complex64),))
    with pytest.raises(UnsupportedModelError, match="view_as_real"):
        prefuse.compile(program)
