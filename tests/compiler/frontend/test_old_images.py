"""Operators on images of old opsets: what they meant then, not what ONNX's converter makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import prefuse
import pytest
import torch
from onnx import helper, numpy_helper
from prefuse.compiler.frontend.importer import import_model
from prefuse.runtime.errors import UnsupportedModelError

rng = np.random.default_rng(17)


def one_node(
    op_type: str, opset: int, *arrays: np.ndarray, outputs: int = 1, constants: tuple[np.ndarray, ...] = (), **attributes: Any
) -> onnx.ModelProto:
    names = [f"x{i}" for i in range(len(arrays) + len(constants))]
    node = helper.make_node(op_type, names, [f"y{i}" for i in range(outputs)], **attributes)
    inputs = [helper.make_tensor_value_info(name, 1, array.shape) for name, array in zip(names, arrays, strict=False)]
    made = [numpy_helper.from_array(array, name) for name, array in zip(names[len(arrays) :], constants, strict=True)]
    results = [helper.make_empty_tensor_value_info(name) for name in node.output]
    graph = helper.make_graph([node], "one", inputs, results, made)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=4)
    return onnx.shape_inference.infer_shapes(model)


def ours(model: onnx.ModelProto, *arrays: np.ndarray) -> Any:
    return prefuse.compile(model, cache=False)(*arrays)


def theirs(model: onnx.ModelProto, *arrays: np.ndarray) -> Any:
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return session.run(None, {port.name: array for port, array in zip(session.get_inputs(), arrays, strict=True)})[0]


@pytest.mark.parametrize(
    ("op_type", "opset", "scales"),
    [("Upsample", 7, (2, 3)), ("Upsample", 9, (2.25, 1.75)), ("Resize", 10, (2.25, 1.75)), ("Resize", 10, (0.375, 0.75)),
     ("Resize", 10, (0.375, 1.75))],
)  # fmt: skip
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_old_resizing_divides_coordinates_by_the_scale(op_type: str, opset: int, scales: tuple[float, ...], mode: str) -> None:
    x = rng.standard_normal((1, 2, 15, 16)).astype(np.float32)
    whole = np.array([1, 1, *scales], np.float32)
    if opset < 9:
        model = one_node(op_type, opset, x, mode=mode, scales=whole.tolist())
    else:
        model = one_node(op_type, opset, x, constants=(whole,), mode=mode)
    np.testing.assert_allclose(ours(model, x), theirs(model, x), rtol=1e-5, atol=1e-5)


def test_the_first_upsample_is_the_same_under_other_names() -> None:
    x = rng.standard_normal((1, 2, 3, 4)).astype(np.float32)
    nearest = one_node("Upsample", 1, x, height_scale=2.0, width_scale=3.0)
    np.testing.assert_array_equal(ours(nearest, x), x.repeat(2, 2).repeat(3, 3))
    bilinear = one_node("Upsample", 1, x, height_scale=2.0, width_scale=3.0, mode="bilinear")
    later = one_node("Upsample", 7, x, scales=[1.0, 1.0, 2.0, 3.0], mode="linear")
    np.testing.assert_allclose(ours(bilinear, x), theirs(later, x), rtol=1e-5, atol=1e-6)


def test_old_nearest_resizing_by_scales_of_a_run_is_refused() -> None:
    model = one_node("Resize", 10, np.zeros((1, 2, 3, 4), np.float32), np.ones(4, np.float32))
    with pytest.raises(UnsupportedModelError, match="scales of opset 10"):
        import_model(model)


@pytest.mark.parametrize(
    ("opset", "outputs", "attributes"), [(9, 3, {}), (13, 5, {}), (6, 1, {"is_test": 0}), (14, 3, {"training_mode": 1})]
)
def test_training_batch_normalization_uses_the_statistics_of_the_batch(
    opset: int, outputs: int, attributes: dict[str, Any]
) -> None:
    x = torch.randn(4, 3, 5)
    scale, bias, mean, variance = torch.rand(4, 3)
    model = one_node(
        "BatchNormalization", opset, *(t.numpy() for t in (x, scale, bias, mean, variance)), outputs=outputs, **attributes
    )
    del model.graph.output[min(outputs, 3) :]
    got = ours(model, *(t.numpy() for t in (x, scale, bias, mean, variance)))
    centre, spread = x.mean((0, 2)), x.var((0, 2), correction=0)
    y = torch.nn.functional.batch_norm(x, None, None, scale, bias, training=True)
    expected = [y, 0.9 * mean + 0.1 * centre, 0.9 * variance + 0.1 * spread]
    for a, b in zip(got if isinstance(got, tuple) else (got,), expected, strict=False):
        np.testing.assert_allclose(a, b.numpy(), rtol=1e-4, atol=1e-5)


def test_saved_statistics_are_refused() -> None:
    x, channel = np.zeros((2, 3, 4), np.float32), np.ones(3, np.float32)
    with pytest.raises(UnsupportedModelError, match="saved statistics"):
        import_model(one_node("BatchNormalization", 9, x, *(channel,) * 4, outputs=5))


@pytest.mark.parametrize("op_type", ["LpPool", "GlobalLpPool"])
def test_the_first_powers_were_numbers_with_a_fraction(op_type: str) -> None:
    x = rng.standard_normal((1, 2, 4, 6)).astype(np.float32)
    kernel: dict[str, Any] = {"kernel_shape": [4, 6]} if op_type == "LpPool" else {}
    got = ours(one_node(op_type, 1, x, p=3.0, **kernel), x)
    np.testing.assert_allclose(got, (np.abs(x) ** 3).sum((2, 3), keepdims=True) ** (1 / 3), rtol=1e-5)
