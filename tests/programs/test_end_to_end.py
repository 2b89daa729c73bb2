"""Every model of the zoo, small, from PyTorch to numbers: against ONNX Runtime, and bit for bit against itself."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import onnx_ir as ir
import prefuse
import pytest
import torch
from prefuse.compiler.api import compile_model, drive
from prefuse.compiler.debugging.oracle import relative_error, run_model
from prefuse.compiler.programs.options import Options
from prefuse.compiler.programs.specialize import SpecializedModel
from prefuse.examples.models import MODELS
from prefuse.runtime.executor import CompiledModel, Context
from prefuse.runtime.loading.load import Loaded
from prefuse.runtime.plan_checker import check_plan
from prefuse.runtime.target import Target

_TOLERANCE = 1e-5  # relative, of the 2-norm


@dataclass(frozen=True)
class Compiled:
    """A model of the zoo: its program, the graph that the program was made of, and its inputs."""

    net: CompiledModel
    graph: ir.Model
    inputs: tuple[np.ndarray, ...]
    expected: tuple[np.ndarray, ...]  # by PyTorch

    def named_inputs(self) -> dict[str, np.ndarray]:
        return {port.name: array for port, array in zip(self.net.inputs, self.inputs, strict=True)}


@pytest.fixture(scope="module", params=MODELS)
def compiled(request: pytest.FixtureRequest) -> Compiled:
    """One model after the other, compiled once for all tests."""
    module, inputs = MODELS[request.param].build(small=True)
    graphs: list[ir.Model] = []

    def driver(model: ir.Model, options: Options, **how: Any) -> None:
        graphs.append(model.clone())
        drive(model, options, **how)

    specialized = compile_model(module, inputs, cache=False, options={}, driver=driver)
    assert isinstance(specialized, SpecializedModel)
    net = specialized.specialize(*inputs)
    assert isinstance(net, CompiledModel)
    with torch.no_grad():
        expected = module(*inputs)
    return Compiled(net, graphs[0], tuple(t.numpy() for t in inputs), tuple(t.numpy() for t in _row(expected)))


def _row(result: object) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def call(net: Loaded | Context, inputs: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    return _row(net(*inputs))


def bits(results: tuple[np.ndarray, ...]) -> tuple[bytes, ...]:
    return tuple(array.tobytes() for array in results)


def check_error(actual: tuple[np.ndarray, ...], expected: tuple[np.ndarray, ...]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert relative_error(one, other) <= (_TOLERANCE if one.dtype.kind == "f" else 0)


def test_agrees_with_onnxruntime_and_torch(compiled: Compiled) -> None:
    actual = call(compiled.net, compiled.inputs)
    check_error(actual, tuple(run_model(compiled.graph, compiled.named_inputs()).values()))
    check_error(actual, compiled.expected)


def test_every_run_gives_the_same_bits(compiled: Compiled) -> None:
    first = bits(call(compiled.net, compiled.inputs))
    assert all(bits(call(compiled.net, compiled.inputs)) == first for _ in range(10))


def test_two_threads_at_once_give_the_same_bits(compiled: Compiled) -> None:
    first = bits(call(compiled.net, compiled.inputs))
    barrier = Barrier(2)

    def work(context: Context) -> bool:
        barrier.wait()
        return all(bits(call(context, compiled.inputs)) == first for _ in range(10))

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(work, [compiled.net.context(), compiled.net.context()]))


def test_saved_and_loaded_gives_the_same_bits(compiled: Compiled, tmp_path: Path) -> None:
    path = tmp_path / "model.prefuse"
    compiled.net.save(path)
    loaded = prefuse.load(path)
    assert loaded.plan == compiled.net.plan
    assert bits(call(loaded, compiled.inputs)) == bits(call(compiled.net, compiled.inputs))


def test_plan_has_no_fault_and_no_slow_kernel(compiled: Compiled) -> None:
    assert not check_plan(compiled.net.plan)
    assert "tvm-default" not in {kernel.template for kernel in compiled.net.plan.kernels}


def test_program_for_avx2_agrees(compiled: Compiled, tmp_path: Path) -> None:
    target = Target.parse("cpu:avx2")
    if missing := target.missing_features():
        pytest.skip(f"this CPU lacks {', '.join(missing)}")
    path = tmp_path / "model.prefuse"
    drive(compiled.graph.clone(), Options(target), name="model", output=path)
    check_error(call(prefuse.load(path), compiled.inputs), compiled.expected)
