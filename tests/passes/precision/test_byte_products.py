"""Products of bytes that models widen themselves: long sums, zero points of both operands; exact as in floating point."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import prefuse
import pytest
from onnx import helper, numpy_helper, parser
from prefuse.compiler.ir.facts import infer_facts
from prefuse.compiler.ir.kinds import Kind, kind_of
from prefuse.compiler.pipeline import Context, parse_pipeline, run_pipeline
from prefuse.compiler.pipeline.pass_table import PASSES
from prefuse.compiler.programs.contents import tensor_digest
from prefuse.runtime.precision import LONGEST_SUM, LONGEST_WIDE_SUM
from prefuse.runtime.target import Target

Arrays = dict[str, np.ndarray]
rng = np.random.default_rng(3)


def model_of(text: str, inputs: Arrays, constants: Arrays) -> onnx.ModelProto:
    """A model of nodes in ONNX's text form, with the result y."""
    graph = parser.parse_graph(f"main () => (float[1] y) {{ {text} }}")
    for name, array in inputs.items():
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        graph.input.append(helper.make_tensor_value_info(name, kind, array.shape))
    graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    del graph.output[:]
    graph.output.append(helper.make_empty_tensor_value_info("y"))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def result(text: str, inputs: Arrays, constants: Arrays) -> np.ndarray:
    net: Any = prefuse.compile(model_of(text, inputs, constants), cache=False, threads=2)
    return np.asarray(net(**inputs))


def bytes_of(dtype: str, *shape: int) -> np.ndarray:
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max + 1, shape, dtype)


def scalar(number: float, dtype: str = "float32") -> np.ndarray:
    return np.array(number, dtype)


CASTS = "a = Cast <to = 1> (x) b = Cast <to = 1> (w) "


@pytest.mark.parametrize("form", ["MatMul", "Conv", "Gemm"])
def test_sums_that_32_bits_do_not_hold_are_floats(form: str) -> None:
    depth = 40_000
    shapes: tuple[tuple[int, ...], ...] = ((2, depth), (depth, 4))
    if form == "Conv":
        shapes = (2, depth, 1, 1), (4, depth, 1, 1)
    x, w = (np.full(shape, 255, np.uint8) for shape in shapes)
    found = result(f"{CASTS} y = {form}(a, b)", {"x": x}, {"w": w})
    np.testing.assert_allclose(found, 255.0**2 * depth, rtol=3e-5)


def widenings(depth: int, more: str = "") -> list[Kind]:
    """The kinds of the nodes that make floats of both operands of a product."""
    kind, nodes = ("int8", more) if more else ("uint8", CASTS)
    scales = "<float one = {1}, float s = {0.5}, int8 z = {3}>"
    text = f"main (uint8[2,{depth}] x, {kind}[{depth},4] w) => (float[2,4] y) {scales} {{ {nodes} y = MatMul(a, b) }}"
    model = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["": 21]> {text}')
    infer_facts(model)
    return [kind_of(node) for node in model.graph if node.op_type != "MatMul"]


def test_kernels_widen_what_32_bits_hold() -> None:
    signed = "a = Cast <to = 1> (x) b = Cast <to = 1> (w)"
    moved = "a = Cast <to = 1> (x) b = DequantizeLinear(w, one, z)"
    assert widenings(LONGEST_WIDE_SUM) == widenings(LONGEST_SUM, signed) == [Kind.OPERAND] * 2
    assert widenings(LONGEST_WIDE_SUM, moved) == [Kind.OPERAND] * 2
    assert Kind.OPERAND not in widenings(LONGEST_WIDE_SUM + 1)
    assert Kind.OPERAND not in widenings(LONGEST_SUM + 1, signed)
    assert Kind.OPERAND not in widenings(LONGEST_WIDE_SUM + 1, moved)


