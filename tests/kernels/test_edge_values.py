"""What the specification fixes at the edges of numbers and shapes: NaN, infinities, signed zeros, tensors without elements."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import prefuse
import pytest
from onnx import parser
from onnx.reference import ReferenceEvaluator

from .harness import LEVELS, Case, check_in_turn, operator

rng = np.random.default_rng(9)
_ODD = np.array([0.0, -0.0, 0.5, -0.5, 1.5, 2.5, -2.5, -0.3, np.inf, -np.inf, np.nan, 3e38, -1e-40], np.float32)
_HEAD = '<ir_version: 10, opset_import: ["": 21]>\n'


def products_of_nothing() -> list[Case]:
    """Operands that are packed in a workspace, which then has no bytes."""
    return [
        operator("MatMul", np.zeros((3, 4, 0), np.float32), np.zeros((0, 5), np.float32), variables=(1,)),
        operator("Gemm", np.zeros((7, 0), np.float32), np.zeros((0, 9), np.float32), variables=(1,)),
    ]


def windows_of_bfloat16() -> Case:
    """The reference lacks the type: the numbers are small integers, which float32 holds as well."""
    x = rng.integers(-50, 50, (1, 2, 7, 9)).astype(np.float32)
    attributes: dict[str, Any] = {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1]}
    wide = operator("MaxPool", x, outputs=2, **attributes)
    values, places = wide.expected
    narrow = ml_dtypes.bfloat16
    return operator("MaxPool", x.astype(narrow), outputs=2, expected=[values.astype(narrow), places], **attributes)


def sums_of_exponentials() -> list[Case]:
    x = rng.integers(-9, 9, (4, 5, 3))
    whole = np.log(np.exp(x.astype(np.float64)).sum(1, keepdims=True))
    kinds = (np.int32, np.int64)
    nothing = operator("ReduceLogSum", np.zeros((2, 0), np.uint32), np.array([1]), expected=[np.zeros((2, 1), np.uint32)])
    return [nothing, *(operator("ReduceLogSumExp", x.astype(k), np.array([1]), expected=[whole.astype(k)]) for k in kinds)]


@pytest.mark.parametrize("level", LEVELS)
def test_operators_at_the_edge_of_their_types(level: str) -> None:
    check_in_turn([*products_of_nothing(), windows_of_bfloat16(), *sums_of_exponentials()], level)


def _run(text: str, *inputs: np.ndarray) -> tuple[np.ndarray, ...]:
    found = prefuse.compile(parser.parse_model(_HEAD + text), cache=False)(*inputs)
    return found if isinstance(found, tuple) else (found,)


def _is_same(found: np.ndarray, expected: np.ndarray) -> bool:
    """Equal, NaN with NaN, and zeros of one sign."""
    signs = np.array_equal(np.signbit(found[found == 0]), np.signbit(expected[expected == 0]))
    return found.dtype == expected.dtype and np.array_equal(found, expected, equal_nan=True) and signs


def test_odd_numbers_through_pointwise_operators() -> None:
    n = len(_ODD)
    expected = {
        "Relu(x)": np.maximum(_ODD, 0),
        "Neg(x)": -_ODD,
        "Abs(x)": abs(_ODD),
        "Sign(x)": np.sign(_ODD),
        "Round(x)": np.rint(_ODD),
        "Ceil(x)": np.ceil(_ODD),
        "Floor(x)": np.floor(_ODD),
        "Max(x, z)": np.maximum(_ODD, np.float32(1)),
        "Min(z, x)": np.minimum(np.float32(1), _ODD),
        "Clip(x, l, z)": np.clip(_ODD, -1, 1),
        "IsNaN(x)": np.isnan(_ODD),
        "IsInf(x)": np.isinf(_ODD),
        "Equal(x, x)": ~np.isnan(_ODD),
        "Less(x, z)": _ODD < 1,
        "Identity(x)": _ODD,
    }
    kinds = ["bool" if array.dtype == bool else "float" for array in expected.values()]
    outputs = ", ".join(f"{kind}[{n}] y{i}" for i, kind in enumerate(kinds))
    body = " ".join(f"y{i} = {call}" for i, call in enumerate(expected))
    found = _run(f"main (float[{n}] x) => ({outputs}) <float z = {{1}}, float l = {{-1}}> {{ {body} }}", _ODD)
    for (call, want), got in zip(expected.items(), found, strict=True):
        if call not in ("Relu(x)", "Sign(x)"):  # of which sign their zero is nobody says
            assert _is_same(got, want), call
        assert np.array_equal(got, want, equal_nan=want.dtype != bool), call


def test_odd_numbers_through_rows() -> None:
    x = np.array([[1, np.nan, 3], [-np.inf, 2, np.inf], [-np.inf, -np.inf, 0], [-np.inf] * 3], np.float32)
    most, least, place, share = _run(
        """main (float[4,3] x) => (float[4] a, float[4] b, int64[4] i, float[4,3] s) <int64[1] k = {1}> {
            a = ReduceMax<keepdims=0>(x, k) b = ReduceMin<keepdims=0>(x, k) i = ArgMax<axis=1, keepdims=0>(x) s = Softmax(x) }""",
        x,
    )
    assert np.array_equal(most, x.max(1), equal_nan=True)
    assert np.array_equal(least, x.min(1), equal_nan=True)
    assert place.tolist() == [1, 2, 2, 0]
    assert np.isnan(share[[0, 1, 3]]).any(1).all()
    assert np.array_equal(share[2], [0, 0, 1])


def test_a_bias_times_zero_is_not_read() -> None:
    x, w = rng.standard_normal((2, 3)).astype(np.float32), rng.standard_normal((3, 4)).astype(np.float32)
    text = "main (float[2,3] x, float[3,4] w, float[4] c) => (float[2,4] y) { y = Gemm<beta=0.0>(x, w, c) }"
    (found,) = _run(text, x, w, np.full(4, np.nan, np.float32))
    np.testing.assert_allclose(found, x @ w, rtol=1e-5)


def test_hardmax_of_bfloat16() -> None:
    x = np.array([[1, 3, 3], [np.nan, 2, 0]], ml_dtypes.bfloat16)
    (hot,) = _run("main (bfloat16[2,3] x) => (bfloat16[2,3] y) { y = Hardmax(x) }", x)
    assert hot.dtype == x.dtype
    assert hot.astype(int).tolist() == [[0, 1, 0], [1, 0, 0]]


_EMPTY = {
    "Add(x, r)": "float[0,3]",
    "MatMul(x, w)": "float[0,4]",
    "MatMul(v, x)": "float[2,3]",
    "Softmax(x)": "float[0,3]",
    "Transpose(x)": "float[3,0]",
    "Concat<axis=0>(x, x)": "float[0,3]",
    "ReduceSum<keepdims=0>(x, zero)": "float[3]",
    "ReduceProd<keepdims=0>(x, zero)": "float[3]",
    "ReduceMax<keepdims=0>(x, one)": "float[0]",
    "CumSum(x, k)": "float[0,3]",
    "Gather(r, none)": "float[0]",
    "Gather<axis=1>(x, pair)": "float[0,2]",
    "Expand(x, shape)": "float[2,0,3]",
    "Tile(w, nothing)": "float[0,4]",
    "Slice(w, one, one, zero)": "float[0,4]",
    "Pad(x, ends)": "float[2,3]",
    "Where(c, x, r)": "float[0,3]",
    "Cast<to=7>(x)": "int64[0,3]",
    "ScatterND(r, places, values)": "float[3]",
    "NonZero(x)": "int64[2,0]",
    "Reshape<allowzero=1>(x, flat)": "float[3,0]",
    "LayerNormalization(x, r)": "float[0,3]",
    "ArgMax<axis=1>(x)": "int64[0,1]",
}


def test_tensors_without_elements() -> None:
    outputs = ", ".join(f"{kind} y{i}" for i, kind in enumerate(_EMPTY.values()))
    body = " ".join(f"y{i} = {call}" for i, call in enumerate(_EMPTY))
    text = f"""main (float[0,3] x, float[3] r, float[3,4] w, float[2,0] v, bool[0,3] c,
        int64[0] none, int64[0,1] places, float[0] values)
        => ({outputs}) <int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[2] pair = {{0, 2}}, int64[3] shape = {{2, 1, 3}},
        int64[2] nothing = {{0, 1}}, int64 k = {{1}}, int64[4] ends = {{1, 0, 1, 0}}, int64[2] flat = {{3, 0}}> {{ {body} }}"""
    kinds = {"v": (2, 0), "r": (3,), "w": (3, 4), "x": (0, 3)}
    given = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in kinds.items()}
    given |= {"c": np.zeros((0, 3), bool), "none": np.zeros(0, np.int64), "places": np.zeros((0, 1), np.int64)}
    given |= {"values": np.zeros(0, np.float32)}
    model = parser.parse_model(_HEAD + text)
    found = _run(text, *(given[name] for name in ("x", "r", "w", "v", "c", "none", "places", "values")))
    expected = [np.asarray(array) for array in ReferenceEvaluator(model).run(None, given)]
    for call, a, b in zip(_EMPTY, found, expected, strict=True):
        assert a.shape == b.shape, call
        assert a.dtype == b.dtype, call
        assert np.array_equal(a, b), call


def test_places_out_of_range_stay_within_their_tensor() -> None:
    """Between poison: what is read is an element of the tensor, what is written beyond it is dropped."""
    whole = np.full((3, 64), np.nan, np.float32)
    x = whole[1]
    x[:] = np.arange(64)
    far = np.array([-(2**62), -65, -64, -1, 63, 64, 2**62], np.int64)
    picked, scattered, hot = _run(
        """main (float[64] x, int64[7] i, float[7] u) => (float[7] y, float[64] z, float[7,64] h)
            <int64 d = {64}, float[2] v = {0, 1}> {
            y = Gather(x, i) z = ScatterElements(x, i, u) h = OneHot(i, d, v) }""",
        x,
        far,
        np.full(7, -1, np.float32),
    )
    assert picked.tolist() == [0, 0, 0, 63, 63, 63, 63]
    assert scattered[[0, 63]].tolist() == [-1, -1]
    assert np.array_equal(scattered[1:63], x[1:63])
    assert hot.sum(1).tolist() == [0, 0, 1, 1, 1, 0, 0]
    assert np.isnan(whole[[0, 2]]).all()


@pytest.mark.parametrize("dtype", ["float", "double"])
def test_products_and_quotients_of_a_constant_zero_know_numbers_that_are_not_finite(dtype: str) -> None:
    """TVM folds 0.0 * x to 0; NaN and infinities must come through."""
    text = f"""main ({dtype}[13] x) => ({dtype}[13] a, {dtype}[13] b, {dtype}[13] c, {dtype}[13] d)
    <{dtype}[1] zero = {{0}}, {dtype}[1] negative = {{-0.0}}>
    {{ a = Mul(zero, x)  b = Mul(x, negative)  c = Div(zero, x)  d = Div(negative, x) }}"""
    kind = {"float": np.float32, "double": np.float64}[dtype]
    x = _ODD.astype(kind)
    with np.errstate(all="ignore"):
        zero, negative = kind(0), kind(-0.0)
        expected = (zero * x, x * negative, zero / x, negative / x)
    for found, wanted in zip(_run(text, x), expected, strict=True):
        assert _is_same(found, wanted), (found, wanted)
