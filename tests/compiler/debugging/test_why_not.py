"""Why two nodes are not in one group, and why a group of one node is alone."""

from __future__ import annotations

import onnx_ir as ir
import pytest
from prefuse.compiler.debugging.compilation import Compilation, trace_compilation
from prefuse.compiler.debugging.why_not import why_not
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.pipeline.grouping import lone_groups
from prefuse.runtime.errors import InputError
from prefuse.runtime.target import Target
from prefuse.tests.compiler.debugging.traced_models import PIPELINE, traced


def test_nodes_of_one_group(compilation: Compilation) -> None:
    answer = why_not(compilation, "product", "r")
    assert answer.together
    assert "one group, prefuse.matmul_add_relu, computed by template matmul" in answer.summary


def test_a_node_that_is_gone(compilation: Compilation) -> None:
    answer = why_not(compilation, "same", "r")
    assert answer.summary == "same is in no group: canonicalize removed it: %biased takes the place of its result"


def test_a_rejection_that_names_both() -> None:
    text = """<ir_version: 10, opset_import: ["": 21]> main (float[4,8] x, float[8,8] w) => (float[4,8] y, float[4,8] p) {
        p = MatMul(x, w)
        y = Relu(p)
    }"""
    answer = why_not(traced(text), "p", "y")
    assert not answer.together
    assert answer.reasons == ("fuse-epilogue: Relu not fused with MatMul: %p is an output of the graph",)


def test_what_a_later_pass_does_in_spite_of_a_refusal_is_told_with_it() -> None:
    text = """<ir_version: 10, opset_import: ["": 21]> main (float[4,8] x, float[8,8] w) => (float[4,8] y, float[4,8] p) {
        p = MatMul(x, w)
        y = Relu(p)
    }"""
    answer = why_not(traced(text, "fuse-epilogue,merge-groups"), "p", "y")
    assert answer.together
    assert answer.reasons == ("refused before: fuse-epilogue: Relu not fused with MatMul: %p is an output of the graph",)


def test_the_last_word_comes_first() -> None:
    text = """<ir_version: 10, opset_import: ["": 21]> main (float[8,8] x) => (float[8,8] y) {
        p = MatMul(x, x)
        axis = Constant<value_int = 0>()
        c = CumSum(p, axis)
        y = Add(p, c)
    }"""
    answer = why_not(traced(text, "fuse-epilogue,merge-groups"), "p", "y")
    assert [reason.partition(":")[0] for reason in answer.reasons] == ["merge-groups", "fuse-epilogue"]


def test_a_pass_that_came_first() -> None:
    """Softmax took the Relu before any pass could refuse it to the product."""
    text = """<ir_version: 10, opset_import: ["": 21]> main (float[4,8] x, float[8,8] w) => (float[4,8] y, float[4,8] z) {
        p = MatMul(x, w)
        r = Relu(p)
        y = Softmax(p)
        z = Softmax(r)
    }"""
    answer = why_not(traced(text, "fuse-rows,fuse-epilogue,merge-groups"), "p", "r")
    assert "no pass refused it" in answer.summary
    assert answer.reasons[0] == "fuse-rows fused r into prefuse.relu_softmax, with z"
    assert all("refused to one of them" in reason for reason in answer.reasons[1:])


def test_the_first_refusal_on_the_way() -> None:
    text = """<ir_version: 10, opset_import: ["": 21]> main (float[4,8] x, float[8,8] w) => (float[4,8] y, float[4,8] p) {
        p = MatMul(x, w)
        r = Relu(p)
        y = Softmax(r)
    }"""
    answer = why_not(traced(text), "p", "y")
    assert "keeps p and r apart" in answer.summary
    assert answer.reasons == ("fuse-epilogue: Relu not fused with MatMul: %p is an output of the graph",)
    assert answer.path == ("p (MatMul)", "r (Relu)", "y (Softmax)")


def test_different_anchors_and_views(compilation: Compilation) -> None:
    answer = why_not(compilation, "y", "product")
    assert "product (prefuse.matmul_add_relu) and y (Softmax) have anchors, MatMul and Softmax, each" in answer.summary
    assert answer.path == ("product (prefuse.matmul_add_relu)", "y (Softmax)")
    text = """<ir_version: 10, opset_import: ["": 21]> main (float[4,8] x) => (float[8,4] y) {
        s = Constant<value_ints = [8, 4]>()
        n = Softmax(x)
        v = Reshape(n, s)
        y = Softmax(v)
    }"""
    assert "v is a view" in why_not(traced(text), "n", "y").summary


def test_no_path(compilation: Compilation) -> None:
    answer = why_not(compilation, "n", "y")
    assert "no path leads from one to the other" in answer.summary
    answer = why_not(compilation, "w_rows", "product")
    assert "both read %w" in answer.summary


def test_a_name_for_several_nodes() -> None:
    model = import_model(
        ir.from_onnx_text('<ir_version: 10, opset_import: ["": 21]> m (float[2] x) => (float[2] y) { a = Neg(x) y = Exp(a) }')
    )
    for node in model.graph:
        node.metadata_props["pkg.torch.onnx.stack_trace"] = 'File "model.py", line 12, in forward'
    with pytest.raises(InputError, match="2 nodes are meant; name one: a, y"):
        why_not(trace_compilation(model, Target.parse("cpu"), PIPELINE), "model.py:12", "y")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("main (float[4,8] x) => (float[4,8] y) { y = Softmax(x) }", {"y": ("nothing beside it to fuse",)}),
        (
            "main (float[4,8] x) => (float[4,8] y) { a = Softmax(x) y = Softmax<axis = 0>(a) }",
            {
                "a": ("nothing beside it to fuse: it is read by Softmax",),
                "y": ("nothing beside it to fuse: it reads Softmax",),
            },
        ),
        (
            "main (float[4,8] x) => (float[4,8] a, float[4,8] y) { a = Softmax(x) y = Relu(a) }",
            dict.fromkeys(("a", "y"), ("fuse-epilogue: Relu not fused with Softmax: %a is an output of the graph",)),
        ),
        ("main (float[4,8] x) => (float[4,8] y) { a = Softmax(x) y = Relu(a) }", {}),
    ],
)
def test_every_group_of_one_node_says_why(text: str, wanted: dict[str, tuple[str, ...]]) -> None:
    compilation = traced(f'<ir_version: 10, opset_import: ["": 21]> {text}')
    assert lone_groups(compilation.model, compilation.lone_nodes, compilation.context.remarks) == wanted
