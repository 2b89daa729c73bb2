"""What is tried and taken, by numbers alone: tables of two formats whose best assignments are known."""

from __future__ import annotations

from itertools import product
from math import inf

import pytest
from prefuse.compiler.bits.mixed.choice import Measured, Table, Uniform, best_of, recovered, scaled
from prefuse.compiler.bits.mixed.formats import REST
from prefuse.compiler.bits.problem import Cast

FORMS = ("float32-fast", "int8")


def table(casts: tuple[Cast, ...] = (), **rows: tuple[float, float, float]) -> Table:
    """Units by name with microseconds in float32, in int8, and the damage of int8; a unit has 4 bytes in float32."""
    choices = dict.fromkeys(rows, FORMS)
    time_us = {(name, form): row[place] for name, row in rows.items() for place, form in enumerate(FORMS)}
    size = {(name, form): float(4 - 3 * place) for name in rows for place, form in enumerate(FORMS)}
    damage = {(name, form): row[2] * place for name, row in rows.items() for place, form in enumerate(FORMS)}
    return Table(
        {**choices, REST: FORMS[:1]},
        {**time_us, (REST, FORMS[0]): 1.0},
        {**size, (REST, FORMS[0]): 0.0},
        {**damage, (REST, FORMS[0]): 0.0},
        casts,
    )


def test_best_within_a_budget_by_brute_force() -> None:
    one = table(a=(10, 4, 3e-4), b=(9, 5, 1e-4), c=(8, 2, 2e-4), d=(5, 7, 1e-6))
    for budget in (0.0, 1e-4, 2e-4, 3.1e-4, 5e-4, 1.0):
        found = one.solved("latency", budget)
        best = min(
            one.total_time_us({**dict(zip("abcd", forms, strict=True)), REST: "float32-fast"})
            for forms in product(FORMS, repeat=4)
            if one.total_damage({**dict(zip("abcd", forms, strict=True)), REST: "float32-fast"}) <= budget
        )
        assert found.objective <= best * 1.005
        assert one.total_damage(found.formats) <= budget
        assert found.formats["d"] == "float32-fast", "the slower format is taken"


def test_size_is_least_and_of_equals_the_fastest() -> None:
    """Both of two formats of one byte are as small: that of fewer microseconds is taken, though it is more damaging."""
    forms = ("float32-fast", "int8", "int8-rows")
    numbers = {("a", "float32-fast"): (1.0, 4.0, 0.0), ("a", "int8"): (5.0, 1.0, 1e-4), ("a", "int8-rows"): (3.0, 1.0, 2e-4)}
    rest = (REST, "float32-fast")
    time_us, size, damage = ({**{pair: row[place] for pair, row in numbers.items()}, rest: 0.0} for place in range(3))
    one = Table({"a": forms, REST: ("float32-fast",)}, time_us, size, damage)
    assert one.solved("size", 1e-3).formats["a"] == "int8-rows"
    assert one.solved("size", 1.5e-4).formats["a"] == "int8"
    assert one.solved("latency", 1e-3).formats["a"] == "float32-fast"


def test_casts_keep_neighbours_together() -> None:
    """What int8 saves alone is less than two conversions; both neighbours in int8 save more."""
    cast = Cast("a", ("b",), {"time": ((0.0, 3.0), (3.0, 0.0))})
    assert table((cast,), a=(10, 9, 1e-4), b=(10, 8, 1e-4)).solved("latency", 1e-4).formats == {
        "a": "float32-fast",
        "b": "float32-fast",
        REST: "float32-fast",
    }
    assert table((cast,), a=(10, 9, 1e-4), b=(10, 8, 1e-4)).solved("latency", 2e-4).formats["a"] == "int8"


def test_formats_that_ruin_outputs_are_none() -> None:
    """Also in casts, whose tables then have fewer rows."""
    cast = Cast("a", ("b",), {"time": ((0.0, 3.0), (3.0, 0.0))})
    found = table((cast,), a=(10, 1, inf), b=(10, 1, 1e-9)).solved("latency", 1.0)
    assert found.formats["a"] == "float32-fast"
    assert found.formats["b"] == "int8"


def test_units_that_took_longer_are_corrected() -> None:
    """By what is more than their time and casts; small surprises are noise, and shorter times those of other neighbours."""
    cast = Cast("a", ("b",), {"time": ((0.0, 3.0), (3.0, 0.0))})
    one = table((cast,), a=(10, 4, 1e-4), b=(10, 4, 1e-4), c=(10, 4, 1e-4), d=(10, 4, 1e-4))
    formats = {"a": "float32-fast", "b": "int8", "c": "int8", "d": "int8", REST: "float32-fast"}
    took = {"a": 18.0, "b": 3.0, "c": 4.1, "d": 6.0, REST: 9.0}
    found = one.corrected(formats, took, 40.0)
    changed = {pair: time_us for pair, time_us in found.time_us.items() if time_us != one.time_us[pair]}
    assert changed == {("a", "float32-fast"): 15.0, ("d", "int8"): 6.0}
    assert found.total_time_us(formats) == 18 + 4 + 4 + 6 + 1
    assert one.total_time_us(formats) == 26
    halved = one.corrected(formats, took, 26 + (5 + 2) / 2)
    assert halved.total_time_us(formats) == pytest.approx(26 + (5 + 2) / 2), "no more than the program took"
    assert one.corrected(formats, took, 20.0) == one, "it was faster than predicted"


