"""Which values lie in 8 bits, and that the result is an ONNX model that ONNX Runtime runs as accurately as 8 bits are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import prefuse
import pytest
from onnx import numpy_helper
from prefuse.compiler.debugging.oracle import relative_error, run_model
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.ir.constants import constant_array
from prefuse.compiler.ir.verifier import verify_model
from prefuse.compiler.quantization.flow import find_flow
from prefuse.compiler.quantization.quantizer import Calibrated, Settings, calibrate
from prefuse.compiler.quantization.units import UnitFormat, fault_of, find_units
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.plan import Role
from prefuse.runtime.target import Target

from .models import SAME, batches, built, feed_forward, residual_network

CPU = Target.parse("cpu")


def calibrated(model: onnx.ModelProto, settings: Settings | None = None) -> Calibrated:
    return calibrate(import_model(model), batches(model, 16), CPU, settings)


def error_of(model: onnx.ModelProto, quantized: ir.Model) -> float:
    (batch,) = batches(model, 1, seed=9)
    expected = run_model(import_model(model), batch)
    return relative_error(run_model(quantized, batch)["y"], expected["y"])


def quantizers(model: ir.Model) -> dict[str, ir.Node]:
    """The nodes that round, by the names of the values."""
    nodes = (node for node in model.graph if node.op_type == "QuantizeLinear")
    return {imported_name(node.inputs[0]): node for node in nodes if node.inputs[0] is not None}


def narrow_edges(model: ir.Model) -> set[tuple[str, str]]:
    """Pairs of the output of an operator that was rounded, and the output of one that reads it so."""
    found = set()
    for node in model.graph:
        for value in node.inputs:
            dequantize = None if value is None else value.producer()
            if dequantize is not None and dequantize.op_type == "DequantizeLinear" and node.op_type != "DequantizeLinear":
                quantize = dequantize.inputs[0].producer() if dequantize.inputs[0] is not None else None
                if quantize is not None and quantize.inputs[0] is not None:
                    found.add((imported_name(quantize.inputs[0]), str(node.outputs[0].name)))
    return found


def imported_name(value: ir.Value) -> str:
    """The name that a value had, whose channels may have factors now."""
    return str(value.name).removesuffix("_smooth")


def test_residual_network() -> None:
    """8 bits flow from each convolution to the next: through the pool, and into one operand of each sum."""
    model = residual_network()
    found = calibrated(model)
    first = next(iter(found.model.graph))
    assert list(found.left) == [first.name]
    assert "3 channels of a group fill no words of 4" in found.left[str(first.name)]
    quantized = found.place(found.uniform())
    verify_model(quantized)
    assert narrow_edges(quantized) == {
        ("r0", "p0"),
        ("p0", "c1"),
        ("p0", "s2"),
        ("r1", "c2"),
        ("r2", "c3"),
        ("r2", "c4"),
        ("r3", "c7"),
        ("c4", "s3"),
        ("r4", "c5"),
        ("f", "y"),
    }
    assert 1e-4 < error_of(model, quantized) < 3e-2


def test_a_pool_has_one_format_before_and_behind() -> None:
    model = calibrated(residual_network())
    quantized = model.place(model.uniform())
    of = quantizers(quantized)
    assert of["r0"].inputs[1:] == of["p0"].inputs[1:]
    assert of["r0"].inputs[1] != of["r1"].inputs[1]


def test_joined_images_have_formats_of_their_own() -> None:
    """Both operands of a Concat lie in 8 bits, the smaller one by no coarser a scale than it needs."""
    nodes: list[Sequence[Any]] = [
        ("Conv", "x w1", "a", SAME),
        ("Conv", "a w2", "b", SAME),
        ("Concat", "a b", "j", {"axis": 1}),
        ("Conv", "j w3", "y", SAME),
    ]
    model = built(nodes, [1, 4, 6, 6], {"w1": (8, 4, 3, 3), "w2": (8, 8, 3, 3), "w3": (4, 16, 3, 3)})
    found = calibrated(model)
    quantized = found.place(found.uniform())
    assert narrow_edges(quantized) == {("x", "a"), ("a", "b"), ("a", "j"), ("b", "j"), ("j", "y")}
    scales = {name: constant_array(node.inputs[1]) for name, node in quantizers(quantized).items()}
    assert float(np.asarray(scales["a"])) < float(np.asarray(scales["b"]))
    assert error_of(model, quantized) < 4e-2


def test_an_image_that_is_cropped_and_pooled_lies_in_bytes() -> None:
    """A step down and up of a UNet: the crop has the format of the image, and what only the Concat reads that of the Concat."""
    nodes: list[Sequence[Any]] = [
        ("Conv", "x w1", "a", SAME),
        ("Relu", "a", "r"),
        ("MaxPool", "r", "p", {"kernel_shape": [2, 2], "strides": [2, 2]}),
        ("Slice", "r starts far axes", "s"),
        ("Slice", "p starts ends axes", "q"),
        ("ConvTranspose", "q w2", "u", {"strides": [2, 2]}),
        ("Concat", "s u", "j", {"axis": 1}),
        ("Conv", "j w3", "y", SAME),
    ]
    model = built(nodes, [1, 4, 12, 12], {"w1": (8, 4, 3, 3), "w2": (8, 4, 2, 2), "w3": (4, 12, 3, 3)})
    bounds = {"starts": [1, 1], "far": [9, 9], "ends": [5, 5], "axes": [2, 3]}
    model.graph.initializer.extend(numpy_helper.from_array(np.array(value, np.int64), name) for name, value in bounds.items())
    found = calibrated(model)
    quantized = found.place(found.uniform())
    verify_model(quantized)
    edges = {("x", "a"), ("r", "p"), ("r", "s"), ("p", "q"), ("q", "u"), ("s", "j"), ("u", "j"), ("j", "y")}
    assert narrow_edges(quantized) == edges
    of = {name: node.inputs[1] for name, node in quantizers(quantized).items()}
    assert of["r"] is of["p"] is of["s"] is of["q"]
    assert of["u"] is of["j"] is not of["s"]
    assert error_of(model, quantized) < 4e-2
    net = prefuse.compile(ir.to_proto(quantized), threads=1)
    assert isinstance(net, CompiledModel)
    template = "tiles" if Target.parse("cpu").has_tiles else "channels_last"
    assert f"transposed_convolution_{template}" in str(net.report())
    largest = max(one.size_bytes for one in net.plan.buffers if one.role is Role.ACTIVATION)
    assert largest < 2 * 8 * 12 * 12  # the first image, in bytes


def test_residuals_of_matrix_products_stay_float() -> None:
    model = feed_forward()
    found = calibrated(model, Settings(is_smooth=False))
    quantized = found.place(found.uniform())
    assert narrow_edges(quantized) == {("n", "m1"), ("g", "m2")}
    assert error_of(model, quantized) < 2e-2


def test_what_others_read_lies_in_float_too() -> None:
    """A value that an operator of float reads is not read in 8 bits by a sum either: nothing would be saved."""
    nodes = [("Conv", "x w1", "a"), ("Sigmoid", "a", "s"), ("Conv", "a w2", "b"), ("Add", "a b", "c"), ("Mul", "c s", "y")]
    model = built(nodes, [1, 4, 5, 5], {"w1": (4, 4, 1, 1), "w2": (4, 4, 1, 1)})
    found = calibrated(model)
    assert narrow_edges(found.place(found.uniform())) == {("x", "a"), ("a", "b")}


def test_biases_and_weights() -> None:
    """Weights are int8 constants with a scale for each output channel, biases int32 of the scales' product."""
    found = calibrated(residual_network())
    quantized = found.place(found.uniform())
    (gemm,) = (node for node in quantized.graph if node.op_type == "Gemm")
    x, w, b = (value.producer() for value in gemm.inputs if value is not None)
    assert x is not None
    assert w is not None
    assert b is not None
    numbers, scales = constant_array(w.inputs[0]), constant_array(w.inputs[1])
    assert numbers is not None
    assert scales is not None
    assert numbers.dtype == np.int8
    assert (scales.shape, w.attributes.get_int("axis")) == ((5,), 0)
    bias, product = constant_array(b.inputs[0]), constant_array(b.inputs[1])
    scale = constant_array(x.inputs[1])
    assert bias is not None
    assert scale is not None
    assert product is not None
    assert bias.dtype == np.int32
    np.testing.assert_allclose(product, scale * scales, rtol=1e-6)


