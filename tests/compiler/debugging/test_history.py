"""The way of a node through the passes."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
import pytest
import torch
from prefuse.compiler.debugging.compilation import Compilation, trace_compilation
from prefuse.compiler.debugging.explanation import explain
from prefuse.compiler.debugging.history import History, NodeState
from prefuse.compiler.frontend.importer import import_model
from prefuse.examples.models import MODELS
from prefuse.runtime.errors import InputError
from prefuse.runtime.target import Target
from prefuse.tests.compiler.debugging.traced_models import HEAD, PIPELINE, traced
from prefuse.tests.scaling import assert_scales


def events(compilation: Compilation, text: str) -> list[tuple[str, str]]:
    (found,) = explain(compilation, text)
    return [(event.pass_name, event.change) for event in found.events]


def test_a_node_is_followed_into_its_group(compilation: Compilation) -> None:
    (found,) = explain(compilation, "biased")
    assert (found.events[-1].pass_name, found.events[-1].change) == ("fuse-epilogue", "fused")
    (placement,) = found.placements
    assert placement.members == ("product", "biased", "r")
    assert (placement.template, placement.alone) == ("matmul", ())
    assert "kernel template matmul" in "\n".join(found.lines())


def test_the_kernel_and_its_rivals_are_shown_with_their_estimates() -> None:
    weights = ", ".join(["0.5"] * 256**2)
    model = ir.from_onnx_text(f"""
        <ir_version: 10, opset_import: ["": 21]>
        main (float[256,256] x) => (float[256,256] y) <float[256,256] w = {{{weights}}}> {{ y = MatMul(x, w) }}""")
    model.graph[0].name = "product"
    target = Target.parse("cpu:avx2,machine=zen3,threads=1")
    (found,) = explain(trace_compilation(model, target, precision="float32-fast"), "product")
    (placement,) = found.placements
    first, second = placement.estimates
    assert placement.template == first.template
    assert {first.template, second.template} == {"matmul", "strassen_matmul"}
    assert first.cycles < second.cycles
    assert first.time_us == pytest.approx(first.cycles / target.machine.ghz / 1e3)
    assert min(first.operations, second.operations) < 2 * 256**3 == max(first.operations, second.operations)
    lines = [line.split() for line in found.lines()]
    head = lines.index(["predicted", "us", "cycles", "bytes", "operations", "unit"])
    assert [line[0] for line in lines[head + 1 : head + 3]] == [first.template, second.template]
    assert not any(line[:2] == ["not", f"{second.template}:"] for line in lines)


def test_what_is_removed_is_said_with_what_takes_its_place(compilation: Compilation) -> None:
    (identity,) = explain(compilation, "same")
    assert [(event.change, event.detail) for event in identity.events] == [("removed", "%biased takes the place of its result")]
    assert not identity.placements
    assert events(compilation, "unused") == [("eliminate-dead", "removed")]


def test_an_equal_node_is_followed_to_the_one_that_stays(compilation: Compilation) -> None:
    (found,) = explain(compilation, "again")
    (merged,) = [event for event in found.events if event.change == "merged"]
    assert merged.pass_name == "merge-equal"
    assert merged.names == ("r",)
    assert found.placements[0].members == ("product", "biased", "r")


def test_a_node_that_is_expanded_is_followed_to_all_that_it_becomes(compilation: Compilation) -> None:
    (found,) = explain(compilation, "Hardmax#0")
    (replaced,) = [event for event in found.events if event.change == "replaced"]
    assert replaced.pass_name == "decompose"
    assert {"arg_reduction", "one_hot"} <= {placement.template for placement in found.placements}


def test_nodes_inside_a_rewritten_pattern_are_absorbed() -> None:
    head = '<ir_version: 10, opset_import: ["": 21]> main (float[2,3] x) => (float[2,3] y)'
    history = History()
    history.take("import", -1, ir.from_onnx_text(head + "{ e = Exp(x) s = ReduceSum(e) l = Log(s) y = Sub(x, l) }"))
    history.take("fuse", 0, ir.from_onnx_text(head + "{ y = LogSoftmax(x) }"))
    life = history.follow(0, "e")
    assert [(event.change, event.detail) for event in life.events] == [("absorbed", "into y: %y = LogSoftmax(%x)")]
    assert life.last[0].operator == "LogSoftmax"


def test_what_a_pass_puts_beside_a_node_is_no_part_of_it() -> None:
    """Before a node that reads it, and behind one whose result it computes now."""
    head = '<ir_version: 10, opset_import: ["": 21]> main (float[2,3] x) => (float[2,3] y)'
    before, after = (ir.from_onnx_text(f"{head} {{ {body} }}") for body in ("y = Exp(x)", "a = Neg(x) b = Exp(a) y = Abs(b)"))
    before.graph[0].name = after.graph[1].name = "exp"
    history = History()
    history.take("import", -1, before)
    history.take("insert", 0, after)
    life = history.follow(0, "exp")
    assert [node.operator for node in life.last] == ["Exp"]
    assert [node.operator for node in life.inserted] == ["Neg", "Abs"]
    assert life.events[0].detail.endswith("; new beside it: a: %a = Neg(%x); y: %y = Abs(%b)")


def test_what_takes_the_place_of_another_node_is_not_put_beside_its_reader() -> None:
    head = '<ir_version: 10, opset_import: ["": 21]> main (float[2,3] x) => (float[2,3] y)'
    history = History()
    history.take("import", -1, ir.from_onnx_text(head + "{ h = Softplus(x) y = Add(h, x) }"))
    after = ir.from_onnx_text(head + "{ e = Exp(x) h = Neg(e) y = Sub(h, x) }")
    after.graph[1].name = "negated"
    history.take("expand", 0, after)
    assert not history.follow(0, "y").inserted
    assert [node.name for node in history.follow(0, "h").last] == ["e", "negated"]


def test_nodes_are_found_by_name_output_number_and_line(compilation: Compilation) -> None:
    for text in ("biased", "%biased", "Add#0"):
        assert compilation.find(text) == [(0, "biased")]
    model = import_model(
        ir.from_onnx_text('<ir_version: 10, opset_import: ["": 21]> m (float[2] x) => (float[2] y) { y = Neg(x) }')
    )
    model.graph[0].metadata_props["pkg.torch.onnx.stack_trace"] = 'File "/home/me/net/model.py", line 12, in forward'
    named = trace_compilation(model, Target.parse("cpu"), PIPELINE)
    assert named.find("model.py:12") == named.find("net/model.py:12") == [(0, "y")]
    with pytest.raises(InputError, match="no such node"):
        named.find("del.py:12")
    with pytest.raises(InputError, match="did you mean 'biased'"):
        compilation.find("bised")
    with pytest.raises(InputError, match="MatMul#0"):
        compilation.find("Add#7")


def test_what_cannot_be_compiled_has_a_history_all_the_same() -> None:
    text = """<ir_version: 10, opset_import: ["": 21]> main (float[4] x, bool go) => (float[4] y) {
        a = Neg(x)
        y = If(go) <then_branch = t () => (float[4] p) { p = Relu(a) }, else_branch = f () => (float[4] q) { q = Identity(a) }>
    }"""
    (found,) = explain(traced(text), "a")
    assert "If" in found.failure
    assert "not compiled" in "\n".join(found.lines())


def test_a_pass_that_changes_nothing_leaves_no_snapshot() -> None:
    history = traced(f"{HEAD} main (float[4] x) => (float[4] y) {{ y = Relu(x) }}").history
    assert [snapshot.pass_name for snapshot in history.snapshots] == ["import", "lowering"]


@pytest.mark.parametrize("name", ["lenet5", "resnet18", "bert-base", "bigru-linear"])
def test_every_node_of_a_model_ends_in_a_group_or_is_removed(name: str) -> None:
    module, inputs = MODELS[name].build(small=True)
    found = trace_compilation(import_model(torch.export.export(module, inputs, strict=False)), Target.parse("cpu"))
    last = found.history.snapshots[-1].nodes
    reached: set[NodeState] = set()
    for node in found.history.snapshots[0].nodes:
        life = found.history.follow(0, node.name)
        assert life.last or life.events[-1].change == "removed", node.name
        assert node.source.startswith("/"), node
        reached.update(life.last, life.inserted)
    assert reached == set(last)


def test_following_is_linear() -> None:
    """Snapshots index their nodes once: a node is not looked for in the whole graph."""

    def prepare(length: int) -> Callable[[], object]:
        history = History()
        for position, operator in enumerate(["Neg", "Abs", "Exp"], -1):
            body = "\n".join(f"v{number + 1} = {operator}(v{number})" for number in range(length))
            history.take("pass", position, ir.from_onnx_text(f"{HEAD} main (float[2] v0) => (float[2] v{length}) {{\n{body}\n}}"))
        return lambda: [history.follow(0, f"v{number + 1}") for number in range(length)]

    assert_scales(prepare, 500, 1000, 3)
