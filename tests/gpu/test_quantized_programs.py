"""precision="int8", "int8-rows" and "mixed" for GPUs: what the CPU's program of the same formats computes."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import onnx
import prefuse
import pytest
import torch
from prefuse.compiler.programs.specialize import SpecializedModel
from prefuse.compiler.quantization.quantizer import wants_pairs
from prefuse.runtime.errors import OptionError
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.target import Target

from ..compiler.quantization.models import batches, feed_forward
from ..sample import every
from .simulator import need_compiler

TARGETS = ("cuda-sim", "rocm-sim")


def network() -> tuple[torch.nn.Module, torch.Tensor]:
    """Convolutions on images large enough for the matrix unit, a pool, and products of few rows."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Conv2d(16, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(4),
        torch.nn.Flatten(),
        torch.nn.Linear(2048, 48),
        torch.nn.ReLU(),
        torch.nn.Linear(48, 10),
    )
    return module.eval(), torch.randn(3, 16, 32, 32)


def result_of(target: str, precision: str) -> tuple[torch.Tensor, set[str]]:
    """What a program computes, and its kernels' templates."""
    module, x = network()
    data: dict[str, Any] = {"calibration": [x]} if precision == "int8" else {}
    net = cast(SpecializedModel, prefuse.compile(module, (x,), target=target, precision=precision, cache=False, **data))
    y = net(x)
    assert isinstance(y, torch.Tensor)
    return y.double(), {kernel.template for kernel in net.plan.kernels}


@pytest.mark.parametrize(("target", "precision"), every(4, [(t, p) for t in TARGETS for p in ("int8", "int8-rows")]))
def test_it_is_the_cpu_s_program(target: str, precision: str) -> None:
    """Sums of integers are exact on both, so that programs whose every product has 8 bits differ by float32's rounding alone."""
    need_compiler()
    module, x = network()
    with torch.no_grad():
        exact = module.double()(x.double())
    found, templates = result_of(target, precision)
    assert "gpu_mma_matmul" in templates
    error = float((found - exact).norm() / exact.norm())
    assert 1e-3 < error < 2e-2
    of_cpu, _ = result_of("cpu", precision)
    apart = float((found - of_cpu).norm() / exact.norm())
    # Without data convolutions are bfloat16 on one, float32 on the other.
    most = 1e-6 if precision == "int8" else error
    assert apart < (2e-2 if wants_pairs(Target.parse("cpu")) else most)  # of pairs of weights that are small, others


@pytest.mark.parametrize("target", ["cuda:sm_75", "rocm:gfx1030", "rocm:gfx90a"])
def test_a_gpu_that_multiplies_no_bytes(target: str) -> None:
    with pytest.raises(OptionError, match="not known to multiply bytes"):
        prefuse.compile(network()[0], precision="int8-rows", target=target)


@pytest.mark.parametrize("target", every(2, TARGETS))
def test_mixed_formats_by_the_cost_model(target: str) -> None:
    """A simulator measures errors, and the cost model says times; the plan is compiled for the GPU itself."""
    need_compiler()
    model = feed_forward(width=128)
    net = prefuse.compile(model, precision="mixed", target=target, calibration=batches(model, 4), max_error=1e-2, cache=False)
    assert isinstance(net, CompiledModel)
    report = str(net.report())
    assert "by the cost model, as a simulator measures no time" in report
    assert "taken: bfloat16" in report  # int8 is faster, and its error 2e-2
    assert np.isfinite(np.asarray(net(**batches(model, 1)[0]))).all()


def test_no_formats_are_found_without_a_gpu() -> None:
    model: onnx.ModelProto = feed_forward()
    with pytest.raises(OptionError, match=r'search with target="cuda-sim:sm_80"'):
        prefuse.compile(model, precision="mixed", target="cuda:sm_80", calibration=batches(model, 1), cache=False)
