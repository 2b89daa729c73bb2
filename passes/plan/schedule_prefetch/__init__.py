"""schedule-prefetch: keep a program within a memory limit, with weights that come from its file when they are due.

| file | what |
|---|---|
| `../prefetch/` | which weights stay and when the others come, call after call, as a pure function |
| `stays.py` | which steps read what each copy brings |
| `residencies.py` | copies, events and buffers that carry it out |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import ClassVar

from ....compiler.pipeline import Context, PlanPass
from ....runtime.errors import CompileError
from ....runtime.hardware.machine import COPY_SECONDS
from ....runtime.hardware.memory_limit import LEAST_STREAMED_BYTES
from ....runtime.plan import (
    ALIGNMENT,
    ARENA_ROLES,
    COMPUTE,
    Buffer,
    Launch,
    Plan,
    Role,
    Step,
    planned_bytes,
    step_reads,
    step_writes,
)
from ....runtime.report import size
from ..plan_memory import PlanMemory
from ..prefetch import problem as prefetch
from ..prefetch.residents import residents, spare_bytes
from ..prefetch.scheduler import InfeasibleError, candidates
from .residencies import Residency, whole_pages, with_residencies
from .stays import Stays, on_demand, seconds_of, stays_of

_TRIES = 20  # schedules for limits that fall by what the packing of the one before took too much
_PACKED = 3  # choices for a limit, of which the fastest that can be packed within it is taken
# Of the room for weights that never leave, shares that are tried: what is left is for looking ahead, and weights are not divided.
_SHARES = (1.0, 0.99, 0.975, 0.95, 0.925, 0.9, 0.875, 0.85, 0.8, 0.75, 0.6, 0.4, 0.0)
_BYTES_PER_SECOND = 1e10  # of a step that no kernel's estimate tells the time of


@dataclass(frozen=True)
class SchedulePrefetch(PlanPass):
    """Leave weights in the program's file and copy each into memory before it is read, where a limit asks for it.

    Before:  launch matmul reads x, w                                     (w in constants)
    After:   copy w to w@0, beside what runs before; wait; launch matmul reads x, w@0    (w in storage, w@0 in the arena)

    Resident weights, weights in memory for a while and activations together never take more than the limit; what the next call
    reads first is copied at the end of this one. Without a limit, or within it, nothing changes. Constants of less than
    `min_bytes` always stay. `on_demand`: each copy begins when its reader is next, as a baseline to measure against.

    Raises:
        CompileError: no schedule fits. The message names the least that would, and the step that asks for it.
    """

    name: ClassVar[str] = "schedule-prefetch"
    on_demand: bool = False
    min_bytes: int = LEAST_STREAMED_BYTES

    def run(self, plan: Plan, context: Context) -> Plan:
        if context.memory_limit is None:
            return plan
        total = planned_bytes(plan)
        limit = context.memory_limit.of(total) if context.limit_bytes is None else context.limit_bytes
        context.limit_bytes, context.call_seconds = limit, sum(context.step_us.values()) / 1e6
        if total <= limit:
            context.remark(self.name, f"{size(total)} are within the limit of {size(limit)}")
            return _bounded(plan, _arena_of(plan), limit)
        weights = _Weights(plan, context, self.min_bytes)
        budget, cut, before = limit, 0, None
        for _ in range(_TRIES):
            problem = weights.problem(budget)
            try:
                choices = self._fastest(problem)
            except InfeasibleError:
                break
            excess = []
            for stays in choices:
                placed, _ = PlanMemory().place(with_residencies(plan, weights.residencies(stays), weights.arena))
                excess.append(planned_bytes(placed) - limit)
                if excess[-1] <= 0:
                    context.call_seconds = seconds_of(problem, stays)
                    self._report(placed, limit, problem, stays, context)
                    return _bounded(placed, weights.arena, limit)
            cut = 2 * cut if choices == before else min(excess)  # what changes nothing was too little
            budget, before = budget - cut, choices
        least, step = weights.least()
        label = weights.labels[step] if weights.labels else "no step"
        what = f"this program takes {size(total)}, and at least {size(least)}: {label} needs that at once"
        at = f"{size(least)} would do" if budget == limit else f"{size(least + limit - budget)} may do"
        raise CompileError(
            "memory_limit", f"{size(limit)} are too little; {what}", f"raise the limit ({at}), or compile smaller inputs"
        )

    def _fastest(self, problem: prefetch.Problem) -> list[Stays]:
        """The best choices, the fastest first. Raises InfeasibleError."""
        found = dict.fromkeys(stays_of(problem, schedule) for schedule in candidates(problem, _residents(problem)))
        fastest = sorted(found, key=partial(seconds_of, problem))[:_PACKED]
        return [on_demand(problem, stays) for stays in fastest] if self.on_demand else fastest

    def _report(self, plan: Plan, limit: int, problem: prefetch.Problem, stays: Stays, context: Context) -> None:
        copied = sum(problem.objects[stay.weight].size_bytes for stay in stays)
        seconds = copied / problem.tiers[0].bandwidth_in
        text = f"{size(planned_bytes(plan))} of {size(limit)}: "
        text += f"{len(stays)} copies of {size(copied)} a call from the file; "
        text += f"{1e3 * seconds_of(problem, stays):.2f} ms are predicted, "
        text += f"{1e3 * problem.compute_seconds:.2f} ms of them for kernels, {1e3 * seconds:.2f} ms for copies"
        context.remark(self.name, text)


def _residents(problem: prefetch.Problem) -> Iterator[frozenset[int]]:
    """Weights that might never leave, each choice once: as many as there is room for, or less, and first what many steps read."""
    spare, found = max(spare_bytes(problem), 0), set[frozenset[int]]()
    for share, most_used in product(_SHARES, (0, len(problem.objects))):
        chosen = residents(problem, int(share * spare), most_used)
        if chosen not in found:
            found.add(chosen)
            yield chosen


def _bounded(plan: Plan, arena: str, limit: int) -> Plan:
    """The Plan with what is left of the limit as the capacity of its arena."""
    room = limit - planned_bytes(plan)
    spaces = (replace(s, capacity_bytes=s.size_bytes + room) if s.name == arena else s for s in plan.spaces)
    return replace(plan, spaces=tuple(spaces))


def _arena_of(plan: Plan) -> str:
    return next((buffer.space for buffer in plan.buffers if buffer.role in ARENA_ROLES), "arena")


class _Weights:
    """A Plan as steps with times, bytes that are live anyway, and weights that every call reads."""

    def __init__(self, plan: Plan, context: Context, min_bytes: int) -> None:
        self._bandwidth = 1e9 * context.target.machine.storage_gbs
        assert all(step.stream == COMPUTE for step in plan.steps), "the plan has copies on other streams already"
        buffers = {buffer.name: buffer for buffer in plan.buffers}
        self.arena = _arena_of(plan)
        self.labels = [step.label if isinstance(step, Launch) else f"step {index}" for index, step in enumerate(plan.steps)]
        kernels = {kernel.symbol: kernel.bytes_moved for kernel in plan.kernels}
        self._seconds = tuple(_seconds(step, context.step_us, kernels) for step in plan.steps)
        uses: dict[str, list[int]] = {}
        for index, step in enumerate(plan.steps):
            for region in step_reads(step):
                if buffers[region.buffer].role is Role.CONSTANT:
                    uses.setdefault(region.buffer, []).append(index)
        large = {name: tuple(dict.fromkeys(steps)) for name, steps in uses.items() if buffers[name].size_bytes >= min_bytes}
        self._names = list(large)
        self._sizes_uses = [(whole_pages(buffers[name].size_bytes), steps) for name, steps in large.items()]
        small = [b for b in plan.buffers if b.role is Role.STATE or (b.role is Role.CONSTANT and b.name not in large)]
        self._fixed = sum(-(-buffer.size_bytes // ALIGNMENT) * ALIGNMENT for buffer in small)
        self._live = _live_bytes(plan, buffers)

    def problem(self, limit: int) -> prefetch.Problem:
        """What to schedule where so many bytes may be used. What is live at a step is as a workspace of it: it never leaves."""
        steps = [prefetch.Step(seconds, self._fixed + live) for seconds, live in zip(self._seconds, self._live, strict=True)]
        tier = prefetch.Tier(self._bandwidth, self._bandwidth, COPY_SECONDS)
        return prefetch.read_only(steps, self._sizes_uses, limit, tier)

    def least(self) -> tuple[int, int]:
        """The smallest limit that any schedule can keep, and the step that asks for it: which needs all its weights at once."""
        needed = self.problem(0).step_bytes()
        most = max(needed, default=0)
        return most, needed.index(most) if needed else 0

    def residencies(self, stays: Stays) -> list[Residency]:
        return [Residency(self._names[one.weight], one.after, one.first, one.last, one.until) for one in stays]


def _seconds(step: Step, step_us: Mapping[str, float], kernels: Mapping[str, int]) -> float:
    if isinstance(step, Launch) and step.label in step_us:
        return step_us[step.label] / 1e6
    moved = kernels.get(step.kernel, 0) if isinstance(step, Launch) else sum(region.size_bytes for region in step_writes(step))
    return moved / _BYTES_PER_SECOND


def _live_bytes(plan: Plan, buffers: Mapping[str, Buffer]) -> list[int]:
    """The bytes of activations and workspaces that lie in the arena at each step, in whole pages."""
    spans: dict[str, tuple[int, int]] = {}
    for index, step in enumerate(plan.steps):
        for region in step_reads(step) + step_writes(step):
            first, _ = spans.get(region.buffer, (index, index))
            spans[region.buffer] = (first, index)
    # Those that share an address in place count once: the highest byte in use, where the plan has placed them, is no less.
    live: list[set[tuple[int, int]]] = [set() for _ in plan.steps]
    for name, (first, last) in spans.items():
        buffer = buffers[name]
        if buffer.role in ARENA_ROLES and buffer.offset is not None:
            for index in range(first, last + 1):
                live[index].add((buffer.offset, buffer.size_bytes))
    return [sum(whole_pages(size_bytes) for size_bytes in dict(sorted(at)).values()) for at in live]
