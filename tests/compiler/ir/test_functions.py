"""Outlining into functions and inlining again."""

import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefuse.compiler.debugging.oracle import random_inputs, relative_error, run_model
from prefuse.compiler.ir.facts import infer_facts, infer_node, source_of, tensor_type
from prefuse.compiler.ir.functions import body_of, fuse_into_function, fused_names, inline_all, inline_function, is_fused
from prefuse.compiler.ir.printer import print_model
from prefuse.compiler.ir.rewriter import replace_node
from prefuse.compiler.ir.verifier import verify_model
from prefuse.runtime.errors import InvalidModelError
from prefuse.tests.models.random_models import random_models


def model_of(body: str, header: str = "float[2,4] x, float[4,4] w) => (float[2,4] y") -> ir.Model:
    model = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["": 21]>\nmain ({header}) {{\n{body}\n}}')
    infer_facts(model)
    for number, node in enumerate(model.graph):
        node.name = f"{node.op_type.lower()}{number}"
    return model


def fuse(model: ir.Model, names: str, group: str = "group") -> ir.Node:
    wanted = set(names.split())
    call = fuse_into_function(model, [node for node in model.graph if node.name in wanted], group)
    verify_model(model)
    return call


@st.composite
def models_with_groups(draw: st.DrawFn) -> tuple[ir.Model, list[ir.Node]]:
    """A model and a contiguous run of its nodes, which is convex; at least one value of it is read outside."""
    model = draw(random_models())
    nodes = list(model.graph)
    begin = draw(st.integers(0, len(nodes) - 1))
    group = nodes[begin : draw(st.integers(begin + 1, len(nodes)))]
    escapes = any(v.is_graph_output() or any(user not in group for user, _ in v.uses()) for node in group for v in node.outputs)
    return (model, group) if escapes else (model, nodes)


@given(models_with_groups())
@settings(max_examples=60, deadline=None)
def test_inline_undoes_fuse(case: tuple[ir.Model, list[ir.Node]]) -> None:
    model, group = case
    before, inputs = print_model(model), random_inputs(model)
    metadata = [dict(node.metadata_props) for node in model.graph]
    expected = run_model(model, inputs, "reference")

    call = fuse_into_function(model, group, "group")

    verify_model(model)
    assert is_fused(call)
    fused = run_model(model, inputs, "reference")
    assert all(relative_error(fused[name], array) == 0 for name, array in expected.items())
    assert inline_all(model)
    verify_model(model)
    assert body_lines(print_model(model)) == body_lines(before)
    assert [dict(node.metadata_props) for node in model.graph] == metadata


def body_lines(text: str) -> list[str]:
    """Lines but those of constants, which come back last, and unused ones of which do not matter."""
    return [line for line in text.splitlines() if not line.strip().startswith("const ")]


def test_round_trip_through_a_file() -> None:
    model = model_of("h = MatMul(x, w)\n y = Relu(h)")
    before = print_model(model)
    fuse(model, "matmul0 relu1")
    loaded = ir.from_proto(ir.to_proto(model))
    infer_facts(loaded)
    verify_model(loaded)
    call = next(iter(loaded.graph))
    assert str(tensor_type(body_of(loaded, call)[0].outputs[0])) == "float32[2,4]"
    inline_all(loaded)
    assert print_model(loaded) == before


def test_equal_bodies_are_shared() -> None:
    body = "h = MatMul(x, w)\n a = Relu(h)\n i = MatMul(a, w)\n y = Relu(i)"
    model = model_of(body)
    first, second = fuse(model, "matmul0 relu1"), fuse(model, "matmul2 relu3")
    assert first.op_identifier() == second.op_identifier()
    assert len(model.functions) == 1
    assert fused_names(second) == ("matmul2", "relu3")
    inline_all(model)
    assert print_model(model) == print_model(model_of(body))


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ("a = Elu<alpha=0.5>(x)\n y = Elu<alpha=0.25>(a)", ["group", "group_2"]),  # other attributes
        ("a = MatMul(x, w)\n b = MatMul(w, w)\n y = MatMul(a, b)", ["group", "group_2", "group"]),  # other types
    ],
)
def test_different_bodies_get_suffixes(body: str, names: list[str]) -> None:
    model = model_of(body)
    assert [fuse(model, node.name or "").op_type for node in list(model.graph)] == names


def test_bodies_whose_constants_tell_other_shapes_are_not_shared() -> None:
    """A cube has one shape in either layout, and what Resize makes of it does not."""
    model = ir.from_onnx_text("""
        <ir_version: 10, opset_import: ["": 21]>
        main (float[1,8,8,8] x) => (float[1,8,16,16] y, float[1,16,16,8] z)
        <float[4] first = {1, 1, 2, 2}, float[4] last = {1, 2, 2, 1}> {
          y = Resize<mode="nearest">(x, "", first)
          z = Resize<mode="nearest">(x, "", last)
        }""")
    infer_facts(model)
    for node in list(model.graph):
        fuse_into_function(model, [node], "group")
    verify_model(model)
    assert [node.op_type for node in model.graph] == ["group", "group_2"]


