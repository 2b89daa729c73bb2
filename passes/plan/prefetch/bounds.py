"""What no schedule can do better: how long a call takes at least, and the smallest limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_matrix

from .problem import Object, Problem


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Seconds that a call takes at least, each for a reason of its own; of a periodic problem, on average over many calls.

    `compute`: the steps, one after the other. `bytes_in`, `bytes_out`: the least that has to be copied, and `transfer` how long
    that takes. `cut`: what is live at a step beyond the limit has to go out before it, and come in after it.
    """

    compute: float
    transfer: float
    cut: float
    bytes_in: float
    bytes_out: float

    @property
    def seconds(self) -> float:
        return max(self.compute, self.transfer, self.cut)


def ceiling(problem: Problem) -> Ceiling:
    """A lower bound of the time of any schedule, also of one that cuts objects into pieces.

    Raises:
        ValueError: a step needs more than the limit for itself.
    """
    limit, step = smallest_limit(problem)
    if limit > problem.limit_bytes:
        raise ValueError(f"step {step} needs {limit} bytes at once, more than the limit of {problem.limit_bytes}")
    least_in, least_out = least_traffic(problem)
    transfer = max(least_in / _bandwidth_in(problem), least_out / _bandwidth_out(problem))
    return Ceiling(problem.compute_seconds, transfer, cut_bound(problem), least_in, least_out)


def smallest_limit(problem: Problem) -> tuple[int, int]:
    """The smallest limit for which there is a schedule, and the step that sets it."""
    needed = problem.step_bytes()
    step = max(range(len(needed)), key=needed.__getitem__, default=0)
    return (needed[step] if needed else 0), step


def _bandwidth_in(problem: Problem) -> float:
    return sum(tier.bandwidth_in for tier in problem.tiers)


def _bandwidth_out(problem: Problem) -> float:
    return sum(tier.bandwidth_out for tier in problem.tiers)


@dataclass(frozen=True, slots=True)
class _Gap:
    """The steps [begin, end) between two uses of an object; if it is not kept over them, it has to come in again."""

    size_bytes: int
    begin: int
    end: int
    is_written: bool  # by the use before it: the object has to go out, too


def least_traffic(problem: Problem) -> tuple[float, float]:
    """The fewest bytes that have to come in, and the fewest that have to go out, in a call.

    Over each gap between two uses an object is kept, or it goes and comes again. What is kept over a step must fit beside what
    the step uses. That matrix has consecutive ones, so the linear program is exact for bytes in of objects that can be divided.
    """
    gaps = [gap for item in problem.objects for gap in _gaps(problem, item)]
    forced = sum(i.size_bytes for i in problem.objects if i.is_outside and i.uses and not (i.is_kept and problem.is_periodic))
    if not gaps:
        return float(forced), 0.0
    scale = max(problem.limit_bytes, 1)  # the solver's tolerances are meant for numbers of about one
    room = (problem.limit_bytes - np.array(problem.step_bytes(), np.float64)) / scale
    sizes = np.array([gap.size_bytes for gap in gaps], np.float64) / scale
    is_written = np.array([gap.is_written for gap in gaps])
    matrix = _differences(gaps, sizes, len(problem.steps))
    change = np.diff(room, prepend=0.0)
    least_out = _least(np.where(is_written, sizes, 0.0), matrix, change) * scale if is_written.any() else 0.0
    return _least(sizes, matrix, change) * scale + forced, least_out


def _differences(gaps: Sequence[_Gap], sizes: np.ndarray, steps: int) -> csr_matrix:
    """For each step, what is kept over it and what stays free, less the same of the step before: two numbers for each of them.

    Written out, gaps as long as a call would fill a matrix of steps times objects.
    """
    count = len(gaps)
    begins = np.array([gap.begin for gap in gaps]) % steps
    ends = np.array([gap.end for gap in gaps]) % steps
    at_first = np.flatnonzero((begins != 0) & (begins >= ends) & (ends != 0))  # these are there before the first step
    left = np.flatnonzero(ends != 0)  # the step after the last one is none
    free = np.arange(steps)
    rows = np.concatenate([begins, ends[left], np.zeros_like(at_first), free, free[1:]])
    columns = np.concatenate([np.arange(count), left, at_first, count + free, count + free[:-1]])
    values = np.concatenate([sizes, -sizes[left], sizes[at_first], np.ones(steps), -np.ones(steps - 1)])
    return csr_matrix((values, (rows, columns)), shape=(steps, count + steps))


def _least(worth: np.ndarray, matrix: csr_matrix, change: np.ndarray) -> float:
    """The least worth of the gaps over which nothing is kept."""
    bounds = np.zeros((matrix.shape[1], 2))
    bounds[:, 1] = np.where(np.arange(len(bounds)) < len(worth), 1.0, np.inf)
    costs = np.concatenate([-worth, np.zeros(matrix.shape[0])])
    result = linprog(costs, A_eq=matrix, b_eq=change, bounds=bounds, method="highs")
    assert result.status == 0, result.message
    return max(float(worth.sum() + result.fun), 0.0)


def _gaps(problem: Problem, item: Object) -> Iterator[_Gap]:
    uses = list(item.uses)
    if uses and item.is_kept and problem.is_periodic:
        uses.append(replace(uses[0], step=uses[0].step + len(problem.steps)))
    for use, following in pairwise(uses):
        if following.step > use.step + 1:
            yield _Gap(item.size_bytes, use.step + 1, following.step, use.is_written)


def cut_bound(problem: Problem) -> float:
    """The most that any cut between two steps says: of what is live there, only so much as the limit is inside.

    What was born before the cut went out before it, or is inside; what is used after it comes in after it, or is inside. What
    the first tiers cannot hold goes to the last one.
    """
    if not problem.steps:
        return 0.0
    born, live = np.zeros((2, len(problem.steps) + 1))
    for item in problem.objects:
        if item.uses:
            begin = 0 if item.is_outside else item.uses[0].step + 1
            for profile in (live,) if item.is_outside else (live, born):
                profile[begin] += item.size_bytes
                profile[item.uses[-1].step + 1] -= item.size_bytes
    elapsed = np.concatenate(([0.0], np.cumsum([step.seconds for step in problem.steps])))
    born, live = np.cumsum(born) - problem.limit_bytes, np.cumsum(live) - problem.limit_bytes
    last, held = problem.tiers[-1], sum(tier.capacity_bytes or 0 for tier in problem.tiers[:-1])
    has_overflow = all(tier.capacity_bytes is not None for tier in problem.tiers[:-1])
    overflow = born - held if has_overflow else np.zeros_like(born)
    before = np.maximum.reduce([elapsed, born / _bandwidth_out(problem), overflow / last.bandwidth_out])
    after = np.maximum.reduce([elapsed[-1] - elapsed, live / _bandwidth_in(problem), overflow / last.bandwidth_in])
    return float((before + after).max())
