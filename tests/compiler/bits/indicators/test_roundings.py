"""What formats leave of operands."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from prefuse.compiler.bits.indicators.roundings import ROUNDINGS, rounded_activations

RNG = np.random.default_rng(0)


@pytest.mark.parametrize(("shape", "axis"), [((70, 5), 1), ((5, 70), 0), ((6, 5, 3, 3), 0), ((6, 40), 0)])
@pytest.mark.parametrize(("form", "levels"), [("int8", 255), ("int8-rows", 255), ("w8", 255), ("w4", 15)])
def test_weights_have_few_levels(form: str, levels: int, shape: tuple[int, ...], axis: int) -> None:
    """For each channel, or of 4 bits each group of 32 along k, no more numbers than the bits have, and none far from its own."""
    w = RNG.standard_normal(shape).astype(np.float32)
    rounded = ROUNDINGS[form].weights(w, axis)
    assert rounded.shape == w.shape
    assert rounded.dtype == np.float32
    for exact, found in zip(np.moveaxis(w, axis, 0), np.moveaxis(rounded, axis, 0), strict=True):
        width = 32 if form == "w4" else exact.size
        for start in range(0, exact.size, width):
            own, group = (array.reshape(-1)[start : start + width] for array in (exact, found))
            step = np.abs(own).max() / (levels // 2)
            assert np.abs(own - group).max() <= step * 0.5001
            assert np.abs(group / step - np.round(group / step)).max() < 1e-4


def test_float32_and_weight_formats_leave_activations() -> None:
    x = RNG.standard_normal((3, 8)).astype(np.float32)
    for form in ("float32", "w8", "w4"):
        assert rounded_activations(x, ROUNDINGS[form].activations, (-1.0, 1.0)) is x
    assert ROUNDINGS["float32"].weights(x, 0) is x


def test_bfloat16() -> None:
    x = RNG.standard_normal((3, 8)).astype(np.float32)
    expected = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert (ROUNDINGS["bfloat16"].weights(x, 0) == expected).all()
    assert (rounded_activations(x, "bfloat16", (0.0, 0.0)) == expected).all()
    assert not (expected == x).all()


def test_activations_by_tensor_saturate_and_by_rows_do_not() -> None:
    x = np.array([[0.0, 1.0, 2.0], [0.0, 50.0, 100.0]], np.float32)
    by_tensor, by_rows = rounded_activations(x, "tensor", (0.0, 2.0)), rounded_activations(x, "rows", (0.0, 0.0))
    assert by_tensor.max() == pytest.approx(2.0)
    assert np.abs(by_rows - x).max() < 0.3
    assert np.abs(by_rows[0] - x[0]).max() < 0.005