def test_what_a_program_damages_is_that_of_its_integers() -> None:
    """Where most of the damage of the program of int8 is that of one unit, the others are not known by it."""
    forms = ("float32-fast", "bfloat16", "int8")
    damage = {("a", "bfloat16"): 2e-5, ("a", "int8"): 5e-3, ("b", "bfloat16"): 1e-5, ("b", "int8"): 1e-4}
    damage |= {(name, "float32-fast"): 0.0 for name in "ab"}
    one = Table(dict.fromkeys("ab", forms), {}, {}, damage)
    learnt = one.learnt({"a": "bfloat16", "b": "int8"}, 1.02e-3)
    assert learnt.damage["b", "int8"] == pytest.approx(1e-3)
    assert learnt.damage["a", "int8"] == pytest.approx(5e-2)
    assert all(learnt.damage[name, "bfloat16"] == one.damage[name, "bfloat16"] for name in "ab")
    assert learnt.total_damage({"a": "bfloat16", "b": "int8"}) == pytest.approx(1.02e-3)
    for formats, measured in (({"a": "bfloat16", "b": "bfloat16"}, 6e-5), ({"a": "bfloat16", "b": "int8"}, 1.2e-5)):
        factor = measured / one.total_damage(formats)
        assert one.learnt(formats, measured).damage == {pair: pytest.approx(factor * was) for pair, was in damage.items()}
    assert one.learnt({"a": "float32-fast", "b": "float32-fast"}, 1e-9).damage == damage


def test_recovery_takes_what_saves_most_damage_a_microsecond() -> None:
    one = table(cheap=(6, 5, 2e-4), dear=(60, 5, 3e-4), small=(6, 5, 1e-5))
    everything = dict.fromkeys(("cheap", "dear", "small"), "int8") | {REST: "float32-fast"}
    assert recovered(one, everything, 3.2e-4) == everything | {"cheap": "float32-fast"}
    assert recovered(one, everything, 2e-5)["dear"] == "float32-fast"
    assert recovered(one, everything, -1.0) == dict.fromkeys((*everything, REST), "float32-fast"), "the least there is"


def test_damages_are_scaled_to_programs_of_one_format() -> None:
    """Sums over units are what was measured of each program; what bfloat16 has more is that of all else."""
    forms = ("float32-fast", "bfloat16", "int8")
    choices = {"a": forms, "b": forms, REST: forms[:2]}
    damage = {(name, form): value for name in "ab" for form, value in zip(forms, (0.0, 1e-6, 1e-4), strict=True)}
    uniforms = [
        Uniform("float32-fast", {"a": forms[0], "b": forms[0], REST: forms[0]}, 1e-12),
        Uniform("bfloat16", {"a": forms[1], "b": forms[1], REST: forms[1]}, 7e-6),
        Uniform("int8", {"a": forms[2], "b": forms[2], REST: forms[1]}, 4e-4),
    ]
    found = scaled(damage, uniforms, choices)
    assert found["a", "float32-fast"] == 0
    for one in uniforms[1:]:
        assert sum(found[pair] for pair in one.formats.items()) == pytest.approx(one.damage)
    assert found["a", "bfloat16"] == pytest.approx(2e-6), "by the scale of int8, which is that of the largest damage"
    assert found[REST, "bfloat16"] == pytest.approx(3e-6)


def test_programs_that_are_not_finite_scale_nothing() -> None:
    choices = {"a": ("float32-fast", "bfloat16"), REST: ("float32-fast", "bfloat16")}
    damage = {("a", "float32-fast"): 0.0, ("a", "bfloat16"): 1e-6}
    found = scaled(damage, [Uniform("bfloat16", {"a": "bfloat16", REST: "bfloat16"}, inf)], choices)
    assert found["a", "bfloat16"] == 1e-6


def program(name: str, error: float, time_us: float, size_bytes: int = 8) -> Measured:
    return Measured(name, error, time_us, size_bytes, not name.startswith("mixed"))


def test_the_fastest_within_the_error_is_taken() -> None:
    slow, fast, mixed = program("float32-fast", 1e-6, 50), program("int8", 4e-2, 10), program("mixed 1", 9e-3, 20)
    best, reason = best_of([slow, fast, mixed], 1e-2, "latency")
    assert best is mixed
    assert "2.50 times as fast as float32-fast" in reason
    assert best_of([slow, fast, mixed], 5e-2, "latency")[0] is fast


def test_a_uniform_program_is_taken_that_is_no_slower() -> None:
    mixed, uniform = program("mixed 1", 9e-3, 20), program("bfloat16", 8e-3, 20)
    best, reason = best_of([mixed, uniform], 1e-2, "latency")
    assert best is uniform
    assert "no mixed program" in reason
    assert best_of([mixed, program("bfloat16", 8e-3, 20, 7)], 1e-2, "size")[0].name == "bfloat16"


def test_of_programs_that_are_as_fast_the_least_error() -> None:
    """Within 1% of the fastest: one of one format first."""
    fastest, exact, slower = program("mixed 1", 9.9e-3, 20), program("mixed 2", 8e-3, 20.1), program("mixed 3", 1e-3, 20.3)
    assert best_of([fastest, exact, slower], 1e-2, "latency")[0] is exact
    uniform = program("int8", 9.95e-3, 20.15)
    assert best_of([fastest, exact, slower, uniform], 1e-2, "latency")[0] is uniform
    assert best_of([fastest, exact, uniform], 9.92e-3, "latency")[0] is exact


def test_impossible_budgets_end_with_the_least_error() -> None:
    best, reason = best_of([program("int8", 4e-2, 10), program("bfloat16", 8e-3, 20)], 1e-5, "latency")
    assert best.name == "bfloat16"
    assert "least that was reached is 0.008" in reason
    mixed, uniform = program("mixed 1", 9e-3, 20), program("int8", 4e-2, 10)
    assert "no program of one format" in best_of([mixed, uniform], 1e-2, "latency")[1]
