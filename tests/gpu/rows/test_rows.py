"""Reductions over the same rows and what is around them as one grid, a block of threads for each row, on the simulators."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import prefuse
import pytest
from prefuse.kernels.codegen.grids import DeviceFunction
from prefuse.kernels.groups.configuration import TEMPLATE
from prefuse.kernels.reduction import rows_gpu
from prefuse.kernels.template.contract import Refusal
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.target import Target

from ...kernels.harness import Case, build
from ...kernels.reduction.test_rows import (
    each_fold,
    masked_softmax,
    plane_norm,
    pooled,
    residual_norm,
    rounded_rows,
    sample_variance,
    statistics,
    unit_vectors,
)
from ...sample import dealt
from ..simulator import CUDA, RDNA, ROCM, check


def by_rows(case: Case) -> Case:
    """The case on a GPU, where the template has another name."""
    group = replace(case.group, configuration={TEMPLATE: "gpu_rows"})
    return replace(case, group=group, template="gpu_rows" if case.template else "")


def cases() -> list[Case]:
    """Rows of one thread, of less than a block, of several turns, of vectors and of single elements, of two dimensions."""
    made = [residual_norm(2, 3, n, outputs=outputs) for n in (17, 64, 100, 1023) for outputs in ("y", "s y")]
    made += [pooled(2, 5, n, keepdims=keepdims) for n, keepdims in ((33, 0), (129, 1), (768, 0))]
    made += [unit_vectors(5, n) for n in (1, 65, 300)] + [sample_variance(3, 2, n) for n in (17, 600)]
    made += [each_fold(3, 17, keepdims=1), each_fold(3, 100, keepdims=0), each_fold(2, 3, 40, keepdims=0, axes=(1, 2))]
    made += [plane_norm(2, 3, 9, 20), plane_norm(2, 3, 8, 12), masked_softmax(2, 3, 170), statistics(2, 3, 133)]
    made += [rounded_rows(5, 17), rounded_rows(5, 260), unit_vectors(2, 30, 17, axes=(-2, -1)), residual_norm(0, 170)]
    made += [residual_norm(3, 100, dtype=dtype) for dtype in ("float64", "float16", "bfloat16")]
    return [by_rows(one) for one in made]


@pytest.mark.parametrize("target", [CUDA, ROCM, RDNA], ids=str)
def test_rows(target: Target, tmp_path: Path) -> None:
    made = cases()
    check(dealt(made, [case.label for case in made], target, [CUDA, ROCM, RDNA]), tmp_path, target)


def shared_arrays(case: Case) -> int:
    """Arrays of shared memory of the one grid of a case."""
    function = build(case, CUDA).function
    assert isinstance(function, DeviceFunction)
    (grid,) = function.functions
    return str(grid).count("alloc_shared")


def test_what_shared_memory_does_not_hold_is_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = by_rows(residual_norm(3, 300, outputs="y"))
    kept = shared_arrays(case)
    monkeypatch.setattr(rows_gpu, "_SHARED_BYTES", 3000)
    assert shared_arrays(case) == kept - 1
    check([case], tmp_path)
    monkeypatch.setattr(rows_gpu, "_SHARED_BYTES", 2000)
    refused = rows_gpu.plan(case.group, CUDA)
    assert isinstance(refused, Refusal)
    assert "2 reductions have more sums" in refused.reason


@pytest.mark.parametrize("target", ["cuda-sim", "rocm-sim:gfx942"])
def test_a_quantized_normalization_is_one_grid(target: str) -> None:
    """The sum that is added on, the normalization and its bytes by the range of each row, which took five grids."""
    text = """<ir_version: 10, opset_import: ["": 21]>
    main (float[7,100] x, float[7,100] r, float[100] w, float[100] b) => (float[7,100] s, uint8[7,100] q, float[7,1] scale)
    <int64[1] axis = {-1}, float levels = {255}, float zero = {0}> {
      s = Add(x, r)  n = LayerNormalization<axis = -1>(s, w, b)  a = Abs(n)
      m = ReduceMax<keepdims = 1>(a, axis)  scale = Div(m, levels)
      d = Div(n, scale)  e = Round(d)  c = Clip(e, zero, levels)  q = Cast<to = 2>(c) }"""
    model = onnx.parser.parse_model(text)
    net, reference = (prefuse.compile(model, target=one, cache=False) for one in (target, "cpu"))
    assert isinstance(net, CompiledModel)
    assert isinstance(reference, CompiledModel)
    assert [(kernel.template, len(kernel.grids)) for kernel in net.plan.kernels] == [("gpu_rows", 1)]
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(shape, np.float32) for shape in ((7, 100), (7, 100), (100,), (100,))]
    found, wanted = net(*inputs), reference(*inputs)
    assert isinstance(found, tuple)
    assert isinstance(wanted, tuple)
    for got, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got.astype(np.float64), expected.astype(np.float64), 1e-6, 1e-6)


def test_few_long_rows_are_left_to_what_many_threads_share() -> None:
    text = """<ir_version: 10, opset_import: ["": 21]> main (float[2,20000] x) => (float[2,20000] y)
    { e = Exp(x) p = Softmax(e) y = Neg(p) }"""
    net = prefuse.compile(onnx.parser.parse_model(text), target="cuda:sm_90", cache=False)
    assert isinstance(net, CompiledModel)
    assert "gpu_rows" not in {kernel.template for kernel in net.plan.kernels}
    assert "most of a GPU would wait" in str(net.report())
