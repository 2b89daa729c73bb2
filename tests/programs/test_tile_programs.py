"""Whole programs for CPUs with tile registers: compiled, loaded and run with the instructions in software."""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import onnx
import prefuse
import pytest
import torch
from prefuse.compiler.programs.specialize import SpecializedModel
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.plan import STORAGE, planned_bytes
from prefuse.runtime.precision import Precision
from prefuse.runtime.target import AMX_EMULATED, host_cpu_flags
from prefuse.tests.kernels.harness import target_of
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


def test_a_model_of_bfloat16_throughout() -> None:
    """Products and convolutions whose results are bfloat16, with no Cast around them: each is rounded once."""
    random = np.random.default_rng(0)
    text = """<ir_version: 10, opset_import: ["": 22]>
    main (bfloat16[1,64,13,15] x) => (bfloat16[1,96,13,15] y, bfloat16[96,64] p) <bfloat16[96,64,3,3] w, bfloat16[195,64] v> {
      z = Conv<pads=[1,1,1,1]>(x, w)
      y = Relu(z)
      shape = Constant<value_ints=[96,195]>()
      rows = Reshape(y, shape)
      p = MatMul(rows, v)
    }"""
    model = onnx.parser.parse_model(text)
    x, w, v = (random.normal(size=size).astype(ml_dtypes.bfloat16) for size in ((1, 64, 13, 15), (96, 64, 3, 3), (195, 64)))
    del model.graph.initializer[:]
    model.graph.initializer.extend([onnx.numpy_helper.from_array(w, "w"), onnx.numpy_helper.from_array(v, "v")])
    net = prefuse.compile(model, target=str(target_of(AMX_EMULATED, 2)), cache=False)
    found = net(x)
    assert isinstance(found, tuple)
    y, p = (np.asarray(one).view(ml_dtypes.bfloat16).astype(np.float64) for one in found)
    assert {"convolution_tiles", "matmul_tiles"} <= {kernel.template for kernel in net.plan.kernels}
    image, kernel = (torch.from_numpy(array.astype(np.float64)) for array in (x, w))
    exact = torch.relu(torch.nn.functional.conv2d(image, kernel, padding=1)).numpy()
    assert (np.abs(y - exact) <= 2.0**-8 * np.abs(exact) + 1e-4).all()
    product = y.reshape(96, 195) @ v.astype(np.float64)
    assert (np.abs(p - product) <= 2.0**-8 * np.abs(product) + 1e-2).all()


class Chain(nn.Module):
    """Products whose weights are all that a program takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(384, 384) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def test_within_a_limit_weights_are_copied_as_they_are(pretended_amx: ctypes.CDLL | None) -> None:
    """Four bytes of a float32 in place of six, the same bits; and without copies nothing changes."""
    torch.manual_seed(0)
    model, x = Chain().eval(), torch.randn(96, 384)
    with running_amx(pretended_amx):
        free, limited, large = (
            prefuse.compile(model, (x,), target="cpu:amx", cache=False, memory_limit=limit) for limit in (None, "60%", "100%")
        )
        results = [np.asarray(net(x)) for net in (free, limited, limited, large)]
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)
    weight = 384 * 384 * 4
    assert {kernel.template for kernel in limited.plan.kernels} == {"matmul_tiles"}
    assert planned_bytes(limited.plan) <= 0.6 * planned_bytes(free.plan)
    for net in (free, large):
        assert net.plan.weights_bytes >= 6 * 1.5 * weight
    stored = [buffer.size_bytes for buffer in limited.plan.buffers if buffer.space == STORAGE]
    assert stored
    assert set(stored) == {weight}
    assert isinstance(limited, SpecializedModel)
    program = limited.specialize(x)
    assert isinstance(program, CompiledModel)
    assert any("6 weights stay as they are" in remark for remark in program.remarks)
