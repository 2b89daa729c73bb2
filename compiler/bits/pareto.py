"""What the objective costs at other budgets: a front by a sweep over one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...runtime.errors import OptionError
from .problem import Problem
from .solver import GAP, Solution, solve


def pareto_front(
    problem: Problem, budget: str, *, points: int = 16, gap: float = GAP, exact: bool = False
) -> tuple[Solution, ...]:
    """Solutions of which none has both a lower objective and less of `budget` than another, the least of `budget` first.

    `points` budgets are swept from the least that can be had of it to what the best objective takes, both ends included, in equal
    ratios where the least is not zero and else by squares: damage lives on many scales. The problem's other budgets hold.

    Raises:
        OptionError: less than two points, or a budget that nothing costs any of.
    """
    if points < 2:
        raise OptionError("points", f"{points} are no front", "give at least 2")
    others = {name: bound for name, bound in problem.budgets.items() if name != budget}
    free = solve(replace(problem, budgets=others), gap=gap, exact=exact)
    if free.status == "impossible":
        return ()
    least = solve(replace(problem, objective=budget, budgets=others), exact=True)
    found = [free]
    for bound in _sweep(least.objective, free.totals[budget], points)[:-1]:
        one = solve(replace(problem, budgets={**others, budget: bound}), gap=gap, exact=exact)
        if one.status != "impossible":
            found.append(one)
    return _undominated(found, budget)


def _sweep(least: float, most: float, points: int) -> Sequence[float]:
    if most <= least:
        return [most]
    steps = np.linspace(0.0, 1.0, points)
    bounds = least * (most / least) ** steps if least > 0 else least + (most - least) * steps**2
    return [float(bound) for bound in bounds]


def _undominated(found: Sequence[Solution], budget: str) -> tuple[Solution, ...]:
    kept: list[Solution] = []
    for one in sorted(found, key=lambda one: (one.totals[budget], one.objective)):
        if not kept or one.objective < kept[-1].objective:
            kept.append(one)
    return tuple(kept)
