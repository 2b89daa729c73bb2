"""Whole models with outputs of a size that only a run knows, as one program: NumPy and torch, direct and saved."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir
import prefuse
import pytest
import torch
from prefuse.compiler.cli import main
from prefuse.compiler.debugging.oracle import run_model
from prefuse.runtime.executor import CompiledModel, load
from prefuse.runtime.plan import Extent
from prefuse.tests.models.text import compiled

rng = np.random.default_rng(5)

SEVERAL = """
main (float[6,5] x, bool[6] rows) => (int64[2,?] where, float[?,5] chosen, float[6,5] plain, float[?] kinds, int64[30] number) {
  h = Relu(x)
  where = NonZero(h)
  chosen = Compress<axis=0>(h, rows)
  r = Round(x)
  kinds, "", number = Unique(r)
  plain = Add(h, x)
}
"""


@pytest.fixture(scope="module")
def several() -> CompiledModel:
    return compiled(SEVERAL)


def expected(x: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
    h = np.maximum(x, 0)
    kinds, number = np.unique(np.round(x), return_inverse=True)
    return [np.array(np.nonzero(h)), h[rows], h + x, kinds, number.reshape(-1)]


def test_several_outputs_each_of_its_own_size(several: CompiledModel, tmp_path: Path) -> None:
    several.save(tmp_path / "several.prefuse")
    loaded = load(tmp_path / "several.prefuse")
    assert loaded.plan == several.plan
    for net in (several, several.context(), loaded):
        for _ in range(3):
            x, rows = rng.standard_normal((6, 5)).astype(np.float32) * 2, rng.random(6) < 0.5
            wanted = expected(x, rows)
            results = net(x, rows)
            assert isinstance(results, tuple)
            for got, want in zip(results, wanted, strict=True):
                assert got.dtype == want.dtype
                np.testing.assert_array_equal(got, want)
            for got, want in zip(net(torch.from_numpy(x), torch.from_numpy(rows)), wanted, strict=True):  # type: ignore[call-overload]
                np.testing.assert_array_equal(got.numpy(), want)


@pytest.mark.parametrize("fill", [-1.0, 1.0])
def test_nothing_and_everything_is_found(several: CompiledModel, fill: float) -> None:
    x, rows = np.full((6, 5), fill, np.float32), np.full(6, fill > 0)
    results = several(x, rows)
    assert isinstance(results, tuple)
    for got, want in zip(results, expected(x, rows), strict=True):
        np.testing.assert_array_equal(got, want)


def test_the_plan_and_the_report_say_what_is_bounded(
    several: CompiledModel, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    where, chosen, plain, kinds, number = several.outputs
    assert (where.type.shape, where.extents) == ((2, 30), (Extent(1, "count:where_count"),))
    assert chosen.type_text == "float32[<=6,5]"
    assert kinds.type_text == "float32[<=30]"
    assert not plain.extents
    assert not number.extents
    several.save(tmp_path / "several.prefuse")
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["prefuse", "inspect", str(tmp_path / "several.prefuse")])
    with pytest.raises(SystemExit) as raised:
        main()
    assert not raised.value.code
    assert "output where: int64[2,<=30]" in capsys.readouterr().out


def test_an_output_given_twice_is_cut_twice() -> None:
    net = compiled("main (float[7] x) => (int64[1,?] y, int64[1,?] z) { y = NonZero(x) z = Identity(y) }")
    x = np.array([0, 1, 0, 2, 3, 0, 0], np.float32)
    results = net(x)
    assert isinstance(results, tuple)
    for got in results:
        np.testing.assert_array_equal(got, [[1, 3, 4]])
    assert not np.shares_memory(*results)


def test_empty_inputs() -> None:
    net = compiled("main (float[0,3] x, bool[0] c) => (int64[2,?] y, float[?,3] z) { y = NonZero(x) z = Compress<axis=0>(x, c) }")
    results = net(np.empty((0, 3), np.float32), np.empty(0, bool))
    assert isinstance(results, tuple)
    assert [array.shape for array in results] == [(2, 0), (0, 3)]


def test_symbolic_dimensions_bound_each_shape() -> None:
    text = '<ir_version: 10, opset_import: ["": 21]> main (float[n] x) => (int64[1,?] y) { y = NonZero(x) }'
    net = prefuse.compile(ir.from_onnx_text(text), cache=False)
    for size in (3, 5):
        x = np.arange(size, dtype=np.float32) % 2
        np.testing.assert_array_equal(net(x), np.array(np.nonzero(x)))


def test_a_masked_selection_is_one_program() -> None:
    class Masked(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x[x > 0].exp(), torch.nonzero(x)

    x = torch.tensor([[1.0, 0.0, -2.0], [3.0, 0.5, 0.0]])
    net = prefuse.compile(Masked().eval(), args=(x,), cache=False)
    for given in (x, -x, torch.zeros(2, 3), torch.ones(2, 3)):
        for got, want in zip(net(given), Masked()(given), strict=True):  # type: ignore[call-overload]
            torch.testing.assert_close(got, want)
    assert [port.type_text for port in net.outputs] == ["float32[<=6]", "int64[<=6,2]"]


SELECTIONS = {
    "masked": ("float[N,3] x", "float[?] y", "n = NonZero(x) i = Transpose(n) v = GatherND(x, i) y = Exp(v)"),
    "masked, then summed": (
        "float[N,3] x",
        "float y",
        "n = NonZero(x) i = Transpose(n) v = GatherND(x, i) y = ReduceSum<keepdims = 0>(v)",
    ),
    "selected twice": (
        "float[N,3] x, bool[N] c",
        "int64[1,?] y",
        "v = Compress<axis = 0>(x, c) m = ReduceMax<keepdims = 0>(v, one) y = NonZero(m)",
    ),
    "kinds of rows": (
        "float[N,3] x",
        "float[?] y, int64[N] z",
        "u, q, z = Unique<axis = 0>(x) y = ReduceMin<keepdims = 0>(u, one)",
    ),
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_selections_of_any_shape(name: str) -> None:
    """Whether one program holds the model or stages do, for shapes that only a call knows."""
    inputs, outputs, nodes = SELECTIONS[name]
    text = f'<ir_version: 10, opset_import: ["": 21]> main ({inputs}) => ({outputs}) <int64[1] one = {{1}}> {{ {nodes} }}'
    net = prefuse.compile(ir.from_onnx_text(text), cache=False)
    for rows in (4, 7):
        x = np.maximum(rng.integers(-2, 3, (rows, 3)), 0).astype(np.float32)
        given = {"x": x, "c": rng.random(rows) < 0.7} if "c" in inputs.split() else {"x": x}
        results = net(**given)
        wanted = run_model(ir.from_onnx_text(text), given, "onnxruntime")
        for got, want in zip(results if isinstance(results, tuple) else (results,), wanted.values(), strict=True):
            np.testing.assert_allclose(got, want, 1e-6)
            assert got.shape == want.shape
