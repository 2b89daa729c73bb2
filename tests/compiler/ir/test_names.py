"""Names of nodes, and what nodes made by passes remember of those that they stand for."""

from __future__ import annotations

import onnx_ir as ir
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.ir.facts import source_of
from prefuse.compiler.ir.functions import fuse_into_function, original_names
from prefuse.compiler.ir.names import name_nodes
from prefuse.compiler.ir.rewriter import Rejection, copy_source, replace_node
from prefuse.compiler.pipeline import Context
from prefuse.runtime.target import Target

TEXT = """<ir_version: 10, opset_import: ["": 21]>
main (float[2] x) => (float[2] y) { a = Neg(x) b = Exp(a) c = Relu(b) y = Abs(c) }"""


def test_every_node_gets_a_name_of_its_own() -> None:
    model = ir.from_onnx_text(TEXT)
    for node, name in zip(model.graph, ["c", "", "c", ""], strict=True):
        node.name = name
    name_nodes(model)
    assert [node.name for node in model.graph] == ["c", "b", "c_1", "y"]
    name_nodes(model)
    assert [node.name for node in model.graph] == ["c", "b", "c_1", "y"]
    assert [node.name for node in import_model(ir.from_onnx_text(TEXT)).graph] == ["a", "b", "c", "y"]


def test_new_nodes_remember_what_they_stand_for() -> None:
    model = import_model(ir.from_onnx_text(TEXT))
    a, b, *_ = model.graph
    for old in (a, b):
        new = ir.node("Identity", [old.inputs[0]])
        replace_node(model, old, [new], new.outputs)
        assert original_names(new) == (old.name,)
        assert source_of(new) == old.name
    first, second, third, last = model.graph
    joined = ir.node("Neg", [third.outputs[0]])
    copy_source((first, second, third), joined)
    assert original_names(joined) == ("a", "b", "c")
    assert original_names(fuse_into_function(model, [second, third], "identity_relu")) == ("b", "c")
    assert original_names(last) == ("y",)


def test_a_rejection_keeps_the_names_of_what_was_fused() -> None:
    model = import_model(ir.from_onnx_text(TEXT))
    context, (a, b, c, _) = Context(Target.parse("cpu")), list(model.graph)
    call = fuse_into_function(model, [b, c], "exp_relu")
    context.reject("some-pass", Rejection("no", (a, call)))
    assert context.remarks[-1].nodes == (("a",), ("b", "c"))
