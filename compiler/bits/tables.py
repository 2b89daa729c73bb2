"""A problem as arrays, which both the linear program and the local search read.

Rows are what a budget bounds or the objective is made of: resources, and the steps of peaks. The objective is the largest of its
rows: one of a resource, and as many as there are steps of a peak.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from .problem import TOLERANCE, Cast, Peak, Problem

Array: TypeAlias = np.ndarray


@dataclass(frozen=True, slots=True)
class CastTable:
    """A cast by the numbers of its units: `costs` is [row of `rows`][format of the maker][form], `wants` [format] a reader."""

    maker: int
    readers: tuple[int, ...]
    wants: tuple[Array, ...]
    rows: Array
    costs: Array

    @property
    def units(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys((self.maker, *self.readers)))

    @property
    def least(self) -> Array:
        """What the cast costs at least of each of its rows."""
        least: Array = self.costs.min(axis=(1, 2))
        return least

    def cost(self, chosen: Array) -> Array:
        """What the cast costs of each of its rows."""
        forms = sorted({int(wants[chosen[reader]]) for reader, wants in zip(self.readers, self.wants, strict=True)})
        total: Array = self.costs[:, chosen[self.maker], forms].sum(axis=1)
        return total


@dataclass(frozen=True, slots=True)
class Tables:
    """`costs` is [row][unit][format], zeros where a unit has fewer formats (`counts`); `bounds` are infinite if there are none.

    An assignment is an array of the number of each unit's format.
    """

    counts: Array
    costs: Array
    fixed: Array
    bounds: Array
    is_objective: Array
    casts: tuple[CastTable, ...]

    @property
    def legal(self) -> Array:
        """Which formats a unit has, [unit][format]."""
        return np.arange(self.costs.shape[2])[None] < self.counts[:, None]

    @property
    def scales(self) -> Array:
        """The size of numbers of each row: of its bound, or else of its costs."""
        sizes = np.abs(self.costs).max(axis=2).sum(axis=1) + np.abs(self.fixed)
        for cast in self.casts:
            sizes[cast.rows] += np.abs(cast.costs).max(axis=(1, 2))
        bounds = np.abs(self.bounds)
        sizes = np.where(np.isfinite(bounds) & (bounds > 0), np.minimum(bounds, np.maximum(sizes, 1e-300)), sizes)
        return np.where(sizes > 0, sizes, 1.0)

    def allowed(self) -> Array:
        """The formats that could stand in an assignment within the bounds, [unit][format]: with the least of all else it fits.

        So no number of a row is much larger than its bound, as the tolerances of a linear program ask.
        """
        allowed = self.legal
        least_casts = self.fixed.copy()
        for cast in self.casts:
            least_casts[cast.rows] += cast.least
        room = self.bounds + TOLERANCE * np.abs(self.bounds)
        while allowed.any(axis=1).all():
            least = np.where(allowed, self.costs, np.inf).min(axis=2)
            beside = (least_casts + least.sum(axis=1))[:, None] - least
            fits = (self.costs + beside[:, :, None] <= room[:, None, None]).all(axis=0) & allowed
            if (fits == allowed).all():
                break
            allowed = fits
        return allowed

    def used(self, chosen: Array) -> Array:
        """What an assignment takes of each row."""
        total: Array = self.fixed + self.costs[:, np.arange(len(chosen)), chosen].sum(axis=1)
        for cast in self.casts:
            total[cast.rows] += cast.cost(chosen)
        return total


def tables_of(problem: Problem) -> Tables:
    """The rows that the budgets and the objective of a problem need. Steps of which another always holds more are left out."""
    wanted = {name: problem.budgets.get(name, np.inf) for name in (problem.objective, *problem.budgets)}
    names = [name for name in problem.resources if name in wanted]
    counts = np.array([len(unit.formats) for unit in problem.units])
    rows, fixed = [_resource_costs(problem, name, counts.max()) for name in names], [0.0] * len(names)
    owners = list(names)
    for peak in problem.peaks:
        if peak.name in wanted:
            for costs, base in _steps(problem, peak, counts.max()):
                rows.append(costs)
                fixed.append(base)
                owners.append(peak.name)
    casts = [_cast_table(problem, cast, names) for cast in problem.casts]
    return Tables(
        counts,
        np.array(rows),
        np.array(fixed),
        np.array([wanted[owner] for owner in owners]),
        np.array([owner == problem.objective for owner in owners]),
        tuple(cast for cast in casts if cast.costs.any()),
    )


def _resource_costs(problem: Problem, name: str, most: int) -> Array:
    costs = np.zeros((len(problem.units), most))
    for place, unit in enumerate(problem.units):
        if name in unit.costs:
            costs[place, : len(unit.formats)] = unit.costs[name]
    return costs


def _steps(problem: Problem, peak: Peak, most: int) -> list[tuple[Array, float]]:
    places = {unit.name: place for place, unit in enumerate(problem.units)}
    costs = np.zeros((len(peak.steps), len(places), most))
    fixed = np.array([step.fixed for step in peak.steps])
    for number, step in enumerate(peak.steps):
        for name, held in step.held.items():
            costs[number, places[name], : len(held)] = held
    kept: list[int] = []
    largest_first = np.argsort(-(costs.max(axis=2).sum(axis=1) + fixed), kind="stable")
    for number in largest_first:
        if not any((costs[number] <= costs[other]).all() and fixed[number] <= fixed[other] for other in kept):
            kept.append(int(number))
    return [(costs[number], float(fixed[number])) for number in sorted(kept)]


def _cast_table(problem: Problem, cast: Cast, names: list[str]) -> CastTable:
    places = {unit.name: place for place, unit in enumerate(problem.units)}
    resources = [name for name in names if name in cast.costs]
    readers = tuple(places[reader] for reader in cast.readers)
    wants = tuple(np.array(cast.forms(place, len(problem.units[one].formats))) for place, one in enumerate(readers))
    costs = np.array([cast.costs[name] for name in resources], dtype=float) if resources else np.zeros((0, 1, 1))
    return CastTable(places[cast.maker], readers, wants, np.array([names.index(name) for name in resources], dtype=int), costs)
