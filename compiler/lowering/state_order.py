"""The order in which states are renewed: whatever reads the old value comes first, or a copy makes it so."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush

from ...runtime.memory.regions import close_between
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
    """Steps, and which of them must come before which: by the bytes that they make, and those of old values that they read."""

    steps: list[Step]
    after: list[set[int]] = field(init=False)  # the steps that must come after each
    reads: dict[str, list[tuple[Region, int]]] = field(default_factory=lambda: defaultdict(list))
    writes: dict[str, list[tuple[Region, int]]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self.after = [set() for _ in self.steps]
        for index, step in enumerate(self.steps):
            for uses, regions in ((self.reads, step_reads(step)), (self.writes, step_writes(step))):
                for region in regions:
                    uses[region.buffer].append((region, index))
        for name, writes in self.writes.items():
            for writer, reader in close_between(writes, self.reads.get(name, ())):
                if reader != writer:
                    self.after[writer].add(reader)

    def renew(self, old: str, new: str) -> bool:
        """Order the readers of an old value before the uses of the same bytes of the new one; False, and nothing done, where that
        cannot be."""
        found = [(replace(region, buffer=old), index) for region, index in (*self.writes[new], *self.reads[new])]
        pairs = dict.fromkeys(close_between(self.reads[old], found))
        if any(reader == user and not self._is_in_place(reader, old, new) for reader, user in pairs):
            return False
        added = [(reader, user) for reader, user in pairs if reader != user and user not in self.after[reader]]
        for reader, user in added:
            self.after[reader].add(user)
        if len(self._sorted()) == len(self.steps):
            return True
        for reader, user in added:
            self.after[reader].remove(user)
        return False

    def detach(self, new: Buffer, elsewhere: str) -> None:
        """Have a new value made elsewhere, and copied to its place when nothing reads the old one any more."""
        assert new.renews is not None
        for index in {index for _, index in (*self.writes[new.name], *self.reads[new.name])}:
            self.steps[index] = _renamed(self.steps[index], new.name, elsewhere)
        copy = len(self.steps)
        self.steps.append(Copy(Region(elsewhere, 0, new.size_bytes), Region(new.name, 0, new.size_bytes)))
        self.after.append(set())
        for _, index in (*self.writes[new.name], *self.reads[new.renews]):
            self.after[index].add(copy)

    def sorted(self) -> list[Step]:
        """The steps in an order that keeps all of this, otherwise as they were."""
        found = self._sorted()
        assert len(found) == len(self.steps), "steps that must come before each other"
        return [self.steps[index] for index in found]

    def _sorted(self) -> list[int]:
        """The same by the places of the steps, without those in circles and what must come after these."""
        needs = [0] * len(self.steps)
        for followers in self.after:
            for follower in followers:
                needs[follower] += 1
        ready = [index for index, count in enumerate(needs) if not count]
        heapify(ready)
        found: list[int] = []
        while ready:
            index = heappop(ready)
            found.append(index)
            for follower in self.after[index]:
                needs[follower] -= 1
                if not needs[follower]:
                    heappush(ready, follower)
        return found

    def _is_in_place(self, index: int, old: str, new: str) -> bool:
        """Whether a step that reads bytes of an old value and uses them of the new one does so in place: it writes each where it
        read it."""
        step = self.steps[index]
        if not isinstance(step, Launch):
            return False
        found = [(region, place) for place, region in enumerate(step.reads) if region.buffer == old]
        writes = [(region, place) for place, region in enumerate(step.writes)]
        reads = [(region, -1) for region in step.reads]  # no pair in place has those
        used = [(replace(region, buffer=old), place) for region, place in (*writes, *reads) if region.buffer == new]
        return all(
            (write, read) in step.inplace and replace(step.writes[write], buffer=old) == step.reads[read]
            for write, read in close_between(used, found)
        )


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
