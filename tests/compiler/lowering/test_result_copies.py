"""Results of symbolic sizes that show bytes of others are computed; whole models with such results are right at each size."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import prefuse
import pytest
from onnx import parser
from onnx.reference import ReferenceEvaluator
from prefuse.compiler.frontend.dimensions import bind_domain
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.lowering.result_copies import copy_shown_results
from prefuse.compiler.programs.symbolic import SymbolicModel
from prefuse.runtime.symbolic.sizes import Dim, Domain

_SHOWN = """
<ir_version: 10, opset_import: ["": 20]>
shown (float[N,6] x) => (float[M] flat, float[N,6] h, float[N,2,3] parts, float[M] again) {
  one = Constant <value_ints = [-1]> ()
  three = Constant <value_ints = [-1, 2, 3]> ()
  flat = Reshape(x, one)
  h = Relu(x)
  parts = Reshape(h, three)
  again = Reshape(parts, one)
}
"""


def test_shown_results_are_casts_and_others_stay() -> None:
    model = import_model(parser.parse_model(_SHOWN))
    before = ir.to_proto(model)
    copy_shown_results(model)
    assert ir.to_proto(model) == before  # sizes are not symbolic
    model = bind_domain(model, Domain([Dim("N", 1, 9)], {"N": 3}), {})
    copy_shown_results(model)
    kinds = sorted(node.op_type for node in model.graph if node.op_type != "Constant")
    assert kinds == ["Cast"] * 3 + ["Relu"] + ["Reshape"] * 3
    assert [value.name for value in model.graph.outputs] == ["flat", "h", "parts", "again"]
    casts = [node for node in model.graph if node.op_type == "Cast"]
    assert all(str(node.outputs[0].shape) == str(node.inputs[0].shape) for node in casts if node.inputs[0] is not None)


@pytest.mark.parametrize("kind", ["float", "int64", "bool"])
def test_each_result_has_memory_of_its_own(kind: str) -> None:
    text = _SHOWN.replace("float", kind).replace("Relu", "Identity" if kind == "bool" else "Abs")
    model = parser.parse_model(text)
    net = prefuse.compile(model, dims={"N": (1, 40)}, cache=False, threads=2)
    assert isinstance(net, SymbolicModel)
    assert "specialised" not in "".join(net.notes), net.notes
    for rows in (1, 3, 39):
        x = np.random.default_rng(rows).integers(-5, 5, (rows, 6)).astype({"float": "float32"}.get(kind, kind))
        found = net(x)
        assert isinstance(found, tuple)
        for got, wanted in zip(found, ReferenceEvaluator(model).run(None, {"x": x}), strict=True):
            np.testing.assert_array_equal(got, wanted)
            assert got.shape == np.shape(wanted)
            got[...] = 1  # of no other result, nor of the input
