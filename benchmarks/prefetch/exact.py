"""The shortest schedule of small cases, by Dijkstra's search over all of them."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

from prefuse.passes.plan.prefetch.problem import Problem


@dataclass(frozen=True, slots=True, order=True)
class _State:
    """The next step (or the running one), when it ends and the copy does (0: neither runs), what is inside, what comes in."""

    step: int
    step_left: float
    copy_left: float
    inside: int  # a bit for each object, also of what comes in
    coming: int


class Exact:
    """Cases of read-only objects and one call, with one stream. States are left only when a step or a copy ends."""

    def __init__(self, problem: Problem) -> None:
        assert not problem.is_periodic
        assert all(item.is_outside and not item.is_written for item in problem.objects)
        assert all(step.seconds > 0 and not step.workspace_bytes for step in problem.steps)
        self._problem = problem
        self._sizes = [item.size_bytes for item in problem.objects]
        self._reads = [0] * (len(problem.steps) + 1)
        for j, item in enumerate(problem.objects):
            for use in item.uses:
                self._reads[use.step] |= 1 << j
        self._last = [item.uses[-1].step if item.uses else -1 for item in problem.objects]

    @cached_property
    def seconds(self) -> float:
        """The least time of any schedule."""
        queue = [(0.0, _State(0, 0.0, 0.0, 0, 0))]
        seen: set[_State] = set()
        while queue:
            now, state = heapq.heappop(queue)
            if state.step == len(self._problem.steps):
                return now
            if state in seen:
                continue
            seen.add(state)
            for begun in self._begun(self._started(state)):
                passed, later = self._later(begun)
                if passed is not None:
                    heapq.heappush(queue, (now + passed, later))
        raise ValueError("no schedule fits the limit")

    def _started(self, state: _State) -> _State:
        """The next step begins when it can: to wait longer never helps."""
        needed = self._reads[state.step]
        if state.step_left or state.coming & needed or state.inside & needed != needed:
            return state
        return replace(state, step_left=self._problem.steps[state.step].seconds)

    def _begun(self, state: _State) -> Iterator[_State]:
        """No copy begins, or any that is of use, over any objects of which none could have stayed."""
        yield state
        if state.coming:
            return
        locked = self._reads[state.step] if state.step_left else 0
        idle = [j for j in range(len(self._sizes)) if state.inside >> j & 1 and not locked >> j & 1]
        inside = sum(size for j, size in enumerate(self._sizes) if state.inside >> j & 1)
        for j, size in enumerate(self._sizes):
            if state.inside >> j & 1 or self._last[j] < state.step:
                continue
            excess = inside + size - self._problem.limit_bytes
            for dropped in self._drops(idle, excess):
                yield replace(state, inside=(state.inside & ~dropped) | 1 << j, coming=1 << j, copy_left=self._copy_seconds(j))

    def _copy_seconds(self, j: int) -> float:
        return self._problem.tiers[0].seconds_in(self._sizes[j])

    def _drops(self, idle: list[int], excess: int) -> Iterator[int]:
        for count in range(len(idle) + 1):
            for chosen in combinations(idle, count):
                freed = sum(self._sizes[j] for j in chosen)
                if freed >= excess and (not chosen or freed - min(self._sizes[j] for j in chosen) < excess):
                    yield sum(1 << j for j in chosen)

    @staticmethod
    def _later(state: _State) -> tuple[float | None, _State]:
        """The state when the next thing ends; None where nothing runs."""
        running = [left for left in (state.step_left, state.copy_left) if left]
        if not running:
            return None, state
        passed = min(running)
        if state.step_left:
            left = state.step_left - passed
            state = replace(state, step_left=left, step=state.step + (not left))
        if state.copy_left:
            left = state.copy_left - passed
            state = replace(state, copy_left=left, coming=state.coming if left else 0)
        return passed, state
