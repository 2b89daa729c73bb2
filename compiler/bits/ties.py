"""Groups that must have the same format become one unit: addends of a residual sum, q, k and v, operands of a Concat."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import networkx as nx

from ...runtime.errors import OptionError
from .problem import Cast, Costs, Peak, Problem, Step, Table, Unit


def tied(problem: Problem, ties: Iterable[Collection[str]]) -> Problem:
    """The problem with one unit for all units that ties connect; it has the first one's name, the formats of all, and their sums.

    Raises:
        OptionError: a tie of a unit that is not there, or of units that have no format in common.
    """
    merger = _Merger(problem, ties)
    return replace(
        problem,
        units=tuple(merger.unit(names) for names in merger.sets),
        casts=tuple(map(merger.cast, problem.casts)),
        peaks=tuple(map(merger.peak, problem.peaks)),
    )


class _Merger:
    """What becomes of units, by name, and of what names them."""

    def __init__(self, problem: Problem, ties: Iterable[Collection[str]]) -> None:
        self.problem = problem
        order = {unit.name: place for place, unit in enumerate(problem.units)}
        graph = nx.Graph()
        graph.add_nodes_from(order)
        for tie in ties:
            for name in tie:
                if name not in order:
                    raise OptionError(f"tie {', '.join(tie)}", f"there is no unit {name!r}", "give names of units")
            nx.add_path(graph, tie)
        found = (sorted(names, key=order.__getitem__) for names in nx.connected_components(graph))
        self.sets = sorted(found, key=lambda names: order[names[0]])
        self.names = {name: names[0] for names in self.sets for name in names}
        self.kept = {name: kept for names in self.sets for name, kept in self._kept(names).items()}

    def _kept(self, names: list[str]) -> dict[str, tuple[int, ...]]:
        """Of each unit of a set the places of the formats that all of them have, in the order of the first."""
        formats = [self.problem.by_name[name].formats for name in names]
        common = [one for one in formats[0] if all(one in others for others in formats)]
        if not common:
            raise OptionError(f"tie {', '.join(names)}", "they have no format in common", "leave the tie out, or add a format")
        return {name: tuple(map(own.index, common)) for name, own in zip(names, formats, strict=True)}

    def unit(self, names: list[str]) -> Unit:
        units = [self.problem.by_name[name] for name in names]
        formats = tuple(units[0].formats[place] for place in self.kept[names[0]])
        resources = dict.fromkeys(resource for unit in units for resource in unit.costs)
        costs = {
            resource: _summed([_picked(unit.costs[resource], self.kept[unit.name]) for unit in units if resource in unit.costs])
            for resource in resources
        }
        return Unit(names[0], formats, costs, tuple(member for unit in units for member in unit.members))

    def cast(self, cast: Cast) -> Cast:
        rows = self.kept[cast.maker]
        costs = {name: tuple(table[row] for row in rows) for name, table in cast.costs.items()}
        wants = tuple(
            _chosen(cast.forms(place, len(self.problem.by_name[reader].formats)), self.kept[reader])
            for place, reader in enumerate(cast.readers)
        )
        return Cast(self.names[cast.maker], tuple(self.names[reader] for reader in cast.readers), costs, wants)

    def peak(self, peak: Peak) -> Peak:
        return Peak(peak.name, tuple(Step(self._held(step.held), step.fixed) for step in peak.steps))

    def _held(self, held: Costs) -> Mapping[str, tuple[float, ...]]:
        rows: dict[str, list[tuple[float, ...]]] = {}
        for name, costs in held.items():
            rows.setdefault(self.names[name], []).append(_picked(costs, self.kept[name]))
        return {name: _summed(found) for name, found in rows.items()}


def _picked(row: tuple[float, ...], places: tuple[int, ...]) -> tuple[float, ...]:
    return tuple(row[place] for place in places)


def _chosen(row: tuple[int, ...], places: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(row[place] for place in places)


def _summed(rows: Table | list[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(map(sum, zip(*rows, strict=True)))
