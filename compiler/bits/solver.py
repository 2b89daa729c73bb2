"""The exact solver: the linear relaxation, an assignment near it, and branch and bound on what these leave open.

The relaxation bounds the objective and says, by its reduced costs, what any other choice adds at least: a choice that brings the
bound above an assignment that is at hand is in no better one, and is left out (reduced cost fixing; Dantzig, Fulkerson and
Johnson, Solution of a Large-Scale Traveling-Salesman Problem, 1954). HiGHS (Huangfu and Hall, 2018; scipy.optimize) solves both.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from .linear_program import LinearProgram, Relaxation
from .problem import TOLERANCE, Problem, exceeded
from .repair import repaired
from .tables import Array, tables_of

GAP = 0.005  # a tenth of what predictions are wrong by
_REFUSED = 50  # assignments of HiGHS that exceed a budget within its tolerance, each of which is refused by name
_SMALL = 100.0  # an optimum this many times smaller than its numbers is sought again on its own scale
_MARGIN = 1e-6  # of the objective: what reduced costs may be wrong by
_ROUNDING = 1e-14

Status = Literal["optimal", "within gap", "limit", "impossible"]


@dataclass(frozen=True, slots=True)
class Shortfall:
    """A budget that cannot be kept: `best` is the least there is of it, beside the budgets in `beside`."""

    budget: str
    bound: float
    best: float
    beside: tuple[str, ...] = ()

    def __str__(self) -> str:
        others = f" with the budgets of {', '.join(self.beside)}" if self.beside else ""
        return f"{self.budget} of {self.bound:.6g} cannot be kept{others}: the least is {self.best:.6g}"


@dataclass(frozen=True, slots=True)
class _Open:
    """A relaxation, the choices it was made of, and the size of the objective that it was scaled for."""

    relaxation: Relaxation
    allowed: Array
    size: float


@dataclass(frozen=True, slots=True)
class Solution:
    """An assignment (unit: format), what it takes, and what is proven: nothing has an objective below `bound`.

    `status` is "optimal" if the proven gap is nothing but rounding, "within gap" if it is what was asked for, "limit" if time was
    up before, and "impossible" if no assignment keeps the budgets: then `shortfalls` says which not, and `formats` has the least
    of the first of these beside those of the others that can be kept.
    """

    status: Status
    formats: Mapping[str, str]
    totals: Mapping[str, float]
    objective: float
    bound: float
    seconds: float
    shortfalls: tuple[Shortfall, ...] = field(default=())

    @property
    def gap(self) -> float:
        """The proven gap, relative to the objective."""
        distance = max(self.objective - self.bound, 0.0)
        return distance / abs(self.objective) if distance else 0.0

    def by_member(self, problem: Problem) -> dict[str, str]:
        """The format of each group."""
        return {member: self.formats[unit.name] for unit in problem.units for member in unit.members}


def solve(problem: Problem, *, gap: float = GAP, exact: bool = False, seconds: float | None = None) -> Solution:
    """The formats with the least objective within the budgets, proven to `gap`, or with `exact` to be the least of all.

    The answer depends on the problem alone, unless `seconds` are up: then it is the best that was found.
    """
    start = time.perf_counter()
    deadline = None if seconds is None else start + seconds
    found = _Solving(problem, 0.0 if exact else gap, deadline).run()
    solution = _impossible(problem, deadline) if found is None else found
    return replace(solution, seconds=time.perf_counter() - start)


class _Solving:
    """One problem on its way: the best assignment so far, and the bound of all others."""

    def __init__(self, problem: Problem, gap: float, deadline: float | None) -> None:
        self.problem = problem
        self.gap = gap
        self.deadline = deadline
        self.tables = tables_of(problem)
        self.best: Array | None = None
        self.objective = np.inf
        self.bound = -np.inf

    def run(self) -> Solution | None:
        """The solution; None if there is none."""
        allowed = self.tables.allowed()
        if not allowed.any(axis=1).all():
            return None
        program = LinearProgram(self.tables)
        relaxation = self._relax(program, allowed)
        if relaxation is None:
            return None
        is_done = self._is_proven() or self._branch(program, relaxation)
        if self.best is None:
            return None
        formats = self._formats(self.best)
        status: Status = "limit" if not is_done else "optimal" if self._is_within(TOLERANCE) else "within gap"
        totals = self.problem.totals(formats)
        return Solution(status, formats, totals, self.objective, min(self.bound, self.objective), 0.0)

    def _relax(self, program: LinearProgram, allowed: Array) -> _Open | None:
        """Bound the objective and round the relaxation; again where the optimum is too small for the numbers around it."""
        size = float(self.tables.scales[self.tables.is_objective].max())
        found: _Open | None = None
        while True:
            relaxation = program.relaxed(allowed, size)
            if relaxation is None or (found is not None and not np.isfinite(relaxation.bound)):
                return found
            self.bound = max(self.bound, relaxation.bound)
            start = np.where(allowed, relaxation.shares, -1.0).argmax(axis=1)
            self._offer(repaired(self.tables, start, allowed))
            found = _Open(relaxation, allowed, size)
            smaller = max(abs(self.bound), abs(self.objective) if self.best is not None else size)
            if smaller >= size / _SMALL or smaller == 0:
                return found
            allowed, size = self._left(found), smaller

    def _left(self, found: _Open) -> Array:
        """The choices that could stand in a better assignment than the best so far."""
        if self.best is None:
            return found.allowed
        margin = _MARGIN * max(abs(self.objective), abs(found.relaxation.bound), found.size / _SMALL)
        return found.allowed & (found.relaxation.bound + found.relaxation.reduced_costs <= self.objective + margin)

    def _branch(self, program: LinearProgram, relaxation: _Open) -> bool:
        """Search what the relaxation leaves open; false if time was up before the gap was proven.

        Assignments that exceed a budget by no more than HiGHS tolerates are refused one by one.
        """
        refused: list[Array] = []
        while self.best is None or len(refused) < _REFUSED:
            timed = self.deadline is not None and self.best is not None
            found = program.whole(
                self._left(relaxation),
                relaxation.size,
                gap=self.gap,
                refused=refused,
                seconds=self.deadline - time.perf_counter() if timed and self.deadline is not None else None,
            )
            if found.end == "limit":
                self._offer(found.chosen)
                return False
            if found.chosen is None:
                self.bound = self.objective
                return True
            self.bound = max(self.bound, min(found.bound, self.objective))
            if self._offer(found.chosen) or self._is_proven():
                return True
            refused.append(found.chosen)
        return False

    def _offer(self, chosen: Array | None) -> bool:
        """Take an assignment if it is the best so far; false if it does not keep the budgets."""
        if chosen is None:
            return False
        totals = self.problem.totals(self._formats(chosen))
        if exceeded(totals, self.problem.budgets):
            return False
        if totals[self.problem.objective] < self.objective:
            self.best, self.objective = chosen, totals[self.problem.objective]
        return True

    def _formats(self, chosen: Array) -> dict[str, str]:
        return {unit.name: unit.formats[form] for unit, form in zip(self.problem.units, chosen, strict=True)}

    def _is_proven(self) -> bool:
        return self.best is not None and self._is_within(self.gap)

    def _is_within(self, gap: float) -> bool:
        return self.objective - self.bound <= max(gap, TOLERANCE) * abs(self.objective) + self.least

    @property
    def least(self) -> float:
        """What objectives differ by if by rounding alone."""
        return _ROUNDING * float(self.tables.scales[self.tables.is_objective].max())


def _impossible(problem: Problem, deadline: float | None) -> Solution:
    """Which budgets cannot be kept, alone or together, and the assignment that comes nearest to the first of them."""
    alone = {name: _least(problem, name, (), deadline) for name in problem.budgets}
    short = [name for name in problem.budgets if exceeded(alone[name].totals, {name: problem.budgets[name]})]
    if short:
        shortfalls = [Shortfall(name, problem.budgets[name], alone[name].objective) for name in short]
        kept = _compatible(problem, [name for name in problem.budgets if name not in short], deadline)
        first = short[0]
    else:
        kept = _compatible(problem, list(problem.budgets), deadline)
        first = next((name for name in problem.budgets if name not in kept), "")
        shortfalls = []
    if not first and (found := _Solving(problem, np.inf, deadline).run()) is not None:  # it was HiGHS that found none
        return replace(found, status="limit")
    least = _least(problem, first, kept, deadline)
    if not short:
        shortfalls = [Shortfall(first, problem.budgets[first], least.objective, kept)]
    budgets = {**{name: problem.budgets[name] for name in kept}, first: least.objective + TOLERANCE * abs(least.objective)}
    cheapest = _Solving(replace(problem, budgets=budgets), GAP, deadline).run()
    return replace(cheapest or least, status="impossible", shortfalls=tuple(shortfalls))


def _least(problem: Problem, name: str, beside: tuple[str, ...], deadline: float | None) -> Solution:
    """The assignment with the least of a budget's resource beside other budgets that can be kept with each other."""
    budgets = {other: problem.budgets[other] for other in beside}
    found = _Solving(replace(problem, objective=name, budgets=budgets), 0.0, deadline).run()
    assert found is not None, f"budgets of {beside} were said to fit each other"
    return found


def _compatible(problem: Problem, names: list[str], deadline: float | None) -> tuple[str, ...]:
    """Of budgets, in their order, those that can be kept together with all before them."""
    kept: tuple[str, ...] = ()
    for name in names:
        budgets = {one: problem.budgets[one] for one in (*kept, name)}
        if _Solving(replace(problem, budgets=budgets), np.inf, deadline).run() is not None:
            kept = (*kept, name)
    return kept
