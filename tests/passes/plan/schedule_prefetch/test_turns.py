"""Copies of weights and activations that one stream makes: each waits for what it must, nothing for itself."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from prefuse.passes.plan.prefetch.problem import Object, Problem, Step, Use
from prefuse.passes.plan.prefetch.schedule import CopyIn, CopyOut, Drop, Schedule
from prefuse.passes.plan.prefetch.scheduler import schedule
from prefuse.passes.plan.schedule_prefetch.stays import Leave, Stay, copies_of, on_demand, seconds_of
from prefuse.tests.sample import sample_number

from .networks import TIER, faults, random_network


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
