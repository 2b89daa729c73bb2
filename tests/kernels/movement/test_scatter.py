"""ScatterElements and ScatterND against NumPy, update by update: every reduction and type, repeated and wrong indices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import prefuse
import pytest
from numpy.typing import DTypeLike
from prefuse.runtime.plan import Launch

from ..harness import LEVELS, Case, check, check_in_turn, operator, target_of

rng = np.random.default_rng(5)
TYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", ml_dtypes.bfloat16),
)
REDUCTIONS = ("none", "add", "mul", "max", "min")
_COMBINE: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "none": lambda old, new: new,
    "add": np.add,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
}


def x(*shape: int, dtype: DTypeLike = "float32") -> np.ndarray:
    return np.asarray(rng.integers(0, 2 if dtype == "bool" else 5, shape), dtype)


def at(extent: int, *shape: int, dtype: str = "int64") -> np.ndarray:
    return rng.integers(-extent, extent, shape).astype(dtype)


def elements(data: np.ndarray, indices: np.ndarray, axis: int = 0, reduction: str = "none") -> Case:
    updates = x(*indices.shape, dtype=data.dtype)
    expected = data.copy()
    for index in np.ndindex(*indices.shape):
        place = list(index)
        place[axis] = indices[index]
        if -data.shape[axis] <= place[axis] < data.shape[axis]:
            expected[tuple(place)] = _COMBINE[reduction](expected[tuple(place)], updates[index])
    attributes: dict[str, Any] = {"axis": axis, "reduction": reduction}
    return operator("ScatterElements", data, indices, updates, variables=(1, 2), expected=[expected], **attributes)


def slices(data: np.ndarray, indices: np.ndarray, reduction: str = "none") -> Case:
    depth = indices.shape[-1]
    updates = x(*indices.shape[:-1], *data.shape[depth:], dtype=data.dtype)
    expected = data.copy()
    for index in np.ndindex(*indices.shape[:-1]):
        place = tuple(indices[index])
        if all(-n <= i < n for i, n in zip(place, data.shape, strict=False)):
            expected[place] = _COMBINE[reduction](expected[place], updates[index])
    return operator("ScatterND", data, indices, updates, variables=(1, 2), expected=[expected], reduction=reduction)


def of_all_types() -> Iterator[Case]:
    for number, dtype in enumerate(TYPES):
        for reduction in ("none", REDUCTIONS[1 + number % 4]):
            yield elements(x(5, 7, dtype=dtype), at(5, 9, 7), reduction=reduction)
    for reduction in REDUCTIONS:
        yield elements(x(4, 6), at(6, 4, 9, dtype="int32"), 1, reduction)
        yield slices(x(4, 6, dtype="bool"), at(4, 9, 2), reduction)
        yield slices(x(4, 21, dtype="float16"), at(4, 9, 1), reduction)
    yield elements((x(5, 3) + 2j * x(5, 3)).astype("complex64"), at(5, 2, 3))


def of_all_shapes() -> Iterator[Case]:
    yield elements(x(3, 9, 4, 5), at(9, 2, 6, 4, 3), 1)  # smaller than the data along other dimensions
    yield elements(x(3, 9, 4, 5), at(9, 3, 6, 2, 5), -3, "add")
    yield elements(x(7), at(7, 30), 0, "add")
    yield elements(x(200, 3, 41), at(3, 200, 5, 41), 1)  # dealt to the threads by rows
    yield elements(x(9, 3000), at(9, 5, 3000), 0, "mul")  # and by columns
    yield elements(x(5, 7), at(5, 0, 7))
    yield elements(x(0, 7), at(1, 0, 7), 1)
    yield slices(x(5, 7, 3), at(5, 4, 2, 1))
    yield slices(x(5, 7, 3), at(5, 11, 3), "add")
    yield slices(x(300, 17), at(300, 3000, 1))  # dealt to the threads by places
    yield slices(x(3, 5000), at(3, 17, 1), "max")  # and by parts of a slice
    yield slices(x(4, 3), np.zeros((2, 0), np.int64), "add")  # an empty tuple is all of the data
    yield slices(x(4, 3), np.zeros((0, 2), np.int64))


def of_wrong_indices() -> Iterator[Case]:
    """They are dropped."""
    wrong = np.array([[4, -5, 3], [-(2**63), 2**63 - 1, -4], [2**31, -(2**31), 2**32]], np.int64)
    yield from (elements(x(4, 3), wrong, reduction=reduction) for reduction in ("none", "add"))
    yield from (slices(x(4, 3, 4), wrong, reduction) for reduction in ("none", "min"))
    yield slices(x(4, 2), np.array([[0], [4], [-5], [2**32 + 1]], np.int64))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("cases", [of_all_types, of_all_shapes, of_wrong_indices])
def test_scatter(cases: object, level: str) -> None:
    assert callable(cases)
    check_in_turn(list(cases()), level)


@pytest.mark.parametrize("op_type", ["ScatterElements", "ScatterND"])
@pytest.mark.parametrize("reduction", ["max", "min"])
def test_nan_is_kept_by_the_greatest_and_the_least(op_type: str, reduction: str) -> None:
    data, nan = np.array([1.0, np.nan, 3.0], np.float32), np.float32(np.nan)
    updates, expected = np.array([nan, 5.0, 3.0], np.float32), np.array([nan, nan, 3.0], np.float32)
    indices = np.arange(3, dtype=np.int64).reshape((3,) if op_type == "ScatterElements" else (3, 1))
    case = operator(op_type, data, indices, updates, variables=(1, 2), expected=[expected], reduction=reduction)
    check([case], target_of("avx2"))


def test_the_output_takes_the_memory_of_data_that_nobody_else_reads() -> None:
    text = """<ir_version: 10, opset_import: ["": 21]>
        main (float[300,4] x, int64[5,4] i, float[5,4] u) => (float[300,4] y) {
          d = Relu(x)
          s = ScatterElements<reduction="add">(d, i, u)
          y = Neg(s)
        }"""
    model = prefuse.compile(onnx.parser.parse_model(text))
    (launch,) = (s for s in model.plan.steps if isinstance(s, Launch) and "scatter" in s.kernel)
    buffers = {buffer.name: buffer for buffer in model.plan.buffers}
    assert buffers[launch.writes[0].buffer].offset == buffers[launch.reads[0].buffer].offset
    data, indices, updates = x(300, 4) - 2, at(300, 5, 4), x(5, 4)
    expected = np.maximum(data, 0)
    np.add.at(expected, (indices, np.arange(4)), updates)
    np.testing.assert_array_equal(model(data, indices, updates), -expected)


@pytest.mark.parametrize(
    ("values", "indices", "scatter", "expected"),
    [
        ("float[3] x", [1, 2, 0], "ScatterElements(d, i, d)", [3, 1, 2]),
        ("float[3] x", [[1], [2], [0]], "ScatterND(d, i, d)", [3, 1, 2]),
        ("int64[3] x", [1, 2, 3], "ScatterElements(d, d, i)", [1, 1, 2]),  # 3 is dropped
        ("int32[3] x", [1, 2, 3], "ScatterElements(d, d, d)", [1, 1, 2]),
        ("int32[3] x", [-1, 0, 1], "ScatterElements(j, j, d)", [2, 1, 3]),
        ("float[1,3,1] x", [1], 'TensorScatter<mode="circular">(d, d, i)', [3, 1, 2]),
    ],
)
def test_data_that_is_read_as_updates_or_indices_is_not_written_over(
    values: str, indices: list[Any], scatter: str, expected: list[int]
) -> None:
    numbers = np.array(indices)
    shape = ",".join(map(str, numbers.shape))
    text = f"""<ir_version: 10, opset_import: ["": 24]>
        main ({values}, int64[{shape}] i) => ({values.replace(" x", " y")}) {{
          d = Abs(x)
          k = Cast<to=6>(i)
          j = Neg(k)
          s = {scatter}
          y = Neg(s)
        }}"""
    model = prefuse.compile(onnx.parser.parse_model(text))
    (kind,) = (port.type for port in model.inputs if port.name == "x")
    assert kind is not None
    data = np.array([1, 2, 3], kind.dtype).reshape(kind.shape)
    np.testing.assert_array_equal(np.ravel(np.asarray(model(data, numbers))), -np.array(expected))
