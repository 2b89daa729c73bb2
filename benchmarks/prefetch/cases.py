"""Cases at random: small ones, for which the optimum can be found, and large ones, to time the scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from prefuse.passes.plan.prefetch.problem import Object, Problem, Step, Tier, Use, read_only


def small_cases(count: int, seed: int = 5) -> Iterator[Problem]:
    """Four or five weights, four to eight steps of one call, all read one or two of them; not all weights fit."""
    rng = Random(seed)
    while count:
        sizes = [rng.randint(1, 3) for _ in range(rng.randint(4, 5))]
        steps = [Step(float(rng.randint(1, 4))) for _ in range(rng.randint(4, 8))]
        reads = [rng.sample(range(len(sizes)), rng.choice((1, 1, 2))) for _ in steps]
        uses = [tuple(Use(step) for step, read in enumerate(reads) if j in read) for j in range(len(sizes))]
        objects = tuple(Object(size, used, True, True) for size, used in zip(sizes, uses, strict=True))
        least = max(sum(sizes[j] for j in read) for read in reads)
        limit = max(least + rng.randint(1, 3), *sizes)
        if limit < sum(sizes):
            count -= 1
            yield Problem(tuple(steps), objects, limit, (Tier(1.0, 1.0),))


def streamed(steps: int, seed: int = 3) -> Problem:
    """A weight a step, of which a third fits; copies take a little longer than steps."""
    rng = Random(seed)
    weights = [(rng.randint(1, 5) * 10**6, [step]) for step in range(steps)]
    return read_only([Step(rng.random() * 3e-3) for _ in range(steps)], weights, steps * 10**6, Tier(1.9e9, 1.9e9))


def training(steps: int, seed: int = 3) -> Problem:
    """Forward and backward: a result and a weight a step, both used again on the way back, where the weight is changed."""
    rng = Random(seed)
    pairs = [(step, steps - 1 - step) for step in range(steps // 2)]
    results = [Object(rng.randint(1, 5) * 10**6, (Use(a, True), Use(b))) for a, b in pairs]
    weights = [Object(rng.randint(1, 5) * 10**6, (Use(a), Use(b, True)), True, True) for a, b in pairs]
    times = tuple(Step(rng.random() * 3e-3) for _ in range(steps))
    return Problem(times, (*results, *weights), steps * 10**6, (Tier(4e9, 4e9),), is_periodic=True)
