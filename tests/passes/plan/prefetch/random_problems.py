"""Small problems of all kinds, drawn at random."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from prefuse.passes.plan.prefetch.problem import Object, Problem, Step, Tier, Use


def random_problem(rng: Random) -> Problem:
    """Weights, states, activations and inputs, a call or call after call, up to the tightest limit."""
    steps = tuple(Step(rng.choice((0.0, 0.5, 1.0, 2.0)), rng.choice((0, 0, 3))) for _ in range(rng.randint(1, 12)))
    kinds = rng.choice((("weight",), ("weight", "state", "activation", "activation", "input")))
    objects = tuple(random_object(rng, rng.choice(kinds), len(steps)) for _ in range(rng.randint(1, 10)))
    tier = Tier(rng.choice((1.0, 2.0, 8.0)), rng.choice((1.0, 2.0, 8.0)), rng.choice((0.0, 0.1)))
    far = replace(tier, bandwidth_in=0.5, bandwidth_out=rng.choice((0.5, 1.0)))
    near = replace(tier, capacity_bytes=rng.choice((0, 3, 8, None)))
    problem = Problem(steps, objects, 1, rng.choice(((tier,), (near, far))), rng.random() < 0.6)
    return replace(problem, limit_bytes=max(problem.step_bytes()) + rng.choice((0, 1, 3, 6)))


def random_training(rng: Random) -> Problem:
    """A longer call: activations are used again at its end, sizes are of all magnitudes, and the first tier may be small."""
    count = rng.randint(20, 100)
    objects = []
    for _ in range(rng.randint(10, 100)):
        item = random_object(rng, rng.choice(("weight", "state", "activation", "activation", "input")), count)
        if not item.is_outside and rng.random() < 0.5:
            step = rng.randrange(count // 2)
            item = replace(item, uses=(Use(step, True), Use(count - 1 - step)))
        objects.append(replace(item, size_bytes=rng.choice((0, 1, 3, 10, 100, int(10 ** rng.uniform(0, 3))))))
    near = Tier(rng.choice((10.0, 100.0, 1000.0)), rng.choice((10.0, 100.0, 1000.0)))
    tight = replace(near, capacity_bytes=rng.choice((0, 50, 500, 5000)))
    steps = tuple(Step(rng.choice((0.0, 0.1, 1.0, 5.0)), rng.choice((0, 0, 200))) for _ in range(count))
    problem = Problem(steps, tuple(objects), 1, rng.choice(((near,), (tight, Tier(20.0, 20.0)))), rng.random() < 0.7)
    return replace(problem, limit_bytes=int(max(problem.step_bytes()) * rng.choice((1.0, 1.0, 1.1, 1.5, 2.0))))


def random_object(rng: Random, kind: str, steps: int) -> Object:
    used = sorted(rng.sample(range(steps), rng.randint(1, min(3, steps))))
    may_write = kind in ("state", "activation")
    uses = (
        Use(step, (kind == "activation" and not rank) or (may_write and rng.random() < 0.4)) for rank, step in enumerate(used)
    )
    return Object(rng.randint(1, 6), tuple(uses), kind != "activation", kind in ("weight", "state"))


def at_other_speeds(problem: Problem, rng: Random) -> Problem:
    """The problem on another machine: each step and each tier takes another time."""
    steps = tuple(replace(step, seconds=rng.random() * 2) for step in problem.steps)
    tiers = tuple(replace(t, bandwidth_in=rng.uniform(0.1, 10), bandwidth_out=rng.uniform(0.1, 10)) for t in problem.tiers)
    return replace(problem, steps=steps, tiers=tiers)
