"""Paging on demand: what comes in for a step does so when the step is next, and victims are chosen by a policy.

The policy fixes the order of copies. Run `ahead`, the streams go through them as soon as bytes are free; `serial`, a copy waits
until the step before the one that needs it is complete.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, TypeAlias

from prefuse.passes.plan.prefetch.events import Boundary, Event
from prefuse.passes.plan.prefetch.handover import scheduled
from prefuse.passes.plan.prefetch.problem import Object, Problem, Use
from prefuse.passes.plan.prefetch.schedule import Schedule

Policy: TypeAlias = Literal["lru", "belady", "size"]
POLICIES: tuple[Policy, ...] = ("lru", "belady", "size")
_FAR = 1024  # steps: the most that a next use counts, for the policy that weighs sizes
_NEVER = 1 << 40


def unrolled(problem: Problem, calls: int) -> Problem:
    """So many calls of a periodic problem as one. What is kept is one object, of all else each call has its own."""
    count = len(problem.steps)
    objects: list[Object] = []
    for item in problem.objects:
        copies = [tuple(Use(call * count + use.step, use.is_written) for use in item.uses) for call in range(calls)]
        if item.is_kept:
            objects.append(replace(item, uses=tuple(use for uses in copies for use in uses)))
        else:
            objects.extend(replace(item, uses=uses) for uses in copies)
    return replace(problem, steps=problem.steps * calls, objects=tuple(objects), is_periodic=False)


def on_demand(problem: Problem, policy: Policy, *, is_serial: bool) -> Schedule:
    """A policy's schedule of a problem that is not periodic (see `unrolled`)."""
    assert not problem.is_periodic
    pager = _Pager(problem, policy)
    events = pager.run()
    found = scheduled(problem, events, Boundary(), 0.0)
    if not is_serial:
        return found
    return replace(
        found,
        copies_in=tuple(replace(copy, after_step=copy.before_step - 1) for copy in found.copies_in),
        copies_out=tuple(
            replace(copy, after_step=max(copy.after_step, step - 1))
            for copy, step in zip(found.copies_out, pager.written_for, strict=True)
        ),
        drops=tuple(
            replace(drop, after_step=max(drop.after_step, step - 1))
            for drop, step in zip(found.drops, pager.dropped_for, strict=True)
        ),
    )


class _Pager:
    """Goes through the steps in order; no time passes."""

    def __init__(self, problem: Problem, policy: Policy) -> None:
        self._problem = problem
        self._victim: Callable[[int], tuple[int, ...]] = {"lru": self._lru, "belady": self._belady, "size": self._size}[policy]
        self._touched: list[list[tuple[int, bool, bool]]] = [[] for _ in problem.steps]
        for j, item in enumerate(problem.objects):
            for rank, use in enumerate(item.uses):
                is_dead = rank == len(item.uses) - 1 and problem.dies(item)
                self._touched[use.step].append((j, use.is_written, is_dead))
        self._next = [iter([*(use.step for use in item.uses), _NEVER]) for item in problem.objects]
        self._due = [next(steps) for steps in self._next]
        self._used = [-1] * len(problem.objects)
        self._has_value = [item.is_outside for item in problem.objects]
        self._inside: dict[int, bool] = {}  # and whether it is dirty
        self._bytes = 0
        self._step = 0
        self._events: list[Event] = []
        self.written_for: list[int] = []  # for each copy out, the step that needs its room
        self.dropped_for: list[int] = []

    def run(self) -> list[Event]:
        for step, touched in enumerate(self._touched):
            self._step = step
            workspace = self._problem.steps[self._step].workspace_bytes
            locked = {j for j, _, _ in touched}
            for j, _, _ in touched:
                if j not in self._inside:
                    self._make_room(self._size_of(j), locked)
                    if self._has_value[j]:
                        self._events.append(Event("in", j))
                    self._inside[j] = False
                    self._has_value[j] = True
                    self._bytes += self._size_of(j)
            self._make_room(workspace, locked)
            self._events += (Event("begin", self._step), Event("end", self._step))
            for j, is_written, is_dead in touched:
                self._inside[j] |= is_written
                self._used[j], self._due[j] = self._step, next(self._next[j])
                if is_dead:
                    self._leave(j)
        return self._events

    def _size_of(self, j: int) -> int:
        return self._problem.objects[j].size_bytes

    def _make_room(self, size_bytes: int, locked: set[int]) -> None:
        while self._bytes + size_bytes > self._problem.limit_bytes:
            j = max((j for j in self._inside if j not in locked), key=self._victim)
            if self._inside[j]:
                self._events += (Event("out", j), Event("written", j))
                self.written_for.append(self._step)
            self._events.append(Event("drop", j))
            self.dropped_for.append(self._step)
            self._leave(j)

    def _leave(self, j: int) -> None:
        del self._inside[j]
        self._bytes -= self._size_of(j)

    def _lru(self, j: int) -> tuple[int, ...]:
        return -self._used[j], j

    def _belady(self, j: int) -> tuple[int, ...]:
        return self._due[j], j

    def _size(self, j: int) -> tuple[int, ...]:
        return min(self._due[j] - self._step, _FAR) * self._size_of(j), j
