"""Activations that leave memory for a while: which buffers of a Plan hold them when, and what is copied out and in again.

Activations that steps compute in place of each other leave and come back as one: a chain. Of a chain, each stay in memory is a
buffer of its own. What goes out is what has been written until then, in whole pages.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ....runtime.plan import (
    ARENA_ROLES,
    PAGE,
    SCRATCH,
    Buffer,
    Launch,
    Plan,
    Region,
    Role,
    Step,
    step_reads,
    step_writes,
)
from ..prefetch.problem import Use


@dataclass(frozen=True, slots=True)
class Chain:
    """Activations of equal size, each but the first computed in place of the one before, and the steps that use any of them."""

    members: tuple[str, ...]
    size_bytes: int
    uses: tuple[Use, ...]


@dataclass(frozen=True, slots=True)
class Departure:
    """A chain's value goes out when step `after` is complete, and step `before` waits for that. The copy stands behind step
    `position`."""

    chain: Chain
    after: int
    before: int | None
    position: int

    @property
    def waiting(self) -> int | None:
        """The step that waits for the copy."""
        return self.before


@dataclass(frozen=True, slots=True)
class Return:
    """A chain's value comes back once step `after` is complete; steps `first` to `last` use it. The copy stands behind step
    `position`."""

    chain: Chain
    after: int
    first: int
    last: int
    position: int

    @property
    def waiting(self) -> int | None:
        """The step that waits for the copy."""
        return self.first


@dataclass(frozen=True, slots=True)
class _Access:
    """A step's use of bytes of a buffer."""

    step: int
    region: Region
    is_write: bool


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a member of a chain is during a stay: a buffer that begins at byte `start` of it."""

    buffer: str
    start: int = 0

    def region(self, offset: int, size_bytes: int) -> Region:
        return Region(self.buffer, offset - self.start, size_bytes)

    def of(self, region: Region) -> Region:
        """A region of the chain's bytes."""
        return replace(region, buffer=self.buffer, offset=region.offset - self.start)


# Which activations may leave


def chains_of(plan: Plan, min_bytes: int) -> list[Chain]:
    """The activations of a placed Plan that may leave memory: of so many bytes at least, with steps that do without them between
    others that do not, and written in whole pages, or to their end."""
    accesses, buffers = _accesses(plan.steps), {buffer.name: buffer for buffer in plan.buffers}
    successors, partial = _successors(plan, accesses, buffers)
    behind = set(successors.values())
    found = []
    for name, buffer in buffers.items():
        if buffer.role is not Role.ACTIVATION or name in behind or name not in accesses or buffer.size_bytes < min_bytes:
            continue
        members = [name]
        while (following := successors.get(members[-1])) is not None:
            members.append(following)
        chain = Chain(tuple(members), buffer.size_bytes, _uses([one for member in members for one in accesses[member]]))
        is_idle = any(b.step > a.step + 1 for a, b in zip(chain.uses, chain.uses[1:], strict=False))
        if is_idle and partial.isdisjoint(members) and all(_is_in_pages(accesses[member], buffer) for member in members):
            found.append(chain)
    return found


def _uses(accesses: Sequence[_Access]) -> tuple[Use, ...]:
    written = {one.step for one in accesses if one.is_write}
    return tuple(Use(step, step in written) for step in sorted({one.step for one in accesses}))


def _is_in_pages(accesses: Sequence[_Access], buffer: Buffer) -> bool:
    """Whether nothing that is written begins or ends within a page that holds anything else."""
    regions = [one.region for one in accesses if one.is_write]
    ends = (region.end for region in regions)
    if any(region.rows > 1 for region in regions):  # one page has bytes of several steps
        return False
    return all(r.offset % PAGE == 0 for r in regions) and all(end % PAGE == 0 or end == buffer.size_bytes for end in ends)


def _successors(
    plan: Plan, accesses: Mapping[str, Sequence[_Access]], buffers: Mapping[str, Buffer]
) -> tuple[dict[str, str], set[str]]:
    """Which buffer takes over all bytes of another in place; and those of which only a part is taken over, or takes over."""
    successors, partial = dict[str, str](), set[str]()
    for index, step in enumerate(plan.steps):
        if not isinstance(step, Launch):
            continue
        for write, read in step.inplace:
            old, new = buffers[step.reads[read].buffer], buffers[step.writes[write].buffer]
            if old is new:  # parts of one, which Concat joins: what is read lies beside what is written
                continue
            if old.role not in ARENA_ROLES or new.role not in ARENA_ROLES or old.offset is None or new.offset is None:
                continue
            is_met = old.offset < new.offset + new.size_bytes and new.offset < old.offset + old.size_bytes
            if is_met and old.space == new.space:
                if (old.offset, old.size_bytes) == (new.offset, new.size_bytes) and old.name not in successors:
                    assert max(one.step for one in accesses[old.name]) == index == min(one.step for one in accesses[new.name])
                    successors[old.name] = new.name
                else:
                    partial |= {old.name, new.name}
    return successors, partial


