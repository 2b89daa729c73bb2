"""Whole programs for "cuda-sim" and "rocm-sim": compiled, written, read and run without a GPU and without its tools."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import prefuse
import pytest
import torch
from prefuse.compiler.lowering.gpu import rocm_compiler
from prefuse.compiler.lowering.gpu.simulator import library
from prefuse.compiler.lowering.roofline import measure_limits
from prefuse.compiler.programs.specialize import SpecializedModel
from prefuse.kernels.codegen.gpu_builder import GpuBuilder
from prefuse.runtime.errors import CompileError, DeviceError, OptionError, ProgramFileError
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.target import Target

from ..runtime.changed_archives import with_text
from ..sample import every
from .simulator import need_compiler
from .test_device import expected, inputs, run, small_model

TARGETS = ("cuda-sim", "rocm-sim")


def convolutional() -> torch.nn.Module:
    """Two convolutions, a pool, a normalization, and products behind them."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 6, 5, padding=2),
        torch.nn.GELU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(6, 8, 3),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(200, 32),
        torch.nn.LayerNorm(32),
        torch.nn.Linear(32, 10),
    ).eval()


class Block(torch.nn.Module):
    """A transformer's: attention with four heads, a product of its projection, normalizations and residual sums."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.LayerNorm(64), torch.nn.LayerNorm(64)
        self.joined, self.merged = torch.nn.Linear(64, 192), torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.joined(self.first(x)).view(1, 33, 3, 4, 16).permute(2, 0, 3, 1, 4)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: torch.Tensor = self.last(x + self.merged(attended.transpose(1, 2).reshape(1, 33, 64)))
        return result


def compiled(model: object, target: str = "cuda-sim") -> CompiledModel:
    need_compiler()
    net = prefuse.compile(model, target=target, cache=False)
    assert isinstance(net, CompiledModel)
    return net


@pytest.mark.parametrize("target", TARGETS)
def test_a_network(target: str, tmp_path: Path) -> None:
    """The products go by the matrix unit; a program's file runs as the program did, to the bit."""
    module, x = convolutional(), torch.randn(2, 1, 14, 14, generator=torch.Generator().manual_seed(1))
    need_compiler()
    net = prefuse.compile(module, (x,), target=target, cache=False)
    assert isinstance(net, SpecializedModel)
    y = net(x)
    assert isinstance(y, torch.Tensor)
    np.testing.assert_allclose(y.numpy(), module(x).detach().numpy(), rtol=1e-5, atol=1e-5)
    assert sum(kernel.template == "gpu_mma_matmul" for kernel in net.plan.kernels) == 2
    path = tmp_path / "net.prefuse"
    net.save(path)
    again = prefuse.load(path)(x)
    np.testing.assert_array_equal(np.asarray(again), y.numpy())
    damaged = with_text(path.read_bytes(), b"simulated.so", b"kernels.cubi")
    (tmp_path / "damaged.prefuse").write_bytes(damaged)
    with pytest.raises(ProgramFileError, match="not the members of a program"):
        prefuse.load(tmp_path / "damaged.prefuse")


@pytest.mark.parametrize(
    ("target", "precision", "error"),
    every(
        2,
        [
            ("cuda-sim", "float32", 2e-6),
            ("cuda-sim", "float32-fast", 2e-5),
            ("cuda-sim", "bfloat16", 1e-2),
            ("cuda-sim", "float16", 2e-3),
            ("rocm-sim", "float32", 2e-6),
            ("rocm-sim", "float32-fast", 2e-6),
            ("rocm-sim", "bfloat16", 1e-2),
            ("rocm-sim", "float16", 2e-3),
        ],
    ),
)
def test_a_transformer_in_every_precision(target: str, precision: str, error: float) -> None:
    """Its products go by the matrix unit, narrow where they may be; its attention is one kernel, and no head is copied.

    Others tomorrow.
    """
    torch.manual_seed(2)
    module, x = Block().eval(), torch.randn(1, 33, 64)
    need_compiler()
    net = prefuse.compile(module, (x,), target=target, precision=precision, cache=False)
    assert isinstance(net, SpecializedModel)
    y = net(x)
    assert isinstance(y, torch.Tensor)
    with torch.no_grad():
        exact = module.double()(x.double())
    found = float((y.double() - exact).norm() / exact.norm())
    assert found < error
    assert (found > 1e-5) == (precision in ("bfloat16", "float16"))
    has_warpgroups = target == "cuda-sim" and precision in ("bfloat16", "float16")
    products = "gpu_wgmma_matmul" if has_warpgroups else "gpu_mma_matmul"
    assert {kernel.template for kernel in net.plan.kernels} == {products, "gpu_mma_attention", "gpu_normalization"}
    assert len(net.plan.steps) == 5


