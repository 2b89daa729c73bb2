"""Pipeline text, and the runner: verification, records, ranges, blame."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefuse.compiler.ir.facts import infer_facts
from prefuse.compiler.ir.rewriter import Rejection, replace_node
from prefuse.compiler.pipeline import (
    AnyPass,
    Context,
    Pass,
    PassError,
    PassRecord,
    PlanPass,
    format_pipeline,
    parse_pipeline,
    run_pipeline,
    run_plan_pipeline,
)
from prefuse.compiler.pipeline.pass_table import DEFAULT_PIPELINE, PASSES
from prefuse.runtime.errors import InvalidModelError, OptionError
from prefuse.runtime.plan import Buffer, Plan, Role, Space
from prefuse.runtime.target import Target


@dataclass(frozen=True)
class Flip(Pass):
    """Replaces Relu by Neg and back, once."""

    name: ClassVar[str] = "flip"
    max_ops: int = 8
    ratio: float = 0.5
    fast: bool = True
    label: str = "plain"
    mode: Literal["all", "some"] = "all"
    limit: int | None = None

    def run(self, model: ir.Model, context: Context) -> bool:
        for node in list(model.graph):
            new = ir.node("Neg" if node.op_type == "Relu" else "Relu", node.inputs)
            context.remark(self.name, f"{node.op_type} flipped", [node])
            replace_node(model, node, [new], new.outputs)
        return True


@dataclass(frozen=True)
class Break(Pass):
    """Fails in the way it is told to."""

    name: ClassVar[str] = "break"
    how: Literal["crash", "cycle", "fault"] = "crash"

    def run(self, model: ir.Model, context: Context) -> bool:
        match self.how:
            case "crash":
                raise KeyError("lost")
            case "cycle":
                model.graph[0].replace_input_with(0, model.graph[0].outputs[0])
            case "fault":
                raise InvalidModelError("net.py:3", "not a model")
        return True


@dataclass(frozen=True)
class Grow(PlanPass):
    """Adds a buffer; one that lies outside its space if `broken`."""

    name: ClassVar[str] = "grow"
    broken: bool = False

    def run(self, plan: Plan, context: Context) -> Plan:
        size = 128 if self.broken else 64
        buffers = (*plan.buffers, Buffer("new", Role.ACTIVATION, size, "cpu", 0))
        return Plan(plan.target, (), (), (Space("cpu", 64),), buffers, (), ())


TABLE = {one.name: f"{__name__}:{one.__name__}" for one in (Flip, Break, Grow)}


def model_of(count: int = 1) -> ir.Model:
    body = "\n".join(f"v{number + 1} = Relu(v{number})" for number in range(count))
    model = ir.from_onnx_text(
        f'<ir_version: 10, opset_import: ["": 21]>\nmain (float[2] v0) => (float[2] v{count}) {{\n{body}\n}}'
    )
    infer_facts(model)
    return model


@pytest.fixture
def context() -> Context:
    return Context(Target.parse("cpu"))


# ---------------------------------------------------------------------------------------------------------------- text


def test_options_are_typed() -> None:
    text = ' flip{max-ops=4, ratio=1e-3 fast=false label="a, {b} \\"c\\"" mode=some limit=2} , flip,grow'
    first, second, third = parse_pipeline(text, TABLE)
    assert first == Flip(4, 1e-3, False, 'a, {b} "c"', "some", 2)
    assert second == Flip()
    assert third == Grow()
    assert parse_pipeline("  ", TABLE) == ()


def test_defaults_are_left_out() -> None:
    assert format_pipeline([Flip(), Flip(max_ops=4, limit=3), Grow()]) == "flip,flip{max-ops=4,limit=3},grow"


OPTIONS = st.builds(
    Flip,
    st.integers(0),
    st.floats(allow_nan=False),
    st.booleans(),
    st.text(),
    st.sampled_from(["all", "some"]),
    st.none() | st.integers(0),
)


@given(st.lists(st.one_of(OPTIONS, st.builds(Break, st.sampled_from(["crash", "cycle", "fault"])))))
def test_text_round_trips(passes: list[AnyPass]) -> None:
    assert parse_pipeline(format_pipeline(passes), TABLE) == tuple(passes)


def test_default_pipeline_round_trips() -> None:
    assert format_pipeline(parse_pipeline(DEFAULT_PIPELINE, PASSES)) == DEFAULT_PIPELINE
    for name in PASSES:
        (one,) = parse_pipeline(name, PASSES)
        assert one.name == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("filp", "unknown name 'filp'; did you mean 'flip'?"),
        ("zzz", "known: break, flip, grow"),
        ("flip{max-op=3}", "options of flip: unknown name 'max-op'; did you mean 'max-ops'?"),
        ("flip{max-ops=many}", "flip{max-ops}: 'many' is not an integer"),
        ("flip{max-ops=-1}", "flip{max-ops}: -1 given; give a number from 0 on"),
        ("flip{ratio=x}", "flip{ratio}: 'x' is not a number"),
        ("flip{fast=1}", "'1' is not a boolean; write true or false"),
        ("flip{mode=al}", "flip{mode}: unknown name 'al'; did you mean 'all'?"),
        ("flip{max-ops}", "cannot read option 'max-ops'"),
        ("flip{max-ops=1", "cannot read 'flip{max-ops=1'"),
        ("flip,", "cannot read ''"),
        ("flip flip", "cannot read 'flip flip'"),
        ("flip,grow,flip", "graph pass flip follows plan pass grow"),
    ],
)
def test_bad_text(text: str, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_pipeline(text, TABLE)
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["fuse-epilogue{max-ops=0}", "fuse-prologue{max-readers=0}", "quantize-weights{block-size=12}"])
def test_numbers_that_no_pass_can_use(text: str) -> None:
    with pytest.raises(OptionError, match="give a number from"):
        parse_pipeline(text, PASSES)


# -------------------------------------------------------------------------------------------------------------- runner


def test_records_and_remarks(context: Context) -> None:
    seen: list[PassRecord] = []
    records = run_pipeline(model_of(), [Flip(), Grow(), Flip()], context, on_pass=seen.append, keep_texts=True)
    assert [record.name for record in records] == ["flip", "flip"]
    assert records == tuple(seen)
    assert all(record.changed and record.seconds > 0 for record in records)
    assert "Neg" in str(records[0].after_text)
    assert records[1].before_text == records[0].after_text
    assert [str(remark) for remark in context.remarks] == ["flip: Relu flipped", "flip: Neg flipped"]
    context.reject("flip", Rejection("too many", ()))
    assert context.remarks[-1].kind == "rejection"


@pytest.mark.parametrize(
    ("start", "stop", "count"), [(None, None, 4), ("break", None, 3), (1, 2, 2), (None, "flip", 1), ("break", "flip", 2)]
)
def test_ranges(context: Context, start: str | int | None, stop: str | int | None, count: int) -> None:
    passes = [Flip(), Quiet(), Flip(), Flip()]
    assert len(run_pipeline(model_of(), passes, context, start=start, stop=stop)) == count


@dataclass(frozen=True)
class Quiet(Pass):
    name: ClassVar[str] = "break"

    def run(self, model: ir.Model, context: Context) -> bool:
        return False


def test_unknown_range(context: Context) -> None:
    with pytest.raises(OptionError, match="did you mean 'flip'"):
        run_pipeline(model_of(), [Flip()], context, stop="flop")
    with pytest.raises(OptionError, match="no pass at position 3"):
        run_pipeline(model_of(), [Flip()], context, start=3)


@pytest.mark.parametrize(("how", "message"), [("crash", "'lost'"), ("cycle", "a cycle, or nodes out of order")])
def test_a_failure_carries_its_reproducer(context: Context, how: Literal["crash", "cycle"], message: str) -> None:
    context.source = "net.onnx"
    passes = [Flip(), Flip(max_ops=2), Break(how), Flip()]
    with pytest.raises(PassError) as caught:
        run_pipeline(model_of(), passes, context, start=1)
    assert (caught.value.pass_name, caught.value.position) == ("break", 2)
    command = caught.value.reproducer
    assert command.startswith("prefuse opt net.onnx --pipeline 'flip{max-ops=2},break")
    assert message in str(caught.value)
    assert command in str(caught.value)
    with pytest.raises(PassError, match=message):
        run_pipeline(model_of(), parse_pipeline(command.split("'")[1], TABLE), context)


def test_a_users_fault_passes_through(context: Context) -> None:
    with pytest.raises(InvalidModelError, match=r"net\.py:3: not a model"):
        run_pipeline(model_of(), [Break("fault")], context)


def test_plan_passes_are_checked(context: Context) -> None:
    seen: list[PassRecord] = []
    empty = Plan("cpu", (), (), (), (), (), ())
    grown = run_plan_pipeline(empty, [Flip(), Grow()], context, on_pass=seen.append)
    assert [buffer.name for buffer in grown.buffers] == ["new"]
    assert [(record.name, record.changed) for record in seen] == [("grow", True)]
    with pytest.raises(PassError, match="pass grow"):
        run_plan_pipeline(empty, [Grow(broken=True)], context)
