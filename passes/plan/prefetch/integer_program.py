"""Schedules of few objects by integer programming: which are inside when, decided for all steps of a call at once.

Rules that look ahead from the present moment (`simulation.py`) keep what has come, whole weights of several steps, where
another choice many steps earlier would have left room. Time is cut into phases, two a step: the pause before it, of a length
that is to be found, and the step itself. A binary variable says whether an object has bytes of memory in a phase, a continuous
one how much of its value is there; the stream copies so many bytes in a phase as its length allows. The sum of all pauses is
minimized, and a little the bytes that are copied, whose cost is that of the cores they take.

The relaxation leaves out that copies are made one after the other: a stream of copies, the most urgent first, is made of what
it finds, and its time is that of a replay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from .events import Boundary, Event
from .handover import scheduled
from .problem import Object, Problem
from .replay import replay
from .schedule import Schedule

_MOST_CHOICES = 1_500  # binary variables: seconds
_MOST_NODES = 20  # of the search, and not seconds: equal problems have equal schedules
_MOST_SECONDS = 10.0  # but for hard ones, as many equal objects make them: these are given up
_OPTIMAL = 0  # of SciPy
_GAP = 0.005  # of the time of a call: what is closer to the bound is not worth a search
_COPYING = (0.03, 0.3)  # of a copy's time, what it is worth to do without: the fewer copies, the less they wait for each other


def is_small(problem: Problem) -> bool:
    """Whether `by_integer_program` takes a problem: weights that are read call after call, and what is born in a call and dies in
    it, before one stream that copies in or out; few enough of both."""
    tier = problem.tiers[0]
    if not problem.is_periodic or len(problem.tiers) > 1 or tier.capacity_bytes is not None or not tier.takes_turns:
        return False
    objects = [item for item in problem.objects if item.uses]
    if any(item.is_outside != item.is_kept or (item.is_kept and item.is_written) for item in objects):
        return False
    return 0 < sum(len(_phases(problem, item)) for item in objects) <= _MOST_CHOICES


def by_integer_program(problem: Problem) -> Iterator[Schedule]:
    """Schedules of a problem that `is_small`; none where a step needs more than the limit, or the search ends without any.

    In a pause, what the steps before and behind it both need as workspace stays taken, as it is where activations lie there.
    """
    for copying in _COPYING:
        values = (program := _Program(problem, copying)).solved()
        if values is None:
            return
        presence = {j: [phase for phase, one in has.items() if values[one] > 0.5] for j, has in program.presence.items()}
        if not _is_within_limit(problem, presence):  # by less than the solver can tell
            return
        events, boundary = _Stream(problem, presence).events()
        found = scheduled(problem, events, boundary, 0.0)
        yield replace(found, seconds=replay(problem, found).seconds)


def _phases(problem: Problem, item: Object) -> range:
    """The phases in which an object may have bytes: 2t is the pause before step t, 2t + 1 that step."""
    if item.is_kept:
        return range(2 * len(problem.steps))
    return range(2 * item.uses[0].step + 1, 2 * item.uses[-1].step + 2)


def _is_within_limit(problem: Problem, presence: Mapping[int, Sequence[int]]) -> bool:
    used = [0] * (2 * len(problem.steps))
    used[1::2] = [step.workspace_bytes for step in problem.steps]
    for j, phases in presence.items():
        for phase in phases:
            used[phase] += problem.objects[j].size_bytes
    return max(used) <= problem.limit_bytes


# The program


class _Rows:
    """Inequalities, each the sum of some multiples of variables, at most a number."""

    def __init__(self) -> None:
        self._terms: list[list[tuple[int, float]]] = []
        self._most: list[float] = []

    def add(self, terms: list[tuple[int, float]], most: float) -> None:
        self._terms.append(terms)
        self._most.append(most)

    def constraint(self, variables: int) -> LinearConstraint:
        lengths = np.cumsum([0, *map(len, self._terms)])
        columns, values = zip(*chain.from_iterable(self._terms), strict=True)
        return LinearConstraint(csr_matrix((values, columns, lengths), shape=(len(self._terms), variables)), -np.inf, self._most)


class _Program:
    """The variables and inequalities of a problem.

    The solver's tolerances are meant for numbers of about one: bytes are shares of the limit, times thousandths of what the
    steps take.
    """

    def __init__(self, problem: Problem, copying: float) -> None:
        """`copying`: what a second of copies costs, of one of pauses."""
        self._problem, self._copying = problem, copying
        self._count = 2 * len(problem.steps)
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._cost: list[float] = []
        self._is_whole: list[bool] = []
        self._rows = _Rows()
        self._inside: list[list[tuple[int, float]]] = [[] for _ in range(self._count)]  # bytes in each phase
        self._copied: list[list[tuple[int, float]]] = [[] for _ in range(self._count)]
        tier = problem.tiers[0]
        self._second = 1e3 / (problem.compute_seconds or 1.0)
        whole = self._second * problem.limit_bytes  # how long a copy of it takes
        self._copy_time = {True: whole / tier.bandwidth_in, False: whole / tier.bandwidth_out}
        self._variable(1.0, 1.0, self._second * problem.compute_seconds)  # always there: gaps are shares of the whole
        self._pauses = [self._variable(0.0, np.inf, 1.0) for _ in problem.steps]
        # For each object that is used, and each of its phases, the variable that says whether it has bytes.
        self.presence = {j: self._object(item) for j, item in enumerate(problem.objects) if item.uses}
        self._limits()

    def solved(self) -> np.ndarray | None:
        bounds, constraint = Bounds(self._lower, self._upper), self._rows.constraint(len(self._cost))
        options = {"node_limit": _MOST_NODES, "mip_rel_gap": _GAP, "time_limit": _MOST_SECONDS}
        found = milp(self._cost, integrality=self._is_whole, bounds=bounds, constraints=constraint, options=options)
        is_done = found.status == _OPTIMAL or (found.mip_node_count or 0) >= _MOST_NODES
        values: np.ndarray | None = found.x if is_done else None
        return values

    def _variable(self, lower: float, upper: float, cost: float = 0.0, *, is_whole: bool = False) -> int:
        self._lower.append(lower)
        self._upper.append(upper)
        self._cost.append(cost)
        self._is_whole.append(is_whole)
        return len(self._cost) - 1

    def _object(self, item: Object) -> dict[int, int]:
        """For each phase of an object, the variable that says whether it has bytes."""
        phases, size = _phases(self._problem, item), item.size_bytes / self._problem.limit_bytes
        used = {2 * use.step + 1 for use in item.uses}
        has, here, comes = dict[int, int](), dict[int, int](), dict[int, int]()
        for phase in phases:
            least = float(phase in used)
            has[phase], here[phase] = self._variable(least, 1.0, is_whole=True), self._variable(least, 1.0)
            comes[phase] = self._copy(phase, size, has[phase], is_in=True) if phase not in used else self._variable(0.0, 0.0)
            self._inside[phase].append((has[phase], size))
            self._rows.add([(here[phase], 1.0), (has[phase], -1.0)], 0.0)
        for phase in phases if item.is_kept else phases[:-1]:
            after = (phase + 1) % self._count
            self._rows.add([(here[after], 1.0), (here[phase], -1.0), (comes[phase], -1.0)], 0.0)
            self._rows.add([(here[after], 1.0), (has[phase], -1.0)], 0.0)  # what leaves comes from outside again
        if not item.is_kept:
            self._outside(item, has, size)
        return has

    def _outside(self, item: Object, has: dict[int, int], size: float) -> None:
        """What is born here and has no bytes inside lies outside, written since the last step that changed it."""
        written, before = {2 * use.step + 1 for use in item.uses if use.is_written}, list[tuple[int, float]]()
        for phase, present in has.items():
            goes = self._copy(phase, size, present, is_in=False)
            lies = self._variable(0.0, float(phase not in written))
            self._rows.add([(lies, 1.0), *before], 0.0)
            self._rows.add([(present, -1.0), (lies, -1.0)], -1.0)
            before = [(lies, -1.0), (goes, -1.0)]

    def _copy(self, phase: int, size: float, present: int, *, is_in: bool) -> int:
        """A copy of a part of an object in a phase: it needs bytes inside."""
        share = self._variable(0.0, 1.0, self._copying * size * self._copy_time[is_in])
        self._copied[phase].append((share, size * self._copy_time[is_in]))
        self._rows.add([(share, 1.0), (present, -1.0)], 0.0)
        return share

    def _limits(self) -> None:
        steps, limit = self._problem.steps, self._problem.limit_bytes
        for step, (before, here) in enumerate(zip((steps[-1], *steps[:-1]), steps, strict=True)):
            pause, phase = 2 * step, 2 * step + 1
            between = min(before.workspace_bytes, here.workspace_bytes)
            self._rows.add(self._inside[pause], 1.0 - between / limit)
            self._rows.add(self._inside[phase], 1.0 - here.workspace_bytes / limit)
            self._rows.add([*self._copied[pause], (self._pauses[step], -1.0)], 0.0)
            self._rows.add(self._copied[phase], self._second * here.seconds)


# What happens then


@dataclass(frozen=True, slots=True, order=True)
class _Job:
    """A copy that may begin with phase `release`, and that phase `due` waits for, of the same call or the next one."""

    due: int
    release: int
    object: int
    is_in: bool


class _Stream:
    """The events of a call in which objects have bytes in given phases, and one stream copies them, the most urgent first."""

    def __init__(self, problem: Problem, presence: dict[int, list[int]]) -> None:
        self._problem, self._count = problem, 2 * len(problem.steps)
        kept = ((j, phases, problem.objects[j]) for j, phases in presence.items() if problem.objects[j].is_kept)
        self._inside = {j for j, phases, item in kept if _is_inside_between_calls(item, phases, self._count)}
        self._drops: list[list[int]] = [[] for _ in range(self._count + 1)]  # of each phase, what has no bytes from it on
        self._waiting: list[_Job] = []
        for j, phases in presence.items():
            self._add(j, problem.objects[j], phases)
        self._now = self._free = 0.0
        self._events: list[Event] = []
        self._written: list[tuple[float, int]] = []  # copies out, by when they are over

    def _add(self, j: int, item: Object, phases: Sequence[int]) -> None:
        used = [2 * use.step + 1 for use in item.uses]
        for begin, end in _stays(item, phases, self._count):
            is_there = begin == 0 if j in self._inside else not item.is_kept and begin == used[0]  # or born there
            if not is_there:
                due = next((phase for phase in used if begin <= phase < end), self._count + used[0])
                self._waiting.append(_Job(due, begin, j, is_in=True))
            if item.is_kept and not (end == self._count and j in self._inside):
                self._drops[end].append(j)
            elif not item.is_kept and end <= used[-1]:
                self._drops[end].append(j)
                changed = max(phase for phase, use in zip(used, item.uses, strict=True) if use.is_written and phase < end)
                if begin <= changed:  # else it is as it lies outside
                    self._waiting.append(_Job(end, changed + 1, j, is_in=False))

    def events(self) -> tuple[list[Event], Boundary]:
        for phase in range(self._count):
            step, is_step = divmod(phase, 2)
            self._copy_until(phase, np.inf, due=phase)
            self._settle(self._now)
            self._events += [Event("drop", j) for j in self._drops[phase]]
            if is_step:
                self._events.append(Event("begin", step))
                end = self._now + self._problem.steps[step].seconds
                self._copy_until(phase, end)
                self._now = end
                self._settle(end)
                self._events.append(Event("end", step))
        self._events += [Event("drop", j) for j in self._drops[self._count]]
        self._copy_until(self._count, np.inf, due=2 * self._count)
        self._settle(np.inf)
        return self._events, Boundary(frozenset(self._inside))

    def _copy_until(self, phase: int, end: float, due: int = -1) -> None:
        """Begin the copies that may begin in a phase before a moment; with `due`, only as long as that phase waits for one, and
        wait until it is over."""
        while True:
            ready = [job for job in self._waiting if job.release <= phase]
            if due >= 0 and not any(job.due <= due for job in ready):
                break
            begin = max(self._free, self._now)
            if not ready or begin >= end:
                break
            job, tier = min(ready), self._problem.tiers[0]
            self._waiting.remove(job)
            size_bytes = self._problem.objects[job.object].size_bytes
            self._settle(begin)
            self._free = begin + (tier.seconds_in(size_bytes) if job.is_in else tier.seconds_out(size_bytes))
            self._events.append(Event("in" if job.is_in else "out", job.object))
            if not job.is_in:
                self._written.append((self._free, job.object))
            if job.due <= due:
                self._now = self._free

    def _settle(self, moment: float) -> None:
        """Note the copies out that are over."""
        for _, j in (one for one in self._written if one[0] <= moment):
            self._events.append(Event("written", j))
        self._written = [one for one in self._written if one[0] > moment]


def _is_inside_between_calls(item: Object, phases: Sequence[int], count: int) -> bool:
    """Whether a kept object has bytes from the end of a call on to a use in the next one."""
    first = next(_runs(phases))
    return phases[0] == 0 and phases[-1] == count - 1 and 2 * item.uses[0].step + 1 in first


def _stays(item: Object, phases: Sequence[int], count: int) -> Iterator[tuple[int, int]]:
    """From when on, and until when, an object has bytes for its uses: of a kept one, not longer than that."""
    wraps = item.is_kept and _is_inside_between_calls(item, phases, count)
    for run in _runs(phases):
        used = [phase for use in item.uses if (phase := 2 * use.step + 1) in run]
        if wraps and run[-1] == count - 1:
            yield run[0], count
        elif used:
            yield run[0], used[-1] + 1 if item.is_kept else run[-1] + 1


def _runs(phases: Sequence[int]) -> Iterator[range]:
    """Phases that follow one another, as one."""
    for _, run in groupby(enumerate(phases), key=lambda pair: pair[1] - pair[0]):
        these = [phase for _, phase in run]
        yield range(these[0], these[-1] + 1)
