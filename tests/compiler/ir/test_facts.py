"""Types and shapes of values, sources of nodes, and constants."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx.shape_inference import infer_node_outputs
from prefuse.compiler.debugging.oracle import random_inputs, run_model
from prefuse.compiler.ir import facts
from prefuse.compiler.ir.constants import add_constant, constant_array, scalar_constant
from prefuse.compiler.ir.facts import data_type, dtype_name, has_static_type, infer_facts, infer_node, source_of, tensor_type
from prefuse.compiler.ir.printer import print_type
from prefuse.compiler.ir.verifier import verify_model
from prefuse.runtime.errors import InvalidModelError
from prefuse.tests.models.random_models import random_models
from prefuse.tests.scaling import assert_scales

HEADER = '<ir_version: 10, opset_import: ["": 21]>\n'


def model_of(text: str) -> ir.Model:
    return ir.from_onnx_text(HEADER + text)


def types_of(model: ir.Model) -> dict[str | None, str]:
    infer_facts(model)
    verify_model(model)
    return {value.name: print_type(value) for node in model.graph for value in node.outputs}


@pytest.mark.parametrize("dtype", [one for one in ir.DataType if one not in (ir.DataType.UNDEFINED, ir.DataType.STRING)])
def test_dtype_names_round_trip(dtype: ir.DataType) -> None:
    assert data_type(dtype_name(dtype)) == dtype


def test_dtype_names() -> None:
    assert dtype_name(ir.DataType.FLOAT) == "float32"
    assert dtype_name(ir.DataType.BFLOAT16) == "bfloat16"
    with pytest.raises(InvalidModelError, match="no dense element type"):
        dtype_name(ir.DataType.STRING)


@given(random_models())
@settings(max_examples=20, deadline=None)
def test_inferred_shapes_are_those_of_execution(model: ir.Model) -> None:
    for node in model.graph:
        node.outputs[0].shape = node.outputs[0].type = None
    infer_facts(model)
    for name, array in run_model(model, random_inputs(model), "reference").items():
        value = next(value for value in model.graph.outputs if value.name == name)
        assert tensor_type(value).shape == array.shape
        assert tensor_type(value).dtype == array.dtype.name


def test_symbols_flow_and_recorded_dimensions_stay() -> None:
    model = model_of(
        """main (float[N,C] x, int64[K] i) => (r) <int64[2] s = {-1, 4}> {
          a = Relu(x)
          r = Reshape(a, s)
          n = NonZero(a)
          t = Transpose<perm = [1, 0]>(n)
        }"""
    )
    model.graph[2].outputs[0].shape = ir.Shape([2, "hits"])
    assert types_of(model) == {"a": "float[N,C]", "r": "float[?,4]", "n": "int64[2,hits]", "t": "int64[hits,2]"}


def test_subgraphs_see_outer_values() -> None:
    model = model_of(
        """main (float[2,4] x, bool c) => (y) {
          h = Transpose(x)
          y = If(c) <then_branch = then () => (t) { t = Relu(h) }, else_branch = other () => (e) { e = Neg(h) }>
        }"""
    )
    branches = [model.graph[1].attributes[name].as_graph() for name in ("then_branch", "else_branch")]
    assert types_of(model)["y"] == "float[4,2]"
    assert [print_type(branch.outputs[0]) for branch in branches] == ["float[4,2]"] * 2


def test_a_function_reads_constants_and_attributes_of_its_call() -> None:
    model = ir.from_onnx_text(
        """<ir_version: 10, opset_import: ["": 21, "local": 1]>
        main (float[2,6] x) => (y) <int64[2] s = {3, 4}> { y = local.view<to = 10>(x, s) }
        <domain: "local", opset_import: ["": 21]>
        view <to> (x, s) => (z) {
          r = Reshape(x, s)
          z = Cast<to: int = @to>(r)
        }"""
    )
    assert types_of(model) == {"y": "float16[3,4]"}


def test_infer_node_after_a_change_of_inputs() -> None:
    model = model_of("main (float[2,4] x, float[2,8] w) => (y) { y = Relu(x) }")
    infer_facts(model)
    model.graph[0].replace_input_with(0, model.graph.inputs[1])
    infer_node(model.graph[0], model)
    assert str(tensor_type(model.graph[0].outputs[0])) == "float32[2,8]"


def test_a_misfit_names_the_node_and_its_inputs() -> None:
    model = model_of("main (float[2,4] x, float[5,3] w) => (y) { y = MatMul(x, w) }")
    model.graph[0].name = "layer1"
    with pytest.raises(InvalidModelError, match=r"layer1: MatMul does not fit.*x: float\[2,4\], w: float\[5,3\].*Incompatible"):
        infer_facts(model)


def test_unknown_types_are_refused_by_name() -> None:
    model = model_of("main (float[N] x) => (y) { y = Relu(x) }")
    infer_facts(model)
    assert not has_static_type(model.graph.inputs[0])
    with pytest.raises(InvalidModelError, match=r"input x: value x has element type float and shape \[N\]"):
        tensor_type(model.graph.inputs[0])


def test_sources() -> None:
    node = ir.node("Relu", [])
    assert source_of(node) == "Relu"
    node.name = "relu1"
    assert source_of(node) == "relu1"
    frame = 'File "{}", line {}, in forward\n    code'
    torch = frame.format("/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", 134)
    node.metadata_props["pkg.torch.onnx.stack_trace"] = f"{frame.format('net.py', 3)}\n{frame.format('block.py', 9)}\n{torch}"
    assert source_of(node) == "block.py:9"
    node.metadata_props["pkg.torch.onnx.stack_trace"] = torch
    assert source_of(node).endswith("linear.py:134")


def test_constants() -> None:
    model = model_of(
        """main (float[2] x, float[1] given) => (y) <float[2] w = {1, 2}, float[1] given = {3}> {
          c = Constant<value_ints = [4, 5]>()
          s = Constant<value_float = 0.5>()
          y = Relu(x)
        }"""
    )
    graph = model.graph
    c, s, y = (node.outputs[0] for node in graph)
    weight = constant_array(graph.initializers["w"])
    assert weight is not None
    assert weight.tolist() == [1, 2]
    several = constant_array(c)
    assert several is not None
    assert several.tolist() == [4, 5]
    assert scalar_constant(s) == 0.5
    assert isinstance(scalar_constant(add_constant(model, np.array([[True]]), "flag")), bool)
    assert scalar_constant(add_constant(model, np.array(2, ml_dtypes.bfloat16), "low")) == 2.0
    for value in (y, graph.inputs[0], graph.initializers["given"], None):
        assert constant_array(value) is None, "not a constant, or one that a caller may override"
    assert scalar_constant(c) is None


@given(st.lists(st.sampled_from(["w", "y", "new", "new_1"]), max_size=6))
def test_added_constants_have_unused_names(hints: list[str]) -> None:
    model = model_of("main (float[2] x) => (y) <float[2] w = {1, 2}> { y = Add(x, w) }")
    infer_facts(model)
    array = np.zeros(3, np.int8)
    values = [add_constant(model, array, hint) for hint in hints]
    verify_model(model)
    assert len({value.name for value in values} | {"w", "x", "y"}) == len(hints) + 3
    for value in values:
        added = constant_array(value)
        assert added is not None
        assert np.shares_memory(added, array)


def test_inference_and_verification_are_linear() -> None:
    """The ratio at n and 2n nodes catches a quadratic walk on any machine."""

    def prepare(length: int) -> Callable[[], object]:
        body = "\n".join(f"v{number + 1} = Add(v{number}, v0)" for number in range(length))
        model = model_of(f"main (float[N] v0) => (v{length}) {{\n{body}\n}}")

        def work() -> None:
            infer_facts(model)
            verify_model(model)

        return work

    assert_scales(prepare, 1000, 2000, 3)


def test_parameters_of_bodies_get_types() -> None:
    """Where a model leaves them out: from the inputs of the node, as far as every iteration agrees with them."""
    model = ir.from_onnx_text("""<ir_version: 10, opset_import: ["": 21]>
        main (float[n,2] x, float[2,k] u, int64 t) => (float[m,2] y) {
            y = Loop(t, "", x) <body = b (i, c, a) => (d, e) { d = Identity(c) f = Cast<to=1>(i) e = Mul(a, f) }>
            z, zs = Scan(x, u) <num_scan_inputs=1, scan_input_axes=[-1], body = g (q, p) => (r, s) { r = Identity(q) s = Exp(p) }>
            l = SequenceConstruct(x)
            w = SequenceMap(l, x) <body = h (j, v) => (o) { o = Add(j, v) }>
        }""")
    infer_facts(model)
    loop, scan, _, mapped = model.graph
    bodies = [node.attributes["body"].as_graph() for node in (loop, scan, mapped)]
    facts = [[(str(value.dtype), None if value.shape is None else str(value.shape)) for value in body.inputs] for body in bodies]
    assert facts[0] == [("INT64", "[]"), ("BOOL", "[]"), ("FLOAT", None)]
    assert facts[1] == [("FLOAT", "[n,2]"), ("FLOAT", "[2]")]
    assert facts[2] == [("FLOAT", None), ("FLOAT", "[n,2]")]
    assert bodies[2].outputs[0].dtype == ir.DataType.FLOAT


def test_sequences_are_no_tensors() -> None:
    """Although they have an element type and a shape of their elements."""
    model = ir.from_onnx_text("""<ir_version: 10, opset_import: ["": 21]>
        main (float[2,6] x) => (float[2,1] y) {
            s = SplitToSequence<axis=1>(x) p = Constant<value_int=1>() y = SequenceAt(s, p) }""")
    infer_facts(model)
    split = next(iter(model.graph)).outputs[0]
    assert split.shape is not None
    assert not has_static_type(split)
    assert has_static_type(model.graph.outputs[0])


@pytest.mark.parametrize("kind", ["int16", "float16", "bfloat16"])
def test_a_range_of_16_bits_has_a_length(kind: str) -> None:
    """Of which onnx's own inference says nothing."""
    model = ir.from_onnx_text(
        f"""<ir_version: 10, opset_import: ["": 27]>
        main () => ({kind}[N] y) <{kind} a = {{1}}, {kind} b = {{8}}, {kind} c = {{2}}> {{ y = Range(a, b, c) }}"""
    )
    assert types_of(model) == {"y": f"{kind}[4]"}


