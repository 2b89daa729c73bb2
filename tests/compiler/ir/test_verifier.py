"""The verifier accepts sound models and names what is wrong with others."""

from collections.abc import Callable

import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings
from prefuse.compiler.ir.facts import infer_facts
from prefuse.compiler.ir.functions import fuse_into_function
from prefuse.compiler.ir.verifier import VerificationError, verify_model
from prefuse.tests.models.random_models import random_models

TEXT = """<ir_version: 10, opset_import: ["": 21]>
main (float[2,4] x, bool c) => (float[2,4] y, float[2,4] z)
<float[4,4] w = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}> {
  h = MatMul(x, w)
  y = Relu(h)
  z = If(c) <then_branch = then () => (float[2,4] t) { t = Neg(h) }, else_branch = other () => (float[2,4] e) { e = Abs(y) }>
}"""


def sound_model() -> ir.Model:
    model = ir.from_onnx_text(TEXT)
    infer_facts(model)
    for node in model.graph:
        node.name = node.op_type.lower()
    return model


# Making a model infers its types, which others on the machine may slow down.
@given(random_models())
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_sound_models_pass(model: ir.Model) -> None:
    verify_model(model)


def test_subgraphs_pass() -> None:
    verify_model(sound_model())


def nodes(model: ir.Model) -> list[ir.Node]:
    return list(model.graph)


def cycle(model: ir.Model) -> None:
    matmul, relu, _ = nodes(model)
    matmul.replace_input_with(0, relu.outputs[0])


def wrong_order(model: ir.Model) -> None:
    matmul, relu, _ = nodes(model)
    model.graph.remove(matmul)
    model.graph.insert_after(relu, matmul)


def duplicate_name(model: ir.Model) -> None:
    nodes(model)[0].outputs[0].name = "y"


def shadowed_name(model: ir.Model) -> None:
    branch = nodes(model)[2].attributes["then_branch"].as_graph()
    branch[0].outputs[0].name = "h"


def dangling_value(model: ir.Model) -> None:
    nodes(model)[1].replace_input_with(0, ir.Value(name="stray"))


def removed_producer(model: ir.Model) -> None:
    model.graph.remove(nodes(model)[0])


def stale_use(model: ir.Model) -> None:
    ir.node("Neg", [nodes(model)[0].outputs[0]])


def missing_opset(model: ir.Model) -> None:
    model.graph.opset_imports.clear()


def unknown_function(model: ir.Model) -> None:
    fuse_into_function(model, nodes(model)[:1], "group")
    model.functions.clear()


def unknown_operator(model: ir.Model) -> None:
    nodes(model)[1].op_type = "Rleu"


def changed_body(model: ir.Model) -> None:
    fuse_into_function(model, nodes(model)[:1], "group")
    next(iter(model.functions.values())).outputs[0].shape = ir.Shape([2, 5])


def recursion(model: ir.Model) -> None:
    fuse_into_function(model, nodes(model)[:1], "group")
    function = next(iter(model.functions.values()))
    function.opset_imports["prefuse"] = 1
    function.append(ir.Node("prefuse", "group", function.inputs))


def too_many_inputs(model: ir.Model) -> None:
    relu = nodes(model)[1]
    relu.resize_inputs(2)
    relu.replace_input_with(1, relu.inputs[0])


def absent_input(model: ir.Model) -> None:
    nodes(model)[1].replace_input_with(0, None)


def unknown_attribute(model: ir.Model) -> None:
    nodes(model)[1].attributes.add(ir.AttrFloat32("alpha", 0.5))


def mistyped_attribute(model: ir.Model) -> None:
    relu = nodes(model)[1]
    relu.op_type = "Elu"
    relu.attributes.add(ir.AttrInt64("alpha", 1))


def missing_attribute(model: ir.Model) -> None:
    nodes(model)[1].op_type = "Cast"


def wrong_shape(model: ir.Model) -> None:
    nodes(model)[0].outputs[0].shape = ir.Shape([2, 5])


def wrong_dtype(model: ir.Model) -> None:
    nodes(model)[0].outputs[0].type = ir.TensorType(ir.DataType.DOUBLE)


def misfit(model: ir.Model) -> None:
    model.graph.inputs[0].shape = ir.Shape([2, 5])


def foreign_output(model: ir.Model) -> None:
    model.graph.outputs[0] = ir.Value(name="nobody")


def repeated_output(model: ir.Model) -> None:
    model.graph.outputs[1] = model.graph.outputs[0]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cycle, "cycle"),
        (wrong_order, "out of order"),
        (duplicate_name, "two values are called %y"),
        (shadowed_name, "two values are called %h"),
        (dangling_value, "%stray, which nothing in scope defines"),
        (removed_producer, "%h, which nothing in scope defines"),
        (stale_use, "%h lists a use that is not in the graph, by Neg as input 0"),
        (missing_opset, "no opset import for domain ''"),
        (unknown_function, r"no function prefuse\.group"),
        (unknown_operator, r"no operator or function ai\.onnx\.Rleu"),
        (changed_body, "its body gives %h shape"),
        (recursion, "calls itself"),
        (too_many_inputs, "2 inputs, legal are 1 to 1"),
        (absent_input, "required input X is absent"),
        (unknown_attribute, "Relu has no attribute alpha"),
        (mistyped_attribute, "attribute alpha is of type INT"),
        (missing_attribute, "required attribute to is absent"),
        (wrong_shape, r"node matmul \(MatMul\) gives %h shape"),
        (wrong_dtype, r"node matmul \(MatMul\) gives %h type"),
        (misfit, "Incompatible dimensions"),
        (foreign_output, "graph output %nobody is not produced"),
        (repeated_output, "output twice"),
    ],
    ids=lambda item: item.__name__ if callable(item) else None,
)
def test_damage_is_found(damage: Callable[[ir.Model], None], message: str) -> None:
    model = sound_model()
    damage(model)
    with pytest.raises(VerificationError, match=message):
        verify_model(model)
