"""Operators of old opsets that ONNX's converter alone would spoil."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import prefuse
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator
from prefuse.compiler.frontend.normalize import normalize
from prefuse.runtime.errors import InvalidModelError, UnsupportedModelError


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


@pytest.mark.parametrize(
    ("op_type", "axis", "shape", "own"),
    [("Add", 1, (3,), (3, 1, 1)), ("Mul", 1, (3, 4), (3, 4, 1)), ("Sub", 0, (3,), (3, 1, 1, 1)), ("Pow", 2, (4, 5), (4, 5)),
     ("Div", -2, (4,), (4, 1)), ("Add", 0, (), ())],
)  # fmt: skip
@pytest.mark.parametrize("opset", [1, 6])
def test_the_second_operand_had_a_place(
    opset: int, op_type: str, axis: int, shape: tuple[int, ...], own: tuple[int, ...]
) -> None:
    """As biases of channels were written, here as many as there are images; behind an operator whose result has no shape."""
    text = f"""<ir_version: 3, opset_import: ["": {opset}]>
        main (float[3,3,4,5] x, float{list(shape) or ""} b) => (float[3,3,4,5] y) {{
          z = Add<broadcast=1>(x, x)
          y = {op_type}<broadcast=1, axis={axis}>(z, b)
        }}"""
    rng = np.random.default_rng(4)
    x, b = rng.standard_normal((3, 3, 4, 5), np.float32), np.asarray(rng.standard_normal(shape, np.float32))
    numpys = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide, "Pow": np.power}
    with np.errstate(invalid="ignore"):
        expected = numpys[op_type](x + x, b.reshape(own))
    found = np.asarray(prefuse.compile(onnx.parser.parse_model(text), cache=False)(x, b))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_place_among_unknown_dimensions_is_refused() -> None:
    text = """<ir_version: 3, opset_import: ["": 5]> main (float[2,3,4] x, float[3] b) => (float[2,3,4] y) {
          z = Relu(x)
          y = Add<broadcast=1, axis=1>(z, b)
        }"""
    with pytest.raises(UnsupportedModelError, match="Add of opset 6 or older"):
        prefuse.compile(onnx.parser.parse_model(text), cache=False)


@pytest.mark.parametrize(("mode", "expected"), [("reflect", [2, 1, 2, 3, 2]), ("edge", [1, 1, 2, 3, 3])])
def test_the_number_of_a_pad_without_one(mode: str, expected: list[float]) -> None:
    text = f"""<ir_version: 3, opset_import: ["": 10]> main (float[3] x) => (float[5] y) {{
          y = Pad<mode="{mode}", pads=[1, 1], value=0.5>(x)
        }}"""
    found = np.asarray(prefuse.compile(onnx.parser.parse_model(text), cache=False)(np.array([1, 2, 3], np.float32)))
    np.testing.assert_array_equal(found, np.array(expected, np.float32))


@pytest.mark.parametrize("op_type", ["Softmax", "LogSoftmax", "Hardmax"])
def test_nothing_may_be_normalized(op_type: str) -> None:
    x = np.zeros((2, 3, 0), np.float32)
    found = np.asarray(prefuse.compile(_over_many_axes(op_type, 1, *x.shape), cache=False)(x))
    assert found.shape == x.shape


@pytest.mark.parametrize("axis", [1, 2])
def test_a_reshape_behind_softmax_keeps_its_meaning(axis: int) -> None:
    text = f"""<ir_version: 7, opset_import: ["": 11]>
        main (float[2,3,4] x) => (float[2,12] y) <int64[2] s = {{0, -1}}> {{
          p = Softmax<axis={axis}>(x)
          y = Reshape(p, s)
        }}"""
    x = np.random.default_rng(3).standard_normal((2, 3, 4), np.float32)
    powers = np.exp(x.reshape(2 if axis == 1 else 6, -1))
    expected = (powers / powers.sum(1, keepdims=True)).reshape(2, 12)
    found = np.asarray(prefuse.compile(onnx.parser.parse_model(text), cache=False)(x))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(("axis", "columns"), [(None, 12), (0, 24), (1, 12), (2, 4), (-1, 4)])
def test_hardmax_was_over_all_dimensions_from_its_axis_on(axis: int | None, columns: int) -> None:
    x = np.random.default_rng(3).permutation(24).astype(np.float32).reshape(2, 3, 4)
    model = _over_many_axes("Hardmax", axis, *x.shape)
    rows = x.reshape(-1, columns)
    expected = rows == rows.max(1, keepdims=True)
    np.testing.assert_array_equal(prefuse.compile(model, cache=False)(x), expected.reshape(x.shape).astype(np.float32))


def _of_groups(opset: int, groups: int, *shape: int) -> onnx.ModelProto:
    """GroupNormalization between others, whose values have no recorded types."""
    dims, factors = str(list(shape)), groups if opset < 21 else shape[1]
    body = f"a = Relu(x) n = GroupNormalization<num_groups={groups}, epsilon=0.01>(a, s, b) y = Mul(n, n)"
    ports = f"(float{dims} x, float[{factors}] s, float[{factors}] b) => (float{dims} y)"
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> main {ports} {{ {body} }}')


@pytest.mark.parametrize(
    ("opset", "groups", "shape"),
    [(18, 3, (2, 6, 5, 7)), (19, 2, (1, 8, 4)), (20, 1, (2, 3, 2, 2, 2)), (18, 4, (3, 4, 9)), (18, 2, (2, 4)), (18, 2, (0, 4, 3)),
     (21, 3, (2, 6, 5))],
)  # fmt: skip
def test_groups_had_factors_of_their_own(opset: int, groups: int, shape: tuple[int, ...]) -> None:
    model = _of_groups(opset, groups, *shape)
    rng = np.random.default_rng(5)
    feeds = {
        value.name: rng.standard_normal([dim.dim_value for dim in value.type.tensor_type.shape.dim]).astype(np.float32)
        for value in model.graph.input
    }
    (expected,) = ReferenceEvaluator(model).run(None, feeds) if min(shape) else (np.zeros(shape, np.float32),)
    found = np.asarray(prefuse.compile(model, cache=False)(*feeds.values()))
    np.testing.assert_allclose(found, np.asarray(expected), rtol=1e-4, atol=1e-5)


def test_groups_had_factors_of_their_own_beside_an_operator_of_com_microsoft() -> None:
    """For which the model is brought to an opset that has factors for each channel."""
    text = """<ir_version: 8, opset_import: ["": 18, "com.microsoft": 1]>
        main (float[2,4,5] x, float[2] s, float[2] b) => (float[2,4,5] y) {
          n = GroupNormalization<num_groups=2, epsilon=0.01>(x, s, b)
          y = com.microsoft.FastGelu(n)
        }"""
    rng = np.random.default_rng(5)
    feeds = {name: rng.standard_normal(shape, np.float32) for name, shape in (("x", (2, 4, 5)), ("s", (2,)), ("b", (2,)))}
    model = onnx.parser.parse_model(text)
    (expected,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    found = np.asarray(prefuse.compile(model, cache=False)(*feeds.values()))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_channels_are_in_equal_groups() -> None:
    with pytest.raises(InvalidModelError, match="has 4 channels in 3 groups"):
        prefuse.compile(_of_groups(18, 3, 1, 4, 3), cache=False)


def test_values_of_one_name_in_two_branches_keep_their_shapes() -> None:
    text = """<ir_version: 7, opset_import: ["": 12]>
        main (bool c, float[2,3] x) => (float[A,B] y) {
          y = If(c) <
            then_branch = first () => (float[2,3] o) <float[2,3] p> { p = Relu(x) o = Neg(p) },
            else_branch = second () => (float[3,2] q) <float[3,2] p> { p = Transpose(x) q = Neg(p) }
          >
        }"""
    model = normalize(ir.from_proto(onnx.parser.parse_model(text)), "model")
    shapes = [node.outputs[0].shape for node in model.graph.all_nodes() if node.op_type in ("Relu", "Transpose")]
    assert [shape is None or list(shape) for shape in shapes] in ([True, True], [[2, 3], [3, 2]])