def test_a_bias_beyond_32_bits_stays_float() -> None:
    model = built([("Gemm", "x w b", "y")], [3, 8], {"w": (8, 4), "b": (4,)})
    model.graph.initializer[1].raw_data = np.array([1e9, 0, 1, 2], np.float32).tobytes()
    found = calibrated(model)
    quantized = found.place(found.uniform())
    (gemm,) = (node for node in quantized.graph if node.op_type == "Gemm")
    assert constant_array(gemm.inputs[2]) is not None
    assert error_of(model, quantized) < 1e-6


@pytest.mark.parametrize("rows", [7, "N"])
def test_rows(rows: int | str) -> None:
    """Ranges of their own for rows: rows of very different sizes are equally exact; shapes may be symbolic."""
    model = feed_forward(rows)
    found = calibrated(model, Settings(is_smooth=False))
    quantized = found.place(found.uniform("int8-rows"))
    verify_model(quantized)
    assert Counter(node.op_type for node in quantized.graph)["QuantizeLinear"] == 0
    (batch,) = batches(model, 1, seed=3)
    batch["x"][0, 1] = 0.0
    expected, given = run_model(import_model(model), batch)["y"] - batch["x"], run_model(quantized, batch)["y"] - batch["x"]
    norms = np.linalg.norm(expected, axis=-1)
    assert (np.linalg.norm(given - expected, axis=-1) < 2e-2 * norms).all()


