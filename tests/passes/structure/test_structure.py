"""Loops, branches, sequences and optionals of known structure: compiled by us, executed by ONNX Runtime, the same results."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from prefuse.compiler.debugging.oracle import random_inputs, run_model
from prefuse.compiler.ir.assignments.node_precision import PRECISION_KEY
from prefuse.compiler.ir.facts import infer_facts
from prefuse.compiler.ir.functions import original_names
from prefuse.compiler.ir.names import name_nodes
from prefuse.compiler.ir.stored_weights import ROW_BITS
from prefuse.compiler.pipeline import Context, parse_pipeline, run_pipeline
from prefuse.compiler.pipeline.pass_table import PASSES
from prefuse.runtime.errors import InvalidModelError
from prefuse.runtime.target import Target
from prefuse.tests.models.text import read
from prefuse.tests.scaling import assert_scales

PIPELINE = "canonicalize,unroll-loops,eliminate-dead,merge-equal"
PLAIN = {"Concat", "Reshape", "Gather", "Add", "Mul", "Exp", "Neg", "Identity", "Slice", "Constant", "Expand", "Cast", "Sub"}


def compiled(model: ir.Model) -> tuple[ir.Model, Context]:
    """A copy of the model after the passes of this file, verified after each."""
    result, context = model.clone(), Context(Target.parse("cpu"))
    run_pipeline(result, parse_pipeline(PIPELINE, PASSES), context)
    return result, context


def assert_resolved(text: str, opset: int = 21) -> ir.Model:
    """Nothing but plain operators is left, and ONNX Runtime sees no difference."""
    model = read(text, opset)
    result, context = compiled(model)
    assert {node.op_type for node in result.graph} <= PLAIN, [str(remark) for remark in context.remarks]
    inputs = random_inputs(model)
    expected, found = run_model(model, inputs), run_model(result, inputs)
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        np.testing.assert_allclose(found[name], array, rtol=1e-6, err_msg=name)
    return result


LOOPS = {
    "stacks of scalars and of matrices": """main (float x, float[2,3] m) => (float[3] z, float[3,2,3] w) {
        n = Constant<value_int=3>()
        y, z, w = Loop(n, "", x) <body = b (int64 i, bool c, float a) => (bool d, float s, float t, float[2,3] u) {
            d = Identity(c) s = Exp(a) t = Neg(s) u = Mul(m, s) }> }""",
    "results that are parameters, captured or alike": """main (float[2] x, float[2] k) => (float[2] y, float[2] v, float[2,2] z) {
        n = Constant<value_int=2>()
        y, v, w, z = Loop(n, "", x, k, x) <body = b (int64 i, bool c, float[2] a, float[2] e, float[2] f)
            => (bool c, float[2] e, float[2] a, float[2] g, float[2] f) { g = Identity(k) }> }""",
    "swapped states": """main (float[2] x, float[2] k) => (float[2] y, float[2] v) {
        n = Constant<value_int=3>()
        y, v = Loop(n, "", x, k) <body = b (int64 i, bool c, float[2] a, float[2] e) => (bool d, float[2] f, float[2] g) {
            d = Identity(c) f = Identity(e) g = Exp(a) }> }""",
    "condition false in the second iteration": """main (float[2] x) => (float[2] y, float[q,2] z) {
        n = Constant<value_int=9>()
        y, z = Loop(n, "", x) <body = b (int64 i, bool c, float[2] a) => (bool d, float[2] e, float[2] f) {
            one = Constant<value_int=1>() d = Less(i, one) e = Exp(a) f = Neg(a) }> }""",
    "negative trip count": """main (float[2] x) => (float[2] y) {
        n = Constant<value_int=-3>()
        y = Loop(n, "", x) <body = b (int64 i, bool c, float[2] a) => (bool d, float[2] e) { d = Identity(c) e = Exp(a) }> }""",
    "length of a shape": """main (float[3,2] x) => (float[2] y) {
        s = Shape<start=0, end=1>(x) n = Squeeze(s) zero = Constant<value=float[2] {0, 0}>()
        y = Loop(n, "", zero) <body = b (int64 i, bool c, float[2] a) => (bool d, float[2] e) {
            d = Identity(c) row = Gather<axis=0>(x, i) e = Add(a, row) }> }""",
    "loop in a branch in a loop": """main (float[2] x) => (float[2] y) {
        n = Constant<value_int=3>()
        y = Loop(n, "", x) <body = b (int64 i, bool c, float[2] a) => (bool d, float[2] e) {
            d = Identity(c) one = Constant<value_int=1>() p = Equal(i, one)
            e = If(p) <
                then_branch = t () => (float[2] f) {
                    f = Loop(n, "", a) <body = q (int64 j, bool g, float[2] h) => (bool k, float[2] l) {
                        k = Identity(g) m = Cast<to=1>(i) o = Cast<to=1>(j) r = Add(m, o) l = Mul(h, r) }> },
                else_branch = u () => (float[2] v) { v = Neg(a) }> }> }""",
    "scan of matrices along their last axis": """main (float[2,2] x, float[2,2,3] u) => (float[2,2] y, float[2,3,2] z) {
        y, z = Scan(x, u) <num_scan_inputs=1, scan_input_axes=[-1], scan_output_axes=[-2],
            body = b (float[2,2] a, float[2,2] p) => (float[2,2] e, float[2,2] f) { e = Add(a, p) f = Exp(e) }> }""",
    "scan without states, backwards": """main (float[4,2] u) => (float[4,2] z) {
        z = Scan(u) <num_scan_inputs=1, scan_input_directions=[1], scan_output_directions=[0],
            body = b (float[2] p) => (float[2] f) { f = Exp(p) }> }""",
    "sequence in and out of loops": """main (float[2,3] x) => (float[6] y) {
        s = SplitToSequence<axis=0, keepdims=0>(x) n = SequenceLength(s) none = SequenceEmpty()
        t = Loop(n, "", none) <body = b (int64 i, bool c, seq(float[3]) a) => (bool d, seq(float[3]) e) {
            d = Identity(c) row = SequenceAt(s, i) twice = Add(row, row) e = SequenceInsert(a, twice) }>
        y = ConcatFromSequence<axis=0>(t) }""",
    "sequence of unequal parts mapped with a tensor": """main (float[5] x, float[1] k) => (float[5] y) {
        two = Constant<value_int=2>() s = SplitToSequence(x, two)
        t = SequenceMap(s, k) <body = scale (float[n] a, float[1] b) => (float[n] c) { c = Mul(a, b) }>
        y = ConcatFromSequence<axis=0>(t) }""",
}


@pytest.mark.parametrize("text", LOOPS.values(), ids=LOOPS)
def test_loops(text: str) -> None:
    assert_resolved(text)


def test_scan_of_nothing() -> None:
    """States stay, and nothing is stacked. ONNX Runtime fails, and so does the reference."""
    model = read("""main (float[2] x, float[0,2] u) => (float[2] y, float[3,0,2] z) {
        y, z = Scan(x, u) <num_scan_inputs=1, scan_output_axes=[-2], body = b (float[2] a, float[2] p)
            => (float[2] e, float[3,2] f) { e = Add(a, p) k = Constant<value_ints=[3, 2]>() f = Expand(e, k) }> }""")
    result, _ = compiled(model)
    inputs = random_inputs(model)
    found = run_model(result, inputs)
    np.testing.assert_array_equal(found["y"], inputs["x"])
    assert found["z"].shape == (3, 0, 2)
    assert found["z"].dtype == np.float32


def test_names_are_unique_where_bodies_share_them() -> None:
    """Two loops with one body's names, one of them in a branch; the verifier would tell."""
    body = "(int64 i, bool c, float[2] a) => (bool d, float[2] e) { d = Identity(c) h = Exp(a) e = Neg(h) }"
    result = assert_resolved(f"""main (float[2] x) => (float[2] y) {{
        n = Constant<value_int=2>() p = Constant<value=bool {{1}}>()
        v = Loop(n, "", x) <body = b {body}>
        y = If(p) <then_branch = t () => (float[2] f) {{ f = Loop(n, "", v) <body = b {body}> }},
            else_branch = u () => (float[2] g) {{ g = Identity(v) }}> }}""")
    assert len(result.graph) == 8


