"""Whole programs for "rocm-sim": the example models on the simulator of AMD's GPUs, in every precision, without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import prefuse
import pytest
import torch
from prefuse.compiler.api import compile_model, drive
from prefuse.compiler.debugging.oracle import relative_error, run_model
from prefuse.compiler.lowering.gpu import rocm_compiler
from prefuse.compiler.lowering.gpu.simulator import library
from prefuse.compiler.programs.options import Options
from prefuse.compiler.programs.specialize import SpecializedModel
from prefuse.examples.models import MODELS
from prefuse.kernels.codegen.gpu_builder import GpuBuilder
from prefuse.runtime.errors import CompileError, DeviceError, OptionError
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.target import Target

from ..sample import dealt, every
from .simulator import need_compiler
from .test_device import expected, inputs, run, small_model
from .test_simulated_target import Block

ERRORS = {"float32": 1e-5, "float32-fast": 2e-5, "bfloat16": 1e-2, "float16": 1e-2}
TARGETS = ("rocm-sim:gfx942", "rocm-sim:gfx1100")
WAYS = [(target, precision) for target in TARGETS for precision in ERRORS]


@pytest.mark.parametrize(("target", "precision"), WAYS)
def test_example_models(target: str, precision: str) -> None:
    """Half of the models, each in one of the ways today, in the next one tomorrow, against ONNX Runtime."""
    need_compiler()
    for name in dealt(every(2, list(MODELS)), every(2, list(MODELS)), (target, precision), WAYS):
        module, tensors = MODELS[name].build(small=True)
        graphs: list[ir.Model] = []

        def driver(model: ir.Model, options: Options, graphs: list[ir.Model] = graphs, **how: Any) -> None:
            graphs.append(model.clone())
            drive(model, options, **how)

        specialized = compile_model(module, tensors, target=target, precision=precision, cache=False, options={}, driver=driver)
        assert isinstance(specialized, SpecializedModel)
        net = specialized.specialize(*tensors)
        assert isinstance(net, CompiledModel)
        arrays = [tensor.numpy() for tensor in tensors]
        got = net(*arrays)
        results = got if isinstance(got, tuple) else (got,)
        right = run_model(graphs[0], {port.name: array for port, array in zip(net.inputs, arrays, strict=True)})
        for one, other in zip(results, right.values(), strict=True):
            assert relative_error(np.asarray(one), other) < ERRORS[precision], name


@pytest.mark.parametrize(
    ("precision", "error"), [("float32", 2e-6), ("float32-fast", 2e-6), ("bfloat16", 1e-2), ("float16", 2e-3)]
)
def test_a_transformer_in_every_precision(precision: str, error: float, tmp_path: Path) -> None:
    """Its products go by the matrix unit, narrow where they may be; a program's file runs as the program did, to the bit."""
    torch.manual_seed(2)
    module, x = Block().eval(), torch.randn(1, 33, 64)
    need_compiler()
    net = prefuse.compile(module, (x,), target="rocm-sim", precision=precision, cache=False)
    assert isinstance(net, SpecializedModel)
    y = net(x)
    assert isinstance(y, torch.Tensor)
    with torch.no_grad():
        exact = module.double()(x.double())
    found = float((y.double() - exact).norm() / exact.norm())
    assert found < error
    assert (found > 1e-5) == (precision in ("bfloat16", "float16"))
    assert {kernel.template for kernel in net.plan.kernels} == {"gpu_mma_matmul", "gpu_mma_attention", "gpu_normalization"}
    path = tmp_path / "net.prefuse"
    net.save(path)
    np.testing.assert_array_equal(np.asarray(prefuse.load(path)(x)), y.numpy())


def test_architectures_round_trip() -> None:
    assert str(Target.parse("rocm-sim")) == "rocm-sim:gfx942"
    assert str(Target.parse("rocm-sim:gfx1100")) == "rocm-sim:gfx1100"
    assert Target.parse(str(Target.parse("rocm-sim"))) == Target.parse("rocm-sim") != Target.parse("rocm:gfx942")
    with pytest.raises(OptionError):
        Target.parse("rocm-sim:sm_90")


@pytest.mark.parametrize("target", TARGETS)
def test_gpus_with_and_without_a_matrix_unit(target: str) -> None:
    need_compiler()
    net = prefuse.compile(small_model(), target=target, cache=False)
    assert isinstance(net, CompiledModel)
    if target.endswith("gfx1100"):
        assert all(kernel.template != "gpu_mma_matmul" for kernel in net.plan.kernels)
    for got, want in zip(run(net, inputs()), expected(small_model(), inputs()), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("fault", ["barrier", "wait"])
def test_races_and_lost_waits_are_errors(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    need_compiler()
    if fault == "barrier":
        monkeypatch.setattr(GpuBuilder, "barrier", lambda self: None)
    else:
        monkeypatch.setattr(rocm_compiler, "_with_waiting_barriers", lambda module: module)
    net = prefuse.compile(small_model(), target="rocm-sim", cache=False)
    assert isinstance(net, CompiledModel)
    with pytest.raises(DeviceError, match=r"what another thread|what nobody wrote|a barrier that does not wait"):
        net(inputs())


def test_it_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find_compiler", lambda: "")
    model = small_model()
    onnx.helper.set_model_props(model, {"of": "this test"})
    library.simulated_rocm_library.cache_clear()
    with pytest.raises(CompileError, match=r"simulator: it needs g\+\+, which this machine lacks; apt-get install g\+\+"):
        prefuse.compile(model, target="rocm-sim", cache=False)
