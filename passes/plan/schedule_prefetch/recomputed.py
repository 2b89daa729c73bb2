"""Activations that are computed again before a late reader, instead of lying in memory until then.

A launch that runs twice gives the same bits: what it reads is written once in a call. So a value may leave memory without a copy,
where its launch reads nothing that would have to stay for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from ....runtime.plan import ARENA_ROLES, Buffer, Copy, Host, Launch, Plan, Region, Role, Step, step_reads, step_writes
from .spills import whole_pages

_MOST = 64  # plans that are tried, each with one more launch
_DRAWN = ("random", "multinomial")  # templates whose results are others each time
Needs = Callable[[Plan], Sequence[int]]  # the bytes that each step of a placed plan needs at once
Place = Callable[[Plan], Plan]


@dataclass(frozen=True, slots=True)
class _Again:
    """The launch at step `made` runs once more before step `before`, for all readers of its result from there on."""

    buffer: Buffer
    made: int
    before: int
    seconds: float


def recomputed(plan: Plan, limit: int, needs: Needs, place: Place, seconds: Mapping[str, float]) -> tuple[Plan, int] | None:
    """The Plan, placed, with launches repeated such that no step needs more than the limit, and how many are; None where none of
    them helps. `seconds`: of launches, by their labels."""
    found, excess = plan, _excess(needs(plan), limit)
    choices, count = _choices(plan, needs(plan), seconds), 0
    reach = _reach(plan, needs(plan), limit)
    for number in range(_MOST):
        if not excess or excess > sum(reach[: _MOST - number]) or (again := next(choices, None)) is None:
            break
        trial = place(_with(found, again))
        needed = needs(trial)
        if (less := _excess(needed, limit)) < excess:
            found, excess, count = trial, less, count + 1
            choices, reach = _choices(found, needed, seconds), _reach(found, needed, limit)
    return (found, count) if count and not excess else None


def _excess(needed: Sequence[int], limit: int) -> int:
    """Bytes above the limit, of all steps together."""
    return sum(max(size_bytes - limit, 0) for size_bytes in needed)


def _reach(plan: Plan, needed: Sequence[int], limit: int) -> list[int]:
    """By how much single launches that are repeated can lower the excess at most, the most first: each lets one activation leave
    between two steps that use it, which may then compute in place of it."""
    above = [max(size_bytes - limit, 0) for size_bytes in needed]
    sums, counts = ([0, *accumulate(numbers)] for numbers in (above, map(bool, above)))
    sizes = {buffer.name: whole_pages(buffer.size_bytes) for buffer in plan.buffers if buffer.role is Role.ACTIVATION}
    found = []
    for name, steps in _uses(plan.steps).items():
        for a, b in pairwise(steps if name in sizes else ()):
            if b > a + 1:
                found.append(min(sums[b + 1] - sums[a], sizes[name] * (counts[b + 1] - counts[a])))
    return sorted(found, reverse=True)


def _choices(plan: Plan, needed: Sequence[int], seconds: Mapping[str, float]) -> Iterator[_Again]:
    """What might be computed again instead of living through the step that needs most, first what takes the least time a byte."""
    worst = max(range(len(needed)), key=lambda step: needed[step])
    buffers = {buffer.name: buffer for buffer in plan.buffers}
    arenas = {buffer.space for buffer in plan.buffers if buffer.role in ARENA_ROLES}
    uses, makers = _uses(plan.steps), _makers(plan, buffers)
    found = []
    for name, steps in uses.items():
        buffer, before = buffers[name], [step for step in steps if step < worst]
        after = [step for step in steps if step > worst]
        if buffer.role is not Role.ACTIVATION or buffer.space not in arenas or worst in steps or not before or not after:
            continue
        made = makers.get(name)
        if made is not None and all(_is_there(buffers[region.buffer], uses, after[0]) for region in step_reads(plan.steps[made])):
            step = plan.steps[made]
            assert isinstance(step, Launch)
            found.append(_Again(buffer, made, after[0], seconds.get(step.label, 0.0)))
    yield from sorted(found, key=lambda one: one.seconds / one.buffer.size_bytes)


def _uses(steps: Sequence[Step]) -> dict[str, list[int]]:
    """The steps that use each buffer, in order."""
    found: dict[str, list[int]] = {}
    for index, step in enumerate(steps):
        for name in dict.fromkeys(region.buffer for region in step_reads(step) + step_writes(step)):
            found.setdefault(name, []).append(index)
    return found


def _makers(plan: Plan, buffers: Mapping[str, Buffer]) -> dict[str, int]:
    """The launches that alone write a buffer, the whole of it and nothing else, by its name; none of those that draw numbers."""
    drawing = {kernel.symbol for kernel in plan.kernels if kernel.template in _DRAWN}
    writers = Counter(name for step in plan.steps for name in {region.buffer for region in step_writes(step)})
    found = {}
    for index, step in enumerate(plan.steps):
        if isinstance(step, Launch) and len(step.writes) == 1 and step.kernel not in drawing:
            (written,) = step.writes
            if writers[written.buffer] == 1 and written == Region(written.buffer, 0, buffers[written.buffer].size_bytes):
                found[written.buffer] = index
    return found


def _is_there(buffer: Buffer, uses: Mapping[str, Sequence[int]], step: int) -> bool:
    """Whether a buffer holds at a step what it held before, and lies in memory then in any case."""
    if buffer.role in (Role.CONSTANT, Role.INPUT):
        return True
    return buffer.role is Role.ACTIVATION and uses[buffer.name][-1] >= step


def _with(plan: Plan, again: _Again) -> Plan:
    """The Plan, not placed, with a launch repeated."""
    launch, suffix = plan.steps[again.made], f" again {again.before}"
    assert isinstance(launch, Launch)
    names = {region.buffer: f"{region.buffer}{suffix}" for region in (*launch.writes, *launch.scratch)}
    repeated = replace(
        launch,
        writes=tuple(replace(region, buffer=names[region.buffer]) for region in launch.writes),
        scratch=tuple(replace(region, buffer=names[region.buffer]) for region in launch.scratch),
    )
    name = again.buffer.name
    later = [_reading(step, name, names[name]) for step in plan.steps[again.before :]]
    buffers = [replace(buffer, name=names[buffer.name], offset=None) for buffer in plan.buffers if buffer.name in names]
    steps = (*plan.steps[: again.before], repeated, *later)
    return replace(plan, steps=steps, buffers=(*plan.buffers, *buffers))


def _reading(step: Step, old: str, new: str) -> Step:
    """A step that reads another buffer in the place of one."""

    def renamed(regions: tuple[Region, ...]) -> tuple[Region, ...]:
        return tuple(replace(region, buffer=new) if region.buffer == old else region for region in regions)

    match step:
        case Launch() | Host():
            return replace(step, reads=renamed(step.reads))
        case Copy():
            return replace(step, source=renamed((step.source,))[0])
        case _:
            return step
