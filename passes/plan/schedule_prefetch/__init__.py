"""schedule-prefetch: keep a program within a memory limit, with weights that come from its file when they are due.

| file | what |
|---|---|
| `weights.py` | which weights stay and when the others come, as a pure function |
| `residencies.py` | copies, events and buffers that carry it out |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from ....compiler.pipeline import Context, PlanPass
from ....runtime.errors import CompileError
from ....runtime.hardware.machine import COPY_SECONDS
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
from .residencies import Residency, whole_pages, with_residencies
from .weights import Choice, Setting, Weight, choose, least_limit

_TRIES = 20  # schedules for limits that fall by what the packing of the one before took too much
_BYTES_PER_SECOND = 1e10  # of a step that no kernel's estimate tells the time of


@dataclass(frozen=True)
class SchedulePrefetch(PlanPass):
    """Leave weights in the program's file and copy each into memory before it is read, where a limit asks for it.

    Before:  launch matmul reads x, w                                     (w in constants)
    After:   copy w to w@0, beside what runs before; wait; launch matmul reads x, w@0    (w in storage, w@0 in the arena)

    Resident weights, weights in memory for a while and activations together never take more than the limit. Without a limit, or
    within it, nothing changes. Constants of less than `min_bytes` always stay. `on_demand`: each copy begins when its reader is
    next, as a baseline to measure against.

    Raises:
        CompileError: no schedule fits. The message names the least that would, and the step that asks for it.
    """

    name: ClassVar[str] = "schedule-prefetch"
    on_demand: bool = False
    min_bytes: int = 1 << 16

    def run(self, plan: Plan, context: Context) -> Plan:
        if context.memory_limit is None:
            return plan
        total = planned_bytes(plan)
        limit = context.memory_limit.of(total)
        if total <= limit:
            context.remark(self.name, f"{size(total)} are within the limit of {size(limit)}")
            return _bounded(plan, _arena_of(plan), limit)
        problem = _Problem(plan, context, self.min_bytes)
        budget, cut, before = limit, 0, None
        for _ in range(_TRIES):
            setting = problem.setting(budget)
            choice = choose(setting, runs_ahead=not self.on_demand)
            if choice is None:
                break
            placed, _ = PlanMemory().place(with_residencies(plan, problem.residencies(choice), problem.arena))
            excess = planned_bytes(placed) - limit
            if excess <= 0:
                self._report(placed, limit, setting, choice, context)
                return _bounded(placed, problem.arena, limit)
            cut = 2 * cut if choice == before else excess  # what changes nothing was too little
            budget, before = budget - cut, choice
        least, step = problem.least()
        label = problem.labels[step] if problem.labels else "no step"
        what = f"this program takes {size(total)}, and at least {size(least)}: {label} needs that at once"
        at = f"{size(least)} would do" if budget == limit else f"{size(least + limit - budget)} may do"
        raise CompileError(
            "memory_limit", f"{size(limit)} are too little; {what}", f"raise the limit ({at}), or compile smaller inputs"
        )

    def _report(self, plan: Plan, limit: int, setting: Setting, choice: Choice, context: Context) -> None:
        copied = sum(setting.weights[stay.weight].size_bytes for stay in choice.stays)
        text = (
            f"{size(planned_bytes(plan))} of {size(limit)}: {len(choice.stays)} copies of {size(copied)} a call from the file; "
        )
        text += f"{1e3 * choice.seconds:.2f} ms are predicted, {1e3 * sum(setting.seconds):.2f} ms of them for kernels, "
        text += f"{1e3 * copied / setting.bandwidth:.2f} ms for copies"
        context.remark(self.name, text)


def _bounded(plan: Plan, arena: str, limit: int) -> Plan:
    """The Plan with what is left of the limit as the capacity of its arena."""
    room = limit - planned_bytes(plan)
    spaces = (replace(s, capacity_bytes=s.size_bytes + room) if s.name == arena else s for s in plan.spaces)
    return replace(plan, spaces=tuple(spaces))


def _arena_of(plan: Plan) -> str:
    return next((buffer.space for buffer in plan.buffers if buffer.role in ARENA_ROLES), "arena")


class _Problem:
    """A Plan as steps with times, bytes that are live anyway, and weights."""

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
        self._weights = tuple(Weight(whole_pages(buffers[name].size_bytes), steps) for name, steps in large.items())
        small = [b for b in plan.buffers if b.role is Role.STATE or (b.role is Role.CONSTANT and b.name not in large)]
        self._fixed = sum(-(-buffer.size_bytes // ALIGNMENT) * ALIGNMENT for buffer in small)
        self._live = _live_bytes(plan, buffers)

    def setting(self, limit: int) -> Setting:
        """What to choose for, where so many bytes may be used."""
        live = tuple(self._fixed + live for live in self._live)
        return Setting(self._seconds, live, self._weights, limit, self._bandwidth, COPY_SECONDS)

    def least(self) -> tuple[int, int]:
        return least_limit(self.setting(0))

    def residencies(self, choice: Choice) -> list[Residency]:
        return [Residency(self._names[stay.weight], stay.after, stay.first, stay.last) for stay in choice.stays]


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
