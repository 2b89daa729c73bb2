"""Schedules by integer programming: right at any speed, and better than rules where a choice shows its worth many steps later."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
from prefuse.passes.plan.prefetch import integer_program
from prefuse.passes.plan.prefetch.bounds import ceiling
from prefuse.passes.plan.prefetch.integer_program import by_integer_program, is_small
from prefuse.passes.plan.prefetch.problem import Object, Problem, Step, Tier, Use
from prefuse.passes.plan.prefetch.replay import replay
from prefuse.passes.plan.prefetch.scheduler import schedule
from prefuse.passes.plan.schedule_prefetch.stays import copies_of, seconds_of
from prefuse.tests.sample import sample_number

from ..prefetch.random_problems import at_other_speeds
from .networks import faults, random_network


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside other processes a program may take longer than is worth it for a user."""
    monkeypatch.setattr(integer_program, "_MOST_SECONDS", 120.0)


def small_networks(rng: Random, count: int) -> Iterator[Problem]:
    """Such as take a fraction of a second each."""
    while count:
        problem = random_network(rng)
        if is_small(problem) and len(problem.steps) * len(problem.objects) < 150:
            count -= 1
            yield problem


@pytest.mark.parametrize("number", range(12))
def test_random_networks(number: int) -> None:
    rng = Random(f"{sample_number()} {number}")
    (problem,) = small_networks(rng, 1)
    found = list(by_integer_program(problem))
    for one in found:
        assert faults(problem, copies_of(problem, one)) == []
        assert one.seconds >= ceiling(problem).seconds * (1 - 1e-6)
        for other in (problem, at_other_speeds(problem, rng)):
            replayed = replay(other, one)
            assert replayed.faults == (), problem
            assert replayed.peak_bytes <= problem.limit_bytes
    assert list(by_integer_program(problem)) == found


def test_on_the_whole_faster_than_rules() -> None:
    rules, programs, solved = 0.0, 0.0, 0
    for problem in small_networks(Random(0), 16):
        if found := [seconds_of(problem, copies_of(problem, one)) for one in by_integer_program(problem)]:
            least = ceiling(problem).seconds
            rules += seconds_of(problem, copies_of(problem, schedule(problem))) / least
            programs += min(found) / least
            solved += 1
    assert solved >= 10
    assert programs < rules


# UNet of 572 x 572 in bfloat16: milliseconds and bytes in use of each step, and millions of bytes and the steps that read them
# of weights, and of activations that are used again on the way up.
_MS = (5.9, 57.3, 3.9, 27.2, 47.6, 1.9, 23.2, 41.2, 0.9, 20.6, 35.2, 0.4, 13.9, 27.8, 22.9, 53.4, 23.5, 19.1, 46.9, 22.4, 18.2)
_MORE_MS = (46.0, 23.4, 18.6, 49.6, 26.8, 2.1, 0.1)
_LIVE = (83, 85, 21, 63, 42, 10, 31, 26, 5, 19, 14, 2, 10, 11, 16, 25, 16, 28, 39, 27, 51, 62, 41, 98, 119, 79, 40, 1)
_WEIGHTS = {1: 0.6, 3: 1.2, 4: 2.4, 6: 4.7, 7: 9.4, 9: 18.9, 10: 37.7, 12: 102.8, 13: 151.0, 14: 8.4, 15: 75.5, 16: 37.7}
_WEIGHTS |= {17: 2.1, 18: 18.9, 19: 9.4, 20: 0.5, 21: 4.7, 22: 2.4, 23: 0.1, 24: 1.2, 25: 0.6}
_SKIPS = {(1, 2, 23): 82.6, (4, 5, 20): 40.1, (7, 8, 17): 18.9, (10, 11, 14): 8.4}


def unet(limit: float) -> Problem:
    """Within so many millions of bytes, copied at 2.1 GB/s."""
    weights = [Object(int(1e6 * size), (Use(step),), True, True) for step, size in _WEIGHTS.items()]
    skips = [Object(int(1e6 * size), (Use(used[0], True), *map(Use, used[1:]))) for used, size in _SKIPS.items()]
    steps = tuple(Step(ms / 1e3, int(1e6 * size)) for ms, size in zip((*_MS, *_MORE_MS), _LIVE, strict=True))
    return Problem(steps, (*weights, *skips), int(1e6 * limit), (Tier(2.1e9, 2.1e9, 1e-4, takes_turns=True),), is_periodic=True)


def test_networks_of_few_large_weights() -> None:
    problem = unet(336)
    rules = seconds_of(problem, copies_of(problem, schedule(problem)))
    program = min(seconds_of(problem, copies_of(problem, one)) for one in by_integer_program(problem))
    assert program < 1.06 * ceiling(problem).seconds < rules


def test_what_is_not_small() -> None:
    problem = unet(336)
    assert not is_small(replace(problem, is_periodic=False))
    assert not is_small(replace(problem, tiers=(Tier(2.0, 2.0),)))
    assert not is_small(replace(problem, steps=problem.steps * 3))
    state = Object(1, (Use(0), Use(1, True)), is_outside=True, is_kept=True)
    assert not is_small(replace(problem, objects=(*problem.objects, state)))


def test_a_limit_below_what_a_step_needs() -> None:
    problem = unet(336)
    assert list(by_integer_program(replace(problem, limit_bytes=max(problem.step_bytes()) - 1))) == []


def test_what_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integer_program, "_MOST_SECONDS", 0.0)
    assert list(by_integer_program(unet(336))) == []
