"""Bounds of schedules, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prefuse.passes.plan.prefetch.bounds import ceiling, least_traffic, smallest_limit
from prefuse.passes.plan.prefetch.problem import Object, Problem, Step, Tier, Use, read_only


def test_weights_that_do_not_fit() -> None:
    """Ten weights of 2 in a memory of 8. Three others stay over each of the nine steps between two uses."""
    problem = read_only([Step(1.0)] * 10, [(2, [step]) for step in range(10)], 8, Tier(0.5, 9.0))
    bound = ceiling(problem)
    assert (bound.compute, bound.bytes_out) == (10.0, 0.0)
    assert bound.bytes_in == pytest.approx(20 - 2 * 30 / 9)
    assert bound.transfer == pytest.approx(bound.bytes_in / 0.5)
    assert bound.seconds == bound.transfer


def test_what_is_used_once_comes_in_once() -> None:
    problem = Problem((Step(1.0),) * 2, (Object(3, (Use(0), Use(1)), True, True),), 3, (Tier(1.0, 1.0),))
    assert least_traffic(problem) == (3.0, 0.0)
    assert least_traffic(replace(problem, is_periodic=True)) == (0.0, 0.0)


def test_cut() -> None:
    """Eight results of 1, of which three stay: before the middle five go out, after it they come in."""
    objects = tuple(Object(1, (Use(step, True), Use(15 - step))) for step in range(8))
    problem = Problem((Step(0.5),) * 16, objects, 3, (Tier(1.0, 0.5),))
    bound = ceiling(problem)
    assert bound.cut == pytest.approx(5 / 0.5 + 5 / 1.0)
    assert [bound.bytes_in, bound.bytes_out] == pytest.approx([5.0, 5.0])


def test_cut_of_two_tiers() -> None:
    """What the first tier cannot hold goes through the second one."""
    objects = tuple(Object(1, (Use(step, True), Use(15 - step))) for step in range(8))
    near, far = Tier(8.0, 8.0, capacity_bytes=3), Tier(0.25, 0.25)
    assert ceiling(Problem((Step(0.5),) * 16, objects, 3, (near, far))).cut == pytest.approx(2 / 0.25 * 2)


def test_smallest_limit() -> None:
    problem = read_only([Step(1.0), Step(1.0, 2)], [(5, [0]), (4, [1])], 5, Tier(1.0, 1.0))
    assert smallest_limit(problem) == (6, 1)
    with pytest.raises(ValueError, match="step 1 needs 6 bytes"):
        ceiling(problem)
    assert smallest_limit(Problem((), (), 0, (Tier(1.0, 1.0),))) == (0, 0)
