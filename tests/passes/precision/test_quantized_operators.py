"""QLinearConv, QLinearMatMul, MatMulInteger and DynamicQuantizeLinear by kernels of integers, compared with ONNX Runtime."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import onnx
import onnxruntime
import prefuse
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.target import Target

rng = np.random.default_rng(5)
TARGETS = ("cpu", "cpu:avx2")
Arrays = dict[str, np.ndarray]


def model_of(nodes: list[onnx.NodeProto], inputs: Arrays, constants: Arrays, outputs: tuple[str, ...]) -> onnx.ModelProto:
    kinds = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in inputs.items()}
    graph = helper.make_graph(
        nodes,
        "main",
        [helper.make_tensor_value_info(name, kinds[name], array.shape) for name, array in inputs.items()],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def unoptimized(model: onnx.ModelProto, inputs: Arrays) -> list[np.ndarray]:
    """What ONNX Runtime computes node by node."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [np.asarray(array) for array in session.run(None, inputs)]


def by_specification(model: onnx.ModelProto, inputs: Arrays) -> list[np.ndarray]:
    """By ONNX's own implementation: without VNNI, ONNX Runtime's sums of uint8 by int8 saturate."""
    return [np.asarray(array) for array in cast(list[Any], ReferenceEvaluator(model).run(None, inputs))]


def compiled(model: onnx.ModelProto, target: str) -> CompiledModel:
    net = prefuse.compile(model, cache=False, threads=2, target=target)
    assert isinstance(net, CompiledModel)
    return net


def results(net: CompiledModel, inputs: Arrays) -> list[np.ndarray]:
    found = net(**inputs)
    return [
        np.asarray(one)
        for one in (found.values() if isinstance(found, dict) else found if isinstance(found, tuple) else (found,))
    ]


def constant_bytes(net: CompiledModel) -> int:
    return sum(buffer.size_bytes for buffer in net.plan.buffers if buffer.space in ("constants", "shared"))


def parameters(prefix: str, weights: np.ndarray, zeros: np.ndarray, scale: float, zero: int) -> Arrays:
    """Of a QLinearConv: scales and zero points of weights and result, and a bias."""
    channels = weights.shape[0]
    scales = (0.004 + 0.004 * rng.random(zeros.shape)).astype(np.float32)
    bias = rng.integers(-3000, 3000, channels, np.int32)
    parts = {"w": weights, "t": scales, "n": zeros, "r": np.array(scale, np.float32), "q": np.array(zero, np.uint8), "b": bias}
    return {prefix + name: array for name, array in parts.items()}


def test_convolutions() -> None:
    """A first layer of 3 channels with unsigned weights, a layer of 16, a depthwise one: bytes that are all equal."""
    x = rng.integers(0, 256, (1, 3, 21, 19), np.uint8)
    weights = [
        rng.integers(0, 256, (16, 3, 7, 7), np.uint8),
        rng.integers(-128, 128, (24, 16, 3, 3), np.int8),
        rng.integers(-128, 128, (24, 1, 3, 3), np.int8),
    ]
    signed = np.zeros(24, np.int8)
    layers: list[tuple[str, str, Arrays, dict[str, Any]]] = [
        ("x", "f", parameters("f", weights[0], np.array(117, np.uint8), 0.35, 131), {"pads": [3] * 4, "strides": [2, 2]}),
        ("f", "g", parameters("g", weights[1], signed, 0.9, 99), {"pads": [1] * 4}),
        ("g", "h", parameters("h", weights[2], signed, 0.7, 118), {"group": 24}),
    ]
    constants: Arrays = {"xr": np.array(0.02, np.float32), "xq": np.array(126, np.uint8)}
    nodes = []
    for source, name, arrays, attributes in layers:
        constants |= arrays
        rest = [f"{name}{part}" for part in "wtnrqb"]
        nodes.append(helper.make_node("QLinearConv", [source, f"{source}r", f"{source}q", *rest], [name], **attributes))
    model = model_of(nodes, {"x": x}, constants, ("f", "g", "h"))
    expected = by_specification(model, {"x": x})
    for target in TARGETS:
        net = compiled(model, target)
        for found, wanted in zip(results(net, {"x": x}), expected, strict=True):
            assert np.ptp(wanted) > 100
            assert np.array_equal(found, wanted)
        sizes = [array.nbytes for name, array in constants.items() if name.endswith("w")]
        # Panels of few channels are mostly padding, those of tiles, 64 bytes deep and 32 wide, above all.
        assert constant_bytes(net) < (3 if Target.parse(target).has_tiles else 2) * sum(sizes) + 8192


