"""What never leaves, and what is left for the rest."""

from __future__ import annotations

from random import Random

from prefuse.passes.plan.prefetch.problem import Object, Problem, Step, Tier, Use, read_only
from prefuse.passes.plan.prefetch.residents import live_bytes, residents, spare_bytes, without

TIER = Tier(1.0, 1.0)


def test_residents_are_spread_evenly() -> None:
    problem = read_only([Step(1.0)] * 12, [(2, [step]) for step in range(12)], 100, TIER)
    assert residents(problem, 8) == {1, 4, 7, 10}
    assert residents(problem, 1) == frozenset()
    assert residents(problem, 24) == frozenset(range(12))


def test_residents_of_random_sizes() -> None:
    """Never more bytes than may be; up to each step, about their share of the weights used so far."""
    rng = Random(3)
    for _ in range(100):
        sizes = [rng.randint(1, 9) for _ in range(rng.randint(1, 40))]
        problem = read_only([Step(1.0)] * len(sizes), [(size, [step]) for step, size in enumerate(sizes)], 400, TIER)
        most = rng.randint(0, sum(sizes))
        chosen = residents(problem, most)
        taken = passed = 0
        for step, size in enumerate(sizes):
            passed += size
            taken += size if step in chosen else 0
            assert abs(taken - passed * most / sum(sizes)) <= 9
        assert taken <= most


def test_only_what_is_kept_and_used_can_stay() -> None:
    objects = (
        Object(1, (), True, True),
        Object(1, (Use(0),), True),
        Object(1, (Use(0, True),)),
        Object(1, (Use(0),), True, True),
    )
    problem = Problem((Step(1.0),), objects, 9, (TIER,), is_periodic=True)
    assert residents(problem, 9) == {3}
    rest = without(problem, frozenset({3}))
    assert (rest.limit_bytes, rest.objects[3].uses, rest.objects[:3]) == (8, (), objects[:3])


def test_live_bytes() -> None:
    """A result that lives over three steps, a weight at the second one, a workspace at the last."""
    objects = (Object(4, (Use(0, True), Use(2))), Object(16, (Use(1),), True, True))
    problem = Problem((Step(1.0), Step(1.0), Step(1.0, 1)), objects, 99, (TIER,), is_periodic=True)
    assert live_bytes(problem) == [4, 20, 5]


def test_what_many_distant_steps_use_is_chosen_first() -> None:
    shared = (10, range(0, 40, 8))
    others = [(10, (step,)) for step in range(1, 40)]
    problem = read_only([Step(1.0)] * 40, [shared, *others], 60, TIER)
    assert 0 in residents(problem, 50, most_used=1)
    assert residents(problem, 5, most_used=1) == frozenset()
    assert len(residents(problem, 50, most_used=1)) == len(residents(problem, 50)) == 5


def test_spare_bytes_are_what_no_step_needs() -> None:
    problem = read_only([Step(1.0, 3), Step(1.0, 20)], [(10, (0,)), (5, (1,))], 60, TIER)
    assert spare_bytes(problem) == 60 - 25
    assert spare_bytes(read_only([], [], 60, TIER)) == 0
