"""Quantized files of any size: one program for a range of images or lengths, against ONNX Runtime."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import QuantType, quantize_dynamic

from .test_quantized_models import convolutions, quantized_statically, quantum, transformer, unoptimized
from .test_symbolic import assert_right, called, compiled, model_of

_SIZES: dict[str, list[tuple[int, ...]]] = {
    "conv": [(8, 10), (13, 31), (40, 24), (33, 33)],
    "transformer": [(1,), (7,), (40,), (64,)],
}
_RANGES: dict[str, dict[str, tuple[int, int]]] = {"conv": {"H": (8, 40), "W": (10, 33)}, "transformer": {"T": (1, 64)}}


def _sized(name: str) -> tuple[onnx.ModelProto, tuple[int, ...]]:
    """A model whose input has sizes, and the shape that it is calibrated at."""
    return (convolutions("H", "W"), (2, 3, 12, 12)) if name == "conv" else (transformer("T"), (2, 7, 32))


def _inputs(name: str, sizes: tuple[int, ...]) -> np.ndarray:
    shape = (2, 3, *sizes) if name == "conv" else (2, *sizes, 32)
    return np.random.default_rng(sum(sizes)).standard_normal(shape).astype(np.float32)


def _compared(quantized: onnx.ModelProto, name: str) -> Iterator[tuple[np.ndarray, Any]]:
    """What one program and ONNX Runtime compute, at each size."""
    net, session = compiled(quantized, dims=_RANGES[name]), unoptimized(quantized)
    assert "specialised" not in net.report(), net.report()
    for sizes in _SIZES[name]:
        x = _inputs(name, sizes)
        found = called(net, x)
        assert np.array_equal(found, called(net, x))
        yield found, session.run(None, {"x": x})[0]


@pytest.mark.parametrize(("name", "form"), [("conv", "QDQ"), ("conv", "QOperator"), ("transformer", "QDQ")])
def test_static(name: str, form: str, tmp_path: Path) -> None:
    model, shape = _sized(name)
    quantized = quantized_statically(model, shape, tmp_path, form, "QUInt8", "QInt8", by_channel=True)
    for found, expected in _compared(quantized, name):
        quanta = np.abs(found - expected) / quantum(quantized)
        assert quanta.max() <= 1.001
        assert (quanta > 0.001).mean() <= (0.01 if name == "transformer" else 0.0)  # the exponentials of Softmax round otherwise


@pytest.mark.parametrize("name", ["conv", "transformer"])
def test_dynamic(name: str, tmp_path: Path) -> None:
    model, _ = _sized(name)
    onnx.save(model, tmp_path / "float.onnx")
    quantize_dynamic(tmp_path / "float.onnx", tmp_path / "quantized.onnx", weight_type=QuantType.QInt8, reduce_range=True)
    for found, expected in _compared(onnx.load(tmp_path / "quantized.onnx"), name):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


_OPERATORS = {
    "by tensor": ("", "q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z)"),
    "by channel": ("", "q = QuantizeLinear <axis = 1> (x, many, zeros) y = DequantizeLinear <axis = 1> (q, many, zeros)"),
    "by row": (
        ", float[N] r",
        "q = QuantizeLinear <axis = 0, output_dtype = 3> (x, r) y = DequantizeLinear <axis = 0> (q, r)",
    ),
    "by block": (
        ", float[N,2,M] b",
        """q = QuantizeLinear <axis = 1, block_size = 3, output_dtype = 3> (x, b)
        y = DequantizeLinear <axis = 1, block_size = 3> (q, b)""",
    ),
    "product of integers": (
        "",
        """t = Transpose <perm = [0, 2, 1]> (x) a = QuantizeLinear(x, s, z) b = QuantizeLinear(t, s, z)
        p = MatMulInteger(a, b, z, z) f = Cast <to = 1> (p) d = Mul(f, s) y = MatMul(d, x)""",
    ),
}


@pytest.mark.parametrize("name", _OPERATORS)
def test_operators(name: str) -> None:
    more, body = _OPERATORS[name]
    model = model_of(
        f"""<ir_version: 10, opset_import: ["": 21]> main (float[N,6,M] x{more}) => (float[N,6,M] y)
        <float s = {{0.03}}, uint8 z = {{120}}, float[6] many = {{0.02, 0.03, 0.04, 0.05, 0.06, 0.07}},
         int8[6] zeros = {{0, 1, -2, 3, 0, 5}}> {{ {body} }}"""
    )
    net = compiled(model, dims={"N": (1, 9), "M": (2, 70)})
    assert "specialised" not in net.report(), net.report()
    for n, m in ((1, 2), (4, 33), (9, 70)):
        random = np.random.default_rng(n)
        inputs = {"x": random.standard_normal((n, 6, m)).astype(np.float32)}
        inputs |= {"r": random.uniform(0.01, 0.04, n).astype(np.float32)} if name == "by row" else {}
        inputs |= {"b": random.uniform(0.01, 0.04, (n, 2, m)).astype(np.float32)} if name == "by block" else {}
        assert_right(net, model, inputs, 1e-4)
