"""The order in which states are renewed: whatever reads the old value comes first, or a copy makes it so."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush

from ...runtime.plan import Buffer, Copy, Host, Launch, Region, Step, step_reads, step_writes


def order_renewals(steps: Sequence[Step], renewals: Sequence[Buffer]) -> tuple[list[Step], dict[str, int]]:
    """The steps, all of one stream, such that the old value of each state is read before a buffer of `renewals` renews it.

    Steps change their places as little as that needs. Where it cannot be, since what reads the old value depends on the new one,
    or a step reads the one and writes the other and cannot do that in place, the new value is made in a buffer of its own and
    copied to its place later; the second result names these buffers, with their bytes.
    """
    order = _Order(list(steps))
    copies: dict[str, int] = {}
    for new in renewals:
        assert new.renews is not None
        if not order.renew(new.renews, new.name):
            copies[f"{new.name}.copied"] = new.size_bytes
            order.detach(new, f"{new.name}.copied")
    return order.sorted(), copies


@dataclass
class _Order:
    """Steps, and which of them must come before which: by the values that they make, and the old values that they read."""

    steps: list[Step]
    after: list[set[int]] = field(init=False)  # the steps that must come after each
    readers: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    writers: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self.after = [set() for _ in self.steps]
        for index, step in enumerate(self.steps):
            for uses, regions in ((self.readers, step_reads(step)), (self.writers, step_writes(step))):
                for name in dict.fromkeys(region.buffer for region in regions):
                    uses[name].append(index)
        for name, readers in self.readers.items():
            for writer in self.writers.get(name, ()):
                written = [region for region in step_writes(self.steps[writer]) if region.buffer == name]
                self.after[writer].update(
                    reader
                    for reader in readers
                    if reader != writer and any(_meet(one, other) for one in written for other in self._reads(reader, name))
                )

    def renew(self, old: str, new: str) -> bool:
        """Order the readers of an old value before the uses of the new one; False, and nothing done, where that cannot be."""
        users = dict.fromkeys((*self.writers[new], *self.readers[new]))
        readers = self.readers[old]
        if any(not self._is_in_place(index, old, new) for index in set(readers) & set(users)):
            return False
        if self._reach(users) & set(readers):
            return False
        for reader in readers:
            self.after[reader].update(user for user in users if user != reader)
        return True

    def detach(self, new: Buffer, elsewhere: str) -> None:
        """Have a new value made elsewhere, and copied to its place when nothing reads the old one any more."""
        assert new.renews is not None
        for index in {*self.writers[new.name], *self.readers[new.name]}:
            self.steps[index] = _renamed(self.steps[index], new.name, elsewhere)
        copy = len(self.steps)
        self.steps.append(Copy(Region(elsewhere, 0, new.size_bytes), Region(new.name, 0, new.size_bytes)))
        self.after.append(set())
        for index in (*self.writers[new.name], *self.readers[new.renews]):
            self.after[index].add(copy)

    def sorted(self) -> list[Step]:
        """The steps in an order that keeps all of this, otherwise as they were."""
        needs = [0] * len(self.steps)
        for followers in self.after:
            for follower in followers:
                needs[follower] += 1
        ready = [index for index, count in enumerate(needs) if not count]
        heapify(ready)
        found: list[Step] = []
        while ready:
            index = heappop(ready)
            found.append(self.steps[index])
            for follower in self.after[index]:
                needs[follower] -= 1
                if not needs[follower]:
                    heappush(ready, follower)
        assert len(found) == len(self.steps), "steps that must come before each other"
        return found

    def _is_in_place(self, index: int, old: str, new: str) -> bool:
        """Whether a step that reads an old value and uses the new one does so in place: it writes each byte where it read it."""
        step = self.steps[index]
        if not isinstance(step, Launch) or any(region.buffer == new for region in step.reads):
            return False
        reads = [number for number, region in enumerate(step.reads) if region.buffer == old]
        writes = [number for number, region in enumerate(step.writes) if region.buffer == new]
        return all((write, read) in step.inplace and _same(step, write, read) for write in writes for read in reads)

    def _reach(self, starts: Mapping[int, None]) -> set[int]:
        """All steps that must come after one of these."""
        found: set[int] = set()
        pending = list(starts)
        while pending:
            for follower in self.after[pending.pop()]:
                if follower not in found:
                    found.add(follower)
                    pending.append(follower)
        return found

    def _reads(self, index: int, name: str) -> Iterator[Region]:
        return (region for region in step_reads(self.steps[index]) if region.buffer == name)


def _meet(one: Region, other: Region) -> bool:
    return max(one.offset, other.offset) < min(one.offset + one.size_bytes, other.offset + other.size_bytes)


def _same(step: Launch, write: int, read: int) -> bool:
    one, other = step.writes[write], step.reads[read]
    return (one.offset, one.size_bytes) == (other.offset, other.size_bytes)


def _renamed(step: Step, old: str, new: str) -> Step:
    """The step with another buffer in the place of one."""

    def regions(given: tuple[Region, ...]) -> tuple[Region, ...]:
        return tuple(replace(region, buffer=new) if region.buffer == old else region for region in given)

    match step:
        case Launch() | Host():
            return replace(step, reads=regions(step.reads), writes=regions(step.writes))
        case Copy():
            (source,), (destination,) = regions((step.source,)), regions((step.destination,))
            return replace(step, source=source, destination=destination)
        case _:
            return step
