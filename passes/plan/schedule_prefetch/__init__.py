"""schedule-prefetch: keep a program within a memory limit, with weights that come from its file when they are due, and
activations that leave memory until they are used again.

| file | what |
|---|---|
| `../prefetch/` | which weights stay and when the others come, call after call, as a pure function |
| `objects.py` | a Plan as a problem of that function |
| `stays.py` | the copies in the order of one stream, and which steps read what each brings |
| `recomputed.py` | activations that are computed again before a late reader |
| `residencies.py` | copies, events and buffers that carry it out; `spills.py` is those of activations |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import ClassVar

from ....compiler.pipeline import Context, PlanPass
from ....runtime.errors import MemoryLimitError
from ....runtime.hardware.memory_limit import LEAST_STREAMED_BYTES
from ....runtime.plan import ALIGNMENT, STORAGE, Plan, Role, planned_bytes
from ....runtime.report import size
from ....runtime.target import Target
from ..plan_memory import PlanMemory
from ..prefetch import problem as prefetch
from ..prefetch.bounds import ceiling
from ..prefetch.integer_program import by_integer_program, is_small
from ..prefetch.residents import residents, spare_bytes
from ..prefetch.schedule import Schedule
from ..prefetch.scheduler import InfeasibleError, candidates
from .objects import Objects, arena_of
from .recomputed import recomputed
from .residencies import with_residencies
from .stays import Copies, Leave, copies_of, on_demand, seconds_of

_TRIES = 20  # schedules for limits that fall by what the packing of the one before took too much
_PACKED = 3  # choices for a limit, of which the fastest that can be packed within it is taken
_SEARCHES = 6  # long searches for packings, of a second each: after them, what is quickly packed has to do
# Of the room for weights that never leave, shares that are tried: what is left is for looking ahead, and weights are not divided.
_SHARES = (1.0, 0.99, 0.975, 0.95, 0.925, 0.9, 0.875, 0.85, 0.8, 0.75, 0.6, 0.4, 0.0)
_SPILLED = 64  # part of the limit: what takes less than that is not worth a copy out and one in, if anything else does
_STALLED = 1.01  # of the time of kernels: below it, nothing is left to gain by copying activations
_PROGRAMS = 2  # limits for which integer programs of some seconds are solved, where rules that look ahead leave something to gain


@dataclass(frozen=True)
class SchedulePrefetch(PlanPass):
    """Leave weights in the program's file and copy each into memory before it is read, where a limit asks for it; and copy
    activations that are idle to a scratch file and back, or compute them again, where that fits or is faster.

    Before:  launch matmul reads x, w                                     (w in constants)
    After:   copy w to w@0, beside what runs before; wait; launch matmul reads x, w@0    (w in storage, w@0 in the arena)

    Resident weights, weights in memory for a while and activations together never take more than the limit; what the next call
    reads first is copied at the end of this one. Without a limit, or within it, nothing changes. Constants of less than
    `min_bytes` always stay. `on_demand`: each copy begins when its reader is next, as a baseline to measure against. Launches run
    twice only where it `repeats` them.

    Raises:
        MemoryLimitError: no schedule fits. The message names the least that would, and the step that asks for it.
    """

    name: ClassVar[str] = "schedule-prefetch"
    on_demand: bool = False
    min_bytes: int = LEAST_STREAMED_BYTES
    repeats: bool = True

    def run(self, plan: Plan, context: Context) -> Plan:
        if context.memory_limit is None:
            return plan
        total = planned_bytes(plan)
        limit = context.memory_limit.of(total) if context.limit_bytes is None else context.limit_bytes
        context.limit_bytes, context.call_seconds = limit, sum(context.step_us.values()) / 1e6
        if total <= limit:
            context.remark(self.name, f"{size(total)} are within the limit of {size(limit)}")
            return _bounded(plan, arena_of(plan), limit)
        worth = max(limit // _SPILLED, self.min_bytes)
        found = self._scheduled(plan, limit, context, worth)
        if self.repeats and (isinstance(found, MemoryLimitError) or found.choice.objects.chains):
            again = self._repeating(plan, limit, context)
            if again is not None and (isinstance(found, MemoryLimitError) or again.choice.seconds < found.choice.seconds):
                found = again
        if isinstance(found, MemoryLimitError):
            found = self._with_small_spills(plan, limit, context, worth, found)
        if isinstance(found, MemoryLimitError):
            raise found
        context.call_seconds = found.choice.predicted_seconds
        self._report(found, limit, context)
        return _bounded(found.plan, arena_of(plan), limit)

    def _repeating(self, plan: Plan, limit: int, context: Context) -> _Scheduled | None:
        """A schedule in which what activations would take beyond the limit is computed again when it is used; None where there is
        none."""

        def needs(trial: Plan) -> tuple[int, ...]:
            return tuple(Objects(trial, context, self.min_bytes, None).problem(0).step_bytes())

        smaller = recomputed(plan, limit, needs, lambda trial: PlanMemory(effort="quick").place(trial)[0], context.step_us)
        if smaller is None:
            return None
        found = self._scheduled(smaller[0], limit, context, None)
        return None if isinstance(found, MemoryLimitError) else replace(found, repeated=smaller[1])

    def _with_small_spills(
        self, plan: Plan, limit: int, context: Context, worth: int, refusal: MemoryLimitError
    ) -> _Scheduled | MemoryLimitError:
        """A schedule in which activations leave that take less than is `worth` it, the largest that might do, then any; or why
        there is none."""
        sizes = [worth]
        while sizes[-1] > self.min_bytes:
            sizes.append(max(sizes[-1] // 2, self.min_bytes))
        leaving = {least: Objects(plan, context, self.min_bytes, least) for least in sizes}
        if context.target.is_gpu or len(leaving[self.min_bytes].chains) == len(leaving[worth].chains):
            return refusal
        enough = next((least for least in sizes[1:] if leaving[least].least()[0] <= limit), self.min_bytes)
        found: _Scheduled | MemoryLimitError = refusal
        for least in dict.fromkeys((enough, self.min_bytes)):
            if isinstance(found, MemoryLimitError):
                found = self._scheduled(plan, limit, context, least)
        return found

    def _scheduled(self, plan: Plan, limit: int, context: Context, least_spilled: int | None) -> _Scheduled | MemoryLimitError:
        """The fastest schedule that is found, or why there is none. Activations may leave of `least_spilled` bytes or more."""
        total = planned_bytes(plan)
        weights = Objects(plan, context, self.min_bytes, None)
        spilled = weights if least_spilled is None else Objects(plan, context, self.min_bytes, least_spilled)
        leaving = spilled if spilled.chains and not context.target.is_gpu else None
        budget, cut, before, searches = limit, 0, None, _SEARCHES
        for number in range(_TRIES):
            choices = self._fastest(weights, leaving, budget, context.target, may_solve=number < _PROGRAMS)
            if not choices:
                break
            excess = []
            for choice in choices:
                movements = choice.objects.movements(choice.copies)
                moved = with_residencies(plan, movements, weights.arena) if movements else plan  # repeated launches may do
                placed, above, has_searched = _placed(moved, weights.arena, limit, may_search=searches > 0)
                searches -= has_searched
                excess.append(above)
                if excess[-1] <= 0:
                    return _Scheduled(placed, choice)
            cut = 2 * cut if choices == before else min(excess)  # what changes nothing was too little
            budget, before = budget - cut, choices
        return _too_little(leaving or weights, total, limit, budget)

    def _fastest(
        self, weights: Objects, spilled: Objects | None, limit: int, target: Target, *, may_solve: bool
    ) -> list[_Choice]:
        """The best choices, the fastest first; none where nothing keeps within the limit.

        Activations leave only where all else cannot keep within it, or is not as fast as the kernels; and integer programs are
        solved only where what they cannot pass is not reached.
        """
        found = self._choices(weights, limit, target)
        if spilled is not None and (not found or found[0].seconds > _STALLED * found[0].problem.compute_seconds):
            found = [*found, *self._choices(spilled, limit, target)]
        all_objects = spilled or weights
        problem = all_objects.problem(limit)
        if may_solve and found and is_small(problem):
            least, best = ceiling(problem), min(choice.seconds for choice in found)
            if least.compute >= least.transfer and best > _STALLED * least.seconds:  # else copies never pause: rules do
                found += self._of(all_objects, problem, by_integer_program(problem), target)
        return sorted(found, key=lambda choice: choice.predicted_seconds)[:_PACKED]

    def _choices(self, objects: Objects, limit: int, target: Target) -> list[_Choice]:
        problem = objects.problem(limit)
        try:
            return self._of(objects, problem, candidates(problem, _residents(problem)), target)
        except InfeasibleError:
            return []

    def _of(self, objects: Objects, problem: prefetch.Problem, schedules: Iterable[Schedule], target: Target) -> list[_Choice]:
        found = dict.fromkeys(copies_of(problem, one) for one in schedules)
        late = dict.fromkeys(on_demand(problem, copies) if self.on_demand else copies for copies in found)
        return sorted((_Choice(objects, problem, one, target) for one in late), key=lambda choice: choice.predicted_seconds)

    def _report(self, found: _Scheduled, limit: int, context: Context) -> None:
        plan, choice = found.plan, found.choice
        problem, away = choice.problem, {copy.object for copy in choice.copies if isinstance(copy, Leave)}
        sizes = [problem.objects[copy.object].size_bytes for copy in choice.copies if copy.object not in away]
        moved = [problem.objects[copy.object].size_bytes for copy in choice.copies if copy.object in away]
        text = f"{size(planned_bytes(plan))} of {size(limit)}: {len(sizes)} copies of {size(sum(sizes))} a call from the file"
        text += f", {found.repeated} launches run again before late readers of what they make" if found.repeated else ""
        text += f", {len(moved)} of {size(sum(moved))} of activations that leave and come back" if moved else ""
        text += f"; {1e3 * context.call_seconds:.2f} ms are predicted, "
        text += f"{1e3 * problem.compute_seconds:.2f} ms of them for kernels, {1e3 * choice.copy_seconds:.2f} ms for copies"
        context.remark(self.name, text)


@dataclass(frozen=True)
class _Choice:
    """Copies that keep within a limit, as long as they can be packed."""

    objects: Objects
    problem: prefetch.Problem
    copies: Copies
    target: Target

    @cached_property
    def seconds(self) -> float:
        """Of a call whose kernels the copies do not slow down."""
        return seconds_of(self.problem, self.copies)

    @property
    def copy_seconds(self) -> float:
        sizes = self.problem.objects
        return sum(sizes[copy.object].size_bytes for copy in self.copies) / self.problem.tiers[0].bandwidth_in

    @cached_property
    def predicted_seconds(self) -> float:
        """Of a call, with what copies take of the kernels' cores: by it choices are compared, so that of equally fast ones that
        with fewer bytes is taken."""
        threads = 1 if self.target.is_gpu else self.target.threads  # of cores: on a GPU none are slowed by copies
        factor = self.target.machine.slowed_by_copies(self.problem.compute_seconds, self.copy_seconds, threads)
        steps = tuple(replace(step, seconds=factor * step.seconds) for step in self.problem.steps)
        return seconds_of(replace(self.problem, steps=steps), self.copies)


@dataclass(frozen=True)
class _Scheduled:
    """A Plan within the limit, and the choice that it is; launches that run twice are `repeated`."""

    plan: Plan
    choice: _Choice
    repeated: int = 0


def _too_little(objects: Objects, total: int, limit: int, budget: int) -> MemoryLimitError:
    """Why nothing keeps within a limit, of which packings have left a `budget`."""
    least, step = objects.least()
    label = objects.labels[step] if objects.labels else "no step"
    if least + limit - budget >= total:  # what is copied is copied in whole pages
        what = f"this program takes {size(total)}, and no less by copies: {label} would need {size(least)} with them"
    else:
        what = f"this program takes {size(total)}, and at least {size(least)}: {label} needs that at once"
    least = min(max(least + limit - budget, limit + 1), total)
    return MemoryLimitError(f"{size(limit)} are too little; {what}", least, f"raise the limit ({size(least)} may do)")


def _residents(problem: prefetch.Problem) -> Iterator[frozenset[int]]:
    """Weights that might never leave, each choice once: as many as there is room for, or less, and first what many steps read.

    There is more room where activations leave.
    """
    rooms = [max(spare_bytes(problem), 0)]
    if any(not item.is_kept for item in problem.objects):
        rooms.append(max(problem.limit_bytes - max(problem.step_bytes()), 0))
    found = set[frozenset[int]]()
    for room, share, most_used in product(rooms, _SHARES, (0, len(problem.objects))):
        chosen = residents(problem, int(share * room), most_used)
        if chosen not in found:
            found.add(chosen)
            yield chosen


def _bounded(plan: Plan, arena: str, limit: int) -> Plan:
    """The Plan with what is left of the limit as the capacity of its arena."""
    return _with_room(plan, arena, plan.space(arena).size_bytes + limit - planned_bytes(plan))


def _with_room(plan: Plan, arena: str, room: int | None) -> Plan:
    """The Plan whose arena may take so many bytes."""
    return replace(plan, spaces=tuple(replace(s, capacity_bytes=room) if s.name == arena else s for s in plan.spaces))


def _placed(plan: Plan, arena: str, limit: int, *, may_search: bool) -> tuple[Plan, int, bool]:
    """The Plan with every buffer in its place, and by how much it is above the limit, at least; below 0, within it. And whether
    that took a long search, which is made only where a packing may fit."""
    kept = (one for one in plan.buffers if one.role in (Role.CONSTANT, Role.STATE) and one.renews is None)
    room = limit - sum(-(-one.size_bytes // ALIGNMENT) * ALIGNMENT for one in kept if one.space != STORAGE)
    quick, packings = PlanMemory(effort="quick").place(_with_room(plan, arena, room))
    if planned_bytes(quick) <= limit or arena not in packings or not may_search:
        return quick, planned_bytes(quick) - limit, False
    if (bound := packings[arena].bound_bytes) > room:
        return quick, bound - room, False
    placed, _ = PlanMemory().place(plan)  # searches for the least find packings that searches for the room do not
    return placed, planned_bytes(placed) - limit, True
