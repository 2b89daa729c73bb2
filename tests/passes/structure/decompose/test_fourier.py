"""DFT and STFT against NumPy's transforms, of every length and kind."""

from __future__ import annotations

import numpy as np
import pytest
from prefuse.runtime.errors import InvalidModelError

from .expanding import compiled, evaluate, expanded, one_node, operators

# Direct, prime, products of them, a prime that is a convolution, twice such a one, and the usual lengths of audio.
LENGTHS = [1, 3, 127, 130, 251, 263, 526, 512]


def _complex(array: np.ndarray) -> np.ndarray:
    return array[..., 0] + 1j * array[..., 1]


def _parts(array: np.ndarray) -> np.ndarray:
    return np.stack([array.real, array.imag], -1)


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("kind", ["fft", "ifft", "rfft", "irfft"])
def test_a_transform_is_numpys(n: int, kind: str) -> None:
    generator = np.random.default_rng(n)
    parts = 1 if kind == "rfft" else 2
    x = generator.standard_normal((2, n // 2 + 1 if kind == "irfft" else n, parts))
    inputs = {"x": x, "c_n": np.array(n, np.int64), "c_axis": np.array(1, np.int64)}
    model = expanded(one_node("DFT", inputs, inverse=int(kind[0] == "i" or kind[1] == "i"), onesided=int("r" in kind[:2])))
    assert "DFT" not in operators(model)
    (found,) = evaluate(model, inputs)
    source = x[..., 0] if parts == 1 else _complex(x)
    transform = getattr(np.fft, kind)
    exact = transform(source, n)[..., None] if kind == "irfft" else _parts(transform(source))
    assert found.shape == exact.shape
    np.testing.assert_allclose(found, exact, atol=1e-12 * n)


@pytest.mark.parametrize("length", [5, 12])
@pytest.mark.parametrize("axis", [0, 1, -2])
@pytest.mark.parametrize("onesided", [0, 1])
def test_axes_and_lengths(length: int, axis: int, onesided: int) -> None:
    """The signal is cut or filled with zeros along the axis."""
    x = np.random.default_rng(0).standard_normal((7, 8, 9, 1))
    inputs = {"x": x, "c_n": np.array(length, np.int64), "c_axis": np.array(axis, np.int64)}
    (found,) = evaluate(expanded(one_node("DFT", inputs, onesided=onesided)), inputs)
    real_axis = axis if axis >= 0 else axis + 1
    transform = np.fft.rfft if onesided else np.fft.fft
    np.testing.assert_allclose(found, _parts(transform(x[..., 0], length, real_axis)), atol=1e-12)


def test_the_axis_is_an_attribute_before_opset_20() -> None:
    x = np.random.default_rng(0).standard_normal((2, 5, 6, 2))
    for model, axis in ((one_node("DFT", {"x": x}, opset=19), 1), (one_node("DFT", {"x": x}, opset=19, axis=2), 2)):
        (found,) = evaluate(expanded(model), {"x": x})
        np.testing.assert_allclose(found, _parts(np.fft.fft(_complex(x), axis=axis)), atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("n", [60, 4096])
def test_compiled(n: int, dtype: type) -> None:
    """Within the rounding of log2(n) additions of the type computed in, and of the result's own."""
    x: np.ndarray = np.asarray(np.random.default_rng(2).standard_normal((3, n, 2)), dtype)
    (found,) = compiled(one_node("DFT", {"x": x, "c_n": np.array(n, np.int64), "c_axis": np.array(1, np.int64)}), x)
    exact = _parts(np.fft.fft(_complex(x.astype(np.float64))))
    unit = np.finfo(dtype).eps if dtype == np.float16 else np.finfo(dtype).eps * np.log2(n)
    assert np.abs(found.astype(np.float64) - exact).max() <= 2 * unit * np.abs(exact).max()


def test_a_long_transform_has_few_operations() -> None:
    """4,096 points: two products with 64 x 64 complex matrices, not one with 4,096 x 4,096."""
    model = expanded(one_node("DFT", {"x": np.zeros((1, 4096, 2), np.float32)}))
    sizes = [np.prod(node.attribute[0].t.dims, dtype=int) for node in model.graph.node if node.op_type == "Constant"]
    assert max(sizes) <= 128 * 128
    assert sum(node.op_type == "MatMul" for node in model.graph.node) == 2


@pytest.mark.parametrize("given", ["window", "length", "both", "neither"])
@pytest.mark.parametrize("parts", [1, 2])
def test_frames(given: str, parts: int) -> None:
    generator = np.random.default_rng(3)
    n = 50 if given == "neither" else 16
    signal, window = generator.standard_normal((2, 50, parts)), generator.random(n)
    inputs = {"x": signal, "c_step": np.array(5, np.int64)}
    inputs |= {"w": window} if given in ("window", "both") else {"none": window}
    inputs |= {"c_n": np.array(n, np.int64)} if given in ("length", "both") else {}
    (found,) = evaluate(expanded(one_node("STFT", inputs, onesided=int(parts == 1))), inputs)
    source = signal[..., 0] if parts == 1 else _complex(signal)
    frames = np.stack([source[:, at : at + n] for at in range(0, 50 - n + 1, 5)], 1)
    frames = frames * window if given in ("window", "both") else frames
    np.testing.assert_allclose(found, _parts((np.fft.rfft if parts == 1 else np.fft.fft)(frames)), atol=1e-11)


def test_frames_of_a_signal_without_parts() -> None:
    """[batch, length], as ONNX Runtime takes it."""
    signal = np.random.default_rng(3).standard_normal((2, 40), np.float32)
    model = one_node("STFT", {"x": signal, "c_step": np.array(8, np.int64), "none": signal, "c_n": np.array(16, np.int64)})
    (found,) = compiled(model, signal)
    frames = np.stack([signal[:, at : at + 16] for at in range(0, 40 - 16 + 1, 8)], 1)
    np.testing.assert_allclose(found, _parts(np.fft.rfft(frames)), atol=1e-5)
    deep = signal.reshape(2, 4, 5, 2)
    with pytest.raises(InvalidModelError, match="a signal of 4 dimensions"):
        expanded(one_node("STFT", {"x": deep, "c_step": np.array(8, np.int64), "none": deep, "c_n": np.array(4, np.int64)}))
