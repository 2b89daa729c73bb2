"""The front: what each of its points is, and that none of the best is missing."""

from __future__ import annotations

import pytest
from prefuse.compiler.bits.pareto import pareto_front
from prefuse.compiler.bits.problem import Problem, Unit

from .problems import every, model_problem, random_problem


@pytest.mark.parametrize("seed", range(6))
def test_points_are_on_the_front(seed: int) -> None:
    """Each is the least objective of its own budget, by every assignment; both ends are there."""
    problem = random_problem(seed)
    problem = Problem(problem.units, "time", {}, problem.casts)
    brute = every(problem)
    front = pareto_front(problem, "damage", points=9, exact=True)
    for one in front:
        assert one.objective == pytest.approx(brute.least("time", {"damage": one.totals["damage"]}), rel=1e-9)
    assert front[0].totals["damage"] == pytest.approx(brute.totals["damage"].min(), rel=1e-9)
    assert front[-1].objective == pytest.approx(brute.totals["time"].min(), rel=1e-9)


def test_the_front_falls() -> None:
    front = pareto_front(model_problem(40), "damage", points=8)
    assert len(front) > 5
    damages, times = [one.totals["damage"] for one in front], [one.objective for one in front]
    assert damages == sorted(set(damages))
    assert times == sorted(set(times), reverse=True)


def test_one_point_where_nothing_trades() -> None:
    units = (Unit("u", ("a", "b"), {"time": (1.0, 2.0), "damage": (1.0, 2.0)}),)
    (only,) = pareto_front(Problem(units, "time"), "damage")
    assert only.formats == {"u": "a"}


def test_no_front_of_what_is_impossible() -> None:
    units = (Unit("u", ("a", "b"), {"time": (1.0, 2.0), "damage": (2.0, 1.0), "bytes": (4.0, 4.0)}),)
    assert pareto_front(Problem(units, "time", {"bytes": 3.0}), "damage") == ()
