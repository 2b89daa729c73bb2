"""Copies of weights and activations that one stream makes: each waits for what it must, nothing for itself."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from prefuse.passes.plan.prefetch.problem import Object, Problem, Step, Tier, Use
from prefuse.passes.plan.prefetch.schedule import CopyIn, CopyOut, Drop, Schedule
from prefuse.passes.plan.prefetch.scheduler import schedule
from prefuse.passes.plan.schedule_prefetch.stays import Copies, Leave, Stay, copies_of, on_demand, seconds_of
from prefuse.tests.sample import sample_number

TIER = Tier(1.0, 1.0, takes_turns=True)


def random_network(rng: Random) -> Problem:
    """Weights, and activations of which many are used again much later, within the tightest limit or somewhat more."""
    count = rng.randint(3, 40)
    steps = tuple(Step(rng.choice((0.0, 0.5, 2.0, 8.0)), rng.choice((0, 0, 3))) for _ in range(count))
    objects = []
    for _ in range(rng.randint(2, 40)):
        used = sorted(rng.sample(range(count), rng.randint(1, min(4, count))))
        if rng.random() < 0.4:
            objects.append(Object(rng.randint(1, 9), tuple(map(Use, used)), is_outside=True, is_kept=True))
        else:
            uses = (Use(step, not rank or rng.random() < 0.3) for rank, step in enumerate(used))
            objects.append(Object(rng.randint(1, 9), tuple(uses)))
    problem = Problem(steps, tuple(objects), 1, (TIER,), is_periodic=True)
    return replace(problem, limit_bytes=max(problem.step_bytes()) + rng.choice((0, 1, 5, 20)))


def faults(problem: Problem, copies: Copies) -> list[str]:
    """What is wrong with the order of copies, and with the values of activations."""
    found = [
        f"{copy} is waited for before it begins" for copy in copies if copy.waiting is not None and copy.waiting <= copy.position
    ]
    positions = [copy.position for copy in copies]
    if positions != sorted(positions):
        found.append("copies out of order")
    for index, item in enumerate(problem.objects):
        own = [(rank, copy) for rank, copy in enumerate(copies) if copy.object == index]
        if item.is_kept:
            found += [f"{copy}: a weight goes out" for _, copy in own if isinstance(copy, Leave)]
            continue
        for rank, stay in own:
            if isinstance(stay, Stay):
                written = max(use.step for use in item.uses if use.is_written and use.step < stay.first)
                if not any(isinstance(one, Leave) and one.after == written for place, one in own if place < rank):
                    found.append(f"{stay} brings what has not gone out")
            elif stay.after not in [use.step for use in item.uses if use.is_written]:
                found.append(f"{stay} takes what step {stay.after} has not written")
    return found


@pytest.mark.parametrize("number", range(150))
def test_copies_in_turns(number: int) -> None:
    rng = Random(f"{sample_number()} {number}")
    problem = random_network(rng)
    chosen = schedule(problem)
    copies = copies_of(problem, chosen)
    assert faults(problem, copies) == []
    assert faults(problem, on_demand(problem, copies)) == []
    assert sum(isinstance(copy, Stay) for copy in copies) == len(chosen.copies_in)
    assert sum(isinstance(copy, Leave) for copy in copies) <= len(chosen.copies_out)
    copied = sum(problem.objects[copy.object].size_bytes for copy in copies)
    assert seconds_of(problem, copies) >= max(problem.compute_seconds, copied / TIER.bandwidth_in) - 1e-9


def test_what_takes_over_bytes_stands_where_they_are_free() -> None:
    """A result of 2 bytes goes out while a step runs that needs a weight of 1; then one of 3 comes, for which it had to go."""
    steps = (Step(1.0), Step(4.0), Step(1.0), Step(1.0))
    result = Object(2, (Use(0, True), Use(3)))
    weights = (Object(1, (Use(1),), True, True), Object(3, (Use(2),), True, True))
    problem = Problem(steps, (result, *weights), 4, (TIER,), is_periodic=True)
    copies = copies_of(problem, schedule(problem))
    leave, large, back = (
        next(c for c in copies if c.object == j and isinstance(c, kind)) for j, kind in ((0, Leave), (2, Stay), (0, Stay))
    )
    assert copies.index(leave) < copies.index(large) < copies.index(back)
    assert isinstance(leave, Leave)
    assert (leave.after, leave.before) == (0, 2)  # out at 1 to 3 s beside step 1; the weight then stands behind that step
    assert (large.position, back.after) == (1, 2)


def test_what_never_comes_back_need_not_go() -> None:
    problem = Problem((Step(1.0),) * 3, (Object(2, (Use(0, True), Use(2))),), 4, (TIER,), is_periodic=True)
    unused = Schedule((), (CopyOut(0, 0, None),), (), frozenset(), frozenset(), frozenset(), 3.0)
    assert copies_of(problem, unused) == ()
    used = replace(unused, copies_in=(CopyIn(0, 1, 2, (1,)),), drops=(Drop(0, 0),))
    assert [type(copy) for copy in copies_of(problem, used)] == [Leave, Stay]
