"""Weights of small pairs: how they are recognized and made, and products of them, exactly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import onnx_ir as ir
import prefuse
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from onnx import TensorProto, helper, numpy_helper
from prefuse.compiler.ir.assignments.pairs import PAIR_SUM, keeps_pairs, within_pairs
from prefuse.compiler.lowering import groups
from prefuse.compiler.quantization.formats import quantize_channels, quantize_pairs
from prefuse.kernels.formats.format import S8_PAIRS, SMALL_PAIRS, U8_PAIRS, Storage, formats_for
from prefuse.runtime.target import Target

from ..convolution.channels_last_cases import channels_last
from ..harness import Case, check_in_turn, run, target_of
from .test_int8 import case_of, convolution_case, extremes

LEVELS = ("avx2", "avx512")  # with VNNI there are dot products for all weights
rng = np.random.default_rng(9)


@given(arrays.arrays(np.int8, arrays.array_shapes(min_dims=2, max_dims=3, max_side=6)), st.integers(-1, 1))
@settings(max_examples=200, deadline=None)
def test_pairs_are_what_16_bits_hold(w: np.ndarray, axis: int) -> None:
    """By the definition: no sum of two products saturates, whatever the activations are; what is small enough stays."""

    def saturates(numbers: np.ndarray) -> bool:
        lines = np.moveaxis(numbers.astype(np.int64), axis, 0)
        pairs = [(lines[i], lines[i + 1]) for i in range(0, len(lines) - 1, 2)]
        sums = [255 * np.stack([np.maximum(a, 0) + np.maximum(b, 0), np.minimum(a, 0) + np.minimum(b, 0)]) for a, b in pairs]
        return any((one > 32767).any() or (one < -32768).any() for one in sums)

    assert keeps_pairs(w, axis) == (not saturates(w))
    made = within_pairs(w, axis)
    assert keeps_pairs(made, axis)
    assert (np.abs(made.astype(int)) <= np.abs(w.astype(int))).all()
    if keeps_pairs(w, axis):
        assert np.array_equal(made, w)


def test_quantized_pairs() -> None:
    """Of normal and uniform weights, along k alone; at most twice the error of all 8 bits, as of 7 bits."""
    for w, axis, along in (
        (rng.normal(size=(301, 20)), 1, (0,)),
        (rng.uniform(-1, 1, (20, 64)), 0, (1,)),
        (rng.normal(size=(16, 12, 3, 3)), 0, (1, -1)),
    ):
        found, plain = quantize_pairs(w.astype(np.float32), axis), quantize_channels(w.astype(np.float32), axis)
        assert all(keeps_pairs(found.numbers, one) for one in along)
        assert not all(keeps_pairs(plain.numbers, one) for one in along)
        assert found.affine.scale.shape == plain.affine.scale.shape
        errors = [np.sqrt(((one.dequantize() - w) ** 2).sum()) for one in (plain, found)]
        assert errors[0] < errors[1] < 2.1 * errors[0]
    depthwise = rng.uniform(-1, 1, (16, 1, 3, 3)).astype(np.float32)
    assert np.array_equal(quantize_pairs(depthwise, 0).numbers, quantize_channels(depthwise, 0).numbers)
    zero = quantize_pairs(np.zeros((4, 3), np.float32), 1)
    assert (zero.affine.scale == 1).all()
    assert not zero.numbers.any()


def test_formats_for_small_pairs() -> None:
    """Where they are not known to be small, that format is not offered; where they are, all others are, too."""
    for a, one in (("uint8", U8_PAIRS), ("int8", S8_PAIRS)):
        known, unknown = (formats_for(Storage(a), b, Target("cpu", "avx2")) for b in (SMALL_PAIRS, Storage("int8")))
        assert known == (one, *unknown)
        assert one not in unknown


def small(case: Case, *axes: int) -> Case:
    """With weights made small, many of them at the ends of what may be, and known to be so."""
    w = case.arrays["b"]
    for axis in axes:
        w = within_pairs(w, axis)
    assert np.abs(w.astype(int)).max() == PAIR_SUM or w.size < 100
    return replace(
        case,
        arrays={**case.arrays, "b": w},
        group=replace(case.group, formats={"b": SMALL_PAIRS}),
        label=f"{case.label} small pairs",
    )


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("dtype", "zero"), [("uint8", None), ("uint8", 128), ("int8", None), ("int8", -128)])
def test_products(dtype: str, zero: int | None, level: str) -> None:
    cases = []
    for m, k, n in ((5, 8, 17), (33, 77, 50), (1, 3, 9), (3, 1, 1), (7, 1030, 40), (2, 4, 16)):
        a, b = extremes(dtype, m, k), extremes("int8", k, n)
        one = small(case_of("MatMul", a, b, zero, np.zeros((m, n))), 0)
        exact = (a.astype(np.int64) - (zero or 0)) @ one.arrays["b"].astype(np.int64)
        cases.append(replace(one, expected=[exact.astype(np.float32)]))
    check_in_turn(cases, level, LEVELS)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("dtype", "zero"), [("uint8", None), ("uint8", 114), ("int8", 77)])
def test_convolutions(dtype: str, zero: int | None, level: str) -> None:
    """Of channels that fill words, and of taps that do."""
    cases = []
    for shape in ((12, 1, 0, 1, 1), (8, 3, 1, 1, 1), (16, 3, 1, 2, 2), (20, 5, 0, 2, 1), (3, 7, 3, 2, 1), (2, 2, 0, 1, 1)):
        one = convolution_case(dtype, zero, *shape, weights=lambda w: within_pairs(within_pairs(w, 1), -1))
        one = replace(one, group=replace(one.group, formats={"b": SMALL_PAIRS}), label=f"{one.label} small pairs")
        cases.append(channels_last(one, template="convolution_channels_last"))
    check_in_turn(cases, level, LEVELS)


def test_sums_of_16_bits_are_used() -> None:
    """What is said to be small and is not saturates: else the tests above tell nothing of pairs."""
    a, b = np.full((2, 8), 255, np.uint8), np.full((8, 8), 127, np.int8)
    case = case_of("MatMul", a, b, None, (a.astype(np.int64) @ b.astype(np.int64)))
    case = replace(case, group=replace(case.group, formats={"b": SMALL_PAIRS}))
    run([case], target_of("avx2"))
    assert (case.got[0] == 4 * 32767).all()


@pytest.mark.parametrize("is_small", [True, False])
def test_weights_of_a_model_are_looked_at(is_small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No sum of a quantized file saturates, whatever weights it has; a transposed operand's pairs are its own."""
    x = np.full((3, 16), 255, np.uint8)
    w = np.full((16, 24), 127, np.int8)
    w[1::2] = 1 if is_small else 127
    nodes = [
        helper.make_node("DequantizeLinear", ["x", "one", "zero"], ["a"]),
        helper.make_node("DequantizeLinear", ["w", "one"], ["b"]),
        helper.make_node("DequantizeLinear", ["v", "one"], ["c"]),
        helper.make_node("MatMul", ["a", "b"], ["y"]),
        helper.make_node("Gemm", ["a", "c"], ["z"], transB=1),
    ]
    constants = {"w": w, "v": np.ascontiguousarray(w.T), "one": np.float32(1), "zero": np.uint8(0)}
    graph = helper.make_graph(
        nodes,
        "quantized",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, x.shape)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, (3, 24)) for name in "yz"],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    seen = set[bool]()

    def noted(numbers: np.ndarray, axis: int) -> bool:
        seen.add(keeps_pairs(numbers, axis))
        return keeps_pairs(numbers, axis)

    monkeypatch.setattr(groups, "keeps_pairs", noted)
    net = prefuse.compile(model, target="cpu:avx2", threads=1, cache=False)
    assert seen == {is_small}
    for found in cast(Any, net(x)):
        np.testing.assert_allclose(found, x.astype(np.int64) @ w.astype(np.int64), rtol=1e-6)


def test_another_tensor_of_a_value_is_looked_at_again() -> None:
    value = ir.Value(name="w", const_value=ir.tensor(np.ones((4, 2), np.int8)))
    ir.Graph([], [], nodes=[], initializers=[value])
    assert groups._keeps_pairs(value, (-2,))
    value.const_value = ir.tensor(np.full((4, 2), 127, np.int8))
    assert not groups._keeps_pairs(value, (-2,))
