"""Which of the objects that every call uses never leave: so many bytes of them, spread evenly between those that do."""

from __future__ import annotations

import operator
from dataclasses import replace
from itertools import accumulate

from .problem import Problem


def residents(problem: Problem, most_bytes: int) -> frozenset[int]:
    """Kept objects of at most so many bytes. Before any step, about the same share of what calls have used so far is theirs."""
    kept = [j for j, item in enumerate(problem.objects) if item.is_kept and item.uses and item.size_bytes]
    total = sum(problem.objects[j].size_bytes for j in kept)
    chosen: set[int] = set()
    passed = taken = 0
    for j in sorted(kept, key=lambda j: problem.objects[j].uses[0].step):
        size = problem.objects[j].size_bytes
        passed += size
        if (taken + size / 2) * total <= passed * most_bytes and taken + size <= most_bytes:
            chosen.add(j)
            taken += size
    return frozenset(chosen)


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
