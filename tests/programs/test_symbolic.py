"""Whole models compiled for ranges of sizes: right at every size, and kind to those who give others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
import prefuse
import pytest
from onnx import parser
from onnx.reference import ReferenceEvaluator
from prefuse.compiler.programs.symbolic import SymbolicModel
from prefuse.runtime.errors import InputError, OptionError, UnsupportedModelError

_OPSET = 'ir_version: 10, opset_import: ["": 20]'
_MLP = f"""
<{_OPSET}>
mlp (float[N,24] x) => (float[N,20] y) {{
  h = MatMul(x, a)
  i = Add(h, b)
  g = Gelu(i)
  j = MatMul(g, c)
  k = Add(j, d)
  y = LayerNormalization <axis = -1> (k, s, t)
}}
"""
_WEIGHTS = {"a": (24, 40), "b": (40,), "c": (40, 20), "d": (20,), "s": (20,), "t": (20,)}
Compiled: TypeAlias = tuple[onnx.ModelProto, SymbolicModel]
_SIZES = (1, 2, 3, 7, 31, 32, 33, 47, 64, 100)


def model_of(text: str, weights: Mapping[str, tuple[int, ...]] | None = None) -> onnx.ModelProto:
    """A model with random numbers for these weights."""
    model, random = parser.parse_model(text), np.random.default_rng(0)
    for name, shape in (weights or {}).items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(random.standard_normal(shape).astype(np.float32), name))
    onnx.checker.check_model(model)
    return model


def compiled(model: onnx.ModelProto, **how: object) -> SymbolicModel:
    net = prefuse.compile(model, cache=False, threads=2, **how)  # type: ignore[arg-type]
    assert isinstance(net, SymbolicModel)
    return net


def reference(model: onnx.ModelProto, inputs: Mapping[str, np.ndarray]) -> list[Any]:
    """What onnx.reference computes."""
    return list(ReferenceEvaluator(model).run(None, dict(inputs)))


def called(net: SymbolicModel, *inputs: np.ndarray) -> np.ndarray:
    """The only result of a call."""
    result = net(*inputs)
    assert isinstance(result, np.ndarray)
    return result


def assert_right(net: SymbolicModel, model: onnx.ModelProto, inputs: dict[str, np.ndarray], tolerance: float = 2e-5) -> None:
    expected = reference(model, inputs)
    found = net(**inputs)
    for got, wanted in zip(found if isinstance(found, tuple) else (found,), expected, strict=True):
        assert isinstance(got, np.ndarray)
        assert got.shape == np.shape(wanted)
        np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def mlp() -> tuple[onnx.ModelProto, SymbolicModel]:
    model = model_of(_MLP, _WEIGHTS)
    return model, compiled(model, dims={"N": (0, 100)})


def test_a_program_serves_a_range(mlp: Compiled) -> None:
    model, net = mlp
    before = len(net.programs)
    for size in _SIZES:
        x = np.random.default_rng(size).standard_normal((size, 24)).astype(np.float32)
        assert_right(net, model, {"x": x})
        assert np.array_equal(called(net, x), called(net, x))
    assert len(net.programs) - before <= 4, net.report()
    assert "sizes N=" in net.report()
    assert "specialised" not in net.report()


def test_nothing_gives_nothing(mlp: Compiled) -> None:
    _, net = mlp
    result = net(np.zeros((0, 24), np.float32))
    assert isinstance(result, np.ndarray)
    assert result.shape == (0, 20)


def test_results_go_where_the_caller_wants_them(mlp: Compiled) -> None:
    model, net = mlp
    x = np.random.default_rng(5).standard_normal((9, 24)).astype(np.float32)
    out = np.full((11, 20), np.nan, np.float32)
    net.specialize(x)(x, out=out[1:10])
    np.testing.assert_allclose(out[1:10], reference(model, {"x": x})[0], rtol=2e-5, atol=2e-5)
    assert np.isnan(out[[0, 10]]).all()
    for call in (net, net.context()):
        out[:] = np.nan
        place = out[1:10]
        assert call(x, out=place) is place
        np.testing.assert_array_equal(place, called(net, x))
        assert np.isnan(out[[0, 10]]).all()
    for wrong in (net, net.context(), net.specialize(x)):
        with pytest.raises(InputError, match=r"out"):
            wrong(x, out=out)
    nothing = np.empty((0, 20), np.float32)
    assert net(x[:0], out=nothing) is nothing


@pytest.mark.parametrize(
    ("shape", "what"),
    [((101, 24), "outside of N=0..100"), ((3, 23), "dimension 1 must be 24"), ((24,), "rank"), ((1, 2, 24), "rank")],
)
def test_other_shapes_are_refused(mlp: Compiled, shape: tuple[int, ...], what: str) -> None:
    _, net = mlp
    with pytest.raises(InputError, match=what):
        net(np.zeros(shape, np.float32))
    x = np.ones((4, 24), np.float32)
    assert np.array_equal(called(net, x), called(net, x))


def test_other_types_are_refused(mlp: Compiled) -> None:
    _, net = mlp
    for dtype in (np.float64, np.int64):
        with pytest.raises(InputError, match="float32"):
            net(np.zeros((4, 24), dtype))


def test_two_inputs_of_one_name_agree() -> None:
    model = model_of(
        '<ir_version: 10, opset_import: ["": 20]> add (float[N,8] x, float[N,8] y) => (float[N,8] z) { z = Add(x, y) }'
    )
    net = compiled(model, dims={"N": (1, 16)})
    one, other = np.ones((3, 8), np.float32), np.ones((4, 8), np.float32)
    assert_right(net, model, {"x": one, "y": one})
    with pytest.raises(InputError, match="N = 3"):
        net(one, other)


def test_dimensions_are_called_by_any_name_or_by_axis() -> None:
    """Names that are no words, as exporters write them, names that are the same as words, and none; and ranges of one size."""
    model = model_of(
        f"<{_OPSET}> add (float[N,M,K] x, float[N,M,K] y, float[M] z) => (float[A,B,C] o) {{ s = Add(x, y) o = Add(s, z) }}"
    )
    for value in model.graph.input:
        for dim, name in zip(value.type.tensor_type.shape.dim[-3:], ("a.b-1", "?", "a_b_1"), strict=False):
            dim.dim_param = name
    model.graph.input[2].type.tensor_type.shape.dim[0].dim_param = "a_b_1"
    net = compiled(model, dims={"a.b-1": (1, 4), "x": {1: "lines"}, "y": {-2: "lines", 2: (2, 5)}, "lines": 3})
    random = np.random.default_rng(0)
    for first, last in ((1, 2), (4, 5), (2, 3)):
        x, y = random.standard_normal((2, first, 3, last)).astype(np.float32)
        assert_right(net, model, {"x": x, "y": y, "z": y[0, 0]})
    with pytest.raises(InputError, match="y_2 = 5"):
        net(x[:, :, :1].repeat(5, 2), y[:, :, :1].repeat(5, 2), y[0, 0])


def test_a_saved_program_checks_its_sizes(mlp: Compiled, tmp_path: Path) -> None:
    model, _ = mlp
    net = compiled(model, dims={"N": (40, 90)})
    program = net.specialize(np.zeros((50, 24), np.float32))
    program.save(tmp_path / "mlp.prefuse")
    loaded = prefuse.load(tmp_path / "mlp.prefuse")
    served = loaded.plan.dims[0]
    for size in {served.least, served.greatest}:
        x = np.random.default_rng(size).standard_normal((size, 24)).astype(np.float32)
        np.testing.assert_array_equal(loaded(x), net(x))
    with pytest.raises(InputError, match="the program is for"):
        loaded(np.zeros((served.greatest + 1, 24), np.float32))


@pytest.mark.parametrize(
    ("dims", "what"),
    [
        ({}, "no mapping"),
        (3, "no mapping"),
        ({"M": (1, 8)}, "no input has a dimension 'M'"),
        ({"N": "8"}, "no range"),
        ({"x": {0: (1, 8), 1: 24}}, "axis 1 of input x is 24"),
        ({"x": {2: (1, 8)}}, "x has no axis 2"),
        ({"z": {0: (1, 8)}}, "no tensor of the call is 'z'"),
        ({"N": (8, 1)}, "no sizes"),
        ({"N": (1, 8, 0)}, "no sizes"),
        ({"N": (0, 0)}, "no sizes"),
        ({"N": (0, 3, 4)}, "no sizes"),
        ({"N": (1, 10**7)}, "too many"),
        ({"N": (1, 8), 3: (1, 8)}, "no mapping"),
    ],
)
def test_other_ranges_are_refused(dims: object, what: str) -> None:
    with pytest.raises(OptionError, match=what):
        compiled(model_of(_MLP, _WEIGHTS), dims=dims)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"memory_limit": "50%"}, "memory_limit: weights are scheduled by bytes and times of one size"),
        ({"states": {"y": "x"}}, "states: sessions keep them in memory that is planned for one size"),
    ],
)
def test_what_is_planned_for_one_size_is_refused(options: dict[str, object], reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        compiled(model_of(_MLP, _WEIGHTS), dims={"N": (1, 8)}, **options)


_ADD = f"<{_OPSET}> add (float[%s,%s] x) => (float[%s,%s] y) {{ y = Add(x, x) }}"


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (_ADD % (("N", "M") * 2), "dimension 'M' has no range"),
        (f"<{_OPSET}> add (float[N,?] x) => (float[N,?] y) {{ y = Add(x, x) }}", "dimensions without a name"),
        (
            f"<{_OPSET}> shaped (float[N,4] x, int64[2] s) => (float[A,B] y) {{ y = Reshape(x, s) }}",
            "contents of s decide shapes",
        ),
    ],
)
def test_models_whose_other_sizes_are_open_are_refused(model: str, what: str) -> None:
    with pytest.raises(OptionError, match=what):
        compiled(model_of(model), dims={"N": (1, 8)})


def test_random_numbers_are_asked_for() -> None:
    model = model_of(f"<{_OPSET}> noise (float[N,4] x) => (float[N,4] y) {{ r = RandomNormalLike(x) y = Add(x, r) }}")
    with pytest.raises(UnsupportedModelError, match="random=True"):
        compiled(model, dims={"N": (1, 8)})


def test_what_has_no_program_for_a_range_is_specialised_and_says_why() -> None:
    model = model_of(f"<{_OPSET}> tri (float[N,N] x) => (float y) {{ y = Det(x) }}")
    net = compiled(model, dims={"N": (2, 6)})
    for size in (2, 5):
        assert_right(net, model, {"x": np.arange(size * size, dtype=np.float32).reshape(size, size)})
    assert "specialised" in net.report()
    assert "det" in net.report().lower()