def _accesses(steps: Sequence[Step]) -> dict[str, list[_Access]]:
    found: dict[str, list[_Access]] = {}
    for index, step in enumerate(steps):
        for regions, is_write in ((step_reads(step), False), (step_writes(step), True)):
            for region in regions:
                found.setdefault(region.buffer, []).append(_Access(index, region, is_write))
    return found


# Where they are when


class Spills:
    """The buffers, places and copies of all chains that leave; `copies` are numbered as they are in the stream.

    `buffers` are new or replace those of the Plan; `pairs` tells for the number of a copy which bytes it moves from where to
    where.
    """

    def __init__(self, plan: Plan, copies: Mapping[int, Departure | Return], arena: str) -> None:
        self._accesses = _accesses(plan.steps)
        self._given = {buffer.name: buffer for buffer in plan.buffers}
        self._arena = arena
        self.buffers: dict[str, Buffer] = {}
        self.pairs: dict[int, tuple[tuple[Region, Region], ...]] = {}
        self._starts: dict[str, list[int]] = {}  # of each member's stays but the first, where they begin
        self._places: dict[str, list[_Place]] = {}
        chains: dict[Chain, dict[int, Departure | Return]] = {}
        for number, copy in copies.items():
            chains.setdefault(copy.chain, {})[number] = copy
        for chain, own in chains.items():
            self._settle(chain, own)

    def place(self, region: Region, step: int) -> Region:
        """Where a step of the Plan finds a region."""
        if region.buffer not in self._starts:
            return region
        place = self._places[region.buffer][bisect_right(self._starts[region.buffer], step)]
        return place.of(region)

    def _settle(self, chain: Chain, copies: Mapping[int, Departure | Return]) -> None:
        returns = {one.first: number for number, one in copies.items() if isinstance(one, Return)}
        starts = sorted(returns)
        away = {start: self._away_before(chain, start) for start in starts}
        for member in chain.members:
            self._starts[member] = starts
            self._places[member] = [_Place(name) for name in (member, *(f"{member}@{returns[start]}" for start in starts))]
            for stay in sorted({bisect_right(starts, one.step) for one in self._accesses[member]}):
                is_born = stay == 0 and away[starts[0]] == member  # then later steps may use more of it than those before
                self._add(member, stay, starts[0] if is_born else None, is_moved=member in away.values())
        departures = {one.after: number for number, one in copies.items() if isinstance(one, Departure)}
        for after, number in departures.items():
            following = min((other for other in departures if other > after), default=starts[-1])
            coming = {returns[start]: start for start in starts if after < start <= following}
            self._move(away[min(coming.values())], after, number, coming)

    def _away_before(self, chain: Chain, start: int) -> str:
        """The member that is used before a step and from that on."""
        steps = {member: [one.step for one in self._accesses[member]] for member in chain.members}
        return next(member for member in chain.members if min(steps[member]) < start <= max(steps[member]))

    def _add(self, member: str, stay: int, end: int | None, *, is_moved: bool) -> None:
        """The buffer of a member in a stay; where that ends before step `end`, of the bytes alone that are used until then."""
        place, given = self._places[member][stay], self._given[member].size_bytes
        size_bytes = whole_pages(given) if is_moved else given
        if end is not None:
            pages = _pages(one.region for one in self._accesses[member] if one.step < end)
            size_bytes = pages[-1].stop - pages[0].start
            place = self._places[member][stay] = replace(place, start=pages[0].start)
        self.buffers[place.buffer] = Buffer(place.buffer, Role.ACTIVATION, size_bytes, self._arena)

    def _move(self, member: str, after: int, number: int, coming: Mapping[int, int]) -> None:
        """Copy number `number` takes out what has been written up to step `after`; those of `coming` bring it back, each for the
        step that it names."""
        accesses = self._accesses[member]
        pages = _pages(one.region for one in accesses if one.is_write and one.step <= after)
        outside = _Place(f"{member} out {number}", pages[0].start)
        size_bytes = pages[-1].stop - pages[0].start
        self.buffers[outside.buffer] = Buffer(outside.buffer, Role.ACTIVATION, size_bytes, SCRATCH)
        for copy, step in {number: after, **coming}.items():
            inside = self._places[member][bisect_right(self._starts[member], step)]
            regions = [(inside.region(run.start, len(run)), outside.region(run.start, len(run))) for run in pages]
            self.pairs[copy] = tuple(pair if copy == number else pair[::-1] for pair in regions)


def _pages(regions: Iterable[Region]) -> list[range]:
    """The whole pages that hold regions, those side by side as one, in order."""
    found: list[range] = []
    for region in sorted(regions, key=lambda region: region.offset):
        pages = range(region.offset // PAGE * PAGE, whole_pages(region.end))
        if found and pages.start <= found[-1].stop:
            found[-1] = range(found[-1].start, max(found[-1].stop, pages.stop))
        else:
            found.append(pages)
    return found


def whole_pages(size_bytes: int) -> int:
    """The bytes that a constant takes in the file, and in memory when it is copied."""
    return -(-size_bytes // PAGE) * PAGE