@pytest.mark.parametrize("is_transposed", [0, 1])
def test_rows_of_gemm(is_transposed: int) -> None:
    """With its bias, and weights either way."""
    nodes = [("Gemm", "x w b", "y", {"transB": is_transposed})]
    model = built(nodes, [7, 32], {"w": (12, 32) if is_transposed else (32, 12), "b": (12,)})
    found = calibrated(model)
    quantized = found.place(found.uniform("int8-rows"))
    verify_model(quantized)
    assert 1e-4 < error_of(model, quantized) < 2e-2


def test_what_has_no_rows() -> None:
    convolution = calibrated(residual_network())
    assert {convolution.fault(unit, "int8-rows") for unit in convolution.units[1:-1]} == {
        "images have no rows with scales of their own"
    }
    scaled = import_model(built([("Gemm", "x w b", "y", {"alpha": 0.5})], [7, 32], {"w": (32, 12), "b": (12,)}))
    assert [fault_of(unit, "int8-rows") for unit in find_units(scaled)] == ["it is scaled by 0.5 and 1"]


def test_mixed_assignments() -> None:
    """Each unit has its own format, or none."""
    model = feed_forward()
    found = calibrated(model)
    first, second = (unit.name for unit in found.units)
    for assignment in ({}, {first: "int8"}, {second: "int8-rows"}, {first: "int8-rows", second: "int8"}):
        quantized = found.place(assignment)  # type: ignore[arg-type]
        counts = Counter(node.op_type for node in quantized.graph)
        assert counts["QuantizeLinear"] == sum(form == "int8" for form in assignment.values())
        assert counts["Clip"] == sum(form == "int8-rows" for form in assignment.values())
        assert error_of(model, quantized) < (2e-2 if assignment else 1e-6)


