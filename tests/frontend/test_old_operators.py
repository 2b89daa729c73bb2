"""Operators of old opsets that ONNX's converter alone would spoil."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import prefuse
import pytest
from onnx import helper


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
@pytest.mark.parametrize(
    ("op_type", "attributes", "expected"),
    [
        ("Clip", {"max": 1.5}, [-3.0, 0.25, 1.5]),
        ("Clip", {"min": -0.5, "max": 1.5}, [-0.5, 0.25, 1.5]),
        ("Pad", {"pads": [1, 0], "value": 1.5}, [1.5, -3.0, 0.25, 7.0]),
    ],
)
def test_numbers_of_attributes_have_the_type_of_the_data(
    dtype: type, op_type: str, attributes: dict[str, Any], expected: list[float]
) -> None:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        [helper.make_node(op_type, ["x"], ["y"], **attributes)],
        "one",
        [helper.make_tensor_value_info("x", kind, [3])],
        [helper.make_tensor_value_info("y", kind, [len(expected)])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 10)], ir_version=4)
    found = np.asarray(prefuse.compile(model, cache=False)(np.array([-3, 0.25, 7], dtype)))
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, np.array(expected, dtype))


def _over_many_axes(op_type: str, axis: int | None, *shape: int) -> onnx.ModelProto:
    attributes: dict[str, Any] = {} if axis is None else {"axis": axis}
    ports = [helper.make_tensor_value_info(name, 1, shape) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node(op_type, ["x"], ["y"], **attributes)], "one", ports[:1], ports[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=6)


@pytest.mark.parametrize("op_type", ["Softmax", "LogSoftmax", "Hardmax"])
def test_nothing_may_be_normalized(op_type: str) -> None:
    x = np.zeros((2, 3, 0), np.float32)
    found = np.asarray(prefuse.compile(_over_many_axes(op_type, 1, *x.shape), cache=False)(x))
    assert found.shape == x.shape


@pytest.mark.parametrize(("axis", "columns"), [(None, 12), (0, 24), (1, 12), (2, 4), (-1, 4)])
def test_hardmax_was_over_all_dimensions_from_its_axis_on(axis: int | None, columns: int) -> None:
    x = np.random.default_rng(3).permutation(24).astype(np.float32).reshape(2, 3, 4)
    model = _over_many_axes("Hardmax", axis, *x.shape)
    rows = x.reshape(-1, columns)
    expected = rows == rows.max(1, keepdims=True)
    np.testing.assert_array_equal(prefuse.compile(model, cache=False)(x), expected.reshape(x.shape).astype(np.float32))
