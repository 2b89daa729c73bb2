"""Which assignment to try, by what formats cost and damage; and what to do where it misses the budget. Numbers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Literal, TypeAlias, get_args

from ..problem import Cast, Problem, Unit
from ..solver import Solution, solve
from .formats import INTEGERS, REST, Formats

Objective: TypeAlias = Literal["latency", "size"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
RESOURCES: Mapping[Objective, str] = {"latency": "time", "size": "bytes"}

Numbers: TypeAlias = Mapping[tuple[str, str], float]  # by unit and format
_NO_TIME = 1e-3  # microseconds: what a step back costs at least, when steps are ranked
_NOISE = 0.01  # by which times of one run differ that are equal
_SURPRISE = 0.05  # of a unit's time: what it may take more than predicted before that counts
_SAME = 1e-6  # relative: sizes within it are equal


@dataclass(frozen=True, slots=True)
class Table:
    """What each of the formats (`choices`) of each unit takes: microseconds, bytes of weights, and damage.

    Damage adds up over units; formats whose damage is not finite are none. `REST` is a unit, too.
    """

    choices: Mapping[str, tuple[str, ...]]
    time_us: Numbers
    size_bytes: Numbers
    damage: Numbers
    casts: Sequence[Cast] = field(default=())

    @property
    def legal(self) -> dict[str, tuple[str, ...]]:
        """The formats of each unit that do not ruin the outputs; the least damaging one where all do."""
        found = {}
        for name, formats in self.choices.items():
            finite = tuple(form for form in formats if isfinite(self.damage[name, form]))
            found[name] = finite or (min(formats, key=lambda form: self.damage[name, form]),)
        return found

    def total_damage(self, formats: Formats) -> float:
        return sum(self.damage[pair] for pair in formats.items())

    def total_time_us(self, formats: Formats) -> float:
        return self.problem("latency", None).totals(formats)["time"]

    def corrected(self, formats: Formats, units_us: Mapping[str, float], call_us: float) -> Table:
        """The table with longer times for the units that took longer in a program of these formats (`units_us`) than all that is
        known of them, casts of what they make included: their kernels are others beside such neighbours.

        All together they are no longer than what the program (`call_us`) took beyond what was predicted: what single steps took
        more than that is noise.
        """
        casts = self._cast_times(formats)
        surprises = {}
        for name, form in formats.items():
            more = units_us.get(name, 0.0) - casts.get(name, 0.0) - self.time_us[name, form]
            if name != REST and more > _SURPRISE * self.time_us[name, form]:
                surprises[name, form] = more
        left = max(call_us - self.total_time_us(formats), 0.0)
        share = min(left / sum(surprises.values()), 1.0) if surprises else 0.0
        return replace(self, time_us={pair: time_us + share * surprises.get(pair, 0.0) for pair, time_us in self.time_us.items()})

    def learnt(self, formats: Formats, damage: float) -> Table:
        """The table with what the damage of a program of these formats says of the predictions.

        Those of floats are near, as the sums of programs of one format are scaled to what was measured. Of integers a few units
        make most of such a sum, and say little of the others; so what is left of the damage is theirs. Without integers, or where
        floats are predicted to make more than all there is, all predictions are wrong by the same factor.
        """
        integers = sum(self.damage[name, form] for name, form in formats.items() if form in INTEGERS)
        total = self.total_damage(formats)
        left = damage - (total - integers)
        if integers > 0 and left > 0:
            factor = left / integers
            return replace(
                self, damage={pair: (factor if pair[1] in INTEGERS else 1.0) * one for pair, one in self.damage.items()}
            )
        return replace(self, damage={pair: damage / total * one for pair, one in self.damage.items()}) if total else self

    def _cast_times(self, formats: Formats) -> dict[str, float]:
        """Microseconds of the casts of what each unit makes."""
        found: dict[str, float] = {}
        for cast in self.casts:
            row = cast.costs["time"][self.choices[cast.maker].index(formats[cast.maker])]
            forms = {
                cast.forms(place, len(self.choices[reader]))[self.choices[reader].index(formats[reader])]
                for place, reader in enumerate(cast.readers)
            }
            found[cast.maker] = found.get(cast.maker, 0.0) + sum(row[form] for form in forms)
        return found

    def problem(self, objective: Objective, budget: float | None) -> Problem:
        """The assignment that is sought, with no more damage than `budget`."""
        legal = self.legal
        units = []
        for name, formats in legal.items():
            costs = {"time": self.time_us, "bytes": self.size_bytes, "damage": self.damage}
            rows = {what: tuple(_finite(row[name, form]) for form in formats) for what, row in costs.items()}
            units.append(Unit(name, formats, rows))
        casts = tuple(_restricted(cast, self.choices, legal) for cast in self.casts)
        return Problem(tuple(units), RESOURCES[objective], {} if budget is None else {"damage": budget}, casts)

    def solved(self, objective: Objective, budget: float) -> Solution:
        """The best assignment within a budget of damage. Of those that are equally small, the fastest."""
        problem = self.problem(objective, budget)
        found = solve(problem)
        if objective == "latency" or found.status == "impossible":
            return found
        smallest = found.totals["bytes"] * (1 + _SAME)
        return solve(replace(problem, objective="time", budgets={**problem.budgets, "bytes": smallest}))


@dataclass(frozen=True, slots=True)
class Uniform:
    """A program of one format, as it was measured: the damage that its error means, and the formats of its units."""

    form: str
    formats: Formats
    damage: float


def scaled(damage: Numbers, uniforms: Sequence[Uniform], choices: Mapping[str, tuple[str, ...]]) -> dict[tuple[str, str], float]:
    """Predicted damages on the scale of what was measured of programs of one format.

    Predictions know units alone. What the program of bfloat16 has more, by the scale of the program of the largest damage, is
    that of `REST` in bfloat16; each other format has a scale of its own. Programs whose error is not finite tell nothing.
    """
    measured = {one.form: one for one in uniforms if isfinite(one.damage)}
    sums = {form: _sums(damage, one.formats) for form, one in measured.items()}
    worst = max(measured, key=lambda form: measured[form].damage, default=None)
    base = 1.0
    if worst is not None and (total := sum(sums[worst].values())) > 0:
        base = measured[worst].damage / total
    scales, rest = {"bfloat16": base}, 0.0
    if (narrow := measured.get("bfloat16")) is not None and (total := sums["bfloat16"].get("bfloat16", 0.0)) > 0:
        scales["bfloat16"] = min(base, narrow.damage / total)
        rest = max(narrow.damage - scales["bfloat16"] * total, 0.0) if "bfloat16" in choices[REST] else 0.0
    for form in ("int8", "int8-rows"):
        if (one := measured.get(form)) is None or not (own := sums[form].get(form, 0.0)):
            continue
        others = sum(scales.get(other, base) * total for other, total in sums[form].items() if other != form)
        left = one.damage - others - (rest if one.formats[REST] == "bfloat16" else 0.0)
        scales[form] = left / own if left > 0 else min(base, one.damage / own)
    found = {(name, form): scales.get(form, base) * value for (name, form), value in damage.items()}
    return {**found, **{(REST, form): rest if form == "bfloat16" else 0.0 for form in choices[REST]}}


def recovered(table: Table, formats: Formats, budget: float) -> dict[str, str]:
    """Formats with no more damage than `budget`, from others by single steps: each the one that saves most damage a microsecond.

    Where the least there is of damage is more, the formats with the least.
    """
    found, legal = dict(formats), table.legal
    while table.total_damage(found) > budget:
        steps = [
            (name, form)
            for name, now in found.items()
            for form in legal.get(name, ())
            if table.damage[name, form] < table.damage[name, now]
        ]
        if not steps:
            break
        name, form = max(steps, key=lambda step: _gain(table, found, *step))
        found[name] = form
    return found


def _gain(table: Table, formats: Formats, name: str, form: str) -> float:
    saved = table.damage[name, formats[name]] - table.damage[name, form]
    time_us = table.time_us[name, form] - table.time_us[name, formats[name]]
    return saved / max(time_us, _NO_TIME)


@dataclass(frozen=True, slots=True)
class Measured:
    """A program as a candidate of the last choice. `is_uniform`: it has one format."""

    name: str
    error: float
    time_us: float
    size_bytes: int
    is_uniform: bool


def best_of(programs: Sequence[Measured], max_error: float, objective: Objective) -> tuple[Measured, str]:
    """The program to take of those that were measured in one run, and why.

    It is the fastest (or smallest) within the budget. Of those within 1% of its time a uniform one is taken, else that of least
    error, as other inputs lose a little more or less. Where none is within the budget, it is the one of least error.
    """
    within = [one for one in programs if one.error <= max_error]
    if not within:
        least = min(programs, key=lambda one: (one.error, one.time_us))
        return least, f"no program keeps the error within {max_error:.3g}: the least that was reached is {least.error:.3g}"
    first = min(within, key=lambda one: _rank(one, objective))
    near = [one for one in within if _is_as_good(one, first, objective)]
    best = min(near, key=lambda one: (not one.is_uniform, one.error))
    uniforms = [one for one in within if one.is_uniform]
    if not uniforms:
        return best, "no program of one format keeps the error within the budget"
    rival = min(uniforms, key=lambda one: _rank(one, objective))
    if best.is_uniform:
        mixed = [one for one in within if not one.is_uniform]
        return best, "no mixed program within the error is better" if mixed else "nothing mixed is better, by what was predicted"
    if objective == "size":
        sizes = f"{best.size_bytes} bytes of weights, {rival.size_bytes} of {rival.name}"
        return best, f"{sizes}, the smallest program of one format within the error"
    return (
        best,
        f"{rival.time_us / best.time_us:.2f} times as fast as {rival.name}, the fastest program of one format within the error",
    )


def _is_as_good(one: Measured, other: Measured, objective: Objective) -> bool:
    """Whether a program is as fast as another, but for what measurements differ by, or as small."""
    is_as_fast = one.time_us <= (1 + _NOISE) * other.time_us
    return is_as_fast and (objective == "latency" or one.size_bytes == other.size_bytes)


def _rank(one: Measured, objective: Objective) -> tuple[float, ...]:
    return (one.time_us,) if objective == "latency" else (one.size_bytes, one.time_us)


def _sums(damage: Numbers, formats: Formats) -> dict[str, float]:
    """The damages of an assignment, by format; what would ruin the outputs is left out."""
    found: dict[str, float] = {}
    for pair in formats.items():
        if pair[0] != REST and isfinite(damage[pair]):
            found[pair[1]] = found.get(pair[1], 0.0) + damage[pair]
    return found


def _restricted(cast: Cast, choices: Mapping[str, tuple[str, ...]], legal: Mapping[str, tuple[str, ...]]) -> Cast:
    """A cast over the formats that are left."""
    rows = [choices[cast.maker].index(form) for form in legal[cast.maker]]
    costs = {name: tuple(table[row] for row in rows) for name, table in cast.costs.items()}
    wants = tuple(
        tuple(cast.forms(place, len(choices[reader]))[choices[reader].index(form)] for form in legal[reader])
        for place, reader in enumerate(cast.readers)
    )
    return Cast(cast.maker, cast.readers, costs, wants)


def _finite(value: float) -> float:
    return value if isfinite(value) else 1e30
