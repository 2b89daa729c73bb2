"""Functions of a file: they become operators of the graph, whatever their domain and their names."""

from __future__ import annotations

import numpy as np
import onnx
import prefuse
import pytest
from onnx import parser
from prefuse.compiler.frontend.importer import import_model
from prefuse.runtime.errors import InvalidModelError, UnsupportedModelError
from prefuse.tests.fuzz.broken import doubling_functions

_BOUNDED = """<ir_version: 10, opset_import: ["": 18, "prefuse": 1]>
g (float[1000] x) => (int64[1,1] m, int64[1] c) { m, c = prefuse.b(x) }
<domain: "prefuse", opset_import: ["": 18]>
b (a) => (r, s) { n = NonZero(a) s = Shape<start=1, end=2>(n) k = Constant<value_ints=[1,1]>() r = Reshape(n, k) }"""

_BRANCHES = """<ir_version: 10, opset_import: ["": 18, "local": 1]>
g (bool c, float[2] x) => (float[2] y) {
  z = local.f(x)
  y = If(c) <then_branch = a () => (float[2] p) { t = Neg(z) p = Exp(t) }, else_branch = b () => (float[2] q) { q = Neg(z) }>
}
<domain: "local", opset_import: ["": 18]>
f (a) => (b) { t = Relu(a) b = Neg(t) }"""

_BODIES = """<ir_version: 10, opset_import: ["": 18, "local": 1]>
g (bool c, float[2] x) => (float[2] y) { z = local.f(c, x) y = local.f(c, z) }
<domain: "local", opset_import: ["": 18]>
f (c, a) => (b) {
  b = If(c) <then_branch = t () => (float[2] p) { u = Neg(a) p = Exp(u) }, else_branch = e () => (float[2] q) { q = Neg(a) }>
}"""


def test_a_group_that_a_file_brings_along_is_not_believed() -> None:
    """Its kernel wrote as many results as there are elements into the one that the file said."""
    net = prefuse.compile(parser.parse_model(_BOUNDED), cache=False)
    assert callable(net)
    with pytest.raises(InvalidModelError, match="1000 elements into 1"):
        net(np.ones(1000, np.float32))
    assert import_model(parser.parse_model(_BOUNDED), keeps_groups=True).functions  # for `prefuse opt`


def test_groups_that_call_others_are_never_kept() -> None:
    model = doubling_functions(5)
    for node in (*model.graph.node, *(node for function in model.functions for node in function.node)):
        node.domain = node.domain and "prefuse"
    for function in model.functions:
        function.domain = "prefuse"
    for opset in (*model.opset_import, *(opset for function in model.functions for opset in function.opset_import)):
        opset.domain = opset.domain and "prefuse"
    assert [name for _, name, _ in import_model(model, keeps_groups=True).functions] == ["f5"]


@pytest.mark.parametrize("text", [_BRANCHES, _BODIES], ids=["of a branch", "of branches in a function"])
def test_names_of_subgraphs_stay_unique(text: str) -> None:
    model = import_model(parser.parse_model(text))
    names = [value.name for node in model.graph.all_nodes() for value in node.outputs]
    assert len(names) == len(set(names))
    assert prefuse.compile(parser.parse_model(text), cache=False)


def test_an_output_that_a_call_leaves_out_may_be_read_inside() -> None:
    text = """<ir_version: 10, opset_import: ["": 18, "local": 1]>
    g (float[2] x) => (float[2] y) { "", y = local.f(x) }
    <domain: "local", opset_import: ["": 18]>
    f (a) => (b, c) { b = Relu(a) c = Neg(b) }"""
    model = import_model(parser.parse_model(text))
    assert [node.op_type for node in model.graph] == ["Relu", "Neg"]
    assert all(value.name for node in model.graph for value in node.outputs)


@pytest.mark.parametrize("levels", [17, 40])
def test_calls_are_counted_before_they_are_inlined(levels: int) -> None:
    with pytest.raises(UnsupportedModelError, match=f"into {2**levels} nodes"):
        import_model(doubling_functions(levels))


def test_a_call_with_too_many_inputs() -> None:
    model = parser.parse_model(_BRANCHES)
    call: onnx.NodeProto = model.graph.node[0]
    call.input.append("x")
    with pytest.raises(InvalidModelError, match="f cannot be inlined: a call has more inputs"):
        import_model(model)
