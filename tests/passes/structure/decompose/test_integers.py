"""Products of integers: exact sums against NumPy's in int64, and the choice of the type that they are made in."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.pipeline import Context, run_pipeline
from prefuse.passes.structure.canonicalize import Canonicalize
from prefuse.passes.structure.decompose import Decompose
from prefuse.runtime.target import Target

from .expanding import compiled, evaluate, expanded, one_node

_GENERATOR = np.random.default_rng(0)


def _integers(dtype: type, *shape: int) -> np.ndarray:
    info = np.iinfo(dtype)
    return _GENERATOR.integers(info.min, info.max, shape, dtype, endpoint=True)


def _product_type(model: onnx.ModelProto, op_type: str) -> str:
    """The element type that the product of an expanded model computes in."""
    typed = onnx.shape_inference.infer_shapes(model)
    (product,) = (node for node in typed.graph.node if node.op_type == op_type)
    (value,) = (value for value in typed.graph.value_info if value.name == product.output[0])
    return str(onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type).name)


@pytest.mark.parametrize("depth", [7, 300, 3000])
@pytest.mark.parametrize("types", [(np.uint8, np.int8), (np.int8, np.uint8), (np.uint8, np.uint8)])
def test_matmul_integer_is_exact(depth: int, types: tuple[type, type]) -> None:
    """Also where float32 would round: 3,000 products of up to 2^16."""
    a, b = _integers(types[0], 5, depth), _integers(types[1], depth, 9)
    inputs = {"a": a, "b": b, "za": _integers(types[0]), "zb": _integers(types[1])}
    model = expanded(one_node("MatMulInteger", inputs))
    assert _product_type(model, "MatMul") == ("float32" if depth == 7 else "int32")
    exact = (a.astype(np.int64) - inputs["za"]) @ (b.astype(np.int64) - inputs["zb"])
    np.testing.assert_array_equal(evaluate(model, inputs)[0], exact)
    if depth == 3000:
        np.testing.assert_array_equal(compiled(model, *inputs.values())[0], exact)


def test_known_weights_bound_the_sums() -> None:
    """Small weights let float32 hold 3,000 products; large ones do not."""
    a = _integers(np.uint8, 5, 3000)
    for limit, working in ((9, "float32"), (127, "int32")):
        inputs = {"a": a, "c_b": _GENERATOR.integers(-limit, limit, (3000, 9), np.int8, endpoint=True)}
        model = expanded(one_node("MatMulInteger", inputs))
        assert _product_type(model, "MatMul") == working
        (found,) = evaluate(model, inputs)
        np.testing.assert_array_equal(found, a.astype(np.int64) @ inputs["c_b"].astype(np.int64))


@pytest.mark.parametrize(
    ("a", "b", "za", "zb"),
    [
        ((4, 5), (5, 6), (4,), (6,)),
        ((2, 4, 5), (2, 5, 6), (2, 4, 1), (2, 1, 6)),
        ((2, 4, 5), (5, 6), (4,), (1,)),
        ((5,), (5, 6), (), (6,)),
        ((4, 5), (5,), (4,), ()),
        ((3, 0), (0, 2), (), ()),
    ],
)
def test_zero_points_of_rows_and_columns(
    a: tuple[int, ...], b: tuple[int, ...], za: tuple[int, ...], zb: tuple[int, ...]
) -> None:
    inputs = {
        "a": _integers(np.uint8, *a),
        "b": _integers(np.int8, *b),
        "za": _integers(np.uint8, *za),
        "zb": _integers(np.int8, *zb),
    }
    wide = {name: array.astype(np.int64) for name, array in inputs.items()}
    rows = wide["za"][:, None] if len(za) == 1 and len(a) > 1 else wide["za"]
    if len(b) == 1:
        exact = (wide["a"] - rows) @ (wide["b"] - wide["zb"])
        model = one_node("MatMulInteger", {**inputs, "za": inputs["za"][:1]})
        exact = (wide["a"] - wide["za"][:1]) @ (wide["b"] - wide["zb"])
        inputs["za"] = inputs["za"][:1]
    else:
        exact = (wide["a"] - rows) @ (wide["b"] - wide["zb"])
        model = one_node("MatMulInteger", inputs)
    np.testing.assert_array_equal(evaluate(expanded(model), inputs)[0], exact)


@pytest.mark.parametrize("channels", [2, 128])
def test_conv_integer_is_exact(channels: int) -> None:
    """Padding stands for the zero point; 128 channels of 3 x 3 go beyond what float32 holds."""
    x, w = _integers(np.uint8, 2, channels, 6, 5), _integers(np.uint8, 4, channels, 3, 3)
    zx, zw = np.array(200, np.uint8), np.array(3, np.uint8)
    inputs = {"x": x, "c_w": w, "c_zx": zx, "c_zw": zw}
    source = one_node("ConvInteger", inputs, pads=[1, 1, 1, 1], strides=[2, 1])
    model = expanded(source)
    assert _product_type(model, "Conv") == ("float32" if channels == 2 else "float64")
    padded = np.pad(x.astype(np.int64) - 200, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))[:, :, ::2]
    exact = np.einsum("nchwij,ocij->nohw", windows, w.astype(np.int64) - 3)
    np.testing.assert_array_equal(compiled(source, x)[0], exact)
    np.testing.assert_array_equal(evaluate(model, inputs)[0], exact)


def test_qlinear_conv_by_channel() -> None:
    """Scales and zero points of each output channel, groups and a bias, as the formula says in float64."""
    x, w = _integers(np.int8, 1, 4, 7), _integers(np.int8, 6, 2, 3)
    xs, ws, ys = np.float32(0.02), _GENERATOR.random(6).astype(np.float32) * 0.01, np.float32(0.3)
    xz, wz, yz = np.array(-7, np.int8), _integers(np.int8, 6), np.array(11, np.int8)
    bias = _GENERATOR.integers(-9999, 9999, 6, np.int32)
    operands = (x, xs, xz, w, ws, wz, ys, yz, bias)
    inputs = {f"{'c_' if at else ''}{at}": np.asarray(array) for at, array in enumerate(operands)}
    (found,) = compiled(one_node("QLinearConv", inputs, group=2, pads=[1, 1]), x)
    padded = np.pad(x.astype(np.float64) + 7, ((0, 0), (0, 0), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, 3, axis=2).reshape(1, 2, 2, 7, 3)
    weights = (w.astype(np.float64) - wz[:, None, None]).reshape(2, 3, 2, 3)
    sums = np.einsum("ngcli,goci->ngol", windows, weights).reshape(1, 6, 7) + bias[:, None]
    factor = (xs * ws / ys).astype(np.float32)[:, None]
    exact = np.clip(np.rint(sums.astype(np.float32) * factor) + 11, -128, 127)
    np.testing.assert_array_equal(found, exact.astype(np.int8))


_NARROW = ["uint16", "int16", "int4", "uint4", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"]


@pytest.mark.parametrize("narrow", _NARROW)
@pytest.mark.parametrize("blocks", [0, 4])
def test_quantize_and_back(narrow: str, blocks: int) -> None:
    """Every narrow type, by tensor and by blocks of which the last is cut, as onnx.reference has it (blocks that divide)."""
    x = (_GENERATOR.standard_normal((3, 8)) * 4).astype(np.float32)
    code = int(ir.DataType.from_numpy(np.dtype(narrow)))
    scale = (_GENERATOR.random((3, 2)) + 0.5).astype(np.float32) if blocks else np.array(0.7, np.float32)
    attributes: dict[str, Any] = {"axis": 1, "block_size": blocks, "output_dtype": code}
    inputs = {"x": x, "s": scale}
    source = one_node("QuantizeLinear", inputs, **attributes)
    (q,), (expected,) = evaluate(expanded(source), inputs), evaluate(source, inputs)
    np.testing.assert_array_equal(q.astype(np.float32), expected.astype(np.float32))
    inputs = {"q": q, "s": scale}
    back = one_node("DequantizeLinear", inputs, axis=1, block_size=blocks)
    for a, b in zip(evaluate(expanded(back), inputs), evaluate(back, inputs), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_last_block_may_be_shorter() -> None:
    q, scale = _integers(np.int8, 2, 7), _GENERATOR.random((2, 3)).astype(np.float32)
    inputs = {"q": q, "s": scale}
    model = one_node("DequantizeLinear", inputs, axis=1, block_size=3)
    exact = q * np.repeat(scale, 3, axis=1)[:, :7]
    np.testing.assert_array_equal(evaluate(expanded(model), inputs)[0], exact)
    np.testing.assert_array_equal(compiled(model, q, scale)[0], exact)
    constant = one_node("DequantizeLinear", {"c_q": q, "c_s": scale}, axis=1, block_size=3)
    np.testing.assert_array_equal(evaluate(expanded(constant), {})[0], exact)


def test_the_scale_says_how_precise_the_quotient_is() -> None:
    """float16 by float32 divides in float32, unless `precision` says float16: 1.3135 / 0.0101 is 130.05 or 130."""
    x, scale = np.array([1.3135, 2.5, -7.25, 0.333], np.float16), np.array(0.0101, np.float32)
    for precision, working in ((0, np.float32), (int(onnx.TensorProto.FLOAT16), np.float16)):
        model = one_node("QuantizeLinear", {"x": x, "s": scale}, output_dtype=int(onnx.TensorProto.INT16), precision=precision)
        (found,) = evaluate(expanded(model), {"x": x, "s": scale})
        exact = np.rint(x.astype(working) / scale.astype(working))
        np.testing.assert_array_equal(found, exact.astype(np.int16))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_narrow_floats_at_opset_21(dtype: type) -> None:
    """Opset 21 has no Round of bfloat16. A kernel keeps its quotient in float32, so that it may be a quantum nearer the truth."""
    x: np.ndarray = np.asarray(_GENERATOR.standard_normal(50) * 9, dtype)
    scale: np.ndarray = np.array(0.07, dtype)
    (found,) = compiled(one_node("QuantizeLinear", {"x": x, "s": scale}, opset=21, output_dtype=3), x, scale)
    exact = np.clip(np.rint((x / scale).astype(np.float32)), -128, 127)
    np.testing.assert_allclose(found, exact, atol=0 if dtype == np.float16 else 1)


def test_powers_of_two_scale_exactly() -> None:
    scale = np.array([0.25, 8.0, 1.0], ml_dtypes.float8_e8m0fnu)
    x = (_GENERATOR.standard_normal((2, 3)) * 9).astype(np.float32)
    inputs = {"x": x, "s": scale}
    model = one_node("QuantizeLinear", inputs, axis=1, output_dtype=int(onnx.TensorProto.INT8))
    exact = np.clip(np.rint(x / np.array([0.25, 8.0, 1.0])), -128, 127)
    np.testing.assert_array_equal(compiled(model, x, scale)[0], exact.astype(np.int8))


@pytest.mark.parametrize(
    ("x", "quantized", "scale", "zero"),
    [
        (0.0, 0, 1.0, 0),
        ([0.0, -0.0, 0.0], [0, 0, 0], 1.0, 0),
        ([[1e-44, 0.0]], [[0, 0]], 1.0, 0),  # a range whose 255th part is no number
        (np.zeros((0, 3)), np.zeros((0, 3)), 1.0, 0),
        ([-1.0, 0.02, 1.55], [0, 102, 255], 0.01, 100),
        ([-2.55, -1.0], [0, 155], 0.01, 255),
        ([51.0, 25.6], [255, 128], 0.2, 0),
    ],
)
def test_numbers_of_no_range_have_the_scale_one(x: Any, quantized: Any, scale: float, zero: int) -> None:
    array = np.array(x, np.float32)
    found, step, place = compiled(one_node("DynamicQuantizeLinear", {"x": array}, 3, opset=13), array)
    np.testing.assert_array_equal(found, np.array(quantized, np.uint8))
    np.testing.assert_allclose(step, np.float32(scale), rtol=1e-6)
    assert [each.dtype.name for each in (found, step, place)] == ["uint8", "float32", "uint8"]
    assert int(place) == zero
    assert found.shape == array.shape
    assert step.shape == place.shape == ()


def test_dequantized_weights_are_computed_when_read() -> None:
    """Weights beyond what folding may add stay as they are stored until the program is written."""
    q = _integers(np.int8, 1100, 1000)
    inputs = {"x": np.zeros((1, 1100), np.float32), "c_q": q, "c_s": np.array(0.5, np.float32)}
    source = one_node("DequantizeLinear", {name: inputs[name] for name in ("c_q", "c_s")})
    source.graph.node.append(onnx.helper.make_node("MatMul", ["x", "y0"], ["y"]))
    source.graph.input.append(onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 1100]))
    source.graph.output[0].name = "y"
    graph = import_model(source)
    run_pipeline(
        graph, [Canonicalize(fold_limit_kib=1), Decompose(), Canonicalize(fold_limit_kib=1)], Context(Target("cpu", "avx2", 1))
    )
    assert {node.op_type for node in graph.graph} == {"MatMul"}
    weights = next(value for value in graph.graph.initializers.values() if value.uses()).const_value
    assert isinstance(weights, ir.LazyTensor)
    np.testing.assert_array_equal(weights.numpy(), q * np.float32(0.5))


def test_qlinear_matmul_of_8_bit_floats() -> None:
    """Sums in float32; the result is rounded once, and saturates."""
    a, b = ((_GENERATOR.standard_normal(shape) * 4).astype(ml_dtypes.float8_e4m3fn) for shape in ((3, 5), (5, 4)))
    scales, zero = (np.array(0.5, np.float32), np.array(2.0, np.float32), np.array(0.01, np.float32)), np.zeros((), a.dtype)
    operands = (a, scales[0], zero, b, scales[1], zero, scales[2], zero)
    inputs = {f"i{at}": array for at, array in enumerate(operands)}
    (found,) = compiled(one_node("QLinearMatMul", inputs), *operands)
    exact = a.astype(np.float32) @ b.astype(np.float32) * np.float32(0.5 * 2.0 / 0.01)
    np.testing.assert_array_equal(found.astype(np.float32), np.clip(exact, -448, 448).astype(a.dtype).astype(np.float32))
