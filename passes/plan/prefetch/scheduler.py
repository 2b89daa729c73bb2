"""Schedules of copies for a memory that does not hold everything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from .events import Boundary, Event
from .handover import scheduled
from .overflow import Absence, absences
from .problem import Problem
from .residents import residents, spare_bytes, without
from .schedule import Schedule
from .simulation import Simulation, StuckError

_CALLS_BEFORE = 2  # of a periodic problem, from an empty memory on, until calls are much alike
_SHARES = (1.0, 1.05)  # of what the first tier cannot hold
_RESIDENTS = (0.95, 0.875, 0.75)  # shares of what would have room
_WORTH = 0.005  # shorter by less is not worth more copies
_MOST_WORK = 4_000_000  # steps times objects, for which more than one choice is tried


class InfeasibleError(ValueError):
    """A step needs more bytes at once than may be inside, or what has to leave has no room outside."""


def schedule(problem: Problem) -> Schedule:
    """A schedule of the problem's copies; of a periodic problem, one that leaves inside what it began with.

    Raises:
        InfeasibleError: a step needs more than `limit_bytes` for itself, or the tiers are too small for what has to leave.
    """
    best: Schedule | None = None
    least = _least_seconds(problem)
    for found in candidates(problem, _choices(problem)):
        if best is None or found.seconds < best.seconds * (1 - _WORTH):
            best = found
        if best.seconds <= least * (1 + _WORTH):
            break
    assert best
    return best


def candidates(problem: Problem, choices: Iterable[frozenset[int]]) -> Iterator[Schedule]:
    """For each choice of objects that never leave, a schedule, one by one.

    Raises:
        InfeasibleError: as `schedule`.
    """
    for step, needed in enumerate(problem.step_bytes()):
        if needed > problem.limit_bytes:
            raise InfeasibleError(f"step {step} needs {needed} bytes at once, more than the limit of {problem.limit_bytes}")
    try:
        for chosen in choices:
            found = _over_tiers(without(problem, chosen))
            yield replace(found, inside=found.inside | chosen, residents=found.residents | chosen)
    except StuckError as error:
        if any(tier.capacity_bytes is None for tier in problem.tiers):
            raise
        raise InfeasibleError(f"what has to leave is more than the tiers hold: {error}") from error


def _choices(problem: Problem) -> Iterator[frozenset[int]]:
    """Objects that might never leave, the most first: what is copied least is best, but what is left must do for looking ahead.

    Nothing that passes has to go out for them.
    """
    spare = spare_bytes(problem) if problem.is_periodic else 0
    shares = _RESIDENTS if spare > 0 else ()
    work = len(problem.steps) * len(problem.objects)
    choices = [residents(problem, int(share * spare)) for share in (*shares, 0.0)]
    for rank, chosen in enumerate(choices):
        if not rank or rank * work < _MOST_WORK:
            yield chosen


def _least_seconds(problem: Problem) -> float:
    """A bound that takes no time to find: what calls use of what is kept, less the limit, comes in with each of them."""
    kept = sum(item.size_bytes for item in problem.objects if item.is_kept and item.uses) if problem.is_periodic else 0
    bandwidth = sum(tier.bandwidth_in for tier in problem.tiers)
    return max(problem.compute_seconds, (kept - problem.limit_bytes) / bandwidth)


def _over_tiers(problem: Problem) -> Schedule:
    """The best schedule found: what the first tier would hold beyond its capacity goes to the second one, and a little more."""
    first = problem.tiers[0]
    if len(problem.tiers) == 1 or first.capacity_bytes is None:
        return _scheduled(problem, {})
    events, _, seconds = _simulated(replace(problem, tiers=(replace(first, capacity_bytes=None),)), {})
    excess = _stored(problem, events) - first.capacity_bytes
    if excess.max(initial=0) <= 0:
        return _scheduled(problem, {})
    best: Schedule | None = None
    for share, is_mirrored in product(_SHARES, (True, False)):
        away = absences(problem, (excess * share).astype(np.int64).tolist(), is_mirrored=is_mirrored)
        found = _scheduled(problem, away)
        if best is None or found.seconds < best.seconds:
            best = found
        if best.seconds <= seconds * (1 + _WORTH):
            break
    assert best
    return best


def _stored(problem: Problem, events: Sequence[Event]) -> np.ndarray:
    """For each step, the bytes of what was born in the call that have gone out and are not dead."""
    change, step, gone = np.zeros(len(problem.steps) + 1, np.int64), 0, set()
    for event in events:
        if event.what == "begin":
            step = event.index % len(problem.steps)
        elif event.what == "out" and not problem.objects[event.index].is_outside and event.index not in gone:
            gone.add(event.index)
            change[step] += problem.objects[event.index].size_bytes
            change[problem.objects[event.index].uses[-1].step + 1] -= problem.objects[event.index].size_bytes
    return np.cumsum(change)[:-1]


def _scheduled(problem: Problem, away: Mapping[int, Absence]) -> Schedule:
    events, boundary, seconds = _simulated(problem, away)
    return scheduled(problem, events, boundary, seconds)


def _simulated(problem: Problem, away: Mapping[int, Absence]) -> tuple[list[Event], Boundary, float]:
    """The events of a call, what is inside as it begins, and how long it takes."""
    simulation = Simulation(problem, None, away)
    if not problem.is_periodic:
        return simulation.run_call(), Boundary(), simulation.now
    for _ in range(_CALLS_BEFORE):
        simulation.run_call()
    boundary = simulation.boundary()
    while True:
        simulation = Simulation(problem, boundary, away)
        events = simulation.run_call()
        idle = _idle(problem, boundary, events)
        dirty = boundary.dirty & simulation.boundary().dirty
        if not idle and dirty == boundary.dirty:
            return events, boundary, simulation.now
        boundary = Boundary(boundary.inside - idle, dirty - idle)


def _idle(problem: Problem, boundary: Boundary, events: Sequence[Event]) -> frozenset[int]:
    """What need not be inside as a call begins, for it comes in at the end of the one before and leaves before it is used."""
    first = [item.uses[0].step if item.uses else 0 for item in problem.objects]
    last = [item.uses[-1].step if item.uses else 0 for item in problem.objects]
    dropped, fetched, step = set(), set(), -1
    for event in events:
        if event.what == "begin":
            step = event.index
        elif event.what == "drop" and step < first[event.index]:
            dropped.add(event.index)
        elif event.what == "in" and step >= last[event.index]:
            fetched.add(event.index)
    return (boundary.inside & dropped - boundary.dirty) | (boundary.dirty & fetched)
