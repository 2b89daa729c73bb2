"""The problem as a linear program: a variable between 0 and 1 for each format of each unit, which integrality makes a choice.

Two units that a cast joins have a variable for each pair of their choices, whose sums over either are the choices of the other:
the local polytope of graphical models (Wainwright and Jordan, Graphical Models, Exponential Families, and Variational
Inference, 2008, section 4.1). Only choices need be integral; pairs are so then. Of a value with several readers each pair of
(format made, form wanted) has one more variable, which is at least each reader's and which the cost hangs on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, linprog, milp
from scipy.sparse import csr_array

from .tables import Array, CastTable, Tables

_SIZE = 1e5  # what the objective is scaled to: HiGHS's tolerances are absolute, 1e-6 and 1e-7

_SOLVED, _INFEASIBLE = 0, 2  # of SciPy's statuses; others are limits and numerical trouble

End = Literal["solved", "infeasible", "limit"]


@dataclass(frozen=True, slots=True)
class Relaxation:
    """The optimum with fractions for choices: `shares` and `reduced_costs` of [unit][format], and the least objective there is.

    An assignment with a choice takes at least `bound` + its reduced cost.
    """

    bound: float
    shares: Array
    reduced_costs: Array


@dataclass(frozen=True, slots=True)
class Found:
    """What the search for whole choices ended with; `bound` holds of all assignments that it was given to look through."""

    end: End
    chosen: Array | None
    bound: float


@dataclass(slots=True)
class _Rows:
    """Rows of a sparse matrix, with the lower and upper ends of each."""

    columns: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def add(self, terms: list[tuple[int, float]], low: float, high: float) -> None:
        for column, value in terms:
            self.columns.append(column)
            self.values.append(value)
            self.places.append(len(self.low))
        self.low.append(low)
        self.high.append(high)

    def matrix(self, columns: int) -> csr_array:
        return csr_array((self.values, (self.places, self.columns)), (len(self.low), columns))


class LinearProgram:
    """Built once of tables, and solved with and without integrality."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.offsets = np.concatenate([[0], np.cumsum(tables.counts)[:-1]])
        self.choices = self.columns = int(tables.counts.sum())
        self.rows = _Rows()
        self.terms: list[list[tuple[int, float]]] = [self._unit_terms(row) for row in range(len(tables.fixed))]
        for unit, count in enumerate(tables.counts):
            self.rows.add([(self._choice(unit, form), 1.0) for form in range(count)], 1, 1)
        self._pairs: dict[tuple[int, int, int, tuple[int, ...]], Array] = {}
        for cast in tables.casts:
            self._add_cast(cast)
        self.cost = self._add_objective()
        self._add_budgets()
        self.matrix = self.rows.matrix(self.columns)
        self.low, self.high = np.array(self.rows.low), np.array(self.rows.high)

    def relaxed(self, allowed: Array, size: float) -> Relaxation | None:
        """The linear relaxation over the `allowed` choices [unit][format]; None if even that has no answer.

        The result is as exact as it is of the order of `size`. Where HiGHS finds none for other reasons, it bounds nothing.
        """
        scale = _SIZE / size
        equal = self.low == self.high
        upper = ~equal
        result = linprog(
            self.cost * scale,
            A_ub=self.matrix[upper] if upper.any() else None,
            b_ub=self.high[upper] if upper.any() else None,
            A_eq=self.matrix[equal],
            b_eq=self.high[equal],
            bounds=np.stack([self._lower(), self._upper(allowed)], axis=1),
            method="highs",
        )
        if result.status == _INFEASIBLE:
            return None
        if result.x is None or result.status != _SOLVED:
            return Relaxation(-np.inf, np.where(allowed, 1.0, 0.0), np.zeros(allowed.shape))
        shares, costs = (self._by_unit(row) for row in (result.x, result.lower.marginals))
        return Relaxation(result.fun / scale + self.fixed, shares, np.maximum(costs, 0.0) / scale)

    def whole(self, allowed: Array, size: float, *, gap: float, refused: list[Array], seconds: float | None) -> Found:
        """The best assignment of the `allowed` choices [unit][format], `refused` ones excepted, to a relative gap."""
        scale = _SIZE / size
        constraints = [LinearConstraint(self.matrix, self.low, self.high)]
        if refused:
            constraints.append(self._without(refused))
        integrality = np.zeros(self.columns)
        integrality[: self.choices] = 1
        options: dict[str, float] = {"mip_rel_gap": gap}
        if seconds is not None:
            options["time_limit"] = max(seconds, 0.01)
        result = milp(
            self.cost * scale,
            integrality=integrality,
            bounds=Bounds(self._lower(), self._upper(allowed)),
            constraints=constraints,
            options=options,
        )
        return self._found(result, scale)

    def _found(self, result: OptimizeResult, scale: float) -> Found:
        chosen = None if result.x is None else self._by_unit(result.x).argmax(axis=1)
        bound = -np.inf if result.mip_dual_bound is None else result.mip_dual_bound / scale + self.fixed
        if result.status == _SOLVED:
            return Found("solved", chosen, bound)
        return Found("infeasible" if result.status == _INFEASIBLE else "limit", chosen, bound)

    def _without(self, refused: list[Array]) -> LinearConstraint:
        rows = _Rows()
        for chosen in refused:
            rows.add([(self._choice(unit, form), 1.0) for unit, form in enumerate(chosen)], 0, len(chosen) - 1)
        return LinearConstraint(rows.matrix(self.columns), rows.low, rows.high)

    def _lower(self) -> Array:
        """Of each column; the largest step of a peak may be anything."""
        lower = np.zeros(self.columns)
        lower[self.free] = -np.inf
        return lower

    def _upper(self, allowed: Array) -> Array:
        """Of each column. That of choices at most 1 follows from their sum, and left out it leaves reduced costs in one piece."""
        upper = np.full(self.columns, np.inf)
        upper[: self.choices][~allowed[self.tables.legal]] = 0.0
        return upper

    def _choice(self, unit: int, form: int) -> int:
        return int(self.offsets[unit]) + int(form)

    def _new(self, count: int) -> Array:
        start, self.columns = self.columns, self.columns + count
        return np.arange(start, self.columns)

    def _by_unit(self, columns: Array) -> Array:
        spread = np.zeros(self.tables.legal.shape)
        spread[self.tables.legal] = columns[: self.choices]
        return spread

    def _unit_terms(self, row: int) -> list[tuple[int, float]]:
        costs = self.tables.costs[row][self.tables.legal]
        return [(int(column), float(costs[column])) for column in np.flatnonzero(costs)]

    def _add_cast(self, cast: CastTable) -> None:
        """What the cast costs hangs on the pairs of its reader, or on the most of the pairs of several."""
        makers, forms = int(self.tables.counts[cast.maker]), cast.costs.shape[2]
        pairs = [self._pair(cast, place) for place in range(len(cast.readers))]
        if len(pairs) == 1:
            paid = pairs[0]
        else:
            paid = np.full((makers, forms), -1)
            for made, form in np.argwhere(cast.costs.any(axis=0)):
                readers = {int(pair[made, form]) for pair in pairs if pair[made, form] >= 0}
                paid[made, form] = readers.pop() if len(readers) == 1 else self._most(readers)
        for place, row in enumerate(cast.rows):
            for made, form in np.argwhere(cast.costs[place] != 0):
                if paid[made, form] >= 0:
                    self.terms[row].append((int(paid[made, form]), float(cast.costs[place, made, form])))

    def _most(self, columns: set[int]) -> int:
        """A column at least as large as each of others; -1 if there are none."""
        if not columns:
            return -1
        most = int(self._new(1)[0])
        for column in sorted(columns):
            self.rows.add([(column, 1.0), (most, -1.0)], -np.inf, 0)
        return most

    def _pair(self, cast: CastTable, place: int) -> Array:
        """The columns of (format of the maker, form that a reader wants), -1 where there can be none."""
        maker, reader, wants = cast.maker, cast.readers[place], cast.wants[place]
        makers, forms = int(self.tables.counts[maker]), cast.costs.shape[2]
        if maker == reader:
            own = np.full((makers, forms), -1)
            own[np.arange(makers), wants] = [self._choice(maker, form) for form in range(makers)]
            return own
        key = maker, reader, forms, tuple(map(int, wants))
        if key not in self._pairs:
            pairs = np.full((makers, forms), -1)
            wanted = np.unique(wants)
            pairs[:, wanted] = self._new(makers * len(wanted)).reshape(makers, -1)
            for made in range(makers):
                self.rows.add([*((int(pairs[made, form]), 1.0) for form in wanted), (self._choice(maker, made), -1.0)], 0, 0)
            for form in wanted:
                choices = [(self._choice(reader, int(one)), -1.0) for one in np.flatnonzero(wants == form)]
                self.rows.add([*((int(pairs[made, form]), 1.0) for made in range(makers)), *choices], 0, 0)
            self._pairs[key] = pairs
        return self._pairs[key]

    def _add_objective(self) -> Array:
        """The cost of each column; of a peak, a column that is at least each of its steps."""
        rows = np.flatnonzero(self.tables.is_objective)
        self.free: list[int] = []
        self.fixed = float(self.tables.fixed[rows[0]]) if len(rows) == 1 else 0.0
        terms = self.terms[rows[0]]
        if len(rows) > 1:
            self.free = [int(self._new(1)[0])]
            terms = [(self.free[0], 1.0)]
            for row in rows:
                scale = float(self.tables.scales[row])
                scaled = [(column, value / scale) for column, value in (*self.terms[row], (self.free[0], -1.0))]
                self.rows.add(scaled, -np.inf, -float(self.tables.fixed[row]) / scale)
        cost = np.zeros(self.columns)
        np.add.at(cost, [column for column, _ in terms], [value for _, value in terms])
        return cost

    def _add_budgets(self) -> None:
        scales = self.tables.scales
        for row, bound in enumerate(self.tables.bounds):
            if np.isfinite(bound):
                scaled = [(column, value / scales[row]) for column, value in self.terms[row]]
                self.rows.add(scaled, -np.inf, (bound - self.tables.fixed[row]) / scales[row])