def test_matrices() -> None:
    """Sums of rows stand in for zero points of weights, per tensor and per column, and sums as int32 stay what they are."""
    a = rng.integers(-128, 128, (2, 9, 30), np.int8)
    w, zeros = rng.integers(0, 256, (30, 21), np.uint8), rng.integers(0, 256, 21, np.uint8)
    constants: Arrays = {
        "s": np.array(0.01, np.float32), "z": np.array(-5, np.int8), "w": w, "n": zeros, "m": np.array(3, np.uint8),
        "t": (0.01 + 0.01 * rng.random(21)).astype(np.float32), "r": np.array(0.2, np.float32), "q": np.array(7, np.int8),
        "v": rng.integers(-128, 128, (30, 21), np.int8), "c": rng.integers(-99999, 99999, 21, np.int32),
        "bias": rng.integers(-20000, 20000, 21, np.int32), "one": np.zeros(21, np.int8),
    }  # fmt: skip
    nodes = [
        helper.make_node("QLinearMatMul", ["a", "s", "z", "v", "t", "one", "r", "q"], ["y"]),
        helper.make_node("MatMulInteger", ["a", "w", "z", "n"], ["i"]),
        helper.make_node("MatMulInteger", ["a", "w", "z", "m"], ["j"]),
        helper.make_node("Cast", ["j"], ["f"], to=onnx.TensorProto.FLOAT),
        helper.make_node("MatMulInteger", ["a", "v", "z"], ["k"]),
        helper.make_node("Add", ["k", "c"], ["l"]),
    ]
    model = model_of(nodes, {"a": a}, constants, ("y", "i", "f", "l"))
    centred = a.astype(np.int64) + 5
    for target in TARGETS:
        y, i, f, last = results(compiled(model, target), {"a": a})
        assert np.array_equal(y, unoptimized(model_of(nodes[:1], {"a": a}, constants, ("y",)), {"a": a})[0])
        assert np.array_equal(i, centred @ (w.astype(np.int64) - zeros))
        assert np.array_equal(f, centred @ (w.astype(np.int64) - 3))
        assert np.array_equal(last, centred @ constants["v"].astype(np.int64) + constants["c"])


@pytest.mark.parametrize("is_signed", [False, True])
def test_qgemm(is_signed: bool) -> None:
    """com.microsoft's QGemm, its bias in the sums, quantized."""
    dtype = np.int8 if is_signed else np.uint8
    a = rng.integers(0, 100, (9, 24)).astype(dtype)
    constants: Arrays = {
        "s": np.array(0.01, np.float32), "z": np.array(11, dtype), "w": rng.integers(-128, 128, (21, 24), np.int8),
        "t": (0.01 + 0.01 * rng.random(21)).astype(np.float32), "n": np.zeros(21, np.int8),
        "c": rng.integers(-9999, 9999, 21, np.int32), "r": np.array(0.1, np.float32), "q": np.array(60, dtype),
    }  # fmt: skip
    node = helper.make_node(
        "QGemm", ["a", "s", "z", "w", "t", "n", "c", "r", "q"], ["y"], domain="com.microsoft", transB=1, alpha=1.0
    )
    model = model_of([node], {"a": a}, constants, ("y",))
    (expected,) = unoptimized(model, {"a": a})
    net = compiled(model, "cpu")
    (found,) = results(net, {"a": a})
    assert np.ptp(expected.astype(np.int32)) > 50
    assert np.array_equal(found, expected)
    assert [kernel.template for kernel in net.plan.kernels] == ["matmul"]


