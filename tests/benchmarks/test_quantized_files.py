"""benchmarks/quantized_files.py: which values of a file are compared, and from what each is made."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from prefuse.benchmarks.quantized_files import apart, expected_values, stored_bytes, values_compared
from prefuse.compiler.debugging.oracle import run_model
from prefuse.compiler.frontend.importer import import_model

INPUTS = {"x": np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32)}


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    """Two products between bytes, and a sum of floats behind them."""
    random = np.random.default_rng(1)
    arrays = {
        "s": np.float32(0.03),
        "z": np.uint8(121),
        "w": random.integers(-127, 128, (8, 8), np.int8),
        "t": (0.01 * random.random(8) + 0.001).astype(np.float32),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["first"]),
        helper.make_node("DequantizeLinear", ["first", "s", "z"], ["a"]),
        helper.make_node("DequantizeLinear", ["w", "t"], ["b"], axis=1),
        helper.make_node("MatMul", ["a", "b"], ["p"]),
        helper.make_node("QuantizeLinear", ["p", "s", "z"], ["second"]),
        helper.make_node("DequantizeLinear", ["second", "s", "z"], ["c"]),
        helper.make_node("MatMul", ["c", "b"], ["y"]),
    ]
    given = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, (5, 8))
    result = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, (5, 8))
    constants = [numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "main", [given], [result], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def test_values_are_those_in_bytes_that_nodes_make(model: onnx.ModelProto) -> None:
    values = expected_values(model, INPUTS)
    assert list(values) == ["first", "second"]
    np.testing.assert_array_equal(values["first"], np.clip(np.rint(INPUTS["x"] / np.float32(0.03)) + 121, 0, 255))


def test_each_value_is_made_of_the_others_as_given(model: onnx.ModelProto) -> None:
    """With zero points given for the first value, the second is of zeros, and the first is not touched by that."""
    values = expected_values(model, INPUTS)
    cut = apart(model, values)
    given = {"first/given": np.full((5, 8), 121, np.uint8), "second/given": values["second"]}
    found = run_model(import_model(cut), {**INPUTS, **given})
    np.testing.assert_array_equal(found["first"], values["first"])
    np.testing.assert_array_equal(found["second"], 121)


def test_all_values_are_compared(model: onnx.ModelProto, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    assert list(values_compared(path, INPUTS, 1)) == [("first", 1.0, 1.0), ("second", 1.0, 1.0)]
    assert stored_bytes(path) == 8 * 8 + 4 * 8 + 4 + 1
