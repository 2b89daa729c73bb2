"""What a short file may ask of the passes over structure: each of these took minutes, or all memory."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from prefuse.compiler.ir.facts import infer_facts
from prefuse.compiler.ir.names import name_nodes
from prefuse.compiler.pipeline import Context, parse_pipeline, run_pipeline
from prefuse.compiler.pipeline.pass_table import PASSES
from prefuse.runtime.target import Target
from prefuse.tests.models.text import read


def _passed(model: ir.Model, pipeline: str) -> tuple[ir.Model, str]:
    context = Context(Target.parse("cpu"))
    infer_facts(model)
    name_nodes(model)
    run_pipeline(model, parse_pipeline(pipeline, PASSES), context)
    return model, "\n".join(map(str, context.remarks))


def _constants(text: str, **shapes: tuple[int, ...]) -> ir.Model:
    """A model whose inputs of these names are constants."""
    model = ir.from_onnx_text('<ir_version: 10, opset_import: ["": 21]>\n' + text)
    for name, shape in shapes.items():
        value = next(one for one in model.graph.inputs if one.name == name)
        model.graph.inputs.remove(value)
        value.const_value = ir.tensor(np.ones(shape, np.float32), name=name)
        model.graph.register_initializer(value)
    return model


def test_loops_in_loops_have_one_budget() -> None:
    model = read(
        """main (float[2] x) => (float[2] y) <int64 n = {6}> {
        t = Constant<value = bool {1}>()
        y = Loop(n, t, x) <body = b1 (int64 i, bool c, float[2] a) => (bool d, float[2] r) {
          d = Identity(c)
          r = Loop(n, t, a) <body = b2 (int64 j, bool e, float[2] f) => (bool g, float[2] s) {
            g = Identity(e)
            s = Loop(n, t, f) <body = b3 (int64 k, bool h, float[2] l) => (bool m, float[2] q) {
              m = Identity(h) q = Exp(l) }> }> }> }""",
        21,
    )
    result, remarks = _passed(model, "unroll-loops{max-nodes=40}")
    assert sum(1 for _ in result.graph.all_nodes()) < 4 * 40 + 40
    assert "iterations of" in remarks


def test_a_state_that_doubles_is_not_followed() -> None:
    model = read(
        """main (float[2] x) => (float[2] y) <int64[1] s = {1}> {
        y, z = Loop("", "", x, s) <body = b (int64 i, bool c, float[2] a, int64[N] p) => (bool d, float[2] r, int64[M] q) {
          q = Concat<axis=0>(p, p)
          m = ReduceSum<keepdims=0>(q)
          zero = Constant<value = int64 {0}>()
          d = Greater(m, zero)
          r = Exp(a) }> }""",
        21,
    )
    _, remarks = _passed(model, "unroll-loops")
    assert "more than 4096 elements" in remarks


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        (
            "main (float[60,60,60] a, float[60,60,60] b, float[60,60,60] c) => (float y)"
            ' { y = Einsum<equation="abc,ade,bde->">(a, b, c) }',
            dict.fromkeys("abc", (60, 60, 60)),
        ),
        (
            "main (float[1,1,4,4] a, float[1,1,2,2] b) => (float[A,B,C,D] y)"
            " { y = Conv<pads=[4000,4000,4000,4000], strides=[8000,8000]>(a, b) }",
            {"a": (1, 1, 4, 4), "b": (1, 1, 2, 2)},
        ),
        (
            "main (float[1,1,300,300] a, float[1,300,300,2] b) => (float[1,1,300,300] y) { y = GridSample(a, b) }",
            {"a": (1, 1, 300, 300), "b": (1, 300, 300, 2)},
        ),
    ],
    ids=["Einsum", "Conv", "GridSample"],
)
def test_constants_are_not_folded_where_that_takes_long(text: str, shapes: dict[str, tuple[int, ...]]) -> None:
    result, remarks = _passed(_constants(text, **shapes), "canonicalize")
    assert len(result.graph) == 1
    assert "not folded" in remarks


def test_a_sequence_of_too_many_parts() -> None:
    model = read("main (float[100000] x) => (seq(float[1]) y) { y = SplitToSequence(x) }", 21)
    result, remarks = _passed(model, "canonicalize")
    assert [node.op_type for node in result.graph] == ["SplitToSequence"]
    assert "100000 parts are more than 4096" in remarks


def test_an_einsum_of_too_many_operands() -> None:
    count = 200
    equation = ",".join(["a"] * count) + "->a"
    names = ", ".join(["x"] * count)
    model = read(f'main (float[3] x) => (float[3] y) {{ y = Einsum<equation="{equation}">({names}) }}', 21)
    result, _ = _passed(model, "decompose")
    assert [node.op_type for node in result.graph] == ["Einsum"]
