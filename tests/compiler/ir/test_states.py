"""Pairs of outputs and inputs become states; what cannot be one is refused with what to do about it."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import prefuse
import pytest
from onnx import parser
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.ir.states import declare_states, state_inputs, states_of
from prefuse.compiler.programs.digest import model_digest
from prefuse.runtime.errors import OptionError, UnsupportedModelError

TEXT = """<ir_version: 10, opset_import: ["": 21]>
g (float[4] x, float[4] a, float[2,2] b, int64[4] i, float[N] n) => (float[4] y, float[4] z, float[N] m, int64[4] j) {
  y = Add(x, a)
  z = Mul(x, a)
  m = Neg(n)
  j = Neg(i)
}"""


def model() -> ir.Model:
    return import_model(parser.parse_model(TEXT))


def test_pairs_stand_in_the_model() -> None:
    graph = model()
    declare_states(graph, {"z": "a", "j": "i"})
    assert list(states_of(graph).items()) == [("z", "a"), ("j", "i")]
    assert states_of(graph.clone()) == states_of(graph)
    assert state_inputs(graph) == {"a", "i"}
    assert model_digest(graph) != model_digest(model())


@pytest.mark.parametrize(
    ("pairs", "fault"),
    [
        ({"q": "a"}, "the model has no output 'q'; its outputs are y, z, m, j"),
        ({"y": "q"}, "the model has no input 'q'; its inputs are x, a, b, i, n"),
        ({"y": "a", "z": "a"}, "'z' renews 'a', one of which is in a pair already"),
        ({"y": "b"}, "output 'y' is float32[4], and 'b', which it shall renew, float32[2,2]"),
        ({"y": "i"}, "output 'y' is float32[4], and 'i', which it shall renew, int64[4]"),
        ({"m": "n"}, "input 'n' is FLOAT[N]: a state has a fixed shape"),
    ],
)
def test_wrong_pairs_are_refused(pairs: dict[str, str], fault: str) -> None:
    with pytest.raises(OptionError) as raised:
        declare_states(model(), pairs)
    assert fault in str(raised.value)


def test_a_pair_is_declared_once() -> None:
    graph = model()
    declare_states(graph, {"y": "a"})
    with pytest.raises(OptionError, match="in a pair already"):
        declare_states(graph, {"y": "x"})


def test_an_initializer_is_what_a_state_is_at_first() -> None:
    proto = parser.parse_model(TEXT.replace("float[4] a, ", ""))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.arange(4, dtype=np.float32), "a"))
    graph = import_model(proto)
    declare_states(graph, {"z": "a"})
    assert [value.name for value in graph.graph.inputs] == ["x", "b", "i", "n", "a"]
    assert graph.graph.initializers["a"].const_value is not None


STAGED = """<ir_version: 10, opset_import: ["": 21]>
g (float[4] x, float[4] a, float[3] r, bool c) => (float[4] y) {
  s = Add(x, a)
  n = Cast<to = 7>(r)
  m = ReduceMax<keepdims = 0>(n)
  y = Loop (m, c, s) <body = b (int64 i, bool go, float[4] p) => (bool on, float[4] q) { on = Identity(go) q = Exp(p) }>
}"""
SHAPING = """<ir_version: 10, opset_import: ["": 21]>
g (float[4] x, int64[1] a) => (float[N] y, int64[1] b) {
  zero = Constant<value_ints = [0]>()
  y = Slice(x, zero, a)
  b = Neg(a)
}"""
LATE = """<ir_version: 10, opset_import: ["": 21]>
g (float[N] x, float[4] a) => (float[M] y) {
  y = Concat<axis = 0>(x, x)
}"""


def test_what_a_program_cannot_keep_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="needs several programs"):
        prefuse.compile(parser.parse_model(STAGED), states={"y": "a"}, cache=False)
    with pytest.raises(OptionError, match="a decides shapes, which a state cannot"):
        prefuse.compile(parser.parse_model(SHAPING), states={"b": "a"}, cache=False)
    with pytest.raises(OptionError, match="is no mapping of names"):
        prefuse.compile(parser.parse_model(STAGED), states=["y"], cache=False)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="precision 'int8' has none"):
        prefuse.compile(parser.parse_model(TEXT), states={"y": "a"}, precision="int8", cache=False)


def test_a_shape_that_a_call_tells_is_checked_then() -> None:
    net = prefuse.compile(parser.parse_model(LATE), states={"y": "a"}, cache=False)
    assert net(np.ones(2, np.float32)) == ()
    with pytest.raises(OptionError, match=r"output 'y' is float32\[6\], and 'a', which it shall renew, float32\[4\]"):
        net(np.ones(3, np.float32))
