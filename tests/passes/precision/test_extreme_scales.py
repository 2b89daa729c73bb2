"""Quantized products whose scales are one, zero, or at the ends of float32: the numbers are those of float64."""

from __future__ import annotations

import numpy as np
import onnx
import prefuse
import pytest
from onnx import numpy_helper, parser
from prefuse.runtime.executor import CompiledModel

ROWS, DEPTH, COLUMNS = 5, 64, 24
ENDS = {
    "MatMul": "y = MatMul(a, b)",
    "Gemm": "y = Gemm<alpha=2.0>(a, b)",
    "quantized": "p = MatMul(a, b) q = QuantizeLinear(p, r, c) y = DequantizeLinear(q, r, c)",
}


def model(end: str, s: float, t: float, r: float) -> onnx.ModelProto:
    body = f"xq = QuantizeLinear(x, s, z) a = DequantizeLinear(xq, s, z) b = DequantizeLinear<axis=1>(w, t) {ENDS[end]}"
    text = f'<ir_version: 10, opset_import: ["": 21]> g (float[{ROWS},{DEPTH}] x) => (float[{ROWS},{COLUMNS}] y) {{ {body} }}'
    found, random = parser.parse_model(text), np.random.default_rng(4)
    arrays: dict[str, np.ndarray] = {
        "w": random.integers(-127, 128, (DEPTH, COLUMNS)).astype(np.int8),
        "s": np.array(s, np.float32),
        "z": np.array(131, np.uint8),
        "t": np.array(t * (1 + np.arange(COLUMNS) % 3), np.float32),
        "r": np.array(r, np.float32),
        "c": np.array(100, np.uint8),
    }
    found.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    return found


@pytest.mark.parametrize("target", ["cpu", "cpu:avx2"])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(
    ("s", "t", "r"),
    [
        (1.0, 0.01, 5.0),  # the scales of weights got lost where the activations' is one
        (1.0, 1e-44, 1e-40),
        (1.0, 0.0, 1.0),
        (0.5, 1.0, 90.0),
        (1e-20, 1e-22, 1e-40),  # products of scales are subnormal
        (1e-20, 1e-18, 1e-36),
        (1e20, 1e10, 1e33),
        (1e-38, 1e30, 1e-6),  # quotients of scales overflow
    ],
)
def test_scales_of_any_size(s: float, t: float, r: float, end: str, target: str) -> None:
    source = model(end, s, t, r)
    arrays = {one.name: numpy_helper.to_array(one).astype(np.float64) for one in source.graph.initializer}
    steps = np.random.default_rng(5).integers(0, 256, (ROWS, DEPTH)) - 131
    x = (steps * arrays["s"]).astype(np.float32)
    net = prefuse.compile(source, target=target, cache=False, threads=1)
    assert isinstance(net, CompiledModel)
    y = np.asarray(net(x)).astype(np.float64)
    exact = steps @ arrays["w"] * (arrays["s"] * arrays["t"]) * (2 if end == "Gemm" else 1)
    if end != "quantized":
        assert np.abs(y - exact).max() <= 1e-6 * np.abs(exact).max() + 1e-44
        return
    found, wanted = np.rint(y / arrays["r"]), np.clip(np.rint(exact / arrays["r"]), -100, 155)
    assert np.ptp(wanted) > 20 or t == 0
    assert np.abs(found - wanted).max() <= 1  # sums of float32 may lie on the other side of half a step
    assert (found == wanted).mean() > 0.98


@pytest.mark.parametrize("s", [1.0, 0.25])
def test_convolutions_of_pixels(s: float) -> None:
    """Images of bytes have a scale of one."""
    text = (
        '<ir_version: 10, opset_import: ["": 21]> g (uint8[1,16,9,9] x) => (y)'
        "{ a = DequantizeLinear(x, s, z) b = DequantizeLinear<axis=0>(w, t) y = Conv(a, b) }"
    )
    source, random = parser.parse_model(text), np.random.default_rng(6)
    w, t = random.integers(-127, 128, (32, 16, 3, 3)).astype(np.int8), random.random(32).astype(np.float32)
    arrays: dict[str, np.ndarray] = {"s": np.array(s, np.float32), "z": np.array(0, np.uint8), "w": w, "t": t}
    source.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    x = random.integers(0, 256, (1, 16, 9, 9)).astype(np.uint8)
    net = prefuse.compile(source, cache=False, threads=1)
    assert isinstance(net, CompiledModel)
    windows = np.lib.stride_tricks.sliding_window_view(x.astype(np.float64), (3, 3), (2, 3))
    exact = np.einsum("nchwij,ocij->nohw", windows, w * t.astype(np.float64).reshape(-1, 1, 1, 1)) * s
    assert np.abs(np.asarray(net(x)) - exact).max() <= 1e-6 * np.abs(exact).max()
