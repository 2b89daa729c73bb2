"""What a problem must be, and what an assignment takes."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import inf, nan

import pytest
from prefuse.compiler.bits.pareto import pareto_front
from prefuse.compiler.bits.problem import Cast, Peak, Problem, Step, Unit
from prefuse.compiler.bits.ties import tied
from prefuse.runtime.errors import OptionError

A = Unit("a", ("wide", "narrow"), {"time": (2.0, 1.0), "damage": (0.0, 1.0)})
B = Unit("b", ("wide", "narrow", "tiny"), {"time": (4.0, 2.0, 1.0)})


def test_totals_add_up() -> None:
    """Casts once for each form that is wanted, peaks by their largest step."""
    cast = Cast("a", ("b",), {"time": ((0.0, 0.5), (0.25, 0.0))}, ((0, 1, 1),))
    peak = Peak("memory", (Step({"a": (4.0, 2.0)}), Step({"b": (4.0, 2.0, 1.0)}, 3.0)))
    problem = Problem((A, B), "time", casts=(cast,), peaks=(peak,))
    assert problem.totals({"a": "wide", "b": "tiny"}) == {"time": 3.5, "damage": 0.0, "memory": 4.0}
    assert problem.totals({"a": "narrow", "b": "wide"}) == {"time": 5.25, "damage": 1.0, "memory": 7.0}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Unit("u", (), {}), "unit 'u': it has no format to choose"),
        (lambda: Unit("u", ("a", "a"), {}), "format 'a' is there twice"),
        (lambda: Unit("u", ("a",), {"time": (1.0, 2.0)}), "unit 'u', time: 2 costs for 1 formats"),
        (lambda: Unit("u", ("a",), {"time": (inf,)}), "not finite; leave out a format"),
        (lambda: Cast("a", (), {}), "nothing reads it"),
        (lambda: Cast("a", ("b",), {"time": ()}), "its table is empty"),
        (lambda: Cast("a", ("b",), {"time": ((1.0,), (1.0, 2.0))}), "2 costs for 1 forms"),
        (lambda: Cast("a", ("b", "c"), {"time": ((-1.0,),)}), "below zero that several readers share"),
        (lambda: Cast("a", ("b", "c"), {}, ((0,),)), "1 lists of wants for 2 readers"),
        (lambda: Problem((), "time"), "it has no units"),
        (lambda: Problem((A, A), "time"), "unit 'a' is there twice"),
        (lambda: Problem((A, Unit("c", ("x",), {}, ("a",))), "time"), "group 'a' is there twice"),
        (lambda: Problem((A,), "speed"), "objective 'speed': nothing costs any of it; give one of time, damage"),
        (lambda: Problem((A,), "time", {"bytes": 1.0}), "budget 'bytes': nothing costs any of it"),
        (lambda: Problem((A,), "time", {"time": nan}), "nan is no bound"),
        (lambda: Problem((A,), "time", {"time": -inf}), "-inf is no bound"),
        (lambda: Problem((A,), "time", casts=(Cast("a", ("z",), {}),)), "there is no unit 'z'"),
        (lambda: Problem((A, B), "time", casts=(Cast("a", ("b",), {"time": ((1.0, 2.0),) * 2}),)), "wants form 2 of 2"),
        (lambda: Problem((A, B), "time", casts=(Cast("a", ("b",), {"time": ((1.0,) * 3,)}),)), "1 rows for 2 formats"),
        (lambda: Problem((A, B), "time", casts=(Cast("a", ("b",), {"time": ((1.0,),) * 2}, ((0,),)),)), "1 wants for 3 formats"),
        (lambda: Problem((A,), "time", peaks=(Peak("time", (Step({}),)),)), "resource 'time' is there twice"),
        (lambda: Peak("memory", ()), "it has no steps"),
        (lambda: Problem((A,), "time", peaks=(Peak("m", (Step({"z": (1.0,)}),)),)), "there is no unit 'z'"),
        (lambda: Problem((A,), "time", peaks=(Peak("m", (Step({"a": (1.0,)}),)),)), "1 costs for 2 formats"),
        (lambda: tied(Problem((A, B), "time"), [("a", "z")]), "tie a, z: there is no unit 'z'"),
        (lambda: tied(Problem((A, Unit("c", ("x",), {})), "time"), [("a", "c")]), "no format in common"),
        (lambda: pareto_front(Problem((A,), "time"), "damage", points=1), "1 are no front"),
        (lambda: pareto_front(Problem((A,), "time"), "bytes"), "nothing costs any of it"),
    ],
)
def test_refusals(make: Callable[[], object], message: str) -> None:
    with pytest.raises(OptionError, match=re.escape(message)):
        make()


def test_ties_join_units() -> None:
    """Formats that all have, in the order of the first; sums of costs; casts and peaks by the new names; ties that connect."""
    c = Unit("c", ("tiny", "narrow", "wide"), {"time": (0.5, 1.0, 2.0), "bytes": (1.0, 2.0, 4.0)}, ("c", "d"))
    e = Unit("e", ("wide",), {"time": (9.0,)})
    casts = (Cast("b", ("c", "e"), {"time": ((0.0, 1.0, 2.0), (3.0, 4.0, 5.0), (6.0, 7.0, 8.0))}, ((2, 1, 0), (0,))),)
    peak = Peak("memory", (Step({"b": (4.0, 2.0, 1.0), "c": (1.0, 2.0, 4.0)}),))
    problem = tied(Problem((A, B, c, e), "time", casts=casts, peaks=(peak,)), [("c", "b"), ("c", "a")])
    joined, alone = problem.units
    assert (joined.name, joined.formats, joined.members) == ("a", ("wide", "narrow"), ("a", "b", "c", "d"))
    assert joined.costs == {"time": (8.0, 4.0), "damage": (0.0, 1.0), "bytes": (4.0, 2.0)}
    assert alone is e or alone == e
    (cast,) = problem.casts
    assert (cast.maker, cast.readers, cast.wants) == ("a", ("a", "e"), ((0, 1), (0,)))
    assert cast.costs == {"time": ((0.0, 1.0, 2.0), (3.0, 4.0, 5.0))}
    assert problem.peaks[0].steps[0].held == {"a": (8.0, 4.0)}
    assert problem.totals({"a": "narrow", "e": "wide"})["time"] == 4.0 + 9.0 + 4.0 + 3.0


def test_ties_do_not_change_what_is_taken() -> None:
    problem = Problem((A, B), "time", casts=(Cast("a", ("b",), {"time": ((0.0, 1.0, 2.0), (3.0, 4.0, 5.0))}),))
    joined = tied(problem, [("a", "b")])
    for form in ("wide", "narrow"):
        assert joined.totals({"a": form}) == problem.totals({"a": form, "b": form})