def test_bytes_beside_scaled_weights_are_no_operand() -> None:
    """No kernel multiplies them: the weights alone are read as they lie."""
    constants = {"w": bytes_of("int8", 8, 4), "s": np.array([1, 2, 3, 4], np.float32)}
    text = "a = Cast <to = 1> (x) b = DequantizeLinear <axis = 1> (w, s) y = MatMul(a, b)"
    model = ir.serde.deserialize_model(model_of(text, {"x": bytes_of("uint8", 2, 8)}, constants))
    infer_facts(model)
    assert kind_of(model.graph[0]) is Kind.ELEMENTWISE


OFFSETS = "a = DequantizeLinear(x, one, z) b = DequantizeLinear(w, one, n) "


@pytest.mark.parametrize("is_constant", [True, False])
@pytest.mark.parametrize("form", ["MatMul", "Conv", "ConvTranspose", "Gemm", "Gemm <transA = 1>"])
def test_both_operands_have_a_zero_point(form: str, is_constant: bool) -> None:
    x, w = bytes_of("uint8", 4, 8), bytes_of("int8", 8, 16)
    exact = (x.astype(np.int64) - 3) @ (w.astype(np.int64) - 5)
    if form.startswith("Conv"):
        x, w = x.reshape(4, 8, 1, 1), (w.T if form == "Conv" else w).reshape(*((16, 8) if form == "Conv" else (8, 16)), 1, 1)
        exact = exact.reshape(4, 16, 1, 1)
    inputs = {"x": np.ascontiguousarray(x.T if "transA" in form else x)}
    constants = {"one": scalar(1), "z": scalar(3, "uint8"), "n": scalar(5, "int8")}
    (constants if is_constant else inputs)["w"] = np.ascontiguousarray(w)
    np.testing.assert_array_equal(result(f"{OFFSETS} y = {form}(a, b)", inputs, constants), exact)


@pytest.mark.parametrize("is_constant", [True, False])
@pytest.mark.parametrize("form", ["MatMul", "Conv"])
def test_the_right_operand_alone_has_a_zero_point(form: str, is_constant: bool) -> None:
    x, w = bytes_of("uint8", 4, 8), bytes_of("int8", 8, 16)
    exact = x.astype(np.int64) @ (w.astype(np.int64) - 5)
    if form == "Conv":
        x, w, exact = x.reshape(4, 8, 1, 1), np.ascontiguousarray(w.T).reshape(16, 8, 1, 1), exact.reshape(4, 16, 1, 1)
    inputs, constants = {"x": x}, {"one": scalar(1), "n": scalar(5, "int8")}
    (constants if is_constant else inputs)["w"] = w
    text = f"a = Cast <to = 1> (x) b = DequantizeLinear(w, one, n) y = {form}(a, b)"
    found = result(text, inputs, constants)
    if form == "MatMul" and is_constant:  # stored weights, which a kernel may meet with rows in fixed point
        rounding = 2.0**-23 * np.abs(x.astype(np.int64)) @ np.abs(w.astype(np.int64) - 5)
        assert np.all(np.abs(found - exact) <= rounding)
    else:
        np.testing.assert_array_equal(found, exact)


