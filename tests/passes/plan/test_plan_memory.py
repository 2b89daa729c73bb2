"""plan-memory: what it plans is right by the checker and by simulation; what it cannot plan is refused with the bytes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefuse.compiler.pipeline import Context
from prefuse.passes.plan.plan_memory import PlanMemory
from prefuse.runtime.errors import CompileError
from prefuse.runtime.plan import Buffer, Copy, Kernel, Launch, Plan, Port, Record, Region, Role, Space, TensorType, Wait
from prefuse.runtime.plan_checker import check_plan
from prefuse.runtime.target import Target
from prefuse.tests.models.plan_strategies import plans, simulated_faults


def planned(plan: Plan, *, inplace: bool = True) -> Plan:
    return PlanMemory(inplace).run(plan, Context(Target.parse("cpu:avx2", threads=1)))


def chain(links: int, inplace: bool, capacity_bytes: int | None = None) -> Plan:
    """x -> h0 -> h1 -> ... -> y, each of 256 bytes."""
    names = ["x", *(f"h{i}" for i in range(links)), "y"]
    roles = [Role.INPUT, *[Role.ACTIVATION] * links, Role.OUTPUT]
    buffers = tuple(
        Buffer(name, role, 256, "arena" if role is Role.ACTIVATION else "caller") for name, role in zip(names, roles, strict=True)
    )
    pairs = ((0, 0),) if inplace else ()
    steps = tuple(Launch("k", (Region(a, 0, 256),), (Region(b, 0, 256),), inplace=pairs) for a, b in pairwise(names))
    kind = TensorType((64,), "float32")
    spaces = (Space("caller"), Space("arena", 0, capacity_bytes))
    ports = ((Port("x", kind, "x"),), (Port("y", kind, "y"),))
    return Plan("cpu:avx2,threads=1", *ports, spaces, buffers, (Kernel("k", "elementwise", 2),), steps)


@settings(max_examples=150, deadline=None)
@given(plans(), st.booleans())
def test_planned_plans_are_right(plan: Plan, inplace: bool) -> None:
    found = planned(plan, inplace=inplace)
    assert check_plan(found) == ()
    assert simulated_faults(found) == []


@settings(max_examples=50, deadline=None)
@given(plans())
def test_planning_is_deterministic_and_idempotent(plan: Plan) -> None:
    once = planned(plan)
    assert planned(plan) == once
    assert planned(once) == once


def test_a_chain_alternates_between_two_places() -> None:
    assert planned(chain(6, inplace=False)).space("arena").size_bytes == 512


def test_in_place_chain_stays_in_one_place() -> None:
    assert planned(chain(6, inplace=True)).space("arena").size_bytes == 256
    assert planned(chain(6, inplace=True), inplace=False).space("arena").size_bytes == 512


def parts(first: tuple[str, int], second: tuple[str, int]) -> Plan:
    """x -> a (512 bytes), half of which is read in place of b, or 256 bytes of which b is written; then y from b."""
    plan = chain(2, inplace=True)
    sizes = {"h0": first[1], "h1": second[1]}
    read, written = (Region(name, int(part), 256) for name, (part, _) in (("h0", first), ("h1", second)))
    return replace(
        plan,
        buffers=tuple(replace(buffer, size_bytes=sizes.get(buffer.name, 256)) for buffer in plan.buffers),
        kernels=(*plan.kernels, Kernel("wide", "elementwise", 2)),
        steps=(
            Launch("wide", (Region("x", 0, 256),), (Region("h0", 0, sizes["h0"]),)),
            Launch("k", (read,), (written,), inplace=((0, 0),)),
            *([Launch("k", (Region("x", 0, 256),), (Region("h1", 256 - written.offset, 256),))] if sizes["h1"] > 256 else []),
            Launch("wide", (Region("h1", 0, sizes["h1"]),), (Region("y", 0, 256),)),
        ),
    )


@pytest.mark.parametrize(
    ("first", "second", "size_bytes", "places"),
    [
        (("0", 512), ("0", 256), 512, (0, 0)),
        (("256", 512), ("0", 256), 512, (0, 256)),
        (("0", 256), ("256", 512), 512, (256, 0)),
        (("256", 512), ("256", 512), 512, (0, 0)),
        (("256", 512), ("0", 512), 768, (0, 256)),
        (("32", 512), ("0", 256), 768, None),  # no place for a buffer
    ],
)
def test_parts_are_overwritten_in_place(
    first: tuple[str, int], second: tuple[str, int], size_bytes: int, places: tuple[int, int] | None
) -> None:
    found = planned(parts(first, second))
    assert check_plan(found) == ()
    assert simulated_faults(found) == []
    assert found.space("arena").size_bytes == size_bytes
    offsets = {buffer.name: buffer.offset for buffer in found.buffers}
    assert places in (None, (offsets["h0"], offsets["h1"]))


def test_a_part_does_not_keep_a_large_buffer_where_that_takes_more() -> None:
    """h0 of 1024 bytes becomes h1 of 256, which is alive with h2 of 1024 later."""
    plan = parts(("0", 1024), ("0", 256))
    late = Buffer("h2", Role.ACTIVATION, 1024, "arena")
    steps = (
        *plan.steps[:2],
        Launch("wide", (Region("x", 0, 256),), (Region("h2", 0, 1024),)),
        Launch("two", (Region("h1", 0, 256), Region("h2", 0, 1024)), (Region("y", 0, 256),)),
    )
    found = planned(
        replace(plan, buffers=(*plan.buffers, late), kernels=(*plan.kernels, Kernel("two", "elementwise", 3)), steps=steps)
    )
    assert check_plan(found) == ()
    assert found.space("arena").size_bytes == 1280


def test_a_second_reader_keeps_its_buffer_from_being_overwritten() -> None:
    plan = chain(3, inplace=True)
    late = Launch("k", (Region("h0", 0, 256),), (Region("y", 0, 256),))  # the last step reads h0 instead of h2
    found = planned(replace(plan, steps=(*plan.steps[:3], late)))
    assert check_plan(found) == ()
    assert found.space("arena").size_bytes == 512


def test_concurrent_streams_do_not_share_bytes() -> None:
    plan = chain(2, inplace=False)
    whole = [Region(name, 0, 256) for name in ("x", "h0", "h1", "y")]
    side_by_side = (Copy(whole[0], whole[1], stream=0), Copy(whole[0], whole[2], stream=1), Copy(whole[1], whole[3], stream=0))
    assert planned(replace(plan, steps=side_by_side)).space("arena").size_bytes == 512
    ordered = (side_by_side[0], side_by_side[2], Record(0, stream=0), Wait(0, stream=1), side_by_side[1])
    assert planned(replace(plan, steps=ordered)).space("arena").size_bytes == 256


def test_unused_buffers_are_dropped_and_constants_follow_their_use() -> None:
    plan = chain(1, inplace=False)
    constants = tuple(Buffer(f"c{i}", Role.CONSTANT, 100, "constants") for i in range(2))
    unused = Buffer("unused", Role.ACTIVATION, 4096, "arena")
    plan = replace(
        plan,
        spaces=(*plan.spaces, Space("constants")),
        buffers=(*plan.buffers, *constants, unused),
        kernels=(*plan.kernels, Kernel("two", "elementwise", 3)),
        steps=(Launch("two", (Region("x", 0, 256), Region("c1", 0, 100)), (Region("h0", 0, 256),)), *plan.steps[1:]),
    )
    found = planned(plan)
    assert check_plan(found) == ()
    assert {buffer.name: buffer.offset for buffer in found.buffers} == {"x": None, "h0": 0, "y": None, "c0": 128, "c1": 0}


def test_too_small_a_capacity_names_the_bytes() -> None:
    assert planned(chain(6, inplace=False, capacity_bytes=512)).space("arena").size_bytes == 512
    with pytest.raises(CompileError, match=r"memory arena: needs 512 bytes, at least 512; its limit is 500"):
        planned(chain(6, inplace=False, capacity_bytes=500))
