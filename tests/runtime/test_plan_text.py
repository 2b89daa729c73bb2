"""The text form of a Plan round-trips, and everything that is no plan is one error with the line."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prefuse.compiler.pipeline import Context
from prefuse.passes.plan.plan_memory import PlanMemory
from prefuse.runtime.errors import ProgramFileError
from prefuse.runtime.plan import Buffer, Extent, Kernel, Launch, Plan, Port, Region, Role, Space, State, TensorType
from prefuse.runtime.plan_text import parse_plan, print_plan
from prefuse.runtime.target import Target
from prefuse.tests.models.plan_strategies import plans

HEADER = "plan 5 target\n"


@settings(max_examples=100, deadline=None)
@given(plans())
def test_plans_round_trip(plan: Plan) -> None:
    assert parse_plan(print_plan(plan)) == plan
    planned = PlanMemory().run(plan, Context(Target.parse("cpu:avx2", threads=1)))
    assert parse_plan(print_plan(planned)) == planned


@example(")", "->", "int8", 0)
@example("stream", "stream", "int8", 1)
@given(st.text(), st.text(), st.sampled_from(["float32", "bfloat16", "int4", "float8_e4m3fn", "bool"]), st.integers(0, 2**62))
def test_any_name_round_trips(name: str, label: str, dtype: str, size: int) -> None:
    region = Region(name, size, 0)
    plan = Plan(
        target=name,
        inputs=(Port(name, TensorType((0, size), dtype), name),),
        outputs=(),
        spaces=(Space(name, size, size),),
        buffers=(Buffer(name, Role.ACTIVATION, size, name, size), Buffer("s", Role.STATE, size, name, None, name)),
        states=(State(name, TensorType((size,), dtype), name, name), State("s", TensorType((), dtype), "s")),
        kernels=(Kernel(name, name, size, size, size),),
        steps=(Launch(name, (region,), (), (region,), ((size, 0),), size, label),),
    )
    assert parse_plan(print_plan(plan)) == plan


def test_text_is_for_people() -> None:
    plan = Plan(
        target="cpu:avx2,threads=2",
        inputs=(Port("x", TensorType((1, 16), "float32"), "x"),),
        outputs=(
            Port("y 1", TensorType((), "float32"), "y 1"),
            Port("z", TensorType((2, 9), "int64"), "z", (Extent(1, "n"), Extent(0, "m 2"))),
        ),
        spaces=(Space("arena", 64, 4096),),
        buffers=(Buffer("x", Role.INPUT, 64, "caller"), Buffer("h", Role.ACTIVATION, 64, "arena", 0)),
        kernels=(Kernel("relu_0", "elementwise", 2, 16, 128), Kernel("pairs", "matmul", 3, 16, 8, multiplies="bfloat16")),
        steps=(Launch("relu_0", (Region("x", 0, 64),), (Region("h", 0, 64),), inplace=((0, 0),), stream=1, label="/Relu"),),
    )
    assert print_plan(plan).splitlines() == [
        'plan 5 "cpu:avx2,threads=2"',
        "space arena size 64 capacity 4096",
        "buffer x input size 64 in caller",
        "buffer h activation size 64 in arena at 0",
        "input x float32[1,16] in x",
        'output "y 1" float32[] in "y 1"',
        'output z int64[2,9] in z extents (1=n, 0="m 2")',
        "kernel relu_0 template elementwise arguments 2 flops 16 bytes 128",
        "kernel pairs template matmul arguments 3 flops 16 bytes 8 multiplies bfloat16",
        "launch relu_0 (x[0:64]) -> (h[0:64]) inplace (0=0) label /Relu stream 1",
    ]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "plan: it is empty"),
        ("space a size 1\n", "plan line 1: expected the header"),
        ("plan 1 target\n", "plan line 1: this prefuse reads plans of version 5, not 1"),
        (HEADER + HEADER, "plan line 2: expected the header"),
        (HEADER + "\nspce a size 1\n", "plan line 3: unknown keyword 'spce'"),
        (HEADER + "space a size -1\n", "plan line 2: cannot read ' -1'"),
        (HEADER + "space a size x\n", "plan line 2: expected a number below 2**63, found 'x'"),
        (HEADER + f"space a size {2**63}\n", "expected a number below 2**63"),
        (HEADER + "space a size 1 1\n", "unexpected '1'"),
        (HEADER + "space a\n", "expected 'size', found 'the end of the line'"),
        (HEADER + 'space "\\q" size 1\n', "malformed name"),
        (HEADER + "buffer a guest size 1 in s\n", "unknown role 'guest'"),
        (HEADER + "input x object[1] in x\n", "unknown element type 'object'"),
        (HEADER + "input x float33[1] in x\n", "unknown element type 'float33'"),
        (HEADER + "input x float32[1 2] in x\n", "expected ',', found '2'"),
        (HEADER + "output y int8[2] in y extents (0 n)\n", "expected '=', found 'n'"),
        (HEADER + "buffer a state size 1 in s renews\n", "expected a name"),
        (HEADER + "state a int8[2] in\n", "expected a name"),
        (HEADER + "copy a[8:4] -> b[0:4]\n", "region of 'a' ends at 4, before its start 8"),
        (HEADER + "launch k (a[0:4] -> (b[0:4])\n", "expected ',', found '->'"),
    ],
)
def test_faults_name_the_line(text: str, fault: str) -> None:
    with pytest.raises(ProgramFileError) as raised:
        parse_plan(text)
    assert fault in str(raised.value)


@settings(max_examples=200, deadline=None)
@given(plans(max_streams=1), st.data())
def test_damaged_text_is_an_error_or_a_plan(plan: Plan, data: st.DataObject) -> None:
    text = print_plan(plan)
    place = data.draw(st.integers(0, len(text) - 1))
    damaged = text[:place] + data.draw(st.text(max_size=3)) + text[place + data.draw(st.integers(0, 5)) :]
    try:
        parsed = parse_plan(damaged)
    except ProgramFileError:
        return
    assert parse_plan(print_plan(parsed)) == parsed


def test_empty_sections_round_trip() -> None:
    plan = Plan("t", (), (), (), (), (), ())
    assert parse_plan(print_plan(plan)) == plan
    assert parse_plan(print_plan(replace(plan, target=""))).target == ""
