"""order-nodes: a topological order, never with a higher peak, and the same values after it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator
from prefuse.compiler.ir.facts import infer_facts, tensor_type
from prefuse.compiler.ir.verifier import verify_model
from prefuse.compiler.pipeline import Context
from prefuse.passes.plan.order_nodes import OrderNodes
from prefuse.passes.plan.order_nodes.dataflow import Dataflow
from prefuse.passes.plan.order_nodes.exact import best_order
from prefuse.runtime.target import Target
from prefuse.tests.scaling import assert_scales


def model_of(text: str) -> ir.Model:
    model = ir.from_onnx_text(text)
    infer_facts(model)
    return model


def order(model: ir.Model) -> tuple[bool, list[str]]:
    """Run the pass; whether it changed anything and the first outputs of the nodes in order."""
    context = Context(Target.parse("cpu:avx2", threads=1))
    changed = OrderNodes().run(model, context)
    verify_model(model)
    assert changed == bool(context.remarks)
    return changed, [str(node.outputs[0].name) for node in model.graph]


HEADER = '<ir_version: 10, opset_import: ["" : 21]>\n'
BRANCHES = (
    HEADER
    + """main (float[100] x, float[100] z) => (float[1] y) {
  a = Exp(x)
  b = Exp(z)
  c = ReduceSum(a)
  d = ReduceSum(b)
  y = Add(c, d)
}"""
)


def test_finishes_a_branch_before_the_next() -> None:
    model = model_of(BRANCHES)
    assert order(model) == (True, ["a", "c", "b", "d", "y"])
    assert order(model) == (False, ["a", "c", "b", "d", "y"])


def test_a_view_is_not_a_tensor_of_its_own() -> None:
    """Reshape frees nothing while its source lives on under another shape."""
    text = BRANCHES.replace(
        "c = ReduceSum(a)", "shape = Constant <value = int64[2] {10, 10}> ()\n  v = Reshape(a, shape)\n  c = ReduceSum(v)"
    )
    text = text.replace("float[1] y", "float[1, 1] y")
    changed, names = order(model_of(text))
    assert changed
    assert names.index("c") < names.index("b")


def test_values_that_subgraphs_capture_are_computed_before() -> None:
    text = (
        HEADER
        + """main (float[100] x, float[100] z, bool[1] p) => (float[1] y) {
  a = Exp(x)
  b = Exp(z)
  c = ReduceSum(a)
  d = If(p) <then_branch = t () => (float[1] e) { e = ReduceSum(b) }, else_branch = f () => (float[1] g) { g = Identity(c) }>
  y = Add(c, d)
}"""
    )
    _, names = order(model_of(text))
    assert names.index("b") < names.index("d")
    assert names.index("c") < names.index("d")


def test_symbolic_shapes_are_left_alone() -> None:
    model = model_of(BRANCHES.replace("float[100]", "float[N]"))
    assert order(model)[0] is False


@st.composite
def graphs(draw: st.DrawFn) -> str:
    """Elementwise nodes, concatenations and reductions over random earlier values."""
    sizes = {"x": 4, "z": 4}
    lines = []
    for index in range(draw(st.integers(2, 14))):
        first, second = (draw(st.sampled_from(sorted(sizes))) for _ in range(2))
        name = f"v{index}"
        match draw(st.sampled_from(["Neg", "Concat", "ReduceMax"])):
            case "Concat" if sizes[first] + sizes[second] < 1000:
                lines.append(f"{name} = Concat <axis = 0> ({first}, {second})")
                sizes[name] = sizes[first] + sizes[second]
            case "ReduceMax":
                lines.append(f"{name} = ReduceMax({first})")
                sizes[name] = 1
            case _:
                lines.append(f"{name} = Neg({first})")
                sizes[name] = sizes[first]
    outputs = draw(st.lists(st.sampled_from([name for name in sizes if name[0] == "v"]), min_size=1, max_size=3, unique=True))
    signature = ", ".join(f"float[{sizes[name]}] {name}" for name in outputs)
    return f"{HEADER}main (float[4] x, float[4] z) => ({signature}) {{\n" + "\n".join(lines) + "\n}"


def peak_bytes(model: ir.Model) -> int:
    """Largest sum of live values, by looking at every point of time."""
    nodes = list(model.graph)
    outputs = set(model.graph.outputs)
    spans = []
    for index, node in enumerate(nodes):
        for value in node.outputs:
            if value not in outputs:
                last = max([index, *(nodes.index(use.node) for use in value.uses())])
                spans.append((index, last, tensor_type(value).size_bytes))
    return max(sum(size for start, end, size in spans if start <= time <= end) for time in range(len(nodes)))


@settings(max_examples=80, deadline=None)
@given(graphs())
def test_never_worse_and_the_same_values(text: str) -> None:
    model = model_of(text)
    before, peak = ir.to_proto(model), peak_bytes(model)
    changed, _ = order(model)
    assert peak_bytes(model) < peak if changed else peak_bytes(model) == peak
    feeds = {"x": np.arange(4, dtype=np.float32), "z": np.ones(4, np.float32)}
    wanted, found = (ReferenceEvaluator(proto).run(None, feeds) for proto in (before, ir.to_proto(model)))
    for left, right in zip(wanted, found, strict=True):
        np.testing.assert_array_equal(left, right)
    assert order(model)[0] is False or peak_bytes(model) < peak


@pytest.mark.parametrize("shape", ["chain", "fan"])
def test_time_is_near_linear(shape: str) -> None:
    def prepare(count: int) -> Callable[[], object]:
        reads = ("v{}" if shape == "chain" else "v0").format
        nodes = [onnx.helper.make_node("Neg", [reads(i)], [f"v{i + 1}"]) for i in range(count)]
        values = [onnx.helper.make_tensor_value_info(f"v{i}", onnx.TensorProto.FLOAT, [4]) for i in range(count + 1)]
        graph = onnx.helper.make_graph(nodes, "g", values[:1], values[-1:], value_info=values[1:-1])
        model = ir.from_proto(onnx.helper.make_model(graph))
        return lambda: OrderNodes().run(model, Context(Target.parse("cpu:avx2", threads=1)))

    assert_scales(prepare, 1000, 4000, 8)


@st.composite
def dataflows(draw: st.DrawFn) -> Dataflow:
    """Random small graphs, as numbers."""
    flow = Dataflow.__new__(Dataflow)
    count = draw(st.integers(1, 7))
    flow.sizes, flow.makes, flow.reads, flow.readers = [], [], [], []
    flow.after, flow.needs = [[] for _ in range(count)], []
    for node in range(count):
        reads = sorted(draw(st.sets(st.integers(0, max(len(flow.sizes) - 1, 0)), max_size=3))) if flow.sizes else []
        makers = {next(n for n, made in enumerate(flow.makes) if tensor in made) for tensor in reads}
        flow.reads.append(reads)
        flow.needs.append(len(makers))
        for maker in makers:
            flow.after[maker].append(node)
        for tensor in reads:
            flow.readers[tensor].append(node)
        flow.makes.append(list(range(len(flow.sizes), len(flow.sizes) + draw(st.integers(1, 2)))))
        for _ in flow.makes[-1]:
            flow.sizes.append(draw(st.integers(0, 9)))
            flow.readers.append([])
    return flow


@settings(max_examples=300, deadline=None)
@given(dataflows())
def test_the_exact_order_is_the_best_of_all(flow: Dataflow) -> None:
    count = len(flow.needs)
    orders = [
        order
        for order in permutations(range(count))
        if all(order.index(node) < order.index(after) for node in range(count) for after in flow.after[node])
    ]
    least = min(map(flow.peak_bytes, orders))
    given = list(range(count))
    found = best_order(flow, 10_000, given)
    if found is None:
        assert flow.peak_bytes(given) == least
    else:
        assert sorted(found) == given
        assert all(found.index(node) < found.index(after) for node in range(count) for after in flow.after[node])
        assert flow.peak_bytes(found) == least < flow.peak_bytes(given)


def test_where_both_greedy_orders_fail_the_best_is_found() -> None:
    """Cheap first steps of one branch lead to its dearest one while the other's is still alive."""
    text = (
        HEADER
        + """main (float[100] x, float[64] z) => (float[1] y) {
  a = Exp(x)
  a2 = Concat <axis = 0> (a, x)
  a3 = ReduceSum <keepdims = 1> (a2)
  b = Exp(z)
  b2 = Concat <axis = 0> (b, z, z)
  b3 = ReduceSum <keepdims = 1> (b2)
  y = Add(a3, b3)
}"""
    )
    model = model_of(text)
    flow = Dataflow(model.graph, list(model.graph))
    orders = [flow.greedy_order(depth_first=depth_first) for depth_first in (False, True)]
    known = min([*orders, list(range(len(flow.needs)))], key=flow.peak_bytes)
    best = best_order(flow, 10_000, known)
    assert best is None or flow.peak_bytes(best) < flow.peak_bytes(known)
    order(model)
    assert Dataflow(model.graph, list(model.graph)).peak_bytes(range(len(flow.needs))) == flow.peak_bytes(best or known)