def test_long_stacks_are_joined_in_a_tree() -> None:
    """No Concat takes hundreds of operands."""
    result = assert_resolved("""main (float[200,2] u) => (float[200,2] z) {
        z = Scan(u) <num_scan_inputs=1, body = b (float[2] p) => (float[2] f) { f = Exp(p) }> }""")
    widths = [len(node.inputs) for node in result.graph if node.op_type == "Concat"]
    assert max(widths) <= 64
    assert len(widths) == 5


def test_constants_of_a_body_are_shared_without_a_copy() -> None:
    tensor = onnx.numpy_helper.from_array(np.ones((2, 2), np.float32), "w")
    model = read("""main (float[2,2] x) => (float[2,2] y) {
        n = Constant<value_int=3>()
        y = Loop(n, "", x) <body = b (int64 i, bool c, float[2,2] a) => (bool d, float[2,2] e) {
            d = Identity(c) f = Add(a, a) e = Exp(f) }> }""")
    loop = next(node for node in model.graph if node.op_type == "Loop")
    body = loop.attributes["body"].as_graph()
    weight = ir.Value(name="w", const_value=ir.serde.deserialize_tensor(tensor))
    body.register_initializer(weight)
    list(body)[1].replace_input_with(1, weight)
    infer_facts(model)
    run_pipeline(model, parse_pipeline(PIPELINE, PASSES), Context(Target.parse("cpu")))
    assert [value.const_value for value in model.graph.initializers.values()] == [weight.const_value]


