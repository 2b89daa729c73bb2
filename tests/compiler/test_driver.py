"""Programs at the edges of what the driver lowers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import prefuse
import pytest
from prefuse.compiler.driver import compile_model, lower_groups
from prefuse.compiler.ir.facts import infer_facts
from prefuse.compiler.pipeline import Context
from prefuse.compiler.programs.options import Options
from prefuse.passes.structure.canonicalize import Canonicalize
from prefuse.runtime.errors import UnsupportedModelError
from prefuse.runtime.precision import PRECISIONS
from prefuse.runtime.target import Target
from prefuse.tests.models.text import compiled


@pytest.mark.parametrize("operator", ["Abs", "Trilu", "Tanh"])
def test_an_empty_result_needs_no_kernel(operator: str) -> None:
    net = compiled(f"main (float[2,0,3] x) => (float[2,0,3] y) {{ y = {operator}(x) }}")
    result = net(np.empty((2, 0, 3), np.float32))
    assert isinstance(result, np.ndarray)
    assert result.shape == (2, 0, 3)
    assert not net.plan.kernels
    assert not net.plan.steps


def test_outputs_that_are_inputs_constants_and_each_other() -> None:
    text = "main (float[3] x) => (float[3] a, float[3] b, float[3,1] c, float[2] d, float[3] x) <float[2] k = {1.0, 2.0}>"
    net = compiled(text + "{ a = Relu(x) b = Identity(a) s = Constant<value_ints = [3, 1]>() c = Reshape(a, s) d = Identity(k) }")
    x = np.array([-1, 0.5, 2], np.float32)
    results = net(x)
    relu = np.array([0, 0.5, 2], np.float32)
    expected = [relu, relu, relu[:, None], np.array([1, 2], np.float32), x]
    assert isinstance(results, tuple)
    assert len({array.ctypes.data for array in results}) == 5
    for result, wanted in zip(results, expected, strict=True):
        np.testing.assert_array_equal(result, wanted)


def test_parts_and_joined_values_cost_no_kernel() -> None:
    """Split and the index are places in h; both sums are written where c lies, which is the caller's; x is copied beside them."""
    text = "main (float[2,3] x) => (float[5,3] c) <int64[2] sizes = {1, 1}, int64 last = {-1}, float[3] one = {1.0, 2.0, 3.0}> {"
    net = compiled(
        text + "h = Softmax(x) p, q = Split<axis = 0>(h, sizes) g = Gather<axis = 0>(h, last) a = Softmax(p) n = Neg(g)"
        " m = Mul(n, one) k = Constant<value_ints = [1, 3]>() r = Reshape(m, k) s = Softmax(q) c = Concat<axis = 0>(a, r, x, s) }"
    )
    x = np.array([[0.5, -1, 2], [3, 0, 1]], np.float32)
    h = np.exp(x) / np.exp(x).sum(1, keepdims=True)
    a, s = (np.exp(row) / np.exp(row).sum() for row in h)
    result = net(x)
    assert isinstance(result, np.ndarray)
    np.testing.assert_allclose(result, np.stack([a, -h[1] * np.array([1, 2, 3]), *x, s]), rtol=1e-6)
    assert [type(step).__name__ for step in net.plan.steps].count("Copy") == 1
    assert len(net.plan.steps) == 5
    assert "alias: 24 bytes of %c are copied: %x is an input of the graph" in net.report()


def test_an_anchor_reads_constants_of_one_element_from_memory() -> None:
    text = "main (float[2,3,1] x) => (float[2,3,1] y) <float[1] s = {0.5}, float[1] b = {0.25}, float[1] c = {2.0}>"
    net = compiled(text + "{ n = LayerNormalization<axis = 2>(x, s, b) m = Mul(n, c) y = Add(m, x) }")
    x = np.arange(6, dtype=np.float32).reshape(2, 3, 1)
    np.testing.assert_array_equal(net(x), x + np.float32(0.5))


def test_the_mean_of_nothing_is_no_number() -> None:
    net = compiled("main (float[2,0,3] x) => (float[2,3] y) <int64[1] axes = {1}> { y = ReduceMean<keepdims = 0>(x, axes) }")
    result = net(np.empty((2, 0, 3), np.float32))
    assert isinstance(result, np.ndarray)
    assert np.isnan(result).all()


def test_all_that_cannot_be_compiled_is_named_at_once(tmp_path: Path) -> None:
    text = (
        "main (float[4,7] x, bool[9] c) => (int64 y, float z) { p = NonZero(x) y = Size(p) q = Compress(x, c) z = ReduceMax(q) }"
    )
    model = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["": 21]> {text}')
    with pytest.raises(UnsupportedModelError, match=r"4 operators.*NonZero.*Size.*Compress.*ReduceMax"):
        compile_model(model, Options(Target.parse("cpu")), name="four", output=tmp_path / "four.prefuse")


def test_groups_keep_the_precision_that_the_user_asks_for(tmp_path: Path) -> None:
    text = '<ir_version: 10, opset_import: ["": 21]> main (float[2,3] x) => (float[2,3] y) { h = Softmax(x) y = Neg(h) }'
    model = ir.from_onnx_text(text)
    infer_facts(model)
    for precision in PRECISIONS:
        lowered, _ = lower_groups(model, Target.parse("cpu"), precision)
        assert [item.group.precision for item in lowered] == [precision] * 2
    assert lowered[0].group.key() != replace(lowered[0].group, precision="float32").key()


def test_passes_see_the_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def run(self: Canonicalize, model: ir.Model, context: Context) -> bool:
        seen.append(context.precision)
        return False

    monkeypatch.setattr(Canonicalize, "run", run)
    text = '<ir_version: 10, opset_import: ["": 21]> main (float[2] x) => (float[2] y) { y = Neg(x) }'
    prefuse.compile(ir.from_onnx_text(text), cache=False, precision="float32-fast")
    assert set(seen) == {"float32-fast"}
