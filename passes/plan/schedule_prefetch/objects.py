"""A Plan as the scheduler sees it: steps with times, bytes that are live anyway, and what may leave memory."""

from __future__ import annotations

from collections.abc import Mapping

from ....compiler.pipeline import Context
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
    step_reads,
    step_writes,
)
from ..prefetch import problem as prefetch
from .residencies import Movement, Residency
from .spills import Departure, Return, chains_of, whole_pages
from .stays import Copies, Leave, Stay

_BYTES_PER_SECOND = 1e10  # of a step that no kernel's estimate tells the time of


class Objects:
    """Weights that every call reads, of `min_bytes` at least, and, unless `least_spilled` is None, activations that may leave
    memory, of so many bytes at least."""

    def __init__(self, plan: Plan, context: Context, min_bytes: int, least_spilled: int | None) -> None:
        self._bandwidth = 1e9 * context.target.machine.storage_gbs
        assert all(step.stream == COMPUTE for step in plan.steps), "the plan has copies on other streams already"
        buffers = {buffer.name: buffer for buffer in plan.buffers}
        self.arena = arena_of(plan)
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
        self._weights = [(whole_pages(buffers[name].size_bytes), steps) for name, steps in large.items()]
        self.chains = [] if least_spilled is None else chains_of(plan, least_spilled)
        kept = [one for one in plan.buffers if one.role in (Role.CONSTANT, Role.STATE) and one.name not in large]
        # What renews a state lies in its bytes.
        self._fixed = sum(-(-one.size_bytes // ALIGNMENT) * ALIGNMENT for one in kept if one.renews is None)
        self._live = _live_bytes(plan, buffers, {member for chain in self.chains for member in chain.members})

    def problem(self, limit: int) -> prefetch.Problem:
        """What to schedule where so many bytes may be used. What is live at a step is as a workspace of it: it never leaves."""
        steps = [prefetch.Step(seconds, self._fixed + live) for seconds, live in zip(self._seconds, self._live, strict=True)]
        tier = prefetch.Tier(self._bandwidth, self._bandwidth, COPY_SECONDS, takes_turns=True)
        weights = prefetch.read_only(steps, self._weights, limit, tier)
        chains = (prefetch.Object(whole_pages(chain.size_bytes), chain.uses) for chain in self.chains)
        return prefetch.Problem(weights.steps, (*weights.objects, *chains), limit, (tier,), is_periodic=True)

    def least(self) -> tuple[int, int]:
        """The smallest limit that any schedule can keep, and the step that asks for it: which needs all its objects at once."""
        needed = self.problem(0).step_bytes()
        most = max(needed, default=0)
        return most, needed.index(most) if needed else 0

    def movements(self, copies: Copies) -> list[Movement]:
        """What the copies of a problem's objects are of the Plan's buffers."""
        return [self._movement(copy) for copy in copies]

    def _movement(self, copy: Stay | Leave) -> Movement:
        number = copy.object - len(self._names)
        if isinstance(copy, Leave):
            return Departure(self.chains[number], copy.after, copy.before, copy.position)
        if number >= 0:
            return Return(self.chains[number], copy.after, copy.first, copy.last, copy.position)
        return Residency(self._names[copy.object], copy.after, copy.first, copy.last, copy.until, copy.position)


def arena_of(plan: Plan) -> str:
    """The space of a context's activations."""
    return next((buffer.space for buffer in plan.buffers if buffer.role in ARENA_ROLES), "arena")


def _seconds(step: Step, step_us: Mapping[str, float], kernels: Mapping[str, int]) -> float:
    if isinstance(step, Launch) and step.label in step_us:
        return step_us[step.label] / 1e6
    moved = kernels.get(step.kernel, 0) if isinstance(step, Launch) else sum(region.size_bytes for region in step_writes(step))
    return moved / _BYTES_PER_SECOND


def _live_bytes(plan: Plan, buffers: Mapping[str, Buffer], movable: set[str]) -> list[int]:
    """The bytes of activations and workspaces that lie in the arena at each step, in whole pages, but for `movable` ones."""
    spans: dict[str, tuple[int, int]] = {}
    for index, step in enumerate(plan.steps):
        for region in step_reads(step) + step_writes(step):
            first, _ = spans.get(region.buffer, (index, index))
            spans[region.buffer] = (first, index)
    # Those that share an address in place count once: the highest byte in use, where the plan has placed them, is no less.
    live: list[set[tuple[int, int]]] = [set() for _ in plan.steps]
    for name, (first, last) in spans.items():
        buffer = buffers[name]
        if buffer.role in ARENA_ROLES and buffer.offset is not None and name not in movable:
            for index in range(first, last + 1):
                live[index].add((buffer.offset, buffer.size_bytes))
    return [sum(whole_pages(size_bytes) for size_bytes in dict(sorted(at)).values()) for at in live]