def test_dynamic_quantization() -> None:
    """The range by rows, what is found of all rows, the rounding, and the product: four kernels, the bytes as ONNX Runtime's."""
    x = rng.standard_normal((1, 40, 96)).astype(np.float32)
    w = rng.integers(-128, 128, (96, 50), np.int8)
    constants: Arrays = {"w": w, "t": (0.01 + 0.01 * rng.random(50)).astype(np.float32)}
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["a", "s", "z"]),
        helper.make_node("MatMulInteger", ["a", "w", "z"], ["i"]),
        helper.make_node("Cast", ["i"], ["f"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Mul", ["s", "t"], ["st"]),
        helper.make_node("Mul", ["f", "st"], ["y"]),
    ]
    alone = compiled(model_of(nodes, {"x": x}, constants, ("y",)), "cpu")
    templates = [kernel.template for kernel in alone.plan.kernels]
    assert templates[:3] + templates[-1:] == ["rows", "rows", "elementwise", "matmul"]
    assert len(templates) <= 5  # vectors of eight take longer to multiply the scales again for each row than a kernel does once
    model = model_of(nodes, {"x": x}, constants, ("y", "a", "s", "z"))
    for target in TARGETS:
        net = compiled(model, target)
        for inputs in ({"x": x}, {"x": 0 * x}, {"x": np.abs(x) + 1}, {"x": -np.abs(x)}):
            y, a, s, z = results(net, inputs)
            expected = unoptimized(model, inputs)
            assert np.array_equal(a, expected[1])
            assert s == expected[2]
            assert z == expected[3]
            np.testing.assert_allclose(y, by_specification(model, inputs)[0], rtol=1e-6, atol=1e-6)


def test_residuals_stay_bytes() -> None:
    """What two convolutions and a sum read is stored once, in 8 bits; the image that is pooled is never float."""
    x = rng.standard_normal((1, 3, 36, 36)).astype(np.float32)
    constants: Arrays = {
        "s": np.array(0.05, np.float32), "z": np.array(3, np.uint8), "u": np.array(0.0021371, np.float32),
        "m": np.zeros((), np.int8), "v": rng.integers(-128, 128, (32, 3, 3, 3), np.int8),
        "w": rng.integers(-128, 128, (32, 32, 1, 1), np.int8),
    }  # fmt: skip

    def quantize(name: str) -> list[onnx.NodeProto]:
        return [
            helper.make_node("QuantizeLinear", [name, "s", "z"], [f"{name}q"]),
            helper.make_node("DequantizeLinear", [f"{name}q", "s", "z"], [f"{name}d"]),
        ]

    nodes = [
        *quantize("x"),
        helper.make_node("DequantizeLinear", ["v", "u", "m"], ["vd"]),
        helper.make_node("DequantizeLinear", ["w", "u", "m"], ["wd"]),
        helper.make_node("Conv", ["xd", "vd"], ["c"], pads=[1] * 4),
        helper.make_node("Relu", ["c"], ["d"]),
        *quantize("d"),
        helper.make_node("MaxPool", ["dd"], ["p"], kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4),
        *quantize("p"),
        helper.make_node("Conv", ["pd", "wd"], ["e"]),
        helper.make_node("Relu", ["e"], ["f"]),
        *quantize("f"),
        helper.make_node("Conv", ["fd", "wd"], ["g"]),
        helper.make_node("Add", ["g", "pd"], ["h"]),
        *quantize("h"),
    ]
    model = model_of(nodes, {"x": x}, constants, ("hd",))
    net = compiled(model, "cpu")
    wide = [b for b in net.plan.buffers if b.space == "arena" and b.size_bytes > 32 * 36 * 36 * 1.2]
    assert not wide, [(b.name, b.size_bytes) for b in wide]
    templates = [kernel.template for kernel in net.plan.kernels]
    assert sorted(templates) == ["convolution_channels_last"] * 3 + ["elementwise", "injective", "pooling_channels_last"]
    (found,), (expected,) = results(net, {"x": x}), unoptimized(model, {"x": x})
    steps = np.abs(np.rint((found - expected) / 0.05))
    assert np.ptp(expected) > 2
    assert steps.max() <= 1
    assert (steps > 0).mean() < 1e-3


def test_dynamic_quantize_matmul() -> None:
    """com.microsoft's DynamicQuantizeMatMul, with unsigned weights and zero points of columns."""
    x = rng.standard_normal((7, 36)).astype(np.float32)
    constants: Arrays = {
        "w": rng.integers(0, 256, (36, 20), np.uint8), "t": (0.01 + 0.01 * rng.random(20)).astype(np.float32),
        "n": rng.integers(100, 140, 20).astype(np.uint8), "c": rng.standard_normal(20).astype(np.float32),
    }  # fmt: skip
    node = helper.make_node("DynamicQuantizeMatMul", ["x", "w", "t", "n", "c"], ["y"], domain="com.microsoft")
    model = model_of([node], {"x": x}, constants, ("y",))
    net = compiled(model, "cpu")
    (found,), (expected,) = results(net, {"x": x}), unoptimized(model, {"x": x})
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert constant_bytes(net) < 3 * constants["w"].nbytes + 4096


@pytest.mark.parametrize(("shape", "kernel"), [((2, 3, 41), (5,)), ((1, 3, 6, 7, 8), (3, 2, 3))])
def test_signals_and_volumes(shape: tuple[int, ...], kernel: tuple[int, ...]) -> None:
    """Three channels, whose taps along the last dimension are words."""
    x, weights = rng.integers(-128, 128, shape, np.int8), rng.integers(-128, 128, (20, 3, *kernel), np.int8)
    constants: Arrays = {"s": np.array(0.02, np.float32), "z": np.array(-7, np.int8)}
    constants |= {"w": weights, "n": np.zeros((), np.int8), "t": np.array(0.01, np.float32)}
    constants |= {"r": np.array(0.23, np.float32), "q": np.array(5, np.int8)}
    node = helper.make_node("QLinearConv", ["x", "s", "z", "w", "t", "n", "r", "q"], ["y"], pads=[1] * (2 * len(kernel)))
    model = model_of([node], {"x": x}, constants, ("y",))
    (expected,) = unoptimized(model, {"x": x})
    for target in TARGETS:
        (found,) = results(compiled(model, target), {"x": x})
        assert np.ptp(expected.astype(np.int32)) > 100
        assert np.array_equal(found, expected)


def test_vectors() -> None:
    """Weights that are no matrix have no columns; a row of activations is one."""
    a, b = rng.integers(0, 256, (5, 24), np.uint8), rng.integers(0, 256, 24, np.uint8)
    constants: Arrays = {
        "v": b,
        "n": np.array(99, np.uint8),
        "w": rng.integers(0, 256, (24, 9), np.uint8),
        "z": np.array(3, np.uint8),
    }
    nodes = [
        helper.make_node("MatMulInteger", ["a", "v", "z", "n"], ["y"]),
        helper.make_node("MatMulInteger", ["b", "w", "z", "n"], ["x"]),
    ]
    y, x = results(compiled(model_of(nodes, {"a": a, "b": b}, constants, ("y", "x")), "cpu"), {"a": a, "b": b})
    assert np.array_equal(y, (a.astype(np.int64) - 3) @ (b.astype(np.int64) - 99))
    assert np.array_equal(x, (b.astype(np.int64) - 3) @ (constants["w"].astype(np.int64) - 99))
