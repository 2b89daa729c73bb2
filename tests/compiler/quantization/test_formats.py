"""The arithmetic of quantized formats, against ONNX Runtime's QuantizeLinear and against what rounding may lose."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from prefuse.compiler.quantization import formats
from prefuse.compiler.quantization.formats import (
    SMALLEST_SCALE,
    Affine,
    group_scales,
    quantize_channels,
    quantize_groups,
    quantize_rows,
    signed_affine,
    unsigned_affine,
)

_ENDS = st.floats(-(2.0**100), 2.0**100, width=32)


def _floats(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32)


def _onnxruntime_quantize(x: np.ndarray, affine: Affine) -> np.ndarray:
    kind = TensorProto.UINT8 if affine.zero.dtype == np.uint8 else TensorProto.INT8
    graph = helper.make_graph(
        [helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"])],
        "main",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape),
            helper.make_tensor_value_info("s", TensorProto.FLOAT, []),
            helper.make_tensor_value_info("z", kind, []),
        ],
        [helper.make_tensor_value_info("q", kind, x.shape)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    found: np.ndarray = session.run(None, {"x": x, "s": np.asarray(affine.scale), "z": np.asarray(affine.zero)})[0]
    return found


@pytest.mark.parametrize("affine", [unsigned_affine(-1.3, 2.7), unsigned_affine(0.0, 4.0), signed_affine(3.1)])
def test_as_onnxruntime_quantizes(affine: Affine) -> None:
    """Ties and both ends included."""
    steps = np.arange(-300, 301, dtype=np.float32) * np.float32(0.5) * affine.scale
    x = np.concatenate([steps, _floats(np.inf, -np.inf, 1e38, -1e38), np.random.default_rng(0).normal(0, 2, 999)])
    x = x.astype(np.float32)
    assert np.array_equal(affine.quantize(x), _onnxruntime_quantize(x, affine))


def test_nan_is_zero() -> None:
    affine = unsigned_affine(-1.0, 3.0)
    assert affine.quantize(_floats(np.nan))[0] == affine.zero
    assert affine.rounded(_floats(np.nan))[0] == 0.0


@given(_ENDS, _ENDS)
@settings(max_examples=300, deadline=None)
def test_unsigned_ranges(first: float, second: float) -> None:
    """Zero is exact, and what lies in the range is off by half a step at most, a whole one at the ends."""
    low, high = min(first, second), max(first, second)
    affine = unsigned_affine(low, high)
    assert affine.scale >= SMALLEST_SCALE
    assert affine.rounded(_floats(0.0))[0] == 0.0
    x = np.linspace(min(low, 0), max(high, 0), 41).astype(np.float32)
    assert (np.abs(affine.rounded(x).astype(np.float64) - x) <= 1.001 * affine.scale.astype(np.float64)).all()


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.0), (1e-42, 3e-42), (-1e-44, 0.0), (-1e38, 1e38), (0.0, 1e-37)])
def test_ranges_at_the_ends_of_float32(low: float, high: float) -> None:
    """No extent, subnormal numbers, and twice the greatest number: the scale is a normal number."""
    affine = unsigned_affine(low, high)
    assert np.isfinite(affine.scale)
    assert affine.scale >= SMALLEST_SCALE
    assert np.isfinite(np.float32(1) / affine.scale)
    x = _floats(low, high)
    assert np.isfinite(unsigned_affine(-3.4e38, 3.4e38).dequantize(np.arange(256, dtype=np.uint8))).all()
    assert (np.abs(affine.rounded(x).astype(np.float64) - x) <= affine.scale.astype(np.float64)).all()


def test_infinite_ranges_are_refused() -> None:
    for low, high in ((0.0, np.inf), (np.nan, 1.0)):
        with pytest.raises(AssertionError, match="not finite"):
            unsigned_affine(low, high)
    with pytest.raises(AssertionError, match="not finite"):
        signed_affine(np.nan)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_channels(axis: int, bits: formats.Bits) -> None:
    w = np.random.default_rng(1).normal(size=(6, 5, 3)).astype(np.float32)
    np.moveaxis(w, axis, 0)[2] = 0.0
    found = quantize_channels(w, axis, bits)
    most = 127 if bits == 8 else 7
    assert found.affine.scale.shape == tuple(n if d == axis % 3 else 1 for d, n in enumerate(w.shape))
    assert np.abs(found.numbers).max() == most
    assert (np.abs(found.dequantize() - w) <= 0.5001 * found.affine.scale).all()
    assert found.affine.scale.reshape(-1)[2] == 1.0


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "group"), [(64, 32), (70, 32), (5, 32), (1, 1), (0, 16)])
def test_groups(rows: int, group: int, bits: formats.Bits) -> None:
    """The last group may be short; each group has the scale of its own largest weight."""
    w = (np.random.default_rng(2).normal(size=(rows, 9)) * np.logspace(0, 3, max(rows, 1))[:rows, None]).astype(np.float32)
    found, scales = quantize_groups(w, group, bits), group_scales(w, group, bits)
    assert scales.shape == (-(-rows // group), 9)
    assert found.numbers.shape == w.shape
    assert (np.abs(found.dequantize() - w) <= 0.5001 * found.affine.scale).all()
    for k in range(rows):
        block = w[k // group * group : (k // group + 1) * group]
        assert np.array_equal(found.affine.scale[k], (np.abs(block).max(0) / (127 if bits == 8 else 7)).astype(np.float32))
    across = quantize_groups(w.T, group, bits, axis=1)
    assert np.array_equal(across.numbers.T, found.numbers)


def test_rows() -> None:
    """Each row has the range of its finite elements, whatever the others are."""
    x = np.random.default_rng(3).normal(size=(2, 4, 33)).astype(np.float32)
    x[0, 1] *= 1000
    x[1, 2] = 0
    x[1, 3, 4], x[1, 3, 5], x[1, 3, 6] = np.inf, -np.inf, np.nan
    found = quantize_rows(x)
    assert found.affine.scale.shape == (2, 4, 1)
    assert found.affine.scale[1, 2] == 1.0
    is_finite = np.isfinite(x)
    assert (np.abs(found.dequantize() - x)[is_finite] <= np.broadcast_to(found.affine.scale, x.shape)[is_finite]).all()
    assert found.numbers[1, 3, 4:7].tolist() == [255, 0, found.affine.zero[1, 3, 0]]
    alone = quantize_rows(x[0, :1])
    assert np.array_equal(alone.numbers, found.numbers[0, :1])
