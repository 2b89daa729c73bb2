"""Two programs of one model side by side: what one computes in a group, beside what the other does for the same nodes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from ...runtime.profile import GroupDescription


class TimedStep(Protocol):
    """A step of a program with the time that it took, or is thought to take."""

    @property
    def label(self) -> str: ...

    @property
    def group(self) -> GroupDescription: ...

    @property
    def time_us(self) -> float: ...

    @property
    def bytes_moved(self) -> int: ...


S = TypeVar("S", bound=TimedStep)
S_co = TypeVar("S_co", bound=TimedStep, covariant=True)


class TimedProgram(Protocol[S_co]):
    """A program's steps in their order: a profile, or a prediction."""

    @property
    def steps(self) -> tuple[S_co, ...]: ...


@dataclass(frozen=True, slots=True)
class Match(Generic[S]):
    """Steps of two programs that compute the same nodes; one side may be empty."""

    first: tuple[S, ...]
    second: tuple[S, ...]

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


def match_steps(first: TimedProgram[S], second: TimedProgram[S]) -> tuple[Match[S], ...]:
    """The steps of two programs of one model beside each other, in order of the first, then of the second.

    Those are joined that are built around the same imported nodes. A step that is built around none stands with the first that
    shares the most nodes with it; what shares none, with all that shares nodes with it. So steps that touch, because both hold
    the conversion or the join between them, stay apart.
    """
    steps = [(side, step) for side, profile in enumerate((first, second)) for step in profile.steps]
    roots = _joined(step.group.computing for _, step in steps)
    users: dict[str, dict[str, None]] = defaultdict(dict)  # of each node, the roots of steps that hold it, in order
    for _, step in steps:
        for name in step.group.nodes if step.group.computing else ():
            users[name][roots[step.group.computing[0]]] = None
    lone = _joined(step.group.nodes for _, step in steps if not step.group.computing)
    found: dict[tuple[str, str] | int, tuple[list[S], list[S]]] = {}
    for number, (side, step) in enumerate(steps):
        found.setdefault(_place(step, roots, users, lone) or number, ([], []))[side].append(step)
    return tuple(Match(tuple(one), tuple(other)) for one, other in found.values())


def _place(
    step: TimedStep, roots: Mapping[str, str], users: Mapping[str, Mapping[str, None]], lone: Mapping[str, str]
) -> tuple[str, str] | None:
    """What a step stands with: the root of what it is built around, or of its nodes; None for a step without nodes."""
    if step.group.computing:
        return "computing", roots[step.group.computing[0]]
    shared = Counter(root for name in step.group.nodes for root in users.get(name, ()))
    if shared:
        return "computing", max(shared, key=lambda root: shared[root])  # the first of equals
    return ("lone", lone[step.group.nodes[0]]) if step.group.nodes else None


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
