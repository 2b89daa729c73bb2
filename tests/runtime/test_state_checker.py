"""The checker takes right plans with states, and rejects what would show a later call, or a step, a wrong value of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from prefuse.runtime.plan import Buffer, Copy, Kernel, Launch, Plan, Port, Record, Region, Role, Space, State, Step, Wait
from prefuse.runtime.plan_checker import check_plan
from prefuse.tests.models.plan_strategies import plans, simulated_faults
from prefuse.tests.runtime.test_plan_checker import BYTES, KIND, planned, whole, with_buffer, with_launch, with_step


def example() -> Plan:
    """0: h = k(old a)   1: new a = two(h, old a) in place   2: new b = copy x   3: y = k(new a); b begins as w."""
    return Plan(
        target="cpu:avx2,threads=1",
        inputs=(Port("x", KIND, "x"),),
        outputs=(Port("y", KIND, "y"),),
        spaces=(Space("caller"), Space("constants", 256), Space("arena", 512), Space("state", 1024)),
        buffers=(
            Buffer("x", Role.INPUT, BYTES, "caller"),
            Buffer("y", Role.OUTPUT, BYTES, "caller"),
            Buffer("w", Role.CONSTANT, BYTES, "constants", 0),
            Buffer("h", Role.ACTIVATION, BYTES, "arena", 0),
            Buffer("a", Role.STATE, BYTES, "state", 0),
            Buffer("new a", Role.STATE, BYTES, "state", 0, "a"),
            Buffer("b", Role.STATE, BYTES, "state", 256),
            Buffer("new b", Role.STATE, BYTES, "state", 256, "b"),
        ),
        kernels=(Kernel("k", "elementwise", 2), Kernel("two", "elementwise", 3)),
        steps=(
            Launch("k", (whole("a"),), (whole("h"),)),
            Launch("two", (whole("h"), whole("a")), (whole("new a"),), inplace=((0, 1),)),
            Copy(whole("x"), whole("new b")),
            Launch("k", (whole("new a"),), (whole("y"),)),
        ),
        states=(State("a", KIND, "a"), State("b", KIND, "b", "w")),
    )


def test_example_is_right() -> None:
    assert check_plan(example()) == ()
    assert simulated_faults(example()) == []


def on_two_streams(*, is_ordered: bool) -> Plan:
    """The example with the reader of the old value on a stream of its own, and the writer waiting for it or not."""
    plan = with_step(example(), 1, Launch("k", (whole("x"),), (whole("new a"),)))
    read = Launch("k", (whole("a"),), (whole("h"),), stream=1)
    order: tuple[Step, ...] = (Record(0, 1), Wait(0)) if is_ordered else ()
    return replace(plan, steps=(read, *order, *plan.steps[1:]))


def test_order_over_streams() -> None:
    assert check_plan(on_two_streams(is_ordered=True)) == ()
    faults = [str(found) for found in check_plan(on_two_streams(is_ordered=False))]
    assert "state a: new a is written where a step may still read the old value" in faults


def swapped(plan: Plan, first: int) -> Plan:
    steps = list(plan.steps)
    steps[first], steps[first + 1] = steps[first + 1], steps[first]
    return replace(plan, steps=tuple(steps))


MUTANTS: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "swapped order": (
        lambda p: replace(p, steps=(Launch("k", (whole("x"),), (whole("new a"),)), p.steps[0], *p.steps[2:])),
        "state a: new a is written where a step may still read the old value",
    ),
    "missing pair": (lambda p: with_launch(p, 1, inplace=()), "step 1: its write 0 and read 1 share bytes of space state"),
    "wrong pair": (lambda p: with_launch(p, 1, inplace=((0, 0),)), "step 1: its write 0 and read 1 share bytes"),
    "two writers": (
        lambda p: with_step(p, 2, p.steps[2], Copy(whole("x"), whole("new b"))),
        "step 3: it overwrites byte 0 of new b, which is of step 2",
    ),
    "two renewals": (
        lambda p: with_buffer(p, "new b", renews="a", offset=0),
        "buffer new b: it renews a, as new a does",
    ),
    "no writer": (lambda p: with_step(p, 2), "state b: byte 0 is never written"),
    "half a write": (
        lambda p: with_step(p, 2, Copy(Region("x", 0, 128), Region("new b", 0, 128))),
        "state b: byte 128 is never written",
    ),
    "read before written": (lambda p: swapped(with_launch(p, 3, reads=(whole("new b"),)), 2), "reads byte 0 of new b, which no"),
    "old value written": (lambda p: with_step(p, 2, Copy(whole("x"), whole("b"))), "step 2: it writes b, which is state"),
    "shared bytes": (
        lambda p: with_buffer(with_buffer(p, "b", offset=192), "new b", offset=192),
        "space state: states a and b share bytes",
    ),
    "moved renewal": (lambda p: with_buffer(p, "new b", offset=512), "buffer new b: it does not have the bytes of b"),
    "activation beside states": (lambda p: with_buffer(p, "h", space="state", offset=512), "space state: it holds states"),
    "state in the arena": (lambda p: with_buffer(p, "b", space="arena"), "space arena: it holds states"),
    "activation renews": (
        lambda p: with_buffer(p, "h", renews="a"),
        "buffer h: activation renews a, which is no state or slot",
    ),
    "renews the new": (lambda p: with_buffer(p, "new b", renews="new a", offset=0), "it renews new a, which is no state"),
    "renews nothing": (lambda p: with_buffer(p, "new b", renews="q"), "buffer new b: it renews q, which is no state"),
    "no port": (lambda p: replace(p, states=p.states[:1]), "buffer b: no state of the program is in it"),
    "two ports": (lambda p: replace(p, states=(*p.states, State("c", KIND, "b"))), "state of buffer b: 2 have this name"),
    "same name": (lambda p: replace(p, states=(p.states[0], State("a", KIND, "b"))), "state a: 2 have this name"),
    "port of the new": (lambda p: replace(p, states=(State("a", KIND, "new a"), p.states[1])), "its buffer new a is no state"),
    "port of an activation": (lambda p: replace(p, states=(*p.states, State("c", KIND, "h"))), "its buffer h is no state"),
    "wrong size": (
        lambda p: with_buffer(with_buffer(p, "b", size_bytes=320), "new b", size_bytes=320),
        "state b: float32[64] has 256 bytes, its buffer 320",
    ),
    "bad initial": (
        lambda p: replace(p, states=(p.states[0], State("b", KIND, "b", "x"))),
        "state b: what it is at first, x, is no constant of 256 bytes",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_rejected(name: str) -> None:
    mutate, fault = MUTANTS[name]
    faults = [str(found) for found in check_plan(mutate(example()))]
    assert any(fault in found for found in faults), faults


def by_halves(first: int, second: int) -> Plan:
    """The example with a renewed by two launches in place, each of the half that begins there, when nothing reads it any more."""
    halves = [(Region("a", offset, 128), Region("new a", offset, 128)) for offset in (first, second)]
    launches = [Launch("k", (old,), (new,), inplace=((0, 0),)) for old, new in halves]
    return with_step(example(), 1, *launches)


def test_each_half_of_a_state_is_renewed_in_place() -> None:
    """Also the second one by what the first has become; only the bytes that nobody reads any more may be renewed."""
    plan = by_halves(0, 128)
    two = Launch("two", (Region("a", 128, 128), Region("new a", 0, 128)), (Region("new a", 128, 128),), inplace=((0, 0),))
    for right in (plan, by_halves(128, 0), with_step(plan, 2, two)):
        assert check_plan(right) == ()
        assert simulated_faults(right) == []
    late = with_launch(plan, 2, reads=(Region("a", 0, 128),), inplace=())
    overlapping = with_launch(plan, 2, reads=(Region("a", 120, 128),))
    for wrong in (late, overlapping, replace(plan, steps=(*plan.steps[1:3], plan.steps[0], *plan.steps[3:]))):
        assert "new a is written where a step may still read the old value" in str(check_plan(wrong)[-1])
        assert simulated_faults(wrong)


@settings(max_examples=150, deadline=None)
@given(plans())
def test_right_plans_with_states_are_taken(plan: Plan) -> None:
    right = planned(plan)
    assert check_plan(right) == ()
    assert simulated_faults(right) == []


@settings(max_examples=150, deadline=None)
@given(plans(), st.data())
def test_swapped_steps_are_rejected(plan: Plan, data: st.DataObject) -> None:
    """Two neighbours of one stream in the other order: the checker finds whatever a simulation does."""
    right = planned(plan)
    assume(len(right.steps) > 1)
    mutant = swapped(right, data.draw(st.integers(0, len(right.steps) - 2)))
    faults = check_plan(mutant)
    assert faults or not simulated_faults(mutant)


@settings(max_examples=150, deadline=None)
@given(plans(), st.data())
def test_dropped_pairs_and_moved_states_are_rejected(plan: Plan, data: st.DataObject) -> None:
    right = planned(plan)
    renewed = [b for b in right.buffers if b.renews is not None]
    assume(renewed)
    new = data.draw(st.sampled_from(renewed))
    index, writer = next(
        (i, step) for i, step in enumerate(right.steps) if isinstance(step, Launch) and step.writes[0].buffer == new.name
    )
    if writer.inplace:
        assert check_plan(with_launch(right, index, inplace=()))
    moved = with_buffer(right, new.name, offset=(new.offset or 0) + 64)
    assert check_plan(moved)
