"""The solver against every assignment, on problems as large as models, and where there is nothing to find."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from prefuse.compiler.bits import linear_program
from prefuse.compiler.bits.problem import Cast, Peak, Problem, Step, Unit
from prefuse.compiler.bits.solver import Solution, solve
from scipy.optimize import linprog, milp

from .problems import every, model_problem, random_problem


def check(problem: Problem, solution: Solution) -> None:
    """What is said of an assignment is so."""
    totals = problem.totals(solution.formats)
    assert totals == solution.totals
    assert problem.keeps(totals)
    assert solution.objective == totals[problem.objective]
    assert solution.bound <= solution.objective


@pytest.mark.parametrize("block", range(10))
def test_equals_every_assignment(block: int) -> None:
    """Of random problems the least objective, or that there is none and what would be the least of each budget."""
    for seed in range(20 * block, 20 * block + 20):
        problem = random_problem(seed)
        brute = every(problem)
        least = brute.least(problem.objective, problem.budgets)
        solution = solve(problem, exact=True)
        if np.isinf(least):
            assert solution.status == "impossible", seed
            for short in solution.shortfalls:
                beside = {name: problem.budgets[name] for name in short.beside}
                assert short.best == pytest.approx(brute.least(short.budget, beside), rel=1e-9), seed
        else:
            assert solution.status == "optimal", seed
            assert solution.objective == pytest.approx(least, rel=1e-9, abs=1e-12), seed
            check(problem, solution)


def test_random_problems_are_of_all_kinds() -> None:
    """Those above have answers and have none, and some of either stand beside every assignment's least in no budget at all."""
    problems = [random_problem(seed) for seed in range(200)]
    answers = [np.isfinite(every(problem).least(problem.objective, problem.budgets)) for problem in problems]
    assert 10 < answers.count(False) < 100
    assert {problem.objective for problem in problems} == {"time", "bytes", "memory"}
    assert any(len(cast.readers) > 2 for problem in problems for cast in problem.casts)
    assert max(len(problem.units) for problem in problems) == 9


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("budget", [0.3, 0.02])
def test_as_large_as_a_transformer(budget: float, shared: bool) -> None:
    """76 groups of 5 formats: the gap is proven, and the exact optimum lies within it."""
    problem = model_problem(76, budget=budget, shared=shared)
    solution, exact = solve(problem), solve(problem, exact=True)
    check(problem, solution)
    check(problem, exact)
    assert solution.gap <= 0.005
    assert exact.status == "optimal"
    assert exact.objective <= solution.objective <= exact.objective * 1.005
    assert solution.bound <= exact.objective * (1 + 1e-9)


def test_four_hundred_groups() -> None:
    problem = model_problem(400)
    solution = solve(problem)
    check(problem, solution)
    assert solution.gap <= 0.005


def test_equal_problems_have_equal_answers() -> None:
    assert solve(model_problem(76, seed=1)).formats == solve(model_problem(76, seed=1)).formats


def test_no_time_leaves_the_rounded_assignment() -> None:
    """An answer that keeps the budgets, and what is proven of it."""
    problem = model_problem(76, seed=1, budget=0.3)
    solution = solve(problem, gap=0.0, seconds=0.0)
    check(problem, solution)
    assert solution.status == "limit"
    assert 0 < solution.gap < 0.01


def test_numbers_of_any_size() -> None:
    """The optimum is a millionth of the numbers around it, and all numbers are tiny: tolerances are relative to the optimum."""
    rng = np.random.default_rng(0)
    for scale in (1e-12, 1.0, 1e12):
        damage = 10.0 ** rng.uniform(-6, 0, (9, 3)) * scale
        units = tuple(
            Unit(f"u{place}", ("a", "b", "c"), {"damage": tuple(row), "bytes": tuple(rng.random(3))})
            for place, row in enumerate(damage)
        )
        free = Problem(units, "damage")
        problem = replace(free, budgets={"bytes": float(np.quantile(every(free).totals["bytes"], 0.2))})
        solution = solve(problem, exact=True)
        assert solution.objective == pytest.approx(every(problem).least("damage", problem.budgets), rel=1e-9)


def test_a_budget_is_kept_where_tolerances_would_not() -> None:
    """One assignment is over the budget by less than what HiGHS tolerates, and would be the best."""
    units = tuple(Unit(f"u{place}", ("fast", "slow"), {"time": (1.0, 2.0), "damage": (1.0, 0.0)}) for place in range(3))
    problem = Problem(units, "time", {"damage": 3 - 1e-7})
    solution = solve(problem, exact=True)
    assert (solution.status, solution.objective) == ("optimal", 4.0)
    assert solution.totals["damage"] == 2.0