def test_units_that_cannot_be_quantized() -> None:
    """Sums too long for 32 bits, weights that are not finite, activations that are not."""
    nodes = [("MatMul", "x w1", "a"), ("Log", "x", "l"), ("MatMul", "l w2", "b"), ("MatMul", "x w3", "c"), ("Sum", "a b c", "y")]
    model = built(nodes, [1, 65_001], {"w1": (65_001, 1), "w2": (65_001, 1), "w3": (65_001, 1)})
    found = calibrated(model)
    assert set(found.left.values()) == {"sums of 65001 products could pass 2^31"}
    nodes = [("MatMul", "x w1", "a"), ("Log", "x", "l"), ("MatMul", "l w2", "b"), ("MatMul", "x w3", "c"), ("Sum", "a b c", "y")]
    model = built(nodes, [3, 8], {"w1": (8, 4), "w2": (8, 4), "w3": (8, 4)})
    model.graph.initializer[0].raw_data = np.full((8, 4), np.inf, np.float32).tobytes()
    found = calibrated(model)
    assert sorted(found.left.values()) == [
        "its activations have NaN or infinities on calibration data",
        "its weights are not finite",
    ]
    assert len(found.uniform()) == 1


def test_what_is_no_unit() -> None:
    """Products of two activations, transposed rows, weights on the left."""
    nodes: list[Sequence[Any]] = [("MatMul", "x x", "a"), ("Gemm", "a w", "b", {"transA": 1}), ("MatMul", "w b", "y")]
    assert find_units(import_model(built(nodes, [4, 4], {"w": (4, 4)}))) == ()


def test_channels_of_zeros() -> None:
    """An output channel without weights is exactly its bias; a tensor of zeros is exact."""
    model = built([("Relu", "x", "r"), ("MatMul", "r w", "y")], [3, 8], {"w": (8, 4)})
    weights = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    weights[:, 2] = 0
    model.graph.initializer[0].raw_data = weights.tobytes()
    found = calibrate(import_model(model), [{"x": np.full((3, 8), -1, np.float32)}], CPU)
    quantized = found.place(found.uniform())
    batch = {"x": np.full((3, 8), -5, np.float32)}
    assert np.array_equal(run_model(quantized, batch)["y"], np.zeros((3, 4), np.float32))
    scales = [constant_array(node.inputs[1]) for node in quantized.graph if node.op_type == "QuantizeLinear"]
    assert scales == [np.float32(1.0)]


def test_a_flow_without_units_is_empty() -> None:
    assert not find_flow(import_model(residual_network()).graph, []).readers


def test_sums_of_named_sizes() -> None:
    """Which of two convolutions' results a sum reads in 8 bits depends on the assignment, whatever the batch is."""
    nodes = [("Conv", "x w0", "a"), ("Conv", "a w1", "e"), ("Relu", "e", "r"), ("Conv", "r w2", "b"), ("Add", "a b", "s")]
    shapes = {f"w{number}": (8, 8, 1, 1) for number in range(4)}
    model = built([*nodes, ("Conv", "s w3", "y")], ["N", 8, 6, 6], shapes)
    data = [{"x": np.random.default_rng(seed).standard_normal((2, 8, 6, 6)).astype(np.float32)} for seed in range(2)]
    found = calibrate(import_model(model), data, Target.parse("cpu"))
    names = list(found.uniform())
    assert len(names) == 4
    for left in names:
        found.place({name: "int8" for name in names if name != left})


@pytest.mark.parametrize("form", ["int8", "int8-rows"])
def test_columns_of_all_sizes_are_quantized_as_the_model_scales_them(form: UnitFormat) -> None:
    """As a table has them: an income and a ratio would share one range, and all ratios be 0."""
    nodes = [
        ("Sub", "x mean", "c"),
        ("Div", "c deviation", "s"),
        ("MatMul", "s w1", "a"),
        ("Relu", "a", "b"),
        ("MatMul", "b w2", "y"),
    ]
    model = built(nodes, [16, 32], {"w1": (32, 64), "w2": (64, 4)})
    is_large = np.arange(32) % 2 == 0
    mean, deviation = (np.where(is_large, *pair).astype(np.float32) for pair in ((50000, 0.4), (20000, 0.2)))
    model.graph.initializer.extend(
        [numpy_helper.from_array(array, name) for array, name in ((mean, "mean"), (deviation, "deviation"))]
    )
    data = [{"x": mean + deviation * batch["x"]} for batch in batches(model, 9)]
    found = calibrate(import_model(model), data[:8], CPU)
    expected, actual = (run_model(one, data[8])["y"] for one in (import_model(model), found.place(found.uniform(form))))
    assert relative_error(actual, expected) < 0.05
