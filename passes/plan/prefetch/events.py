"""What happens in a call, in order, and what is there between two of them: from the simulation to the schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Happening: TypeAlias = Literal["begin", "end", "in", "drop", "out", "written"]


@dataclass(frozen=True, slots=True)
class Event:
    """A step begins or ends; an object is let in, is dropped, begins to go out, or has been written out, by a tier's stream."""

    what: Happening
    index: int
    tier: int = 0


@dataclass(frozen=True, slots=True)
class Boundary:
    """What is inside when a call ends and the next one begins, and what of that is newer than its value outside."""

    inside: frozenset[int] = frozenset()
    dirty: frozenset[int] = frozenset()
