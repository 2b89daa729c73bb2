"""Two programs of one model side by side: what one computes in a group, beside what the other does for the same nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...runtime.executor import CompiledModel
from ...runtime.profile import Profile, StepProfile

_CALLS_A_TURN = 5


@dataclass(frozen=True, slots=True)
class Match:
    """Steps of two programs that compute the same nodes; one side may be empty."""

    first: tuple[StepProfile, ...]
    second: tuple[StepProfile, ...]

    @property
    def time_us(self) -> tuple[float, float]:
        return sum(step.time_us for step in self.first), sum(step.time_us for step in self.second)

    @property
    def bytes_moved(self) -> tuple[int, int]:
        return sum(step.bytes_moved for step in self.first), sum(step.bytes_moved for step in self.second)

    @property
    def label(self) -> str:
        """The side that has fewer steps says it shorter."""
        sides = [side for side in (self.first, self.second) if side]
        return " | ".join(step.label for step in min(sides, key=len))


def profile_in_turns(nets: Sequence[CompiledModel], inputs: Mapping[str, object], runs: int) -> tuple[Profile, ...]:
    """The profile of each program over `runs` calls, a few of each in turn, so that the machine is as busy for all of them.

    Raises:
        OptionError: a program has no counters.
        InputError: the inputs are not those of the model.
    """
    turns = [min(_CALLS_A_TURN, runs - begin) for begin in range(0, runs, _CALLS_A_TURN)]
    found = [[net.profile(**inputs, runs=turn) for net in nets] for turn in turns]
    merged = (np.concatenate([one.stamps_ns for one in profiles]) for profiles in zip(*found, strict=True))
    return tuple(replace(first, stamps_ns=stamps) for first, stamps in zip(found[0], merged, strict=True))


def match_steps(first: Profile, second: Profile) -> tuple[Match, ...]:
    """The steps of two profiles joined where they share imported nodes, in order of the first profile, then of the second."""
    sides = (first.steps, second.steps)
    roots = _joined(step.group.nodes for side in sides for step in side)
    found: dict[str | tuple[int, int], tuple[list[StepProfile], list[StepProfile]]] = {}
    for number, side in enumerate(sides):
        for position, step in enumerate(side):
            nodes = step.group.nodes
            found.setdefault(roots[nodes[0]] if nodes else (number, position), ([], []))[number].append(step)
    return tuple(Match(tuple(one), tuple(other)) for one, other in found.values())


def _joined(sets: Iterable[tuple[str, ...]]) -> dict[str, str]:
    """Each name with the one that stands for all that it is joined with (union-find, paths halved)."""
    parents: dict[str, str] = {}

    def root(name: str) -> str:
        parents.setdefault(name, name)
        while parents[name] != name:
            parents[name] = parents[parents[name]]
            name = parents[name]
        return name

    for names in sets:
        for name in names:
            parents[root(name)] = root(names[0])
    return {name: root(name) for name in parents}
