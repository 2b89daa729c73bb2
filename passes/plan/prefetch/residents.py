"""Which of the objects that every call uses never leave: so many bytes of them, spread evenly between those that do."""

from __future__ import annotations

import operator
from dataclasses import replace
from itertools import accumulate

from .problem import Object, Problem

_NEAR = 3  # steps from the first use to the last, over which an object stays inside anyway


def spare_bytes(problem: Problem) -> int:
    """What is left of the limit at every step, below 0 where one needs more: room for what never leaves."""
    return problem.limit_bytes - max(live_bytes(problem), default=0) if problem.steps else 0


def residents(problem: Problem, most_bytes: int, most_used: int = 0) -> frozenset[int]:
    """Kept objects of at most so many bytes. Before any step, about the same share of what calls have used so far is theirs.

    Before these, at most `most_used` are chosen of those whose uses lie far apart, the most used first.
    """
    kept = [j for j, item in enumerate(problem.objects) if item.is_kept and item.uses and item.size_bytes]
    chosen: set[int] = set()
    often = (j for j in kept if _span(problem.objects[j]) > _NEAR)
    for j in sorted(often, key=lambda j: -len(problem.objects[j].uses))[:most_used]:
        if problem.objects[j].size_bytes <= most_bytes:
            chosen.add(j)
            most_bytes -= problem.objects[j].size_bytes
    kept = [j for j in kept if j not in chosen]
    total = sum(problem.objects[j].size_bytes for j in kept)
    passed = taken = 0
    for j in sorted(kept, key=lambda j: problem.objects[j].uses[0].step):
        size = problem.objects[j].size_bytes
        passed += size
        if (taken + size / 2) * total <= passed * most_bytes and taken + size <= most_bytes:
            chosen.add(j)
            taken += size
    return frozenset(chosen)


def _span(item: Object) -> int:
    return item.uses[-1].step - item.uses[0].step


def live_bytes(problem: Problem) -> list[int]:
    """For each step, the bytes of what is live then but not kept, and of what the step uses of the rest."""
    change = [0] * (len(problem.steps) + 1)
    used = [step.workspace_bytes for step in problem.steps]
    for item in problem.objects:
        if item.uses and not item.is_kept:
            change[item.uses[0].step] += item.size_bytes
            change[item.uses[-1].step + 1] -= item.size_bytes
        elif item.is_kept:
            for use in item.uses:
                used[use.step] += item.size_bytes
    return list(map(operator.add, accumulate(change), used))


def without(problem: Problem, chosen: frozenset[int]) -> Problem:
    """The problem of all else, with the bytes that are left for it."""
    size = sum(problem.objects[j].size_bytes for j in chosen)
    objects = tuple(replace(item, uses=()) if j in chosen else item for j, item in enumerate(problem.objects))
    return replace(problem, objects=objects, limit_bytes=problem.limit_bytes - size)
