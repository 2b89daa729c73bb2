"""compiler/engines/onnxruntime_session.py: weights are lent to ONNX Runtime, wherever they come from."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from prefuse.compiler.engines.onnxruntime_session import OnnxRuntimeSession

RNG = np.random.default_rng(0)


def product(weights: np.ndarray, *, operator: str = "MatMul") -> ir.Model:
    """y = x W, or the rows of W that x names."""
    is_gather = operator == "Gather"
    kind = ir.DataType.INT64 if is_gather else ir.DataType.FLOAT
    shape = [3] if is_gather else [2, weights.shape[0]]
    x = ir.Value(name="x", type=ir.TensorType(kind), shape=ir.Shape(shape))
    w = ir.Value(name="w", const_value=ir.Tensor(weights, name="w"))
    w.type, w.shape = ir.TensorType(w.const_value.dtype), ir.Shape(weights.shape)  # type: ignore[union-attr]
    node = ir.node(operator, [w, x] if is_gather else [x, w])
    node.outputs[0].name = "y"
    graph = ir.Graph([x], node.outputs, nodes=[node], initializers=[w], opset_imports={"": 21}, name="net")
    return ir.Model(graph, ir_version=10)


@pytest.mark.parametrize("optimize", [False, True])
def test_large_weights_and_transposed_ones(optimize: bool) -> None:
    weights = RNG.standard_normal((400, 300)).astype(np.float32).T
    x = RNG.standard_normal((2, 300)).astype(np.float32)
    model = product(weights)
    (found,) = OnnxRuntimeSession(model, optimize=optimize).run({"x": x})
    np.testing.assert_allclose(found, x.astype(np.float64) @ weights, rtol=1e-4, atol=1e-4)
    assert model.graph.initializers["w"].const_value.numpy() is weights  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int8, np.uint8, np.int16, np.int32, np.int64, np.bool_])
@pytest.mark.parametrize("rows", [3, 40000])
def test_weights_of_all_types(dtype: type, rows: int) -> None:
    weights: np.ndarray = RNG.integers(0, 100, (rows, 5)).astype(dtype)
    (found,) = OnnxRuntimeSession(product(weights, operator="Gather"), optimize=True).run({"x": np.array([0, 2, rows - 1])})
    assert found.tobytes() == weights[[0, 2, rows - 1]].tobytes()


@pytest.mark.parametrize("columns", [5, 5000])
def test_weights_in_a_file(tmp_path: Path, columns: int) -> None:
    weights = RNG.standard_normal((16, columns)).astype(np.float32)
    ir.save(product(weights), tmp_path / "model.onnx", external_data="weights", size_threshold_bytes=0)
    loaded = ir.load(tmp_path / "model.onnx")
    x = RNG.standard_normal((2, 16)).astype(np.float32)
    (found,) = OnnxRuntimeSession(loaded, optimize=True).run({"x": x})
    np.testing.assert_allclose(found, x.astype(np.float64) @ weights, rtol=1e-4, atol=1e-4)


def test_weights_live_as_long_as_the_session() -> None:
    """Nothing but the session holds the copy of a transposed weight; memory that is made later does not change it."""
    weights = RNG.standard_normal((400, 300)).astype(np.float32)
    session = OnnxRuntimeSession(product(weights.T), optimize=False)
    x = RNG.standard_normal((2, 300)).astype(np.float32)
    (first,) = session.run({"x": x})
    rest = [np.full((300, 400), number, np.float32) for number in range(20)]
    (second,) = session.run({"x": x})
    assert first.tobytes() == second.tobytes()
    assert len(rest) == 20
