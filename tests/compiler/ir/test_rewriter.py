"""Replacing nodes keeps outputs, names, facts and sources; rules run to a fixpoint and say why they refuse."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir
import pytest
from prefuse.compiler.ir.facts import infer_facts, source_of, tensor_type
from prefuse.compiler.ir.names import fresh_name, release_name
from prefuse.compiler.ir.printer import print_model
from prefuse.compiler.ir.rewriter import Match, Rejection, apply_rules, remove_nodes, replace_node
from prefuse.compiler.ir.verifier import verify_model
from prefuse.compiler.pipeline import Context
from prefuse.runtime.target import Target
from prefuse.tests.scaling import assert_scales

TEXT = """<ir_version: 10, opset_import: ["": 21]>
main (float[2,4] x) => (float[2,4] y, float[2,4] z) <float[4] b = {1, 2, 3, 4}> {
  h = Identity(x)
  a = Add(h, b)
  y = Identity(a)
  z = Identity(x)
}"""


def model_of(text: str = TEXT) -> ir.Model:
    model = ir.from_onnx_text(text)
    infer_facts(model)
    return model


def lines(model: ir.Model) -> list[str]:
    verify_model(model)
    return [line.strip() for line in print_model(model).splitlines()[1:-1] if "const" not in line]


def test_an_inner_value_is_replaced() -> None:
    model = model_of()
    node = model.graph[0]
    replace_node(model, node, [], [model.graph.inputs[0]])
    assert lines(model)[0] == "%a = Add(%x, %b) : float[2,4]"
    assert node.graph is None
    assert node.inputs == (None,)


def test_a_value_takes_over_the_name_of_an_output() -> None:
    model = model_of()
    node = model.graph[2]
    replace_node(model, node, [], [node.inputs[0]])
    assert lines(model)[:2] == ["%h = Identity(%x) : float[2,4]", "%y = Add(%h, %b) : float[2,4]"]


def test_an_input_as_output_stays_under_an_identity() -> None:
    model = model_of()
    node = model.graph[3]
    replace_node(model, node, [], [model.graph.inputs[0]])
    assert lines(model)[3] == "%z = Identity(%x) : float[2,4]"


def test_one_value_for_two_outputs() -> None:
    model = model_of(TEXT.replace("Identity(x)\n}", "Identity(a)\n}"))
    for node in list(model.graph)[2:]:
        replace_node(model, node, [], [node.inputs[0]])
    assert lines(model)[1:] == ["%y = Add(%h, %b) : float[2,4]", "%z = Identity(%y) : float[2,4]"]


def test_new_nodes_get_names_facts_and_sources() -> None:
    model = model_of()
    node = model.graph[1]
    node.metadata_props["pkg.torch.onnx.stack_trace"] = 'File "net.py", line 7, in forward'
    first = ir.node("Neg", [node.inputs[0]])
    second = ir.node("Sub", [node.inputs[1], first.outputs[0]])
    replace_node(model, node, [first, second], second.outputs)
    assert lines(model)[1:3] == ["%a_1 = Neg(%h) : float[2,4]", "%a = Sub(%b, %a_1) : float[2,4]"]
    assert source_of(first) == source_of(second) == "net.py:7"
    assert str(tensor_type(first.outputs[0])) == "float32[2,4]"


def test_removal_refuses_what_is_read() -> None:
    model = model_of()
    with pytest.raises(ValueError, match="still being used"):
        remove_nodes([model.graph[0]])
    verify_model(model)


def test_fresh_names() -> None:
    model = model_of()
    assert [fresh_name(model, hint) for hint in ("new", "a", "a", "b", "new")] == ["new", "a_1", "a_2", "b_1", "new_1"]
    release_name(model, "a_1")
    assert fresh_name(model, "a_1") == "a_1"
    assert fresh_name(model.clone(), "new") == "new", "a clone counts its own names"


@dataclass(frozen=True)
class TwiceNegated:
    """The match of a Neg of a Neg."""

    node: ir.Node
    value: ir.Value

    def rewrite(self, model: ir.Model) -> Sequence[ir.Node]:
        new = ir.node("Identity", [self.value])
        replace_node(model, self.node, [new], new.outputs)
        return [new]


@dataclass(frozen=True)
class CancelNegations:
    name: str = "cancel-negations"

    def match(self, node: ir.Node) -> Match | Rejection | None:
        if node.op_type != "Neg" or node.inputs[0] is None:
            return None
        inner = node.inputs[0].producer()
        if inner is None or inner.op_type != "Neg" or inner.inputs[0] is None:
            return Rejection("the operand is not negated", (node,))
        return TwiceNegated(node, inner.inputs[0])


def chain(length: int) -> ir.Model:
    body = "\n".join(f"v{number + 1} = Neg(v{number})" for number in range(length))
    return model_of(f'<ir_version: 10, opset_import: ["": 21]>\nmain (float[N] v0) => (float[N] v{length}) {{\n{body}\n}}')


def test_rules_run_to_a_fixpoint_and_refuse_with_reasons() -> None:
    model, context = chain(3), Context(Target.parse("cpu"))
    assert apply_rules(model, [CancelNegations()], context)
    assert lines(model) == [
        "%v1 = Neg(%v0) : float[N]",
        "%v2 = Identity(%v0) : float[N]",
        "%v3 = Neg(%v2) : float[N]",
    ]
    assert str(context.remarks[0]) == "cancel-negations: the operand is not negated"
    assert context.remarks[0].kind == "rejection"
    assert not apply_rules(model, [CancelNegations()], context)


def test_rules_are_linear() -> None:
    """A quadratic worklist makes twice the nodes cost four times the time, on any machine."""

    def prepare(length: int) -> Callable[[], object]:
        model, context = chain(length), Context(Target.parse("cpu"))
        return lambda: apply_rules(model, [CancelNegations()], context)

    assert_scales(prepare, 1000, 2000, 3)