def test_a_type_that_an_operator_lacks_is_one_error() -> None:
    """onnx's schemas raise another error for it than its inference does."""
    text = '<ir_version: 8, opset_import: ["": 18]> main (float[2,2] x, float16[2,2] w) => (float[2,2] y) { y = MatMul(x, w) }'
    model = ir.from_onnx_text(text)
    with pytest.raises(InvalidModelError, match="MatMul does not fit its inputs"):
        infer_facts(model)


@pytest.mark.parametrize(
    ("second", "asked"),
    [
        ("b = Slice(y, starts, ends)", 1),
        ("b = Slice(y, starts, starts)", 2),  # other contents
        ("b = Slice(w, starts, ends)", 2),  # another shape
        ("b = Slice(h, starts, ends)", 2),  # another type
        ("b = Slice(y, starts, ends, zero)", 2),  # an operand more
    ],
)
def test_equal_questions_are_asked_once(monkeypatch: pytest.MonkeyPatch, second: str, asked: int) -> None:
    """A node that differs from another in its names alone is not inferred again; what inference reads makes it another."""
    names = {"x": "float[7]", "y": "float[7]", "w": "float[6]", "h": "float16[7]"}
    text = f"""<ir_version: 10, opset_import: ["": 21]>
main ({", ".join(f"{kind} {name}" for name, kind in names.items())}) => (a, b)
<int64[1] starts = {{1}}, int64[1] ends = {{3}}, int64[1] zero = {{0}}> {{
  a = Slice(x, starts, ends)
  {second}
}}"""
    monkeypatch.setattr(facts, "_ANSWERS", {})
    calls: list[str] = []

    def counted(schema: onnx.defs.OpSchema, *operands: Any) -> dict[str, onnx.TypeProto]:
        calls.append(schema.name)
        return infer_node_outputs(schema, *operands)

    monkeypatch.setattr(facts, "infer_node_outputs", counted)
    model = ir.from_onnx_text(text)
    infer_facts(model)
    assert len(calls) == asked
    length = 0 if "starts, starts" in second else 2
    assert [value.shape for value in model.graph.outputs] == [(2,), (length,)]
    for value in model.graph.outputs:
        assert value.dtype == (ir.DataType.FLOAT16 if value.name == "b" and "(h" in second else ir.DataType.FLOAT)


