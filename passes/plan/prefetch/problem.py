"""Steps in a fixed order, the objects they use, and a memory that is too small for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Step:
    """A kernel: how long it takes, and the bytes it needs beside the objects it uses, while it runs."""

    seconds: float
    workspace_bytes: int = 0

    def __post_init__(self) -> None:
        assert self.seconds >= 0, self
        assert self.workspace_bytes >= 0, self


@dataclass(frozen=True, slots=True)
class Use:
    """A step reads an object, or writes it, too. Either way it needs the value there was, but for what it bears."""

    step: int
    is_written: bool = False

    def __post_init__(self) -> None:
        assert self.step >= 0, self


@dataclass(frozen=True, slots=True)
class Object:
    """Bytes that are moved as one, with the steps of one call that use them, in order.

    An object that `is_outside` has its value outside when a call begins: a weight, or an input. Any other is born by the step
    that uses it first, which writes it. One that `is_kept` is the same in the next call, which uses it again: a weight, or an
    optimizer's state. Any other is dead after its last use.
    """

    size_bytes: int
    uses: tuple[Use, ...]
    is_outside: bool = False
    is_kept: bool = False

    def __post_init__(self) -> None:
        steps = [use.step for use in self.uses]
        assert self.size_bytes >= 0, self
        assert all(a < b for a, b in pairwise(steps)), f"one use a step, in order: {self}"
        assert self.is_outside or not self.is_kept, f"what is kept is outside when the first call begins: {self}"
        assert self.is_outside or not self.uses or self.uses[0].is_written, f"read before it is born: {self}"

    @property
    def is_written(self) -> bool:
        return any(use.is_written for use in self.uses)


@dataclass(frozen=True, slots=True)
class Tier:
    """A memory outside: bytes per second into the fast memory and out of it, seconds that each copy takes beside these, and how
    many bytes of what is born inside it holds; None: all there are. Where it `takes_turns`, as a disk does, it copies in or out,
    never both at a time."""

    bandwidth_in: float
    bandwidth_out: float
    latency: float = 0.0
    capacity_bytes: int | None = None
    takes_turns: bool = False

    def __post_init__(self) -> None:
        assert self.bandwidth_in > 0, self
        assert self.bandwidth_out > 0, self
        assert self.latency >= 0, self

    def seconds_in(self, size_bytes: int) -> float:
        return self.latency + size_bytes / self.bandwidth_in

    def seconds_out(self, size_bytes: int) -> float:
        return self.latency + size_bytes / self.bandwidth_out


@dataclass(frozen=True, slots=True)
class Problem:
    """Steps, objects, and at most how many bytes may be inside at any time.

    Each tier has a stream for copies in and one for copies out, which run side by side with each other and with the steps. What
    is outside at first lies in the first tier. Where the problem `is_periodic`, a call follows a call, forever.
    """

    steps: tuple[Step, ...]
    objects: tuple[Object, ...]
    limit_bytes: int
    tiers: tuple[Tier, ...]
    is_periodic: bool = False

    def __post_init__(self) -> None:
        assert self.tiers, "copies need a tier"
        for item in self.objects:
            assert not item.uses or item.uses[-1].step < len(self.steps), item

    @property
    def compute_seconds(self) -> float:
        return sum(step.seconds for step in self.steps)

    def dies(self, item: Object) -> bool:
        """Whether an object's value is of no use after its last use in a call."""
        return not item.is_kept or not (self.is_periodic or item.is_written)

    def step_bytes(self) -> list[int]:
        """For each step, the bytes of its objects and its workspace, which must be inside together."""
        needed = [step.workspace_bytes for step in self.steps]
        for item in self.objects:
            for use in item.uses:
                needed[use.step] += item.size_bytes
        return needed


def divided(problem: Problem, most_bytes: int) -> tuple[Problem, tuple[int, ...]]:
    """The problem with each object cut into pieces of at most so many bytes, which move one by one, and whose each piece is.

    Pieces fill the memory to its limit; a step still waits for all pieces of what it uses.
    """
    assert most_bytes > 0
    pieces: list[Object] = []
    owners: list[int] = []
    for index, item in enumerate(problem.objects):
        for start in range(0, max(item.size_bytes, 1), most_bytes):
            pieces.append(replace(item, size_bytes=min(most_bytes, item.size_bytes - start)))
            owners.append(index)
    return replace(problem, objects=tuple(pieces)), tuple(owners)


def read_only(steps: Sequence[Step], weights: Sequence[tuple[int, Sequence[int]]], limit_bytes: int, tier: Tier) -> Problem:
    """Weights that are streamed, call after call: (bytes, steps that read it) each."""
    objects = (
        Object(size, tuple(Use(step) for step in sorted(set(used))), is_outside=True, is_kept=True) for size, used in weights
    )
    return Problem(tuple(steps), tuple(objects), limit_bytes, (tier,), is_periodic=True)
