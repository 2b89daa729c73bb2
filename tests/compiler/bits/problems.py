"""Problems for the solver: random ones, those like a whole model, and the answer by looking at every assignment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from prefuse.compiler.bits.problem import Cast, Peak, Problem, Step, Unit
from prefuse.compiler.bits.ties import tied

SPEED = (1.0, 0.8, 0.5, 0.45, 0.28)  # of five formats, the faster ones less exact
BITS = (24, 17, 8, 11, 7)


@dataclass(frozen=True, slots=True)
class Every:
    """All assignments of a problem, [assignment][unit], and what each takes of every resource and peak."""

    chosen: np.ndarray
    totals: Mapping[str, np.ndarray]

    def keeping(self, budgets: Mapping[str, float]) -> np.ndarray:
        """Which of them keep the budgets."""
        kept = np.ones(len(self.chosen), bool)
        for name, bound in budgets.items():
            kept &= self.totals[name] <= bound + 1e-9 * abs(bound)
        return kept

    def least(self, objective: str, budgets: Mapping[str, float]) -> float:
        """The least objective within the budgets; infinite if there is none."""
        return float(self.totals[objective][self.keeping(budgets)].min(initial=np.inf))


def every(problem: Problem) -> Every:
    """By numpy over all assignments, with no code of the product's."""
    place = {unit.name: number for number, unit in enumerate(problem.units)}
    grids = np.meshgrid(*(np.arange(len(unit.formats)) for unit in problem.units), indexing="ij")
    chosen = np.stack([grid.reshape(-1) for grid in grids], axis=1)
    totals: dict[str, np.ndarray] = {}

    def add(name: str, costs: np.ndarray) -> None:
        totals[name] = totals.get(name, np.zeros(len(chosen))) + costs

    for unit in problem.units:
        for name, row in unit.costs.items():
            add(name, np.array(row)[chosen[:, place[unit.name]]])
    for cast in problem.casts:
        for name, table in cast.costs.items():
            for form in range(len(table[0])):
                wanted = np.zeros(len(chosen), bool)
                for number, reader in enumerate(cast.readers):
                    wants = np.array(cast.wants[number] if cast.wants else range(len(table[0])))
                    wanted |= wants[chosen[:, place[reader]]] == form
                add(name, wanted * np.array(table)[chosen[:, place[cast.maker]], form])
    for peak in problem.peaks:
        steps = [
            step.fixed + sum(np.array(row)[chosen[:, place[name]]] for name, row in step.held.items()) for step in peak.steps
        ]
        totals[peak.name] = np.max([np.broadcast_to(step, len(chosen)) for step in steps], axis=0)
    return Every(chosen, totals)


def random_problem(seed: int) -> Problem:
    """Up to 9 units of 1 to 3 formats, casts with one reader or more, a peak; budgets and the objective by chance."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 10))
    names = [f"u{number}" for number in range(count)]
    formats = [int(rng.integers(1, 4)) for _ in names]
    scale = {name: 10.0 ** rng.uniform(-6, 6) for name in ("time", "damage", "bytes")}
    units = tuple(
        Unit(name, tuple("abc"[:size]), {one: tuple(rng.random(size) * by) for one, by in scale.items()})
        for name, size in zip(names, formats, strict=True)
    )
    casts = tuple(_random_cast(rng, names, formats, scale["time"]) for _ in range(rng.integers(0, 2 * count)))
    peaks = (Peak("memory", tuple(_random_step(rng, names, formats) for _ in range(rng.integers(1, 5)))),)
    free = Problem(units, "time", {}, casts, peaks)
    found = every(free).totals
    among = [name for name in ("damage", "bytes", "memory") if rng.random() < 0.6]
    budgets = {name: float(np.quantile(found[name], rng.uniform(0.02, 0.7))) for name in among}
    objective = "time" if rng.random() < 0.7 else str(rng.choice(["bytes", "memory"]))
    return Problem(units, objective, budgets, casts, peaks)


def _random_cast(rng: np.random.Generator, names: list[str], formats: list[int], scale: float) -> Cast:
    maker, *readers = (int(one) for one in rng.integers(0, len(names), rng.integers(2, 5)))
    readers = list(dict.fromkeys(readers))
    wants = tuple(tuple(int(one) for one in rng.integers(0, 2, formats[reader])) for reader in readers)
    low = -0.3 if len(readers) == 1 else 0.0
    table = tuple(tuple(rng.uniform(low, 0.5, 2) * scale) for _ in range(formats[maker]))
    return Cast(names[maker], tuple(names[reader] for reader in readers), {"time": table}, wants)


def _random_step(rng: np.random.Generator, names: list[str], formats: list[int]) -> Step:
    held = [place for place in range(len(names)) if rng.random() < 0.5]
    return Step({names[place]: tuple(rng.random(formats[place])) for place in held}, float(rng.random()))


def model_problem(groups: int, *, seed: int = 0, budget: float = 0.1, shared: bool = False) -> Problem:
    """Like a residual network: a chain, an edge over two groups at each second one, ties of three; damage is bounded.

    `budget` is the fraction of the damage with the fastest format everywhere.
    """
    rng = np.random.default_rng(seed)
    count = len(SPEED)
    time = (rng.lognormal(0, 1, groups) * 100)[:, None] * SPEED * rng.uniform(0.85, 1.15, (groups, count))
    damage = rng.lognormal(0, 1.5, groups)[:, None] * 4.0 ** (8 - np.array(BITS)) * rng.uniform(0.5, 2, (groups, count))
    damage[:, 0] = 0
    names = [f"g{number}" for number in range(groups)]
    formats = tuple(f"format{number}" for number in range(count))
    units = tuple(
        Unit(name, formats, {"time": tuple(time[place]), "damage": tuple(damage[place])}) for place, name in enumerate(names)
    )
    casts = []
    for place in range(groups - 1):
        readers = [names[place + 1], *names[place + 3 : place + 4] * (place % 2 == 0)]
        for some in [readers] if shared else [[one] for one in readers]:
            table = rng.uniform(2, 12) * rng.uniform(0.6, 1.4, (count, count)) * (1 - np.eye(count))
            casts.append(Cast(names[place], tuple(some), {"time": tuple(map(tuple, table))}))
    ties = [names[place : place + 3] for place in range(5, groups - 3, 12)]
    return tied(Problem(units, "time", {"damage": float(damage[:, -1].sum() * budget)}, tuple(casts)), ties)
