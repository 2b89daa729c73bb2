"""The bodies of LRN and MeanVarianceNormalization, compiled, against float64."""

from __future__ import annotations

import numpy as np
import prefuse
import pytest

from .expanding import expanded, one_node, operators

rng = np.random.default_rng(23)


def normalized(x: np.ndarray, size: int, alpha: float, beta: float, bias: float) -> np.ndarray:
    """The definition, channel by channel."""
    wide, y = x.astype(np.float64), np.empty(x.shape)
    for channel in range(x.shape[1]):
        window = wide[:, max(0, channel - (size - 1) // 2) : channel + size // 2 + 1]
        y[:, channel] = wide[:, channel] / (bias + alpha / size * (window**2).sum(1)) ** beta
    return y


@pytest.mark.parametrize(
    ("shape", "size", "dtype"),
    [((2, 7, 3), 3, "float32"), ((1, 11, 3, 5), 4, "float64"), ((2, 5, 3, 2, 3), 5, "float32"), ((1, 3, 7), 1, "float16")],
)
def test_local_response_normalization(shape: tuple[int, ...], size: int, dtype: str) -> None:
    x = rng.standard_normal(shape).astype(dtype)
    model = one_node("LRN", {"x": x}, size=size, alpha=0.5, beta=0.6, bias=1.5)
    assert "LRN" not in operators(expanded(model))
    found = np.asarray(prefuse.compile(model, cache=False)(x))
    tolerance = {"float16": 2e-3, "float32": 1e-5, "float64": 1e-7}[dtype]  # the attributes are float32
    assert found.dtype == x.dtype
    np.testing.assert_allclose(found, normalized(x, size, 0.5, 0.6, 1.5), rtol=tolerance, atol=tolerance)


def test_squares_beyond_float16() -> None:
    x = np.full((1, 5, 2), 300, np.float16)
    found = np.asarray(prefuse.compile(one_node("LRN", {"x": x}, size=5), cache=False)(x))
    np.testing.assert_allclose(found, normalized(x, 5, 1e-4, 0.75, 1.0), rtol=1e-3)


def test_default_attributes_and_no_elements() -> None:
    x = rng.standard_normal((1, 4, 5)).astype(np.float32)
    found = np.asarray(prefuse.compile(one_node("LRN", {"x": x}, size=3), cache=False)(x))
    np.testing.assert_allclose(found, normalized(x, 3, 1e-4, 0.75, 1.0), rtol=1e-5)
    empty = np.zeros((0, 4, 5), np.float32)
    assert np.asarray(prefuse.compile(one_node("LRN", {"x": empty}, size=3), cache=False)(empty)).shape == empty.shape


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_variance_of_differences_that_are_small_beside_the_mean(dtype: str) -> None:
    """Of pairs, too, whose mean of squares less the square of their mean has no right digit, or is negative."""
    x = (3 + rng.standard_normal((2, 3, 11, 4)) / 64).astype(dtype)
    model = one_node("MeanVarianceNormalization", {"x": x}, axes=[0])
    assert "MeanVarianceNormalization" not in operators(expanded(model))
    rest = x.astype(np.float64) - x.astype(np.float64).mean(0)
    expected = rest / (np.sqrt((rest**2).mean(0)) + 1e-9)
    found = np.asarray(prefuse.compile(model, cache=False)(x))
    assert found.dtype == x.dtype
    assert np.linalg.norm(found - expected) <= 1e-3 * np.linalg.norm(expected)
    level = np.full((1, 2, 3, 5), 7, dtype)
    assert not np.asarray(prefuse.compile(one_node("MeanVarianceNormalization", {"x": level}), cache=False)(level)).any()
