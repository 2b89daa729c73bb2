"""Stays of weights over calls: never above the limit, and each reader finds its weight, by a count of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefuse.passes.plan.prefetch.problem import Problem, Step, Tier, read_only
from prefuse.passes.plan.prefetch.schedule import CopyIn, Schedule
from prefuse.passes.plan.prefetch.scheduler import schedule
from prefuse.passes.plan.schedule_prefetch.stays import Copies, Stay, copies_of, on_demand

TIER = Tier(10.0, 10.0, 0.1)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    count = draw(st.integers(1, 12))
    uses = st.sets(st.integers(0, count - 1), min_size=1, max_size=4)
    weights = draw(st.lists(st.tuples(st.integers(1, 50), uses), min_size=1, max_size=10))
    steps = [Step(draw(st.floats(0, 3)), draw(st.integers(0, 20))) for _ in range(count)]
    free = read_only(steps, [(size, tuple(used)) for size, used in weights], 0, TIER)
    least = max(free.step_bytes())
    return read_only(steps, [(size, tuple(used)) for size, used in weights], draw(st.integers(least, least + 150)), TIER)


def intervals(stay: Stay, count: int) -> list[tuple[int, int]]:
    """The first and last steps of two calls in which a stay of the first one takes bytes; of the one before, its end."""
    if stay.until is None:
        return [(stay.after + 1, stay.last)]
    return [(0, stay.until), (stay.after + 1, count - 1)]


def faults(problem: Problem, residents: frozenset[int], stays: Sequence[Stay]) -> list[str]:
    """What is wrong with the stays of a call that follows itself."""
    found, count = [], len(problem.steps)
    always = sum(problem.objects[index].size_bytes for index in residents)
    taken = np.array([step.workspace_bytes + always for step in problem.steps])
    for stay in stays:
        for first, last in intervals(stay, count):
            taken[first : last + 1] += problem.objects[stay.object].size_bytes
    found += [f"step {step}: {taken[step]} bytes" for step in np.flatnonzero(taken > problem.limit_bytes)]
    for index, item in enumerate(problem.objects):
        for use in (use.step for use in item.uses):
            own = [one for one in stays if one.object == index]
            at = sum(one.first <= use <= one.last for one in own)
            at += sum(one.until is not None and use <= one.until for one in own)
            if at + (index in residents) != 1:
                found.append(f"weight {index} is there {at} times at step {use}")
    found += [f"{stay} is read before its copy" for stay in stays if stay.is_read and stay.after >= stay.first]
    afters = [stay.after for stay in stays]
    if afters != sorted(afters):
        found.append("copies out of order")
    return found


def only_stays(copies: Copies) -> list[Stay]:
    stays = [copy for copy in copies if isinstance(copy, Stay)]
    assert len(stays) == len(copies), "a weight never goes out"
    return stays


def waits_for_itself(problem: Problem, stays: Sequence[Stay]) -> bool:
    """Whether a reader waits for a copy that is behind one that waits for the reader, or a later step."""
    return any(one.is_read and other.after >= one.first for rank, one in enumerate(stays) for other in stays[:rank])


@settings(max_examples=300, deadline=None)
@given(problems())
def test_stays_keep_the_limit_and_bring_all(problem: Problem) -> None:
    chosen = schedule(problem)
    stays = only_stays(copies_of(problem, chosen))
    assert faults(problem, chosen.residents, stays) == []
    assert not waits_for_itself(problem, stays)
    assert len(stays) == len(chosen.copies_in)


@settings(max_examples=300, deadline=None)
@given(problems())
def test_on_demand_nothing_comes_before_its_reader_is_next(problem: Problem) -> None:
    chosen = schedule(problem)
    stays = only_stays(on_demand(problem, copies_of(problem, chosen)))
    assert faults(problem, chosen.residents, stays) == []
    assert all(stay.after == stay.first - 1 and stay.until is None for stay in stays)


def _schedule(copies: Sequence[CopyIn], inside: frozenset[int]) -> Schedule:
    return Schedule(tuple(copies), (), (), inside, frozenset(), frozenset(), 1.0)


def _copy(weight: int, after: int, before: int) -> CopyIn:
    return CopyIn(weight, after, before, (0,))


def test_a_copy_for_the_next_call_is_read_by_that_one() -> None:
    problem = read_only([Step(1.0)] * 4, [(10, (0, 1)), (10, (3,))], 10, TIER)
    stays = copies_of(problem, _schedule([_copy(1, 1, 3), _copy(0, 2, 4)], frozenset([0])))
    assert stays == (Stay(1, 1, 3, 3), Stay(0, 2, 4, 3, until=1))


def test_a_weight_stays_from_the_last_readers_of_a_call_to_the_first_of_the_next() -> None:
    problem = read_only([Step(1.0)] * 4, [(10, (0, 3)), (10, (1,))], 10, TIER)
    stays = copies_of(problem, _schedule([_copy(1, 0, 1), _copy(0, 1, 3)], frozenset([0])))
    assert stays == (Stay(1, 0, 1, 1), Stay(0, 1, 3, 3, until=0))


def test_a_copy_that_waits_for_the_last_step_is_the_first_of_the_next_call() -> None:
    problem = read_only([Step(1.0)] * 2, [(10, (0,)), (10, (1,))], 10, TIER)
    stays = copies_of(problem, _schedule([_copy(1, 0, 1), _copy(0, 1, 2)], frozenset([0])))
    assert stays == (Stay(0, -1, 0, 0), Stay(1, 0, 1, 1))


@pytest.mark.parametrize("share", [0.25, 0.5])
@pytest.mark.parametrize("per_copy", [0.2, 1.0, 5.0])
def test_a_chain_is_near_its_ceiling(share: float, per_copy: float) -> None:
    """Of kernels that take 0.2, 1 or 5 times what the copy of their weights takes: nothing but the longer side is left."""
    steps = [Step(per_copy * 1e-3, 10_000)] * 48
    weights = [(1_000_000, (step,)) for step in range(48)]
    problem = read_only(steps, weights, int(share * 48e6) + 10_000, Tier(1e9, 1e9))
    chosen = schedule(problem)
    copied = sum(problem.objects[stay.object].size_bytes for stay in copies_of(problem, chosen)) / 1e9
    assert copied <= 1.15 * (1 - share) * 48e6 / 1e9, "what fits stays"
    assert chosen.seconds <= 1.06 * max(problem.compute_seconds, (1 - share) * 48e6 / 1e9)
