"""From any assignment to a good one within the budgets, by single changes and by pairs of changes."""

from __future__ import annotations

import numpy as np

from .problem import TOLERANCE
from .tables import Array, Tables

_MOST_MOVES = 20  # a unit: each lowers what is exceeded or the objective, and rounds more than that gain nothing worth a wait
_PARTNERS = 120  # of either side of a pair of changes, the most promising ones
_TRIES = 30  # pairs that are looked at more closely before the search ends
_EPSILON = 1e-12


def repaired(tables: Tables, chosen: Array, allowed: Array) -> Array | None:
    """An assignment of `allowed` formats [unit][format] within the bounds, from a start without this; None where none is found.

    Greedy: what the bounds exceed is brought down by the change that costs the least of the objective for it; then whatever
    lowers the objective and keeps the bounds, at last by two units that change at once. Deterministic.
    """
    search = _Search(tables, chosen, allowed)
    if not search.bring_down():
        return None
    moves = _MOST_MOVES * len(chosen)
    while moves > 0 and (search.improve() or search.exchange()):
        moves -= 1
    return search.chosen


class _Search:
    """An assignment with what it takes, and what each single change of it would add: `deltas` is [row][unit][format]."""

    def __init__(self, tables: Tables, chosen: Array, allowed: Array) -> None:
        self.tables = tables
        self.allowed = allowed
        self.chosen = chosen.copy()
        self.room = np.where(np.isfinite(tables.bounds), tables.bounds + TOLERANCE * np.abs(tables.bounds), np.inf)
        self.scales = tables.scales
        self.objective_rows = np.flatnonzero(tables.is_objective)
        self.near: list[list[int]] = [[] for _ in chosen]
        for number, cast in enumerate(tables.casts):
            for unit in cast.units:
                self.near[unit].append(number)
        self.used = tables.used(self.chosen)
        self.cast_deltas = np.zeros_like(tables.costs)
        for unit in range(len(chosen)):
            self._refresh(unit)

    def bring_down(self) -> bool:
        """Change formats until the bounds are kept; false where no change helps any more."""
        for _ in range(_MOST_MOVES * len(self.chosen)):
            excess = self._excess(self.used)
            if excess == 0:
                return True
            deltas = self._deltas()
            less = excess - self._excesses(self.used[:, None, None] + deltas)
            worse = self._objective(self.used[:, None, None] + deltas) - self._objective(self.used)
            helps = self.allowed & (less > _EPSILON * excess)
            if not helps.any():
                return False
            rates = np.where(helps, worse / np.where(helps, less, 1.0), np.inf)
            rates = np.where(helps & (worse <= 0), -less, rates)  # what costs nothing goes first, the largest of it
            self._move(*_place(rates.argmin(), rates.shape))
        return False

    def improve(self) -> bool:
        """Make the single change that lowers the objective most, if there is one."""
        after = self.used[:, None, None] + self._deltas()
        fits = self.allowed & (after <= self.room[:, None, None]).all(axis=0)
        gains = np.where(fits, self._objective(self.used) - self._objective(after), 0.0)
        best = _place(gains.argmax(), gains.shape)
        if gains[best] <= self._least_gain():
            return False
        self._move(*best)
        return True

    def exchange(self) -> bool:
        """Make two changes at once, one of which gives what the other takes, if that lowers the objective."""
        deltas = self._deltas()
        places = np.argwhere(self.allowed & (np.arange(self.allowed.shape[1])[None] != self.chosen[:, None]))
        found = deltas[:, places[:, 0], places[:, 1]]
        worse = self._objective(self.used[:, None] + found) - self._objective(self.used)
        gaining, giving = np.flatnonzero(worse < 0), np.flatnonzero(worse >= 0)
        gaining = gaining[np.argsort(worse[gaining], kind="stable")][:_PARTNERS]
        giving = giving[np.argsort(worse[giving], kind="stable")][:_PARTNERS]
        partners = np.concatenate([gaining, giving])
        if not len(gaining) or not len(partners):
            return False
        after = self.used[:, None, None] + found[:, gaining][:, :, None] + found[:, partners][:, None, :]
        fits = (after <= self.room[:, None, None]).all(axis=0) & (places[gaining, 0][:, None] != places[partners, 0][None])
        gains = np.where(fits, self._objective(self.used) - self._objective(after), 0.0)
        for place in np.argsort(-gains, axis=None, kind="stable")[:_TRIES]:
            first, second = np.unravel_index(place, gains.shape)
            if gains[first, second] <= self._least_gain():
                return False
            if self._both(places[gaining[first]], places[partners[second]]):
                return True
        return False

    def _both(self, first: Array, second: Array) -> bool:
        """Make two changes if they lower the objective together: casts between the two were not counted before."""
        before, old = self._objective(self.used), self.chosen.copy()
        self._move(*first)
        self._move(*second)
        if self._excess(self.used) == 0 and before - self._objective(self.used) > self._least_gain():
            return True
        self._move(second[0], old[second[0]])
        self._move(first[0], old[first[0]])
        return False

    def _least_gain(self) -> float:
        return _EPSILON * float(self.scales[self.objective_rows].max())

    def _deltas(self) -> Array:
        costs = self.tables.costs
        own = np.take_along_axis(costs, self.chosen[None, :, None], axis=2)
        deltas: Array = costs - own + self.cast_deltas
        return deltas

    def _objective(self, used: Array) -> Array:
        objective: Array = used[self.objective_rows].max(axis=0)
        return objective

    def _excesses(self, used: Array) -> Array:
        """By how much of their bounds these are exceeded, summed over the first axis."""
        room, scales = (row.reshape(-1, *[1] * (used.ndim - 1)) for row in (self.room, self.scales))
        excess: Array = (np.maximum(used - room, 0.0) / scales).sum(axis=0)
        return excess

    def _excess(self, used: Array) -> float:
        return float(self._excesses(used))

    def _move(self, unit: int, form: int) -> None:
        self.chosen[unit] = form
        self.used = self.tables.used(self.chosen)
        for other in sorted({unit, *(one for number in self.near[unit] for one in self.tables.casts[number].units)}):
            self._refresh(other)

    def _refresh(self, unit: int) -> None:
        """What other formats of a unit would add to its casts."""
        if not self.near[unit]:
            return
        deltas = np.zeros((len(self.tables.fixed), self.allowed.shape[1]))
        trial = self.chosen.copy()
        for number in self.near[unit]:
            cast = self.tables.casts[number]
            now = cast.cost(self.chosen)
            for form in range(int(self.tables.counts[unit])):
                trial[unit] = form
                deltas[cast.rows, form] += cast.cost(trial) - now
        self.cast_deltas[:, unit] = deltas


def _place(number: np.intp, shape: tuple[int, ...]) -> tuple[int, int]:
    """Unit and format of an element's number."""
    unit, form = divmod(int(number), shape[1])
    return unit, form
