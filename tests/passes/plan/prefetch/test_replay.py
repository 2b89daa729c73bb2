"""The checker of schedules rejects what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from prefuse.passes.plan.prefetch.problem import Object, Problem, Step, Tier, Use, read_only
from prefuse.passes.plan.prefetch.replay import replay
from prefuse.passes.plan.prefetch.schedule import CopyIn, CopyOut, Drop, Schedule
from prefuse.passes.plan.prefetch.scheduler import schedule

from .random_problems import at_other_speeds

# Two weights of 2 take turns in a memory of 3, in which a result of 1 lives, too.
TURNS = read_only([Step(1.0)] * 2, [(2, [0]), (2, [1])], 3, Tier(2.0, 2.0))
IN_TURNS = Schedule(
    (CopyIn(1, 0, 1, (0,)), CopyIn(0, 1, 2, (0,))),
    (),
    (Drop(0, 0), Drop(1, 1)),
    frozenset({0}),
    frozenset(),
    frozenset(),
    4.0,
)

# A result of 2 goes out for a weight, is read again, and dies.
SPILL = Problem(
    (Step(1.0), Step(1.0), Step(1.0)),
    (Object(2, (Use(0, True), Use(2))), Object(3, (Use(1),), True, True)),
    4,
    (Tier(1.0, 1.0),),
)
SPILLED = Schedule(
    (CopyIn(1, 0, 1, (1,)), CopyIn(0, 1, 2, (1,))),
    (CopyOut(0, 0, None),),
    (Drop(0, 0),),
    frozenset(),
    frozenset(),
    frozenset(),
    8.0,
)


def test_right_schedules() -> None:
    """Their times, by hand."""
    turns = replay(TURNS, IN_TURNS)
    assert (turns.seconds, turns.stalls, turns.busy_in, turns.peak_bytes, turns.faults) == (4.0, (1.0, 1.0), (2.0,), 2, ())
    spill = replay(SPILL, SPILLED)
    assert (spill.seconds, spill.stalls, spill.bytes_in, spill.bytes_out, spill.faults) == (10.0, (0.0, 5.0, 2.0), 5, 2, ())


MUTANTS = {
    "earlier": (replace(IN_TURNS, copies_in=(CopyIn(1, -1, 1, (0,)), IN_TURNS.copies_in[1])), "4 bytes inside"),
    "lost": (replace(IN_TURNS, copies_in=IN_TURNS.copies_in[1:]), "used by step 1 while it is absent"),
    "swapped": (replace(IN_TURNS, copies_in=IN_TURNS.copies_in[::-1]), "wait for each other forever"),
    "later": (replace(IN_TURNS, copies_in=(CopyIn(1, 0, 2, (0,)), IN_TURNS.copies_in[1])), "used by step 1 while it is absent"),
    "twice": (replace(IN_TURNS, copies_in=(*IN_TURNS.copies_in, CopyIn(0, 1, 2, (0,)))), "while it is inside"),
    "undropped": (replace(IN_TURNS, drops=IN_TURNS.drops[1:]), "object 0 comes in for step 2 while it is inside"),
    "resident": (replace(IN_TURNS, residents=frozenset({0})), "is a resident, but moves"),
    "missing": (replace(IN_TURNS, inside=frozenset()), "object 0 is used by step 0 while it is absent"),
    "unknown": (replace(IN_TURNS, drops=(Drop(7, 0),)), "does not have"),
    "tier": (
        replace(IN_TURNS, copies_in=(CopyIn(1, 0, 1, (0,), 1), IN_TURNS.copies_in[1])),
        "tier that the problem does not have",
    ),
    "dirty": (replace(IN_TURNS, dirty=frozenset({1})), "is not inside"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_rejected(name: str) -> None:
    mutant, fault = MUTANTS[name]
    assert fault in "; ".join(replay(TURNS, mutant).faults)


SPILL_MUTANTS = {
    "unwritten": (replace(SPILLED, copies_out=(), copies_in=(CopyIn(1, 0, 1, (0,)), CopyIn(0, 1, 2, (0,)))), "no value outside"),
    "undropped": (replace(SPILLED, drops=()), "while it is inside"),
    "not waited for": (replace(SPILLED, copies_in=(CopyIn(1, 0, 1, (0,)), SPILLED.copies_in[1])), "5 bytes inside"),
    "early": (replace(SPILLED, copies_out=(CopyOut(0, -1, None),)), "goes out after step -1 while it is absent"),
    "late": (replace(SPILLED, copies_out=(CopyOut(0, 2, None),)), "wait for each other forever"),
    "dropped dirty": (
        replace(SPILLED, copies_out=(), copies_in=(CopyIn(1, 0, 1, (0,)),)),
        "object 0 is dropped while it is newer than its value outside",
    ),
}


@pytest.mark.parametrize("name", SPILL_MUTANTS)
def test_mutants_with_copies_out_are_rejected(name: str) -> None:
    mutant, fault = SPILL_MUTANTS[name]
    assert fault in "; ".join(replay(SPILL, mutant).faults)


def test_an_object_is_not_written_while_it_goes_out() -> None:
    problem = Problem((Step(1.0),) * 3, (Object(4, (Use(0, True), Use(1, True), Use(2))),), 4, (Tier(1.0, 1.0),))
    torn = Schedule((), (CopyOut(0, 0, None),), (), frozenset(), frozenset(), frozenset(), 3.0)
    assert replay(problem, torn).faults == ("object 0 is written by step 1 while it goes out",)
    assert replay(problem, replace(torn, copies_out=(CopyOut(0, 0, 1),))).faults == ()


def test_an_input_is_not_there_before_its_call() -> None:
    problem = Problem((Step(1.0),), (Object(1, (Use(0),), True),), 2, (Tier(1.0, 1.0),), is_periodic=True)
    right = Schedule((CopyIn(0, -1, 0, (0,)),), (), (), frozenset(), frozenset(), frozenset(), 2.0)
    assert replay(problem, right).faults == ()
    early = replace(right, copies_in=(CopyIn(0, -2, 0, (0,)),))
    assert replay(problem, early).faults[0] == "object 0 is an input of a call, but comes in before the call begins"


def test_a_tier_holds_no_more_than_it_does() -> None:
    tight = replace(SPILL, tiers=(Tier(1.0, 1.0, capacity_bytes=1),))
    assert "2 bytes in tier 0" in replay(tight, SPILLED).faults[0]


def streamed(rng: Random) -> Problem:
    """A tight memory, so that almost no copy can be elsewhere."""
    count = rng.randint(6, 12)
    weights = [(rng.randint(2, 5), [step]) for step in range(count)]
    return read_only([Step(rng.choice((1.0, 2.0, 6.0))) for _ in range(count)], weights, 9, Tier(1.0, 1.0))


def earlier(found: Schedule, index: int) -> Schedule:
    copy = found.copies_in[index]
    return with_copy(found, index, replace(copy, after_step=copy.after_step - 2))


def with_copy(found: Schedule, index: int, copy: CopyIn) -> Schedule:
    return replace(found, copies_in=(*found.copies_in[:index], copy, *found.copies_in[index + 1 :]))


def lost(found: Schedule, index: int) -> Schedule:
    return replace(found, copies_in=found.copies_in[:index] + found.copies_in[index + 1 :])


def undropped(found: Schedule, index: int) -> Schedule:
    return replace(found, drops=found.drops[:index] + found.drops[index + 1 :])


def unawaited(found: Schedule, index: int) -> Schedule:
    copy = found.copies_in[index]
    return with_copy(found, index, replace(copy, before_step=copy.before_step + 1))


@pytest.mark.parametrize("mutate", [lost, undropped, unawaited])
def test_all_mutants_of_streamed_weights_are_rejected(mutate: Callable[[Schedule, int], Schedule]) -> None:
    rng = Random(2)
    for _ in range(20):
        problem = streamed(rng)
        found = schedule(problem)
        for index in range(len(found.copies_in)):
            assert replay(problem, mutate(found, index)).faults, (problem, index)


def test_copies_that_wait_for_less_are_rejected() -> None:
    """Where no other wait stands in for it, a copy that may begin two steps earlier breaks the limit if copies are fast."""
    rng, tried = Random(4), 0
    for _ in range(40):
        problem = streamed(rng)
        found = schedule(problem)
        speeds = [replace(problem, tiers=(Tier(1e6, 1e6),)), *(at_other_speeds(problem, rng) for _ in range(10))]
        for index in range(len(found.copies_in)):
            if is_binding(found, index):
                tried += 1
                assert any(replay(other, earlier(found, index)).faults for other in speeds), (problem, found, index)
        free = replace(found, copies_in=tuple(replace(copy, after_step=-2 * len(problem.steps)) for copy in found.copies_in))
        assert replay(speeds[0], free).faults
    assert tried > 40


def is_binding(found: Schedule, index: int) -> bool:
    """No copy before it, behind which it stands anyway, waits as long; nor is it its own object's last use that it waits for."""
    copy = found.copies_in[index]
    waits = max((before.after_step for before in found.copies_in[:index]), default=-2)
    return waits <= copy.after_step - 2 and Drop(copy.object, copy.after_step) not in found.drops
