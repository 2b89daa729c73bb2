"""plan-memory: give every buffer of a Plan its place."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from ....compiler.pipeline import Context, PlanPass
from ....runtime.errors import CompileError
from ....runtime.plan import (
    ALIGNMENT,
    ARENA_ROLES,
    LASTING_ROLES,
    PAGE,
    SCRATCH,
    SHARED,
    STORAGE,
    Buffer,
    Copy,
    Launch,
    Plan,
    Record,
    Role,
    Space,
    Step,
    Wait,
    step_reads,
    step_writes,
)
from ..packing import Block, Effort, Packing, pack

_Group = list[tuple[Buffer, int]]  # buffers of one block of memory, and where they lie in it


@dataclass(frozen=True)
class PlanMemory(PlanPass):
    """Place constants one after the other, and the buffers of a context where they share bytes only when they cannot meet.

    `effort` is how long memory is packed for: about a second, or a minute ("max").

    Before:  buffer h activation size 4096 in arena
    After:   buffer h activation size 4096 in arena at 0, and the size of each space known

    A buffer lives from its first use to the last step that may run beside its last use; on one stream that is the last use. A
    buffer written in place of one, or of a part of one, that dies at that step shares its address; of parts that is tried, as the
    larger buffer's memory then stays taken. Arena buffers that no step uses are dropped. States
    share nothing: they are kept from call to call. What a call finds in a slot lives from its beginning, what it leaves there
    to its end; these two have the same bytes, at the bottom of the arena.

    Raises:
        CompileError: a space needs more bytes than its capacity.
    """

    name: ClassVar[str] = "plan-memory"
    inplace: bool = True
    effort: Effort = "default"

    def run(self, plan: Plan, context: Context) -> Plan:
        planned, packings = self.place(plan)
        for space in planned.spaces:
            if space.name in packings:
                _require_capacity(space, packings[space.name])
                arena = [b for b in planned.buffers if b.space == space.name and b.role in ARENA_ROLES]
                self._report(space, arena, packings[space.name], context)
        return planned

    def place(self, plan: Plan) -> tuple[Plan, dict[str, Packing]]:
        """The Plan with every buffer in its place, and how each space that holds buffers of a context was packed, which may take
        more than its capacity."""
        lifetimes = _lifetimes(plan)
        offsets: dict[str, int] = {}
        paged = _paged_spaces(plan)
        packings: dict[str, Packing] = {}
        spaces = []
        for space in plan.spaces:
            constants = [buffer for buffer in plan.buffers if buffer.space == space.name and buffer.role is Role.CONSTANT]
            alignment = PAGE if space.name in paged else ALIGNMENT
            if space.name == SHARED:
                size_bytes = sum(buffer.size_bytes for buffer in constants)
            else:
                size_bytes = _place_constants(constants, lifetimes, offsets, alignment)
            arena = [b for b in plan.buffers if b.space == space.name and b.role in ARENA_ROLES and b.name in lifetimes]
            assert not (constants and arena), f"space {space.name} holds constants and buffers of one context"
            if arena:
                groups, packing = self._packed(plan.steps, arena, lifetimes, alignment, space.capacity_bytes)
                size_bytes, packings[space.name] = packing.total_bytes, packing
                for group, offset in zip(groups, packing.offsets, strict=True):
                    offsets.update((buffer.name, offset + within) for buffer, within in group)
            size_bytes += _place_lasting([b for b in plan.buffers if b.space == space.name and b.role in LASTING_ROLES], offsets)
            spaces.append(replace(space, size_bytes=size_bytes))
        kept = (buffer for buffer in plan.buffers if buffer.role not in ARENA_ROLES or buffer.name in lifetimes)
        buffers = tuple(replace(buffer, offset=offsets.get(buffer.name)) for buffer in kept)
        return replace(plan, spaces=tuple(spaces), buffers=buffers), packings

    def _packed(
        self,
        steps: Sequence[Step],
        arena: Sequence[Buffer],
        lifetimes: Mapping[str, range],
        alignment: int,
        capacity_bytes: int | None,
    ) -> tuple[list[_Group], Packing]:
        """The buffers that share addresses, and the packing of these groups: with or without parts, whichever takes less."""
        choices, pins = [[[(buffer, 0)] for buffer in arena]], _slot_places(arena, alignment)
        if self.inplace:
            whole, parts = (_groups(steps, arena, lifetimes, part_alignment) for part_alignment in (None, alignment))
            choices = [whole] if len(parts) == len(whole) else [whole, parts]  # parts only add to what is shared
        packed = [
            (
                groups,
                pack(
                    [_block(group, lifetimes, pins) for group in groups], alignment, capacity=capacity_bytes, effort=self.effort
                ),
            )
            for groups in choices
        ]
        return min(packed, key=lambda one: one[1].total_bytes)

    def _report(self, space: Space, arena: Sequence[Buffer], packing: Packing, context: Context) -> None:
        alone = sum(buffer.size_bytes for buffer in arena)
        text = f"{space.name}: {packing.total_bytes} bytes for {len(arena)} buffers of {alone} bytes; "
        text += f"the lower bound is {packing.bound_bytes}"
        context.remark(self.name, text)


def _paged_spaces(plan: Plan) -> set[str]:
    """Where bytes come from a file or go to one, and the files: only in whole pages."""
    places = {buffer.name: buffer.space for buffer in plan.buffers}
    pairs = [{places[step.source.buffer], places[step.destination.buffer]} for step in plan.steps if isinstance(step, Copy)]
    return {STORAGE, SCRATCH}.union(*(pair for pair in pairs if pair & {STORAGE, SCRATCH}))


def _place_constants(constants: Sequence[Buffer], lifetimes: Mapping[str, range], offsets: dict[str, int], alignment: int) -> int:
    """Put constants one after the other in the order of their first use, as they are read; return the bytes they take."""
    end = 0
    for buffer in sorted(
        constants, key=lambda buffer: lifetimes[buffer.name].start if buffer.name in lifetimes else len(lifetimes)
    ):
        offsets[buffer.name] = end
        end += -(-buffer.size_bytes // alignment) * alignment
    return end


def _place_lasting(states: Sequence[Buffer], offsets: dict[str, int]) -> int:
    """Put states or barriers one after the other as they come, what renews one in its bytes; return the bytes they take.

    So programs of equal states have them at equal places.
    """
    end = 0
    for buffer in states:
        if buffer.renews is None:
            offsets[buffer.name] = end
            end += -(-buffer.size_bytes // ALIGNMENT) * ALIGNMENT
    offsets.update((buffer.name, offsets[buffer.renews]) for buffer in states if buffer.renews is not None)
    return end


def _require_capacity(space: Space, packing: Packing) -> None:
    if space.capacity_bytes is not None and packing.total_bytes > space.capacity_bytes:
        bound = packing.bound_bytes
        fix = (
            "no order of steps given here fits"
            if bound > space.capacity_bytes
            else "a tighter packing may exist (plan-memory{effort=max})"
        )
        what = f"needs {packing.total_bytes} bytes, at least {bound}; its limit is {space.capacity_bytes}"
        raise CompileError(f"memory {space.name}", what, f"{fix}: raise the limit or use a smaller batch")


def _slot_places(arena: Sequence[Buffer], alignment: int) -> dict[str, int]:
    """Where slots lie: all live as a call ends and the next one begins, so they stand one on the other."""
    found, end = dict[str, int](), 0
    for buffer in arena:
        if buffer.role is Role.SLOT and buffer.renews is not None:
            found[buffer.name] = found[buffer.renews] = end
            end += -(-buffer.size_bytes // alignment) * alignment
    return found


def _block(group: _Group, lifetimes: Mapping[str, range], pins: Mapping[str, int]) -> Block:
    """One block for buffers that share bytes one after the other."""
    spans = [lifetimes[buffer.name] for buffer, _ in group]
    size_bytes = max(within + buffer.size_bytes for buffer, within in group)
    return Block(min(s.start for s in spans), max(s.stop for s in spans), size_bytes, pins.get(group[0][0].name))


# Lifetimes


def _lifetimes(plan: Plan) -> dict[str, range]:
    """For each buffer the half-open range of step indices in which its bytes are its own.

    From `stop` on, every step that touches memory runs after all uses of the buffer, whatever its stream.
    """
    starts: dict[str, int] = {}
    for index, step in enumerate(plan.steps):
        for region in step_reads(step) + step_writes(step):
            starts.setdefault(region.buffer, index)
    ends = _ends(plan.steps)
    found = {name: range(start, max(ends[name].values())) for name, start in starts.items()}
    for buffer in plan.buffers:
        if buffer.role is Role.SLOT and (life := found.get(buffer.name)) is not None:
            found[buffer.name] = range(life.stop) if buffer.renews is None else range(life.start, len(plan.steps))
    return found


def _ends(steps: Sequence[Step]) -> dict[str, dict[int, int]]:
    """For each buffer and each stream that uses it, from where on every step that touches memory runs after its uses there."""
    followers = _followers(steps)
    found: dict[str, dict[int, int]] = defaultdict(dict)
    for index, step in enumerate(steps):
        for region in step_reads(step) + step_writes(step):
            found[region.buffer][step.stream] = followers[index]
    return found


def _followers(steps: Sequence[Step]) -> list[int]:
    """For each step, the first index from which on every step that touches memory runs after it."""
    streams = {stream: number for number, stream in enumerate(dict.fromkeys(step.stream for step in steps))}
    if len(streams) == 1:
        return list(range(1, len(steps) + 1))
    everything = [len(steps)] * len(streams)
    completed = zip(steps, _completed(steps, streams), strict=True)
    before = [list(everything) if isinstance(step, (Record, Wait)) else clock for step, clock in completed]
    for clock, later in zip(before[-2::-1], before[:0:-1], strict=True):  # from the end: what all steps from here on run after
        clock[:] = map(min, clock, later)
    by_stream = [[clock[number] for clock in before] for number in range(len(streams))]
    seen = [0] * len(streams)
    followers = []
    for step in steps:
        number = streams[step.stream]
        followers.append(bisect_right(by_stream[number], seen[number]))
        seen[number] += 1
    return followers


def _completed(steps: Sequence[Step], streams: Mapping[int, int]) -> Iterator[list[int]]:
    """For each step, how many steps of each stream are complete when it starts."""
    clocks = [[0] * len(streams) for _ in streams]
    events: dict[int, list[int]] = {}
    for step in steps:
        number = streams[step.stream]
        yield list(clocks[number])
        clocks[number][number] += 1
        if isinstance(step, Record):
            events[step.event] = list(clocks[number])
        elif isinstance(step, Wait):
            clocks[number] = list(map(max, clocks[number], events[step.event]))


# In-place


def _groups(
    steps: Sequence[Step], arena: Sequence[Buffer], lifetimes: Mapping[str, range], part_alignment: int | None
) -> list[_Group]:
    """Arena buffers, those together that take over each other's bytes in place, in the order of first use.

    With a `part_alignment`, also where the one or the other is only a part of its buffer, and begins at a multiple of it.
    """
    buffers = {buffer.name: buffer for buffer in arena}
    successor: dict[str, tuple[str, int]] = {}  # of a buffer, and how far behind its beginning that begins
    taken: set[str] = set()
    uses, ends = _use_counts(steps), _ends(steps)
    for index, step in enumerate(steps):
        if not isinstance(step, Launch):
            continue
        for write, read in step.inplace:
            old, new = step.reads[read], step.writes[write]
            if old.buffer in successor or new.buffer in taken or not (old.buffer in buffers and new.buffer in buffers):
                continue
            if {buffers[old.buffer].role, buffers[new.buffer].role} != {Role.ACTIVATION} or old.size_bytes != new.size_bytes:
                continue
            is_last = lifetimes[old.buffer].stop == index + 1 and uses[index, old.buffer] == 1
            is_last &= all(end <= index for stream, end in ends[old.buffer].items() if stream != step.stream)  # none beside it
            is_first = lifetimes[new.buffer].start == index and uses[index, new.buffer] == 1
            is_whole = all(region.size_bytes == buffers[region.buffer].size_bytes for region in (old, new))
            behind = old.offset - new.offset
            if is_last and is_first and (is_whole or (part_alignment is not None and behind % part_alignment == 0)):
                successor[old.buffer] = new.buffer, behind
                taken.add(new.buffer)
    heads = sorted((buffer for buffer in arena if buffer.name not in taken), key=lambda buffer: lifetimes[buffer.name].start)
    return [_chain(head, buffers, successor) for head in heads]


def _use_counts(steps: Sequence[Step]) -> dict[tuple[int, str], int]:
    """How often a step uses a buffer."""
    counts: dict[tuple[int, str], int] = defaultdict(int)
    for index, step in enumerate(steps):
        for region in step_reads(step) + step_writes(step):
            counts[index, region.buffer] += 1
    return counts


def _chain(head: Buffer, buffers: Mapping[str, Buffer], successor: Mapping[str, tuple[str, int]]) -> _Group:
    """A buffer and those that take over bytes of it, one after the other."""
    found, within = [(head, 0)], 0
    while (then := successor.get(found[-1][0].name)) is not None:
        within += then[1]
        found.append((buffers[then[0]], within))
    first = min(within for _, within in found)
    return [(buffer, within - first) for buffer, within in found]
