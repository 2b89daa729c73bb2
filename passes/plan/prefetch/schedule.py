"""A schedule of copies: what a scheduler decides, and all that a machine needs to carry it out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CopyIn:
    """An object comes in from a tier.

    It may begin when step `after_step` is complete and, of each tier, `after_outs` copies out: it takes over bytes that these
    used last, or the value that they wrote. Step `before_step` waits for it: the first that uses it.

    Steps are counted from the call in which the copy is listed: step -1 is the last one of the call before, and step N, where N
    is a call's number of steps, the first one of the next call. Copies out are counted alike: 0 of them means all of the calls
    before, -2 all of these but the last two.
    """

    object: int
    after_step: int
    before_step: int
    after_outs: tuple[int, ...]
    tier: int = 0


@dataclass(frozen=True, slots=True)
class CopyOut:
    """An object's value goes out to a tier, when step `after_step` is complete, which wrote it or used last what it takes there.

    Step `before_step` waits for it, for it takes over its bytes or writes the object; None: no step does. Steps are counted as
    for copies in.
    """

    object: int
    after_step: int
    before_step: int | None
    tier: int = 0


@dataclass(frozen=True, slots=True)
class Drop:
    """An object's bytes are free once its last use and its copies out up to step `after_step` are complete."""

    object: int
    after_step: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """The copies of one call, in the order in which the streams of their tiers carry them out, one at a time.

    Nothing here depends on how long anything takes: a machine that waits as the copies say stays within the limit at any
    speed. What dies is free after its last use; all else only where a drop says so. `inside`: what is inside, or on its way
    in, when a call begins; of a call's `inside`, `dirty` are newer than what lies outside. `residents` never leave. `seconds`:
    of one call, as simulated.
    """

    copies_in: tuple[CopyIn, ...]
    copies_out: tuple[CopyOut, ...]
    drops: tuple[Drop, ...]
    inside: frozenset[int]
    dirty: frozenset[int]
    residents: frozenset[int]
    seconds: float
