"""Models from ONNX Runtime's quantizers, compiled as they are written, against ONNX Runtime without its graph optimizations.

Sums of integers are exact in both, and so is what is rounded from them; where floating-point sums are rounded to 16 bits, or feed
a range that is found at run time, their own rounding may show in the last place.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import onnx
import onnxruntime
import prefuse
import pytest
from onnx import helper, numpy_helper
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    matmul_nbits_quantizer,
    quantize_dynamic,
    quantize_static,
)

_WIDTH = 32


class _Samples(CalibrationDataReader):  # type: ignore[misc]  # onnxruntime has no type stubs
    def __init__(self, shape: tuple[int, ...]) -> None:
        generator = np.random.default_rng(1)
        self._samples = iter([{"x": generator.standard_normal(shape).astype(np.float32)} for _ in range(4)])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._samples, None)


Shape: TypeAlias = Sequence[int | str]


def _model(nodes: list[onnx.NodeProto], x: Shape, y: Shape, weights: dict[str, tuple[int, ...]]) -> onnx.ModelProto:
    generator = np.random.default_rng(0)
    arrays = {name: (generator.standard_normal(shape) * 0.3).astype(np.float32) for name, shape in weights.items()}
    graph = helper.make_graph(
        nodes,
        "main",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, x)],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, y)],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def convolutions(height: int | str = 12, width: int | str = 12) -> onnx.ModelProto:
    """A residual network: dense and grouped convolutions, pools, a sum and a classifier."""
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["c1"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c1"], ["r1"]),
        helper.make_node("MaxPool", ["r1"], ["p1"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Conv", ["p1", "w2", "b2"], ["c2"], pads=[1, 1, 1, 1], group=2),
        helper.make_node("Add", ["c2", "p1"], ["sum"]),
        helper.make_node("Relu", ["sum"], ["r2"]),
        helper.make_node("GlobalAveragePool", ["r2"], ["mean"]),
        helper.make_node("Flatten", ["mean"], ["flat"]),
        helper.make_node("Gemm", ["flat", "w3", "b3"], ["y"], transB=1),
    ]
    weights = {"w1": (8, 3, 3, 3), "b1": (8,), "w2": (8, 4, 3, 3), "b2": (8,), "w3": (5, 8), "b3": (5,)}
    return _model(nodes, [2, 3, height, width], [2, 5], weights)


def transformer(length: int | str = 7) -> onnx.ModelProto:
    """One head of attention and a gated feed-forward layer."""
    d = _WIDTH
    nodes = [
        *(helper.make_node("MatMul", ["x", f"w{name}"], [name]) for name in "qkv"),
        helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["q", "kt"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "v"], ["o"]),
        helper.make_node("Add", ["o", "x"], ["h"]),
        helper.make_node("LayerNormalization", ["h", "gain"], ["n"], axis=-1),
        helper.make_node("MatMul", ["n", "w1"], ["m1"]),
        helper.make_node("Add", ["m1", "b1"], ["m2"]),
        helper.make_node("Sigmoid", ["m2"], ["gate"]),
        helper.make_node("Mul", ["m2", "gate"], ["m3"]),
        helper.make_node("MatMul", ["m3", "w2"], ["y"]),
    ]
    weights = {**{f"w{name}": (d, d) for name in "qkv"}, "gain": (d,), "w1": (d, 4 * d), "b1": (4 * d,), "w2": (4 * d, d)}
    return _model(nodes, [2, length, d], [2, length, d], weights)


def unoptimized(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """ONNX Runtime without its graph optimizations."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


def _compared(model: onnx.ModelProto) -> tuple[np.ndarray, np.ndarray]:
    """What prefuse and ONNX Runtime compute."""
    shape = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    x = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    (expected,) = unoptimized(model).run(None, {"x": x})
    return np.asarray(prefuse.compile(model, cache=False)(x)), expected


def quantum(model: onnx.ModelProto) -> float:
    """The scale of the result."""
    last = next(node for node in model.graph.node if node.output[0] == "y")
    scale = next(tensor for tensor in model.graph.initializer if tensor.name == last.input[1])
    return float(numpy_helper.to_array(scale).max())


