"""Quantized models as other tools write them, honoured as given: every value that they round is within a step of ONNX Runtime's
without graph optimizations.

NNCF leaves weights in float32 behind QuantizeLinear, with an axis; ModelOpt has signed activations without zero points, and since
opset 21 their type as an attribute; both share scales and zero points between nodes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import prefuse
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from prefuse.runtime.target import Target

X = np.random.default_rng(2).standard_normal((2, 8, 10, 10)).astype(np.float32)


class _Writer:
    """Nodes and constants of a model that is quantized by hand."""

    def __init__(self, opset: int, activations: type[np.generic], *, has_zeros: bool, keeps_float_weights: bool) -> None:
        self.opset = opset
        self.dtype = np.dtype(activations)
        self.has_zeros = has_zeros
        self.keeps_float_weights = keeps_float_weights
        self.nodes: list[onnx.NodeProto] = []
        self.arrays: dict[str, np.ndarray] = {}
        self.random = np.random.default_rng(3)

    def constant(self, name: str, array: np.ndarray) -> str:
        self.arrays[name] = array
        return name

    def op(self, op_type: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op_type, inputs, [output], **attributes))
        return output

    def rounded(self, name: str, scale: float, zero: int, shared: str = "") -> str:
        """A value behind QuantizeLinear and DequantizeLinear; `shared` names the scale and zero point of another one."""
        stem = shared or name
        operands = [f"{stem}_s"]
        self.constant(operands[0], np.array(scale, np.float32))
        extra: dict[str, Any] = {}
        if self.has_zeros:
            operands.append(self.constant(f"{stem}_z", np.array(zero, self.dtype)))
        elif self.dtype == np.int8:
            extra["output_dtype"] = TensorProto.INT8
        self.op("QuantizeLinear", [name, *operands], f"{name}_q", **extra)
        return self.op("DequantizeLinear", [f"{name}_q", *operands], f"{name}_dq")

    def weights(self, name: str, shape: tuple[int, ...], axis: int, largest: int = 127) -> str:
        array = (self.random.standard_normal(shape) * 0.2).astype(np.float32)
        others = tuple(d for d in range(len(shape)) if d != axis)
        scales = np.abs(array).max(others) / np.float32(largest)
        operands = [self.constant(f"{name}_s", scales)]
        if self.has_zeros:
            operands.append(self.constant(f"{name}_z", np.zeros(scales.shape, np.int8)))
        place = [-1 if d == axis else 1 for d in range(len(shape))]
        numbers = np.rint(array / scales.reshape(place)).astype(np.int8)
        if self.keeps_float_weights:
            self.constant(name, array)
            extra = {} if self.has_zeros else {"output_dtype": TensorProto.INT8}
            self.op("QuantizeLinear", [name, *operands], f"{name}_q", axis=axis, **extra)
        else:
            self.constant(f"{name}_q", numbers)
        return self.op("DequantizeLinear", [f"{name}_q", *operands], f"{name}_dq", axis=axis)

    def bias(self, name: str, weights: str, scale: float) -> str:
        """An int32 bias of the scales' product."""
        product = (self.arrays[f"{weights}_s"] * np.float32(scale)).astype(np.float32)
        numbers = np.rint(self.random.standard_normal(product.shape) * 0.3 / product).astype(np.int32)
        operands = [self.constant(f"{name}_q", numbers), self.constant(f"{name}_s", product)]
        return self.op("DequantizeLinear", operands, f"{name}_dq", axis=0)

    def model(self, result: str, shape: tuple[int, ...]) -> onnx.ModelProto:
        """With all that QuantizeLinear rounds of activations as outputs, too."""
        kind = TensorProto.UINT8 if self.dtype == np.uint8 else TensorProto.INT8
        rounded = [node.output[0] for node in self.nodes if node.op_type == "QuantizeLinear" and node.input[0] not in self.arrays]
        outputs = [helper.make_tensor_value_info(name, kind, None) for name in rounded]
        graph = helper.make_graph(
            self.nodes,
            "main",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
            [helper.make_tensor_value_info(result, TensorProto.FLOAT, None), *outputs],
            [numpy_helper.from_array(array, name) for name, array in self.arrays.items()],
        )
        inferred = onnx.shape_inference.infer_shapes(
            helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=9)
        )
        return inferred