def test_equal_constants_are_one_however_they_lie() -> None:
    """A transposed view and a copy of it; another view differs in the middle alone."""
    rows = np.arange(300 * 200, dtype=np.float32).reshape(300, 200)
    other = rows.T.copy()
    other[100, 150] = 0
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(rows.T.shape))
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 21}, name="main")
    sums = [x]
    for name, array in {"a": rows.T, "b": rows.T.copy(), "c": other}.items():
        value = ir.Value(name=name, const_value=ir.Tensor(array, name=name))
        value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(array.shape)
        graph.register_initializer(value)
        graph.append(ir.node("Add", [sums[-1], value]))
        sums.append(graph[-1].outputs[0])
        sums[-1].name = f"sum_{name}"
    graph.outputs.append(sums[-1])
    model = ir.Model(graph, ir_version=10)
    infer_facts(model)
    name_nodes(model)
    model, _ = compiled(model)
    assert sorted(model.graph.initializers) == ["a", "c"]


def test_optionals_are_their_contents() -> None:
    """Through a branch that is taken, and a loop that fills one."""
    result, context = compiled(
        read("""main (float[2] x) => (float[2] y, bool has) {
        p = Constant<value=bool {1}>() n = Constant<value_int=2>()
        o = If(p) <then_branch = t () => (optional(float[2]) f) { f = Optional(x) },
            else_branch = u () => (optional(float[2]) g) { g = Optional<type = float[2]>() }>
        has = OptionalHasElement(o)
        z = Loop(n, "", o) <body = b (int64 i, bool c, optional(float[2]) a) => (bool d, optional(float[2]) e) {
            d = Identity(c) h = OptionalGetElement(a) k = Exp(h) e = Optional(k) }>
        y = OptionalGetElement(z) }""")
    )
    assert sorted(node.op_type for node in result.graph) == ["Exp", "Exp", "Identity"], context.remarks
    assert [bool(value.const_value.numpy()) for value in result.graph.initializers.values() if value.const_value] == [True]


def test_unrolling_is_linear() -> None:
    """In the iterations, a sequence that grows with them included."""

    def prepare(length: int) -> Callable[[], object]:
        model = read(f"""main (float[{length},2] u) => (float[{length},2] z) {{
            n = Constant<value_int={length}>() none = SequenceEmpty()
            s = Loop(n, "", none) <body = b (int64 i, bool c, seq(float[2]) h) => (bool d, seq(float[2]) g) {{
                d = Identity(c) r = Gather(u, i) q = Exp(r) g = SequenceInsert(h, q) }}>
            z = ConcatFromSequence<axis=0, new_axis=1>(s) }}""")
        passes = parse_pipeline("unroll-loops", PASSES)
        return lambda: run_pipeline(model, passes, Context(Target.parse("cpu")), verify=False)

    assert_scales(prepare, 100, 200, limit=2.7)


