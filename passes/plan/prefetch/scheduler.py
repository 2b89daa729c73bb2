"""Schedules of copies for a memory that does not hold everything."""

from __future__ import annotations

from collections.abc import Sequence

from .handover import scheduled
from .problem import Problem
from .schedule import Schedule
from .simulation import Boundary, Event, Simulation

_CALLS_BEFORE = 2  # of a periodic problem, from an empty memory on, until calls are much alike


class InfeasibleError(ValueError):
    """A step needs more bytes at once than may be inside."""


def schedule(problem: Problem) -> Schedule:
    """A schedule of the problem's copies; of a periodic problem, one that leaves inside what it began with.

    Raises:
        InfeasibleError: a step needs more than `limit_bytes` for itself.
    """
    for step, needed in enumerate(problem.step_bytes()):
        if needed > problem.limit_bytes:
            raise InfeasibleError(f"step {step} needs {needed} bytes at once, more than the limit of {problem.limit_bytes}")
    simulation = Simulation(problem)
    if not problem.is_periodic:
        events = simulation.run_call()
        return scheduled(problem, events, Boundary(), simulation.now)
    for _ in range(_CALLS_BEFORE):
        simulation.run_call()
    boundary = simulation.boundary()
    while True:
        simulation = Simulation(problem, boundary)
        events = simulation.run_call()
        idle = _idle(problem, boundary, events)
        if not idle:
            return scheduled(problem, events, boundary, simulation.now)
        boundary = Boundary(boundary.inside - idle, boundary.dirty - idle)


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
