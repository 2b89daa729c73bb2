"""Small cases at random, for which the optimum can be found."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from prefuse.passes.plan.prefetch.problem import Object, Problem, Step, Tier, Use


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
