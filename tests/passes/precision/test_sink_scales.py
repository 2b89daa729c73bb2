"""Quantized models by kernels of integers: what becomes one kernel, in how many bytes, and the numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import prefuse
import pytest
from onnx import helper, numpy_helper
from prefuse.runtime.executor import CompiledModel

rng = np.random.default_rng(17)


def quantized(shape: tuple[int, ...], weights: np.ndarray, op: str, zero: int, dtype: str = "uint8") -> onnx.ModelProto:
    """y = Q(relu(op(DQ(Q(x)), DQ(w)) + bias)), weights with a scale for each output channel."""
    axis = 0 if op == "Conv" else 1
    channels = weights.shape[axis]
    pads: dict[str, Any] = {"pads": [1] * 4} if op == "Conv" else {}
    bias = rng.standard_normal((channels,)).astype(np.float32)
    arrays = {
        "w": weights,
        "t": (0.01 + rng.random((channels,)) * 0.01).astype(np.float32),
        "s": np.array(0.02, np.float32),
        "z": np.array(zero, dtype),
        "r": np.array(0.05, np.float32),
        "q": np.array(3, np.uint8),
        "bias": bias.reshape(-1, *[1] * (len(shape) - 2)) if op == "Conv" else bias,
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "s", "z"], ["a"]),
        helper.make_node("DequantizeLinear", ["w", "t"], ["b"], axis=axis),
        helper.make_node(op, ["a", "b"], ["p"], **pads),
        helper.make_node("Add", ["p", "bias"], ["c"]),
        helper.make_node("Relu", ["c"], ["e"]),
        helper.make_node("QuantizeLinear", ["e", "r", "q"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "main",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)],
        [helper.make_empty_tensor_value_info("y")],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


_PRODUCTS = ("matmul", "matmul_tiles", "convolution_channels_last", "convolution_tiles")


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("op", ["MatMul", "Conv"])
def test_one_kernel_of_integers(op: str, dtype: str) -> None:
    """The product, its scales, bias, activation and rounding are one kernel, and its weights 8 bits."""
    shape, size = ((2, 37, 129), (129, 70)) if op == "MatMul" else ((2, 32, 11, 13), (48, 32, 3, 3))
    weights = rng.integers(-128, 128, size, np.int8)
    model = quantized(shape, weights, op, 119 if dtype == "uint8" else -9, dtype)
    net = prefuse.compile(model, cache=False, threads=2)
    assert isinstance(net, CompiledModel)
    products = [kernel for kernel in net.plan.kernels if kernel.template in _PRODUCTS]
    assert len(products) == 1
    assert "quant" not in {kernel.template for kernel in net.plan.kernels}
    constants = sum(buffer.size_bytes for buffer in net.plan.buffers if buffer.space in ("constants", "shared"))
    assert constants < 2 * weights.nbytes + 4096  # panels are filled up to whole tiles, 64 deep and 32 wide on AMX; floats take 4
    x = rng.standard_normal(shape).astype(np.float32)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    (expected,) = onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, {"x": x})
    found = np.asarray(net(x))
    steps = np.abs(found.astype(np.int32) - expected)
    assert found.dtype == np.uint8
    assert np.ptp(expected) > 20  # it is not all saturated
    assert steps.max() <= 1
    assert steps.mean() < 1e-3  # at ties only
    assert np.array_equal(found, np.asarray(net(x)))


def test_sums_beyond_24_bits_are_exact() -> None:
    """Of 5,000 products that are all as large as can be, which float32 sums would round."""
    a, w = np.full((3, 5000), 255, np.uint8), np.full((5000, 16), -128, np.int8)
    w[0] = 127
    nodes = [
        helper.make_node("MatMulInteger", ["a", "w", "z"], ["i"]),
        helper.make_node("Cast", ["i"], ["y"], to=onnx.TensorProto.FLOAT),
    ]
    graph = helper.make_graph(
        nodes,
        "main",
        [helper.make_tensor_value_info("a", onnx.TensorProto.UINT8, a.shape)],
        [helper.make_empty_tensor_value_info("y")],
        [numpy_helper.from_array(w, "w"), numpy_helper.from_array(np.array(1, np.uint8), "z")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    exact = (a.astype(np.int64) - 1) @ w.astype(np.int64)
    assert (np.abs(exact) > 2**24).all()
    assert np.array_equal(np.asarray(prefuse.compile(model, cache=False)(a)), exact.astype(np.float32))


@pytest.mark.parametrize(("dtype", "least", "zero"), [("uint8", 0, 0), ("int8", 100, 110)])
def test_parts_of_sums_beyond_24_bits_are_exact(dtype: str, least: int, zero: int) -> None:
    """Sums of small differences from a zero point, each the difference of two large sums, one of them odd."""
    w = rng.integers(least, least + 11, (1000, 8)).astype(dtype)
    a = rng.integers(200, 256, (4, 1000)).astype(np.uint8)
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["a", "w", "", "z"], ["y"])],
        "main",
        [helper.make_tensor_value_info("a", onnx.TensorProto.UINT8, a.shape)],
        [helper.make_empty_tensor_value_info("y")],
        [numpy_helper.from_array(w, "w"), numpy_helper.from_array(np.array(zero, dtype), "z")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    exact = a.astype(np.int64) @ (w.astype(np.int64) - zero)
    assert np.abs(exact).max() < 2**24
    assert np.array_equal(np.asarray(prefuse.compile(model, cache=False)(a)), exact)