@pytest.mark.parametrize(
    ("name", "architecture", "another"),
    [("cuda-sim", "sm_90", "sm_80"), ("rocm-sim", "gfx942", "gfx1100")],
)
def test_architectures_round_trip(name: str, architecture: str, another: str) -> None:
    assert str(Target.parse(name)) == f"{name}:{architecture}"
    assert str(Target.parse(f"{name}:{another}")) == f"{name}:{another}"
    assert (
        Target.parse(str(Target.parse(name))) == Target.parse(name) != Target.parse(f"{name.removesuffix('-sim')}:{architecture}")
    )


@pytest.mark.parametrize("text", ["cuda-sim:gfx942", "rocm-sim:sm_90", "cpu-sim"])
def test_there_is_no_such_architecture(text: str) -> None:
    with pytest.raises(OptionError):
        Target.parse(text)


@pytest.mark.parametrize("target", ["cuda-sim:sm_75", "rocm-sim:gfx1100", "rocm-sim:gfx942"])
def test_gpus_with_and_without_a_matrix_unit(target: str) -> None:
    net = compiled(small_model(), target)
    if not target.endswith("gfx942"):  # that of RDNA multiplies no float32
        assert all(kernel.template != "gpu_mma_matmul" for kernel in net.plan.kernels)
    for got, want in zip(run(net, inputs()), expected(small_model(), inputs()), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


def no_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GpuBuilder, "barrier", lambda self: None)


def lost_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rocm_compiler, "_with_waiting_barriers", lambda module: module)


@pytest.mark.parametrize(
    ("target", "mutate", "fault"),
    [
        ("cuda-sim", no_barrier, r"what another thread|what a copy|what nobody wrote"),
        ("rocm-sim", no_barrier, r"what another thread|what nobody wrote"),
        ("rocm-sim", lost_wait, "a barrier that does not wait"),
    ],
)
def test_races_and_lost_waits_are_errors(
    target: str, mutate: Callable[[pytest.MonkeyPatch], None], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    net = compiled(small_model(), target)
    with pytest.raises(DeviceError, match=fault):
        net(inputs())


@pytest.mark.parametrize("target", TARGETS)
def test_it_needs_a_compiler(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find_compiler", lambda: "")
    model = small_model()
    onnx.helper.set_model_props(model, {"of": "this test"})
    model.graph.initializer[0].raw_data = b"\1" + model.graph.initializer[0].raw_data[1:]
    library.simulated_library.cache_clear()
    library.simulated_rocm_library.cache_clear()
    with pytest.raises(CompileError, match=r"simulator: it needs g\+\+, which this machine lacks; apt-get install g\+\+"):
        prefuse.compile(model, target=target, cache=False)


def test_a_profile_has_the_model_beside_it() -> None:
    """Each step's time and what was predicted of it, under limits that are assumed."""
    need_compiler()
    x = torch.randn(3, 32)
    net = prefuse.compile(torch.nn.Linear(32, 16), (x,), target="cuda-sim", cache=False, profile=True)
    assert isinstance(net, SpecializedModel)
    profile = net.profile(x, runs=2).with_limits(measure_limits(Target.parse("cuda-sim")))
    assert [step.template for step in profile.steps] == ["gpu_mma_matmul"]
    assert profile.time_us > 0
    assert 1 < profile.predicted_us < 20
    assert profile.speed == 1