def _residual(w: _Writer) -> onnx.ModelProto:
    """Rounded around everything: Conv, Relu, MaxPool, both operands of an Add, Transpose, Reshape and Gemm."""
    zero = 128 if w.dtype == np.uint8 else 0
    first = 0 if w.dtype == np.uint8 else -128 if w.has_zeros else 0
    x = w.rounded("x", 0.03, zero)
    w.op("Conv", [x, w.weights("w1", (8, 8, 3, 3), 0), w.bias("b1", "w1", 0.03)], "c1", pads=[1, 1, 1, 1])
    w.op("Relu", [w.rounded("c1", 0.05, zero)], "r1")
    w.op("MaxPool", [w.rounded("r1", 0.02, first)], "p1", kernel_shape=[2, 2], strides=[2, 2])
    p1 = w.rounded("p1", 0.02, first, "r1")
    w.op("Conv", [p1, w.weights("w2", (8, 8, 1, 1), 0)], "c2")
    w.op("Add", [w.rounded("c2", 0.04, zero), p1], "s")
    w.op("Transpose", [w.rounded("s", 0.05, zero)], "t", perm=[0, 2, 3, 1])
    w.constant("shape", np.array([2, 200], np.int64))
    w.op("Reshape", [w.rounded("t", 0.05, zero, "s"), "shape"], "f")
    f = w.rounded("f", 0.05, zero, "s")
    w.op("Gemm", [f, w.weights("w3", (12, 200), 0), w.bias("b3", "w3", 0.05)], "g", transB=1)
    return w.model(w.rounded("g", 0.1, zero), X.shape)


def _of_onnxruntime(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    results = onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, inputs)
    return dict(zip([value.name for value in model.graph.output], results, strict=True))


def _check(model: onnx.ModelProto, inputs: dict[str, np.ndarray], share: float = 0.999, equal: float = 0.9) -> None:
    """Of each value at least `share` of the elements are within one step, of what rounds it last, and `equal` are the same."""
    expected = _of_onnxruntime(model, inputs)
    found = prefuse.compile(model, cache=False, threads=2)(**inputs)
    for (name, b), a in zip(expected.items(), found if isinstance(found, tuple) else (found,), strict=True):
        assert a.dtype == b.dtype
        step = 1.0 if a.dtype.kind in "iu" else _step(model, name)
        steps = np.abs(a.astype(np.float64) - b) / step
        assert np.ptp(b.astype(np.float64)) > 20 * step, f"{name} is saturated"
        assert (steps < 1.001).mean() >= share, f"{name}: {steps.max()} steps"
        assert (steps < 0.001).mean() >= equal, name


def _step(model: onnx.ModelProto, name: str) -> float:
    """The scale by which an output is dequantized."""
    (node,) = (node for node in model.graph.node if name in node.output)
    assert node.op_type == "DequantizeLinear"
    (scale,) = (numpy_helper.to_array(tensor) for tensor in model.graph.initializer if tensor.name == node.input[1])
    return float(scale)


