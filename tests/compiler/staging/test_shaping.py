"""Which inputs a model is compiled for the values of."""

from __future__ import annotations

import numpy as np
import onnx
import prefuse
import pytest
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.frontend.shaping import shaping_inputs
from prefuse.compiler.programs import sources
from prefuse.runtime.staged.staged_model import StagedModel


def _model(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> main {text}')


def _branches(condition: str) -> str:
    return f"""{condition}
        y = If (c) <then_branch = t () => (float[4] a) {{ a = Relu(x) }}, else_branch = e () => (float[4] b) {{ b = Neg(x) }}>"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"(float[4] x, bool[1] c) => (float[4] y) {{ {_branches('')} }}", ("c",)),
        (f"(float[4] x, bool[M] c) => (float[4] y) {{ {_branches('')} }}", ()),
        (f"(float[4] x, int64 n) => (float[4] y) {{ {_branches('c = Cast<to=9>(n)')} }}", ("n",)),
        (f"(float[4] x, float n) => (float[4] y) {{ {_branches('c = Cast<to=9>(n)')} }}", ()),
        (f"(float[4] x) => (float[4] y) {{ {_branches('m = ReduceMax<keepdims=0>(x) c = Cast<to=9>(m)')} }}", ()),
        ("(float[4] x, int64[2] s) => (float[A,B] y) { y = Reshape(x, s) }", ("s",)),
        ("(float[4] x, float[2] s) => (float[A,B] y) { n = Cast<to=7>(s) y = Reshape(x, n) }", ()),
        ("(float[1,1,4,4] x, float[4] s) => (float[A,B,C,D] y) { y = Resize(x, , s) }", ("s",)),
        ("(float a, float b, float c) => (float[N] y) { y = Range(a, b, c) }", ("a", "b", "c")),
    ],
)
def test_data_of_each_call_are_none_of_them(text: str, expected: tuple[str, ...]) -> None:
    assert shaping_inputs(import_model(_model(text))) == expected


def test_a_branch_by_data_is_compiled_once() -> None:
    text = f"(float[4] x) => (float[4] y) {{ {_branches('m = ReduceMax<keepdims=0>(x) c = Cast<to=9>(m)')} }}"
    net = prefuse.compile(_model(text), cache=False)
    assert isinstance(net, StagedModel)
    for x in (np.array([1, 2, 3, -4], np.float32), -np.abs(np.arange(4, dtype=np.float32))):
        np.testing.assert_array_equal(np.asarray(net(x)), np.maximum(x, 0) if x.max() else -x)


def test_many_programs_by_values_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MANY_PROGRAMS", 2)
    net = prefuse.compile(_model("(float[4] x, int64[2] s) => (float[A,B] y) { y = Reshape(x, s) }"), cache=False)
    x = np.ones(4, np.float32)
    net(x, np.array([2, 2]))
    with pytest.warns(UserWarning, match="compiled for the 2th values of s"):
        net(x, np.array([4, 1]))