def test_a_body_that_changed_is_not_shared() -> None:
    model = model_of("h = Relu(x)\n a = Neg(h)\n i = Relu(a)\n y = Neg(i)")
    first = fuse(model, "relu0 neg1")
    function = body_of(model, first)
    function[0].attributes.add(ir.AttrFloat32("changed", 1.0))
    second = fuse_into_function(model, [node for node in model.graph if not is_fused(node)], "group")
    assert second.op_type == "group_2"


def test_scalars_go_inside_and_weights_stay_outside() -> None:
    model = model_of("two = Constant<value = float {2.0}>()\n h = MatMul(x, w)\n y = Mul(h, two)")
    call = fuse(model, "matmul1 mul2")
    assert [value.name for value in call.inputs if value is not None] == ["x", "w"]
    assert [node.op_type for node in body_of(model, call)] == ["Constant", "MatMul", "Mul"]
    assert [node.op_type for node in model.graph] == ["group"]


def test_constants_come_back() -> None:
    """One that only the group read as an initializer, one that was a member of the group as the node it was."""
    body = "two = Constant<value = float {2.0}>()\n h = Mul(x, two)\n s = Constant<value_ints = [2, 4]>()\n y = Reshape(h, s)"
    model = model_of(body)
    call = fuse(model, "mul1 constant2 reshape3")
    assert fused_names(call) == ("mul1", "constant2", "reshape3")
    inline_all(model)
    verify_model(model)
    assert [node.op_type for node in model.graph] == ["Mul", "Constant", "Reshape"]
    assert list(model.graph.initializers) == ["two"]


def test_absent_outputs_stay_absent() -> None:
    body = "a, , c = Unique(x)\n h = Cast<to = 1>(c)\n y = ReduceSum(h)"
    model = model_of(body, "float[2,4] x) => (float[1] y")
    before = print_model(model)
    fuse(model, "unique0 cast1")
    inline_all(model)
    assert print_model(model) == before


def test_a_body_that_changed_is_inlined_as_it_is() -> None:
    model = model_of("h = Relu(x)\n i = Neg(h)\n y = Add(i, w)", "float[4,4] x, float[4,4] w) => (float[4,4] y")
    call = fuse(model, "relu0 neg1")
    function = body_of(model, call)
    split = ir.node("Split", [function[0].outputs[0]], {"num_outputs": 2}, num_outputs=2)
    join = ir.node("Concat", split.outputs, {"axis": 0})
    replace_node(function.graph, function[1], [split, join], join.outputs)
    infer_facts(model)
    verify_model(model)
    inline_all(model)
    verify_model(model)
    assert [node.op_type for node in model.graph] == ["Relu", "Split", "Concat", "Add"]


def test_a_reader_between_the_members_moves_behind_the_call() -> None:
    model = model_of("a = Relu(x)\n b = Neg(a)\n c = Tanh(x)\n y = Add(a, c)", "float[2,4] x) => (float[2,4] y, float[2,4] b")
    inputs = random_inputs(model)
    expected = run_model(model, inputs)
    fuse(model, "relu0 tanh2")
    assert [node.op_type for node in model.graph] == ["group", "Neg", "Add"]
    actual = run_model(model, inputs)
    assert all(relative_error(actual[name], expected[name]) == 0 for name in expected)


def test_sources_are_joined() -> None:
    model = model_of("h = Relu(x)\n y = Neg(h)")
    stack = 'File "/home/me/net.py", line {}, in forward\n  y\nFile "/venv/lib/site-packages/torch/nn/f.py", line 9, in f\n  z'
    for line, node in enumerate(model.graph, 3):
        node.metadata_props["pkg.torch.onnx.stack_trace"] = stack.format(line)
    call = fuse(model, "relu0 neg1")
    assert source_of(call) == "/home/me/net.py:3, /home/me/net.py:4"
    first, second = inline_function(model, call)
    assert (source_of(first), source_of(second)) == ("/home/me/net.py:3", "/home/me/net.py:4")


USER_FUNCTION = """<ir_version: 10, opset_import: ["": 21, "local": 1]>
main (float[2,4] x) => (float[2,4] y, float[3] z) {
  y = local.scaled_elu<scale = 2.0>(x)
  three = Constant<value = float[3] {1.0, 2.0, 3.0}>()
  z = local.scaled_elu<scale = 0.5>(three)
}
<domain: "local", opset_import: ["": VERSION]>
scaled_elu <scale: float = 1.0> (x) => (y) {
  e = Elu(x)
  s = Constant<value_float: float = @scale>()
  y = Mul(e, s)
}"""


def test_user_functions_with_attributes() -> None:
    model = ir.from_onnx_text(USER_FUNCTION.replace("VERSION", "21"))
    infer_facts(model)
    verify_model(model)
    inputs = random_inputs(model)
    expected = run_model(model, inputs, "reference")
    calls = [node for node in model.graph if node.domain == "local"]
    infer_node(calls[0], model)
    assert str(tensor_type(next(iter(model.functions.values()))[0].outputs[0])) == "float32[2,4]"
    inline_all(model)
    verify_model(model)
    assert not model.functions
    assert "local" not in model.opset_imports
    actual = run_model(model, inputs, "reference")
    assert all(relative_error(actual[name], expected[name]) == 0 for name in expected)


def test_a_function_of_another_opset_is_refused() -> None:
    model = ir.from_onnx_text(USER_FUNCTION.replace("VERSION", "17"))
    with pytest.raises(InvalidModelError, match="opset 17"):
        inline_all(model)
