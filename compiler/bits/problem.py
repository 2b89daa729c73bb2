"""The assignment of formats as a problem of numbers: what each choice costs, what may be spent, and what is to be least.

Names are the caller's: of units (what gets one format), of formats, and of resources (time, bytes of weights, damage, ...), which
add up over units and casts. A resource that a unit does not name costs it nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import fsum, inf, isfinite, isnan
from typing import TypeAlias

from ...runtime.errors import OptionError

Costs: TypeAlias = Mapping[str, tuple[float, ...]]  # resource: a number for each format
Table: TypeAlias = tuple[tuple[float, ...], ...]
Formats: TypeAlias = Mapping[str, str]  # unit: its format

TOLERANCE = 1e-9  # of a bound: sums of float64 in another order differ by less


@dataclass(frozen=True, slots=True)
class Unit:
    """What gets one format: a group, or several that must have the same one. `members` are these; by default itself alone."""

    name: str
    formats: tuple[str, ...]
    costs: Costs
    members: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        where = f"unit {self.name!r}"
        if not self.formats:
            raise OptionError(where, "it has no format to choose", "give at least the one that it is computed in now")
        _check_distinct(where, "format", self.formats)
        for resource, costs in self.costs.items():
            _check_row(f"{where}, {resource}", costs, len(self.formats), "formats")
        if not self.members:
            object.__setattr__(self, "members", (self.name,))


@dataclass(frozen=True, slots=True)
class Cast:
    """A value that one unit makes and others read: each form in which it is wanted costs once, whoever wants it.

    `costs[resource][f][k]` is what the k-th form costs of a maker in its f-th format; a reader in its h-th format wants form
    `wants[reader][h]`, by default the h-th. With one reader this is any table over two units, and may be negative.
    """

    maker: str
    readers: tuple[str, ...]
    costs: Mapping[str, Table]
    wants: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        where = f"cast of {self.maker!r}"
        if not self.readers:
            raise OptionError(where, "nothing reads it", "leave it out")
        if self.wants and len(self.wants) != len(self.readers):
            raise OptionError(where, f"{len(self.wants)} lists of wants for {len(self.readers)} readers", "give one a reader")
        forms = next((len(table[0]) for table in self.costs.values() if table), 0)
        for resource, table in self.costs.items():
            if not table:
                raise OptionError(f"{where}, {resource}", "its table is empty", "give a row for each format of the maker")
            for row in table:
                _check_row(f"{where}, {resource}", row, forms, "forms")
            if len(self.readers) > 1 and min(map(min, table)) < 0:
                raise OptionError(f"{where}, {resource}", "a cost below zero that several readers share", "give a cast a reader")

    def forms(self, reader: int, formats: int) -> tuple[int, ...]:
        """The form that a reader wants in each of its formats."""
        return self.wants[reader] if self.wants else tuple(range(formats))


@dataclass(frozen=True, slots=True)
class Step:
    """What is held at one moment: of each unit, in each of its formats, and `fixed` beside it."""

    held: Costs
    fixed: float = 0.0


@dataclass(frozen=True, slots=True)
class Peak:
    """A resource of which the most that is held at any step counts, as bytes of memory."""

    name: str
    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        if not self.steps:
            raise OptionError(f"peak {self.name!r}", "it has no steps", "give one for each moment of the program")


@dataclass(frozen=True)
class Problem:
    """The formats are sought with the least of `objective` among those that keep within `budgets`.

    Budgets are upper bounds of resources, those of peaks included; so is the objective one of either. All names are checked here.

    Raises:
        OptionError: a name that is not there or is there twice, a number that is none, or tables that do not fit the formats.
    """

    units: tuple[Unit, ...]
    objective: str
    budgets: Mapping[str, float] = field(default_factory=dict)
    casts: tuple[Cast, ...] = ()
    peaks: tuple[Peak, ...] = ()

    def __post_init__(self) -> None:
        if not self.units:
            raise OptionError("problem", "it has no units", "give at least one")
        _check_distinct("problem", "unit", [unit.name for unit in self.units])
        _check_distinct("problem", "group", [member for unit in self.units for member in unit.members])
        _check_distinct("problem", "resource", [*self.resources, *(peak.name for peak in self.peaks)])
        for cast in self.casts:
            self._check_cast(cast)
        for peak in self.peaks:
            self._check_peak(peak)
        self._check_known("objective", self.objective)
        for name, bound in self.budgets.items():
            self._check_known("budget", name)
            if isnan(bound) or bound == -inf:
                raise OptionError(f"budget {name!r}", f"{bound} is no bound", "give a number, or leave it out")

    @cached_property
    def by_name(self) -> Mapping[str, Unit]:
        return {unit.name: unit for unit in self.units}

    @cached_property
    def resources(self) -> tuple[str, ...]:
        """What adds up, in the order of appearance."""
        costs = (*(unit.costs for unit in self.units), *(cast.costs for cast in self.casts))
        return tuple(dict.fromkeys(name for one in costs for name in one))

    def totals(self, formats: Formats) -> dict[str, float]:
        """What an assignment takes of every resource and of every peak."""
        chosen = {unit.name: unit.formats.index(formats[unit.name]) for unit in self.units}
        sums = {name: fsum(self._spent(name, chosen)) for name in self.resources}
        peaks = {
            peak.name: max((_held(step, chosen) for step in peak.steps), default=0.0)
            for peak in self.peaks
        }  # fmt: skip
        return {**sums, **peaks}

    def keeps(self, totals: Mapping[str, float], budgets: Mapping[str, float] | None = None) -> bool:
        """Whether totals keep within the budgets, but for rounding."""
        return not exceeded(totals, self.budgets if budgets is None else budgets)

    def _spent(self, resource: str, chosen: Mapping[str, int]) -> Iterator[float]:
        for unit in self.units:
            if resource in unit.costs:
                yield unit.costs[resource][chosen[unit.name]]
        for cast in self.casts:
            if resource in cast.costs:
                forms = {
                    cast.forms(place, len(self.by_name[reader].formats))[chosen[reader]]
                    for place, reader in enumerate(cast.readers)
                }
                yield from (cast.costs[resource][chosen[cast.maker]][form] for form in sorted(forms))

    def _check_known(self, what: str, name: str) -> None:
        known = (*self.resources, *(peak.name for peak in self.peaks))
        if name not in known:
            raise OptionError(f"{what} {name!r}", "nothing costs any of it", f"give one of {', '.join(known)}")

    def _check_cast(self, cast: Cast) -> None:
        where = f"cast of {cast.maker!r}"
        for name in (cast.maker, *cast.readers):
            self._check_unit(where, name)
        forms = min((len(row) for table in cast.costs.values() for row in table), default=0)
        for resource, table in cast.costs.items():
            _check_count(f"{where}, {resource}", len(table), len(self.by_name[cast.maker].formats), "rows for", "formats")
        for place, reader in enumerate(cast.readers):
            formats = len(self.by_name[reader].formats)
            wanted = cast.forms(place, formats)
            _check_count(f"{where}, reader {reader!r}", len(wanted), formats, "wants for", "formats")
            if cast.costs and not all(0 <= form < forms for form in wanted):
                raise OptionError(f"{where}, reader {reader!r}", f"it wants form {max(wanted)} of {forms}", "add its column")

    def _check_peak(self, peak: Peak) -> None:
        for number, step in enumerate(peak.steps):
            where = f"peak {peak.name!r}, step {number}"
            for name, held in step.held.items():
                self._check_unit(where, name)
                _check_row(f"{where}, unit {name!r}", held, len(self.by_name[name].formats), "formats")
            _check_row(where, (step.fixed,), 1, "fixed numbers")

    def _check_unit(self, where: str, name: str) -> None:
        if name not in self.by_name:
            raise OptionError(where, f"there is no unit {name!r}", "give the name of a unit; tied groups have that of the first")


def exceeded(totals: Mapping[str, float], budgets: Mapping[str, float]) -> list[str]:
    """The budgets that totals do not keep, but for rounding."""
    return [name for name, bound in budgets.items() if totals[name] > bound + TOLERANCE * abs(bound)]


def _held(step: Step, chosen: Mapping[str, int]) -> float:
    return fsum((step.fixed, *(held[chosen[name]] for name, held in step.held.items())))


def _check_row(where: str, row: Collection[float], count: int, what: str) -> None:
    _check_count(where, len(row), count, "costs for", what)
    if not all(map(isfinite, row)):
        raise OptionError(where, f"{tuple(row)} has a number that is not finite", "leave out a format that cannot be had")


def _check_count(where: str, found: int, wanted: int, what: str, of_what: str) -> None:
    if found != wanted:
        raise OptionError(where, f"{found} {what} {wanted} {of_what}", "give one each")


def _check_distinct(where: str, what: str, names: Collection[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise OptionError(where, f"{what} {name!r} is there twice", "give each name once")
        seen.add(name)