def test_a_value_is_cast_once() -> None:
    """Three readers that gain less than a cast each take the other format together."""
    readers = tuple(Unit(f"r{place}", ("wide", "narrow"), {"time": (5.0, 3.0)}) for place in range(3))
    maker = Unit("maker", ("wide",), {"time": (1.0,)})
    cast = Cast("maker", ("r0", "r1", "r2"), {"time": ((0.0, 4.0),)})
    solution = solve(Problem((maker, *readers), "time", casts=(cast,)), exact=True)
    assert solution.objective == 1 + 3 * 3 + 4
    alone = tuple(Cast("maker", (f"r{place}",), {"time": ((0.0, 4.0),)}) for place in range(3))
    assert solve(Problem((maker, *readers), "time", casts=alone), exact=True).objective == 1 + 3 * 5


def test_the_largest_step_counts() -> None:
    """A peak as a budget and as the objective: formats are narrow where much lies at once."""
    units = tuple(Unit(f"u{place}", ("wide", "narrow"), {"time": (1.0, 1.5)}) for place in range(3))
    held = {"u0": (4.0, 2.0)}, {"u0": (4.0, 2.0), "u1": (4.0, 2.0)}, {"u2": (4.0, 2.0)}
    peak = Peak("memory", tuple(Step(one, 1.0) for one in held))
    solution = solve(Problem(units, "time", {"memory": 7.0}, peaks=(peak,)), exact=True)
    assert (solution.totals["memory"], solution.objective) == (7.0, 3.5)
    assert solution.formats["u2"] == "wide"
    least = solve(Problem(units, "memory", {"time": 4.0}, peaks=(peak,)), exact=True)
    assert (least.objective, least.totals["time"]) == (5.0, 4.0)


def test_impossible_alone() -> None:
    """The budget's least is named, and the assignment has it, with the least objective of those that do."""
    units = tuple(Unit(f"u{place}", ("a", "b", "c"), {"time": (1.0, 3.0, 2.0), "damage": (5.0, 1.0, 1.0)}) for place in range(4))
    solution = solve(Problem(units, "time", {"damage": 3.0}))
    assert solution.status == "impossible"
    assert [str(one) for one in solution.shortfalls] == ["damage of 3 cannot be kept: the least is 4"]
    assert (solution.totals["damage"], solution.objective) == (4.0, 8.0)


def test_impossible_together() -> None:
    units = tuple(Unit(f"u{place}", ("a", "b"), {"time": (1.0, 3.0), "damage": (5.0, 1.0)}) for place in range(4))
    solution = solve(Problem(units, "time", {"damage": 8.0, "time": 8.0}))
    assert solution.status == "impossible"
    (short,) = solution.shortfalls
    assert (short.budget, short.beside, short.best) == ("time", ("damage",), 10.0)
    assert "with the budgets of damage" in str(short)
    assert solution.totals == {"time": 10.0, "damage": 8.0}


def test_nothing_to_choose() -> None:
    """One format each, no costs but zeros: the objective and the gap are 0."""
    solution = solve(Problem((Unit("u", ("a",), {"time": (0.0,)}),), "time", {"time": 0.0}))
    assert (solution.status, solution.objective, solution.gap, dict(solution.formats)) == ("optimal", 0.0, 0.0, {"u": "a"})


def test_an_infinite_budget_is_none() -> None:
    units = (Unit("u", ("a", "b"), {"time": (2.0, 1.0)}),)
    assert solve(Problem(units, "time", {"time": float("inf")})).objective == 1.0


@pytest.mark.parametrize("working", [0, 1])
def test_relaxations_that_highs_gives_up(working: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numerical trouble is no proof that nothing keeps the budgets; what was known before still is."""
    problem = model_problem(12, budget=0.3)
    expected, calls, relaxed = solve(problem, exact=True), list[Any](), linprog

    def troubled(*given: Any, **options: Any) -> Any:
        calls.append(relaxed(*given, **options))
        if len(calls) > working:
            calls[-1].status, calls[-1].x = 4, None
        return calls[-1]

    monkeypatch.setattr(linear_program, "linprog", troubled)
    found = solve(problem, exact=True)
    assert found.status == expected.status == "optimal"
    assert found.objective == pytest.approx(expected.objective, rel=1e-9)


def test_searches_that_highs_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, whole = model_problem(12, budget=0.3), milp

    def troubled(*given: Any, **options: Any) -> Any:
        result = whole(*given, **options)
        result.status, result.x = 4, None
        return result

    monkeypatch.setattr(linear_program, "milp", troubled)
    solution = solve(problem, exact=True)
    assert solution.status in ("limit", "optimal")
    check(problem, solution)
