"""Schedules of copies: right at any speed, near the ceiling, and found in time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from prefuse.passes.plan.prefetch.bounds import ceiling
from prefuse.passes.plan.prefetch.problem import Object, Problem, Step, Tier, Use, divided, read_only
from prefuse.passes.plan.prefetch.replay import replay
from prefuse.passes.plan.prefetch.schedule import CopyIn
from prefuse.passes.plan.prefetch.scheduler import InfeasibleError, schedule
from prefuse.tests.scaling import assert_scales

from .random_problems import at_other_speeds, random_problem, random_training


@pytest.mark.parametrize("seed", range(8))
def test_schedules_are_right_at_any_speed(seed: int) -> None:
    """Also on machines whose steps and tiers are slower and faster than those for which they were made."""
    rng = Random(seed)
    for _ in range(40):
        problem = random_problem(rng)
        found = schedule(problem)
        replayed = replay(problem, found)
        assert replayed.faults == (), problem
        assert replayed.peak_bytes <= problem.limit_bytes
        assert replayed.seconds >= ceiling(problem).seconds * (1 - 1e-6)
        for _ in range(3):
            assert replay(at_other_speeds(problem, rng), found).faults == (), problem
        assert schedule(problem) == found


@pytest.mark.parametrize("seed", range(4))
def test_schedules_of_trainings_are_right_at_any_speed(seed: int) -> None:
    rng = Random(seed)
    for _ in range(6):
        problem = random_training(rng)
        found = schedule(problem)
        for other in (problem, at_other_speeds(problem, rng), at_other_speeds(problem, rng)):
            assert replay(other, found).faults == (), problem


def chain(steps: int, seconds: float, size: int, limit: int, bandwidth: float = 1.0) -> Problem:
    """A weight a step, call after call."""
    tier = Tier(bandwidth, bandwidth)
    return read_only([Step(seconds)] * steps, [(size, [step]) for step in range(steps)], limit, tier)


def test_what_fits_stays() -> None:
    found = schedule(chain(10, 1.0, 5, 50))
    assert (found.copies_in, found.drops) == ((), ())
    assert found.residents == frozenset(range(10))


def test_weights_come_in_behind_the_steps_before_theirs() -> None:
    """Two slots, and copies as fast as steps: while one weight is used the next one comes in, also across calls."""
    problem = chain(4, 1.0, 1, 2)
    found = schedule(problem)
    assert {copy.before_step - copy.after_step for copy in found.copies_in} == {2}
    replayed = replay(problem, found)
    assert replayed.seconds == pytest.approx(4.0)
    assert replayed.stalls == pytest.approx((0, 0, 0, 0))


@pytest.mark.parametrize(("seconds", "limit"), [(0.5, 20), (0.5, 60), (1.0, 30), (4.0, 30), (0.5, 90)])
def test_streamed_chains_are_near_the_ceiling(seconds: float, limit: int) -> None:
    """And they copy little more than they must, though where steps take longer there would be time for it."""
    problem = chain(100, seconds, 1, limit)
    replayed, bound = replay(problem, schedule(problem)), ceiling(problem)
    assert replayed.seconds <= 1.05 * bound.seconds
    assert replayed.bytes_in <= bound.bytes_in + 0.08 * limit + 1


def test_activations_go_out_and_come_back() -> None:
    """Forward and backward of a chain, of whose results half fit."""
    count = 40
    objects = [Object(1, (Use(step, True), Use(2 * count - 1 - step))) for step in range(count)]
    problem = Problem((Step(1.0),) * (2 * count), tuple(objects), count // 2, (Tier(2.0, 2.0),))
    found = schedule(problem)
    replayed = replay(problem, found)
    assert replayed.faults == ()
    assert replayed.bytes_in == replayed.bytes_out == count // 2
    assert replayed.seconds == pytest.approx(2 * count)


def test_a_weight_that_is_written_goes_out_once() -> None:
    """One state too many, each updated once a call."""
    states = [Object(1, (Use(step, True),), True, True) for step in range(4)]
    problem = Problem((Step(1.0),) * 4, tuple(states), 3, (Tier(4.0, 4.0),), is_periodic=True)
    replayed = replay(problem, schedule(problem))
    assert replayed.faults == ()
    assert replayed.bytes_in <= replayed.bytes_out <= 4
    assert replayed.seconds == pytest.approx(4.0)


def test_pieces_fill_what_whole_objects_cannot() -> None:
    """Weights of 3 in a memory of 5: whole ones come in one after the other, pieces beside the step before."""
    whole = chain(10, 3.0, 3, 5)
    pieces, owners = divided(whole, 1)
    assert owners == tuple(index for index in range(10) for _ in range(3))
    assert {item.size_bytes for item in pieces.objects} == {1}
    assert replay(whole, schedule(whole)).seconds == pytest.approx(60)
    assert replay(pieces, schedule(pieces)).seconds < 45


def test_a_step_that_does_not_fit_is_named() -> None:
    with pytest.raises(InfeasibleError, match="step 1 needs 7 bytes at once, more than the limit of 6"):
        schedule(read_only([Step(1.0), Step(1.0, 2)], [(5, [1]), (1, [0])], 6, Tier(1.0, 1.0)))


def test_tiers_that_are_too_small() -> None:
    """A result of 2 has to make room for a weight of 3, and there is only 1 for it outside."""
    objects = (Object(2, (Use(0, True), Use(2))), Object(3, (Use(1),), True, True))
    problem = Problem((Step(1.0),) * 3, objects, 4, (Tier(1.0, 1.0, capacity_bytes=1),))
    with pytest.raises(InfeasibleError, match="more than the tiers hold: step 1"):
        schedule(problem)
    roomy = replace(problem, tiers=(Tier(1.0, 1.0, capacity_bytes=2),))
    assert replay(roomy, schedule(roomy)).faults == ()


def test_an_empty_problem_has_an_empty_schedule() -> None:
    problem = Problem((), (), 0, (Tier(1.0, 1.0),))
    assert schedule(problem).copies_in == ()
    assert schedule(replace(problem, steps=(Step(1.0),), is_periodic=True)).seconds == 1.0


def test_inputs_come_in_with_their_call() -> None:
    found = schedule(Problem((Step(1.0),) * 2, (Object(1, (Use(1),), True),), 1, (Tier(1.0, 1.0),), is_periodic=True))
    assert found.copies_in == (CopyIn(0, -1, 1, (0,)),)


def test_time_grows_little_faster_than_steps() -> None:
    """Arrays of objects are looked through at each copy, which counts for little up to thousands of them."""

    def prepare(size: int) -> Callable[[], object]:
        rng = Random(3)
        weights = [(rng.randint(1, 5), sorted(rng.sample(range(size), rng.choice((1, 2))))) for _ in range(size)]
        problem = read_only([Step(rng.uniform(2, 5)) for _ in range(size)], weights, size, Tier(1.0, 1.0))
        return lambda: schedule(problem)

    assert_scales(prepare, 250, 1000, limit=8)


def test_what_the_first_tier_cannot_hold_goes_to_the_second() -> None:
    """Of 30 results that leave, ten have room in the first tier; both tiers together are fast enough."""
    objects = tuple(Object(1, (Use(step, True), Use(79 - step))) for step in range(40))
    near, far = Tier(8.0, 8.0, capacity_bytes=10), Tier(0.8, 0.8)
    problem = Problem((Step(1.0),) * 80, objects, 10, (near, far), is_periodic=True)
    found = schedule(problem)
    replayed = replay(problem, found)
    assert replayed.faults == ()
    assert sum(copy.tier == 1 for copy in found.copies_out) >= 20
    assert replayed.seconds <= 1.05 * ceiling(problem).seconds