def _cut(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model in which every rounded value is an input of those that read it, so that what one rounds otherwise at a tie
    moves no other."""
    cut = onnx.ModelProto()
    cut.CopyFrom(model)
    rounded = {value.name: value.type.tensor_type.elem_type for value in model.graph.output if "QuantizeLinear" in value.name}
    for node in cut.graph.node:
        node.input[:] = [f"{name}_given" if name in rounded else name for name in node.input]
    cut.graph.input.extend(helper.make_tensor_value_info(f"{name}_given", kind, None) for name, kind in rounded.items())
    return cut


@pytest.mark.parametrize(
    ("opset", "activations", "has_zeros", "keeps_float_weights"),
    [
        (13, np.uint8, True, True),  # NNCF
        (13, np.int8, True, False),  # ONNX Runtime, signed
        (19, np.int8, True, True),  # ModelOpt
        (21, np.int8, False, False),
        (21, np.int8, False, True),
    ],
)
def test_rounded_by_hand(opset: int, activations: type[np.generic], has_zeros: bool, keeps_float_weights: bool) -> None:
    _check(_residual(_Writer(opset, activations, has_zeros=has_zeros, keeps_float_weights=keeps_float_weights)), {"x": X})


class _Samples(CalibrationDataReader):  # type: ignore[misc]  # onnxruntime has no type stubs
    def __init__(self) -> None:
        generator = np.random.default_rng(1)
        self._samples = iter([{"x": generator.standard_normal(X.shape).astype(np.float32)} for _ in range(4)])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._samples, None)


def _float_model() -> onnx.ModelProto:
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["c1"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c1"], ["r1"]),
        helper.make_node("AveragePool", ["r1"], ["p1"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Conv", ["p1", "w2"], ["c2"]),
        helper.make_node("Add", ["c2", "p1"], ["s"]),
        helper.make_node("Transpose", ["s"], ["t"], perm=[0, 2, 3, 1]),
        helper.make_node("MatMul", ["t", "w3"], ["m"]),
        helper.make_node("Reshape", ["m", "shape"], ["f"]),
        helper.make_node("Gemm", ["f", "w4", "b4"], ["y"]),
    ]
    generator = np.random.default_rng(0)
    shapes = {"w1": (8, 8, 3, 3), "b1": (8,), "w2": (8, 8, 1, 1), "w3": (8, 12), "w4": (300, 6), "b4": (6,)}
    arrays = {name: (generator.standard_normal(shape) * 0.3).astype(np.float32) for name, shape in shapes.items()}
    arrays["shape"] = np.array([2, 300], np.int64)
    graph = helper.make_graph(
        nodes,
        "main",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, X.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 6])],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


_OPTIONS: list[dict[str, Any]] = [
    {"ForceQuantizeNoInputCheck": True},
    {"ActivationSymmetric": True, "DedicatedQDQPair": True},
    {"QuantizeBias": False, "AddQDQPairToWeight": True},
]


@pytest.mark.parametrize("extra", _OPTIONS, ids=lambda extra: "+".join(extra))
@pytest.mark.parametrize("activations", ["QUInt8", "QInt8"])
def test_options_of_onnxruntime(activations: str, extra: dict[str, Any], tmp_path: Path) -> None:
    onnx.save(_float_model(), tmp_path / "float.onnx")
    quantize_static(
        tmp_path / "float.onnx",
        tmp_path / "quantized.onnx",
        _Samples(),
        quant_format=QuantFormat.QDQ,
        activation_type=QuantType[activations],
        weight_type=QuantType.QInt8,
        per_channel=True,
        extra_options=extra,
    )
    model = onnx.load(tmp_path / "quantized.onnx")
    kind = TensorProto.UINT8 if activations == "QUInt8" else TensorProto.INT8
    constants = {tensor.name for tensor in model.graph.initializer}
    rounded = [node.output[0] for node in model.graph.node if node.op_type == "QuantizeLinear" and node.input[0] not in constants]
    model.graph.output.extend(helper.make_tensor_value_info(name, kind, None) for name in rounded)
    # Quotients of a mean of four numbers lie halfway between two steps often, and where ONNX Runtime's rounding of the last bit
    # decides, the residual sum adds up two such steps: 2% of the whole program may be two steps off, nothing of any one value.
    _check(model, {"x": X}, share=0.98, equal=0.5)
    values = _of_onnxruntime(model, {"x": X})
    cut = _cut(model)
    given = {value.name: values[value.name.removesuffix("_given")] for value in cut.graph.input[1:]}
    assert len(given) >= 6
    _check(cut, {"x": X, **given}, share=1.0)


@pytest.mark.parametrize("target", ["cpu", "cpu:avx2", "cpu:avx512"])
def test_what_is_not_finite(target: str) -> None:
    """Infinities saturate, and NaN is the least number of uint8, in vectors and behind them."""
    if Target.parse(target).missing_features():
        pytest.skip("this CPU has no such instructions")
    nodes = [helper.make_node("Neg", ["x"], ["n"]), helper.make_node("QuantizeLinear", ["n", "s", "z"], ["y"])]
    graph = helper.make_graph(
        nodes,
        "main",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [37])],
        [helper.make_tensor_value_info("y", TensorProto.UINT8, [37])],
        [numpy_helper.from_array(np.array(0.1, np.float32), "s"), numpy_helper.from_array(np.array(7, np.uint8), "z")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    x = np.linspace(-1, 1, 37, dtype=np.float32)
    finite = prefuse.compile(model, cache=False, target=target)
    expected = np.asarray(finite(x)).copy()
    for place in (0, 5, 31, 36):
        for number, result in ((np.nan, 0), (np.inf, 0), (-np.inf, 255)):
            x[place], before = number, x[place]
            found = np.asarray(finite(x))
            assert found[place] == result
            assert np.array_equal(np.delete(found, place), np.delete(expected, place))
            x[place] = before
