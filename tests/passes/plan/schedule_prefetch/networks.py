"""Networks at random, whose weights and activations one stream moves, and what is wrong with the order of its copies."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from prefuse.passes.plan.prefetch.problem import Object, Problem, Step, Tier, Use
from prefuse.passes.plan.schedule_prefetch.stays import Copies, Leave, Stay

TIER = Tier(1.0, 1.0, takes_turns=True)


def random_network(rng: Random) -> Problem:
    """Weights, and activations of which many are used again much later, within the tightest limit or somewhat more."""
    count = rng.randint(3, 40)
    steps = tuple(Step(rng.choice((0.0, 0.5, 2.0, 8.0)), rng.choice((0, 0, 3))) for _ in range(count))
    objects = []
    for _ in range(rng.randint(2, 40)):
        used = sorted(rng.sample(range(count), rng.randint(1, min(4, count))))
        if rng.random() < 0.4:
            objects.append(Object(rng.randint(1, 9), tuple(map(Use, used)), is_outside=True, is_kept=True))
        else:
            uses = (Use(step, not rank or rng.random() < 0.3) for rank, step in enumerate(used))
            objects.append(Object(rng.randint(1, 9), tuple(uses)))
    problem = Problem(steps, tuple(objects), 1, (TIER,), is_periodic=True)
    return replace(problem, limit_bytes=max(problem.step_bytes()) + rng.choice((0, 1, 5, 20)))


def faults(problem: Problem, copies: Copies) -> list[str]:
    """What is wrong with the order of copies, and with the values of activations."""
    found = [
        f"{copy} is waited for before it begins" for copy in copies if copy.waiting is not None and copy.waiting <= copy.position
    ]
    positions = [copy.position for copy in copies]
    if positions != sorted(positions):
        found.append("copies out of order")
    for index, item in enumerate(problem.objects):
        own = [(rank, copy) for rank, copy in enumerate(copies) if copy.object == index]
        if item.is_kept:
            found += [f"{copy}: a weight goes out" for _, copy in own if isinstance(copy, Leave)]
            continue
        for rank, stay in own:
            if isinstance(stay, Stay):
                written = max(use.step for use in item.uses if use.is_written and use.step < stay.first)
                if not any(isinstance(one, Leave) and one.after == written for place, one in own if place < rank):
                    found.append(f"{stay} brings what has not gone out")
            elif stay.after not in [use.step for use in item.uses if use.is_written]:
                found.append(f"{stay} takes what step {stay.after} has not written")
    return found
