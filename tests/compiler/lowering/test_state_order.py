"""Steps are ordered so that old values are read before they are overwritten, and copied where no order is."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from prefuse.compiler.lowering.state_order import order_renewals
from prefuse.runtime.plan import Buffer, Copy, Launch, Plan, Port, Region, Role, Step
from prefuse.runtime.plan_checker import check_plan
from prefuse.tests.models.plan_strategies import plans, simulated_faults
from prefuse.tests.runtime.test_plan_checker import BYTES, planned, whole

NEW_A, NEW_B = (Buffer(f"new {name}", Role.STATE, BYTES, "state", None, name) for name in "ab")


def launch(reads: str, writes: str, inplace: tuple[tuple[int, int], ...] = ()) -> Launch:
    """Of buffers named by letters, a capital one for the new value."""

    def regions(names: str) -> tuple[Region, ...]:
        return tuple(whole(f"new {name.lower()}" if name.isupper() else name) for name in names)

    return Launch("k", regions(reads), regions(writes), inplace=inplace)


def test_steps_in_a_right_order_stay() -> None:
    steps = [launch("a", "h"), launch("ah", "A", ((0, 0),)), launch("A", "y")]
    assert order_renewals(steps, [NEW_A]) == (steps, {})


def test_a_reader_comes_before_the_writer() -> None:
    write, other, read = launch("x", "A"), launch("x", "z"), launch("a", "y")
    assert order_renewals([write, other, read], [NEW_A]) == ([other, read, write], {})


def test_a_reader_that_needs_the_new_value_has_a_copy() -> None:
    """h = k(new a), y = k(h, a): the new value waits elsewhere."""
    steps, copies = order_renewals([launch("x", "A"), launch("A", "h"), launch("ha", "y")], [NEW_A])
    assert copies == {"new a.copied": BYTES}
    assert steps[0].writes == steps[1].reads == (whole("new a.copied"),)  # type: ignore[union-attr]
    assert steps[3] == Copy(whole("new a.copied"), whole("new a"))


def test_a_step_in_place_only_with_its_pair() -> None:
    assert order_renewals([launch("a", "A", ((0, 0),))], [NEW_A])[1] == {}
    assert order_renewals([launch("a", "A")], [NEW_A])[1] == {"new a.copied": BYTES}
    shifted = replace(launch("a", "A", ((0, 0),)), reads=(Region("a", 64, BYTES - 64),))
    assert order_renewals([shifted], [NEW_A])[1] == {"new a.copied": BYTES}


def half(index: int, *, also: tuple[Region, ...] = ()) -> Launch:
    """Renews one half of a in place, and reads other bytes."""
    old, new = (Region(name, index * BYTES // 2, BYTES // 2) for name in ("a", "new a"))
    return Launch("k", (old, *also), (new,), inplace=((0, 0),))


def test_halves_of_a_state_are_renewed_in_place_each() -> None:
    """In any order, and the one by what the other has become; not both by the old value of the other."""
    first, second = (Region(name, 0, BYTES // 2) for name in ("a", "new a"))
    for steps in ([half(0), half(1)], [half(1), half(0)], [half(0), half(1, also=(second,))]):
        assert order_renewals(steps, [NEW_A]) == (steps, {})
    assert order_renewals([half(0), half(1, also=(first,))], [NEW_A]) == ([half(1, also=(first,)), half(0)], {})
    crossed = [half(0, also=(Region("a", BYTES // 2, 8),)), half(1, also=(first,))]
    assert order_renewals(crossed, [NEW_A])[1] == {"new a.copied": BYTES}


def test_what_is_stored_as_rows_comes_before_who_reads_the_last_of_them() -> None:
    """c is 4 rows of two columns, of which the left needs the new value; who reads its end and the old one needs a copy."""
    column, end = Region("c", 0, BYTES // 2, 4, BYTES // 4), Region("c", BYTES - 64, 64)
    steps = [launch("x", "A"), Launch("k", (whole("new a"),), (column,)), Launch("k", (end, whole("a")), (whole("y"),))]
    found, copies = order_renewals(steps, [NEW_A])
    assert copies == {"new a.copied": BYTES}
    assert found[2] == steps[2]


def test_two_states_that_change_places_have_one_copy() -> None:
    steps, copies = order_renewals([Copy(whole("a"), whole("new b")), Copy(whole("b"), whole("new a"))], [NEW_A, NEW_B])
    assert copies == {"new b.copied": BYTES}
    assert steps.index(Copy(whole("b"), whole("new a"))) < steps.index(Copy(whole("new b.copied"), whole("new b")))


def test_a_cycle_over_two_states_has_a_copy() -> None:
    """Each writer needs what reads the other's old value to come first, and that needs the writer."""
    steps = [launch("x", "A"), launch("x", "B"), launch("Ab", "y"), launch("Ba", "z")]
    _, copies = order_renewals(steps, [NEW_A, NEW_B])
    assert copies == {"new b.copied": BYTES}


def unordered(plan: Plan, data: st.DataObject) -> list[Step]:
    """The steps of a plan of one stream in another order, in which values are still written before they are read."""
    steps, left = list[Step](), list(plan.steps)
    waiting = [name for step in left for name in _written(step)]
    while left:
        ready = [step for step in left if not set(waiting) & {region.buffer for region in _reads(step)}]
        step = data.draw(st.sampled_from(ready))
        left.remove(step)
        steps.append(step)
        for name in _written(step):
            waiting.remove(name)
    return steps


def _reads(step: Step) -> tuple[Region, ...]:
    return (step.source,) if isinstance(step, Copy) else () if not hasattr(step, "reads") else step.reads


def _written(step: Step) -> list[str]:
    return [step.destination.buffer] if isinstance(step, Copy) else [region.buffer for region in getattr(step, "writes", ())]


@settings(max_examples=200, deadline=None)
@given(plans(max_streams=1), st.data())
def test_any_order_becomes_a_right_one(plan: Plan, data: st.DataObject) -> None:
    renewals = [buffer for buffer in plan.buffers if buffer.renews is not None]
    steps, copies = order_renewals(unordered(plan, data), renewals)
    made = tuple(Buffer(name, Role.ACTIVATION, size_bytes, "arena") for name, size_bytes in copies.items())
    right = planned(replace(plan, buffers=plan.buffers + made, steps=tuple(steps)))
    assert check_plan(right) == ()
    assert simulated_faults(right) == []
    assert isinstance(right.outputs[0], Port)