_SUM = "body = b (float[2] p, float[2] q) => (float[2] o) { o = Add(p, q) }"
FAULTS = {
    "scan_input_directions is [1] for 2 values": f"""main (float[3,2] u) => (float[3,2] z) {{
        z = Scan(u, u) <num_scan_inputs=2, scan_input_directions=[1], {_SUM}> }}""",
    "scan_output_directions is [2] for 1 values": f"""main (float[3,2] u) => (float[3,2] z) {{
        z = Scan(u, u) <num_scan_inputs=2, scan_output_directions=[2], {_SUM}> }}""",
    "the body gives 0 values for a condition and 1 carried values": """main (float[2] x) => (float[2] y) {
        n = Constant<value_int=2>() y = Loop(n, "", x) <body = b (int64 i, bool c, float[2] a) => () { d = Identity(c) }> }""",
    "the body takes 2 values, and is given 3": """main (float[2] x) => (float[2] y) {
        n = Constant<value_int=2>() y = Loop(n, "", x) <body = b (int64 i, bool c) => (bool d, float[2] e) {
            d = Identity(c) e = Exp(x) }> }""",
    "the body takes 1 values, and is given 2": """main (float[2] x) => (float[K,2] y) {
        n = Constant<value_int=2>() y = Loop(n, "") <body = b (int64 i) => (bool d, float[2] e) {
            d = Constant<value = bool {1}>() e = Exp(x) }> }""",
    "num_scan_inputs is 0, of 2 inputs": f"""main (float[3,2] u) => (float[3,2] z) {{
        z = Scan(u, u) <num_scan_inputs=0, {_SUM}> }}""",
    "num_scan_inputs is 3, of 2 inputs": f"""main (float[3,2] u) => (float[3,2] z) {{
        z = Scan(u, u) <num_scan_inputs=3, {_SUM}> }}""",
    "scan_input_axes is [1] for 2 values": f"""main (float[2,3] u) => (float[3,2] z) {{
        z = Scan(u, u) <num_scan_inputs=2, scan_input_axes=[1], {_SUM}> }}""",
    "scan_output_axes is [0, 0] for 1 values": f"""main (float[3,2] u) => (float[3,2] z) {{
        z = Scan(u, u) <num_scan_inputs=2, scan_output_axes=[0, 0], {_SUM}> }}""",
    "x has 0 axes, and is scanned along axis 0": """main (float x) => (float[K] y) {
        y = Scan(x) <num_scan_inputs=1, body = b (p) => (float q) { q = Exp(p) }> }""",
    "its trip count has the shape [2]": """main (float[2] x) => (float[2] y) {
        n = Constant<value_ints=[2, 3]>()
        y = Loop(n, "", x) <body = b (int64 i, bool c, float[2] a) => (bool d, float[2] e) { d = Identity(c) e = Exp(a) }> }""",
    "parts of [-2, 8] elements": """main (float[6] x) => (float[8] y) {
        k = Constant<value_ints=[-2, 8]>() s = SplitToSequence(x, k) p = Constant<value_int=1>() y = SequenceAt(s, p) }""",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_that_inference_does_not_notice(fault: str) -> None:
    with pytest.raises(InvalidModelError, match=re.escape(fault)):
        compiled(read(FAULTS[fault]))


def test_nodes_of_a_branch_that_a_pass_has_made_get_names_of_their_own() -> None:
    """Those of both graphs were named by their numbers there, and what they were made of is still known."""
    model = read("""main (float[4,4] x) => (float[4,4] y) {
        yes = Constant <value = bool {1}> ()
        w = Hardmax(x)
        b = If (yes) <
            then_branch = t () => (float[4,4] r) { r = Hardmax(w) },
            else_branch = e () => (float[4,4] s) { s = Neg(w) }
        >
        y = Add(w, b)
    }""")
    name_nodes(model)
    run_pipeline(model, parse_pipeline("decompose,canonicalize", PASSES), Context(Target.parse("cpu")))
    names = [node.name for node in model.graph]
    assert len(names) == len(set(names)) > 6
    assert {name for node in model.graph for name in original_names(node)} == {"w", "r", "y"}


def test_more_parts_than_a_kernel_takes() -> None:
    """Along an inner axis, where they are copied."""
    names = [f"p{number}" for number in range(300)]
    body = f"{', '.join(names)} = Split<axis=-1, num_outputs=300>(x) y = Concat<axis=1>({', '.join(reversed(names))})"
    result = assert_resolved(f"main (float[2,600] x) => (float[2,600] y) {{ {body} }}")
    assert max(len(node.inputs) for node in result.graph if node.op_type == "Concat") <= 256
    outer = f"{', '.join(names)} = Split<num_outputs=300>(x) y = Concat<axis=0>({', '.join(reversed(names))})"
    result, _ = compiled(read(f"main (float[600] x) => (float[600] y) {{ {outer} }}", 21))
    assert [node.op_type for node in result.graph] == ["Split", "Concat"], "these are aliases"


@pytest.mark.parametrize(("key", "text"), [(PRECISION_KEY, "float32"), (ROW_BITS, "8")])
def test_equal_nodes_that_are_computed_more_and_less_exactly_are_two(key: str, text: str) -> None:
    source = "main (float[2,3] x, float[3,2] w) => (float[2,2] y) { a = MatMul(x, w) b = MatMul(x, w) y = Add(a, b) }"
    for marked, products in (((), 1), ((1,), 2), ((0, 1), 1)):
        model = read(source)
        for place in marked:
            model.graph[place].metadata_props[key] = text
        run_pipeline(model, parse_pipeline("merge-equal", PASSES), Context(Target.parse("cpu")))
        assert [node.op_type for node in model.graph] == ["MatMul"] * products + ["Add"]