def test_attributes_and_dropped_outputs_are_part_of_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """<ir_version: 10, opset_import: ["": 21]>
main (float[4,6] x) => (a, b, c, d) {
  a = ReduceSum <keepdims = 0> (x)
  b = ReduceSum <keepdims = 1> (x)
  c, i = TopK <axis = 0> (x, n)
  d, j = TopK <axis = 1> (x, n)
}""".replace("(a, b, c, d) {", "(a, b, c, d) <int64[1] n = {2}> {")
    monkeypatch.setattr(facts, "_ANSWERS", {})
    model = ir.from_onnx_text(text)
    infer_facts(model)
    assert [value.shape for value in model.graph.outputs] == [(), (1, 1), (2, 6), (4, 2)]


class _Forgetful(dict[Any, Any]):
    """Answers that another thread takes away right after this one has seen that they are there."""

    def __contains__(self, key: object) -> bool:
        found = super().__contains__(key)
        self.clear()
        return found


def test_answers_that_another_thread_clears(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_ANSWERS", _Forgetful())
    for _ in range(2):
        model = model_of("main (float[2] x) => (y, z) { y = Relu(x)\n z = Relu(x) }")
        infer_facts(model)
        assert [value.shape for value in model.graph.outputs] == [(2,), (2,)]


def test_sizes_of_the_parts_of_a_split_are_known_however_many() -> None:
    parts = 300
    outputs = ", ".join(f"p{number}" for number in range(parts))
    model = model_of(f"main (float[2,900] x, int64[{parts}] s) => (p7) {{ {outputs} = Split <axis = 1> (x, s) }}")
    sizes = model.graph.inputs.pop(1)
    sizes.const_value = ir.tensor(np.full(parts, 3), name="s")
    model.graph.register_initializer(sizes)
    assert set(types_of(model).values()) == {"float[2,3]"}