def quantized_statically(
    model: onnx.ModelProto, shape: tuple[int, ...], folder: Path, form: str, activations: str, weights: str, *, by_channel: bool
) -> onnx.ModelProto:
    """What ONNX Runtime's quantizer makes of a model, by samples of one shape."""
    onnx.save(model, folder / "float.onnx")
    quantize_static(
        folder / "float.onnx",
        folder / "quantized.onnx",
        _Samples(shape),
        quant_format=QuantFormat[form],
        activation_type=QuantType[activations],
        weight_type=QuantType[weights],
        per_channel=by_channel,
        reduce_range=weights == "QInt8",  # 7 bits: ONNX Runtime saturates sums of two products on CPUs without VNNI
    )
    return onnx.load(folder / "quantized.onnx")


_STATIC = [
    ("conv", "QDQ", "QUInt8", "QInt8", False),
    ("conv", "QDQ", "QInt8", "QInt8", True),
    ("conv", "QOperator", "QUInt8", "QInt8", True),
    ("conv", "QOperator", "QUInt8", "QUInt8", False),
    ("transformer", "QDQ", "QInt8", "QInt8", True),
    ("transformer", "QDQ", "QUInt16", "QInt16", False),
    ("transformer", "QOperator", "QUInt8", "QInt8", True),
]


@pytest.mark.parametrize(("name", "form", "activations", "weights", "by_channel"), _STATIC)
def test_static(name: str, form: str, activations: str, weights: str, by_channel: bool, tmp_path: Path) -> None:
    model = convolutions() if name == "conv" else transformer()
    shape = tuple(dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim)
    quantized = quantized_statically(model, shape, tmp_path, form, activations, weights, by_channel=by_channel)
    found, expected = _compared(quantized)
    quanta = np.abs(found - expected) / quantum(quantized)
    assert quanta.max() <= 1.001, f"{quanta.max()} quanta"
    assert (quanta > 0.001).mean() <= (0.05 if "16" in activations else 0.0)


@pytest.mark.parametrize(("name", "weights", "by_channel"), [("conv", "QUInt8", False), ("transformer", "QInt8", True)])
def test_dynamic(name: str, weights: str, by_channel: bool, tmp_path: Path) -> None:
    onnx.save(convolutions() if name == "conv" else transformer(), tmp_path / "float.onnx")
    how = {"weight_type": QuantType[weights], "per_channel": by_channel, "reduce_range": weights == "QInt8"}  # as above
    quantize_dynamic(tmp_path / "float.onnx", tmp_path / "quantized.onnx", **how)
    quantized = onnx.load(tmp_path / "quantized.onnx")
    assert {"DynamicQuantizeLinear", "MatMulInteger"} <= {node.op_type for node in quantized.graph.node}
    found, expected = _compared(quantized)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
def test_weights_of_4_bits_in_blocks(form: str, is_symmetric: bool) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w1"], ["a"]), helper.make_node("Relu", ["a"], ["b"])]
    nodes.append(helper.make_node("MatMul", ["b", "w2"], ["y"]))
    model = _model(nodes, [3, 64], [3, 40], {"w1": (64, 96), "w2": (96, 40)})
    config = matmul_nbits_quantizer.DefaultWeightOnlyQuantConfig(
        block_size=32, is_symmetric=is_symmetric, quant_format=QuantFormat[form], op_types_to_quantize=("MatMul",), bits=4
    )
    quantizer = matmul_nbits_quantizer.MatMulNBitsQuantizer(model, algo_config=config)
    quantizer.process()
    assert "MatMul" not in {node.op_type for node in quantizer.model.model.graph.node} or form == "QDQ"
    found, expected = _compared(quantizer.model.model)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("DequantizeLinear(x, one, three)", "DequantizeLinear(x, one, hundred)"),
        ("DequantizeLinear(x, one, three)", "Cast<to=1>(x)"),
        ("Cast<to=1>(x)", "DequantizeLinear(x, one, three)"),
    ],
)
def test_one_value_with_two_zero_points(a: str, b: str) -> None:
    """Kernels of products know an operand's zero point by its name."""
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        main (uint8[5,5] x) => (float[5,5] y) <float one = {{1}}, uint8 three = {{3}}, uint8 hundred = {{100}}> {{
            a = {a}
            b = {b}
            y = MatMul(a, b)
        }}""")
    x = np.random.default_rng(0).integers(0, 255, (5, 5)).astype(np.uint8)
    np.testing.assert_array_equal(prefuse.compile(model, cache=False)(x), unoptimized(model).run(None, {"x": x})[0])
