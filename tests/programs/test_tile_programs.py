"""Whole programs for CPUs with tile registers: compiled, loaded and run with the instructions in software."""

from __future__ import annotations

import ctypes

import numpy as np
import prefuse
import pytest
import torch
from prefuse.runtime.precision import Precision
from prefuse.runtime.target import host_cpu_flags
from prefuse.tests.kernels.microkernels.amx_emulator import AMX, emulator, running_amx
from torch import nn

__all__ = ["emulator"]
ERRORS: dict[Precision, float] = {"float32-fast": 2e-5, "bfloat16": 1e-2}


@pytest.fixture
def pretended_amx(emulator: ctypes.CDLL | None, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL | None:
    """The emulator, on a machine that says it has AMX and permits it."""
    flags = host_cpu_flags() | set(AMX.missing_features())
    monkeypatch.setattr("prefuse.runtime.target.host_cpu_flags", lambda: flags)
    monkeypatch.setattr("prefuse.runtime.hardware.tile_state.refusal", lambda: "")
    return emulator


class Net(nn.Module):
    """A strided and a pointwise convolution, then an encoder's layer over the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.strided = nn.Conv2d(64, 96, 3, stride=2, padding=1)
        self.pointwise = nn.Conv2d(96, 128, 1)
        self.layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True, dropout=0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = self.pointwise(torch.relu(self.strided(x)))
        result: torch.Tensor = self.layer(image.flatten(2).transpose(1, 2))
        return result


@pytest.mark.parametrize("precision", ERRORS)
def test_a_program_on_tiles(pretended_amx: ctypes.CDLL | None, precision: Precision) -> None:
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(1, 64, 23, 22)
    with torch.no_grad():
        exact = model.double()(x.double()).numpy()
    model.float()
    with running_amx(pretended_amx) as counts:
        net = prefuse.compile(model, (x,), target="cpu:amx", precision=precision, cache=False)
        first, second = (np.asarray(net(x)) for _ in range(2))
    templates = {kernel.template for kernel in net.plan.kernels}
    assert {"convolution_tiles", "matmul_tiles"} <= templates
    assert counts is None or counts["tdpbf16ps"] > 0
    np.testing.assert_array_equal(first, second)
    assert np.linalg.norm(first - exact) <= ERRORS[precision] * np.linalg.norm(exact)