def test_padding_stays_zero() -> None:
    """Around the image, whose numbers and weights have zero points."""
    x, w = bytes_of("uint8", 1, 4, 3, 3), bytes_of("int8", 8, 4, 3, 3)
    constants = {"one": scalar(1), "z": scalar(3, "uint8"), "n": scalar(5, "int8"), "w": w}
    found = result(f"{OFFSETS} y = Conv <pads = [1, 1, 1, 1]> (a, b)", {"x": x}, constants)
    padded = np.pad(x.astype(np.int64) - 3, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
    np.testing.assert_array_equal(found, np.einsum("nchwij,ocij->nohw", windows, w.astype(np.int64) - 5))


def test_a_zero_point_that_a_run_gives_with_a_dimension() -> None:
    x, w, z = bytes_of("uint8", 4, 8), bytes_of("int8", 8, 16), np.array([7], np.uint8)
    text = "a = DequantizeLinear(x, one, z) b = Cast <to = 1> (w) y = MatMul(a, b)"
    found = result(text, {"x": x, "z": z}, {"one": np.ones(1, np.float32), "w": w})
    np.testing.assert_array_equal(found, (x.astype(np.int64) - 7) @ w.astype(np.int64))


def test_a_bias_of_bytes_keeps_its_zero_point() -> None:
    x, w, c = bytes_of("uint8", 4, 8), bytes_of("int8", 8, 16), bytes_of("uint8", 16)
    text = f"{CASTS} d = DequantizeLinear(c, one, z) y = Gemm(a, b, d)"
    found = result(text, {"x": x, "c": c}, {"one": scalar(1), "z": scalar(3, "uint8"), "w": w})
    np.testing.assert_array_equal(found, x.astype(np.int64) @ w.astype(np.int64) + (c.astype(np.int64) - 3))


def test_many_scales_of_a_residual_are_not_divided() -> None:
    """As no other constants of so many numbers are; it was an assertion."""
    columns = (1 << 16) + 1
    constants = {
        "s": scalar(0.5), "t": scalar(0.25), "r": scalar(4), "q": scalar(3, "uint8"), "w": bytes_of("int8", 4, columns),
        "k": np.full(columns, 2, np.float32), "h": bytes_of("uint8", 1, columns),
    }  # fmt: skip
    text = """a = DequantizeLinear(x, s) b = DequantizeLinear(w, t) m = MatMul(a, b) e = DequantizeLinear(g, k) d = Add(m, e)
        y = QuantizeLinear(d, r, q)"""
    inputs = {"x": bytes_of("uint8", 1, 4), "g": constants.pop("h")}
    model = ir.serde.deserialize_model(model_of(text, inputs, constants))
    infer_facts(model)
    run_pipeline(model, parse_pipeline("sink-scales,eliminate-dead", PASSES), Context(Target.parse("cpu:avx2", 1)))
    assert [node.op_type for node in model.graph].count("DequantizeLinear") == 1


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("odd", [np.inf, np.nan])
def test_weights_that_are_not_finite_stay_as_they_are(weights: str, odd: float) -> None:
    w = np.ones((64, 32), np.float32)
    w[3, 4] = odd
    model = ir.serde.deserialize_model(model_of("y = MatMul(x, w)", {"x": np.ones((2, 64), np.float32)}, {"w": w}))
    infer_facts(model)
    context = Context(Target.parse("cpu:avx2", 1))
    run_pipeline(model, parse_pipeline(f"quantize-weights{{weights={weights},min-elements=1}}", PASSES), context)
    assert [node.op_type for node in model.graph] == ["MatMul"]
    assert any("they are not finite" in remark.message for remark in context.remarks)


def test_weights_that_two_products_read_are_quantized_once() -> None:
    """What is made alike of one constant is equal, which is known before it is made."""
    w = rng.standard_normal((64, 32)).astype(np.float32)
    inputs = {"x": np.ones((2, 64), np.float32)}
    model = ir.serde.deserialize_model(model_of("a = MatMul(x, w) b = MatMul(x, w) y = Add(a, b)", inputs, {"w": w}))
    infer_facts(model)
    run_pipeline(
        model, parse_pipeline("quantize-weights{weights=int8,min-elements=1}", PASSES), Context(Target.parse("cpu:avx2", 1))
    )
    weights = [node.inputs[:2] for node in model.graph if node.op_type == "DequantizeLinear"]
    assert len(weights) == 2
    for one, other in zip(*weights, strict=True):
        assert one is not None
        assert other is not None
        assert one.const_value is not None
        assert other.const_value is not None
        assert tensor_digest(one.const_value) == tensor_digest(other.const_value)
    numbers, scales = (one.const_value.numpy() for one in weights[0] if one is not None and one.const_value is not None)
    np.testing.assert_allclose(numbers * scales, w, atol=float(scales.max()))
