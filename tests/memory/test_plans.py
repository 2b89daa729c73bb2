"""The checker of Plans beside two calls on named bytes: a few of `python -m tests.memory plans`, others each day."""

from __future__ import annotations

from collections import Counter

import pytest

from ..sample import sample_number
from . import plans
from .mutants import copies_of, with_later_copies, with_steps, without_events
from .plans import judge_planned_plans, judge_streamed_plan
from .streamed_plans import streamed_plan

_SEED, _PLANS = 18, 6


def judged(first: int) -> Counter[str]:
    """What is seen of some streamed plans, and of a mutant of each kind."""
    return sum((judge_streamed_plan((_SEED, first + turn), mutants=1) for turn in range(_PLANS)), Counter[str]())


def faults(counts: Counter[str]) -> list[str]:
    return [what for what in counts if what.startswith("FAULT")]


def test_right_plans_pass_and_wrong_mutants_do_not() -> None:
    counts = judged(_PLANS * sample_number())
    assert not faults(counts)
    assert counts["streamed plans"]
    assert any(what.endswith(": refused") for what in counts)


def test_plans_of_several_streams_are_right_once_their_memory_is_planned() -> None:
    counts = judge_planned_plans((sample_number(), 10))
    assert not faults(counts)
    assert counts["plans of several streams"]


def test_a_checker_that_sees_nothing_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of mutants that can be carried out at all, which a checker sees to."""
    monkeypatch.setattr(plans, "MUTATIONS", (without_events,))
    monkeypatch.setattr(plans, "check_plan", lambda plan: ())
    assert any(what.startswith("FAULT unnoticed") for what in faults(judged(0)))


def test_a_checker_that_refuses_all_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "check_plan", lambda plan: ("wrong",))
    assert any(what.startswith("FAULT false alarm") for what in faults(judge_streamed_plan((_SEED, 0), mutants=0)))


def test_a_copy_that_ends_a_plan_is_no_later_than_anything() -> None:
    """It is for the next call; nothing behind it records that it has arrived."""
    plan = next(plan for turn in range(100) if (plan := streamed_plan(_SEED, turn)) is not None and copies_of(plan))
    last = with_steps(plan, list(plan.steps[: copies_of(plan)[0] + 1]))
    assert not list(with_later_copies(last))
