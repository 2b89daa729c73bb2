"""The bytes that would be live at each coming step if nothing more were dropped."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .overflow import Absence
from .problem import Problem


class Window:
    """A profile of bytes over the steps from the present one on: to the end of the call, or one whole call of a periodic problem.

    An object that is absent counts from its next use on, for then it has to be inside. Steps are counted over all calls. Over a
    planned absence nothing counts. What is `staying` outlives the steps.
    """

    def __init__(self, problem: Problem, staying: frozenset[int] = frozenset(), absences: Iterable[Absence] = ()) -> None:
        self._steps = len(problem.steps)
        self._is_periodic = problem.is_periodic
        change = np.zeros(self._steps + 1, np.int64)
        kept = np.zeros(self._steps + 1, np.int64)
        for j, item in enumerate(problem.objects):
            if item.uses:
                target = change if problem.dies(item) and j not in staying else kept
                target[item.uses[0].step] += item.size_bytes
                if target is change:
                    change[item.uses[-1].step + 1] -= item.size_bytes
        for absence in absences:
            change[absence.out] -= problem.objects[absence.object].size_bytes
            change[absence.due] += problem.objects[absence.object].size_bytes
        workspaces = np.array([step.workspace_bytes for step in problem.steps], np.int64)
        passing = np.cumsum(change)[:-1] + workspaces
        self._bytes = passing + np.cumsum(kept)[:-1]
        self._repeated = passing + kept.sum()  # of the next call, in which all that is kept is there from the beginning

    def advance(self, step: int) -> None:
        """The step is over: its place becomes that of the same step in the next call."""
        if self._is_periodic:
            self._bytes[step % self._steps] = self._repeated[step % self._steps]

    def add(self, begin: int, end: int, size_bytes: int) -> None:
        """Bytes live (or not any more, if negative) at the steps [begin, end) beside what is known."""
        for part in self._parts(begin, end):
            self._bytes[part] += size_bytes

    def most(self, begin: int, end: int) -> int:
        return max((int(self._bytes[part].max()) for part in self._parts(begin, end)), default=0)

    def ahead(self, step: int) -> np.ndarray:
        """The profile from this step on."""
        start = step % self._steps
        return np.concatenate((self._bytes[start:], self._bytes[:start])) if self._is_periodic else self._bytes[step:]

    def _parts(self, begin: int, end: int) -> list[slice]:
        if not self._is_periodic:
            return [slice(begin, end)] if begin < min(end, self._steps) else []
        begin, end = begin % self._steps, begin % self._steps + min(end - begin, self._steps)
        if begin >= end:
            return []
        if end <= self._steps:
            return [slice(begin, end)]
        return [slice(begin, self._steps), slice(0, end - self._steps)]
