"""Which weights stay and when the others come: never above the limit, by a count of bytes that shares no code with the choice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefuse.passes.plan.schedule_prefetch.weights import Choice, Setting, Weight, choose, least_limit


@st.composite
def problems(draw: st.DrawFn) -> Setting:
    steps = draw(st.integers(1, 12))
    weights = draw(
        st.lists(
            st.tuples(st.integers(1, 50), st.sets(st.integers(0, steps - 1), min_size=1, max_size=4)), min_size=1, max_size=10
        )
    )
    live = tuple(draw(st.lists(st.integers(0, 20), min_size=steps, max_size=steps)))
    seconds = tuple(draw(st.lists(st.floats(0, 3), min_size=steps, max_size=steps)))
    found = tuple(Weight(size, tuple(sorted(uses))) for size, uses in weights)
    free = Setting(seconds, live, found, 0, 10.0, 0.1)
    least = least_limit(free)[0]
    return Setting(seconds, live, found, draw(st.integers(least, least + 150)), 10.0, 0.1)


def faults(setting: Setting, choice: Choice) -> list[str]:
    """What is wrong with a choice."""
    found = []
    for step, live in enumerate(setting.live_bytes):
        taken = live + sum(setting.weights[index].size_bytes for index in choice.residents)
        taken += sum(setting.weights[stay.weight].size_bytes for stay in choice.stays if stay.after < step <= stay.last)
        if taken > setting.limit_bytes:
            found.append(f"step {step}: {taken} bytes")
    for index, weight in enumerate(setting.weights):
        for use in weight.uses:
            at = [stay for stay in choice.stays if stay.weight == index and stay.after < use and stay.first <= use <= stay.last]
            if len(at) + (index in choice.residents) != 1:
                found.append(f"weight {index} is there {len(at)} times at step {use}")
    order = [(stay.after, stay.first) for stay in choice.stays]
    if order != sorted(order):
        found.append("copies out of order")
    return found


@settings(max_examples=300, deadline=None)
@given(problems())
def test_choices_keep_the_limit_and_bring_all(setting: Setting) -> None:
    choice, baseline = choose(setting), choose(setting, runs_ahead=False)
    assert choice is not None, "the least limit was given at least"
    assert faults(setting, choice) == []
    assert choice.seconds >= sum(setting.seconds) - 1e-9
    assert sum(choice.stalls) == pytest.approx(choice.seconds - sum(setting.seconds), abs=1e-9)
    if baseline is not None:
        assert faults(setting, baseline) == []
        assert choice.seconds <= baseline.seconds + 1e-9


def test_below_the_least_limit_there_is_none() -> None:
    setting = Setting((1.0, 1.0), (5, 7), (Weight(10, (0,)), Weight(20, (1,))), 26, 10.0)
    assert least_limit(setting) == (27, 1)
    assert choose(setting) is None


def _chain(layers: int, share: float, seconds_each: float) -> Setting:
    weights = tuple(Weight(1_000_000, (step,)) for step in range(layers))
    return Setting((seconds_each,) * layers, (10_000,) * layers, weights, int(share * layers * 1_000_000) + 10_000, 1e9)


@pytest.mark.parametrize("share", [0.25, 0.5])
@pytest.mark.parametrize("per_copy", [0.2, 1.0, 5.0])
def test_a_chain_is_near_its_ceiling(share: float, per_copy: float) -> None:
    """Of kernels that take 0.2, 1 or 5 times what the copy of their weights takes: nothing but the longer side is left."""
    setting = _chain(48, share, per_copy * 1e-3)
    choice = choose(setting)
    assert choice is not None
    copied = sum(setting.weights[stay.weight].size_bytes for stay in choice.stays) / setting.bandwidth
    floor = max(sum(setting.seconds), (1 - share) * 48e6 / 1e9)
    assert copied <= 1.15 * (1 - share) * 48e6 / 1e9, "what fits stays"
    assert choice.seconds <= 1.10 * floor


def test_residents_lie_between_the_others() -> None:
    choice = choose(_chain(40, 0.5, 1e-3))
    assert choice is not None
    gaps = np.diff(sorted(choice.residents))
    assert gaps.max() <= 5


def test_what_many_steps_read_stays() -> None:
    shared = Weight(100, tuple(range(0, 40, 8)))
    others = tuple(Weight(100, (step,)) for step in range(1, 40))
    choice = choose(Setting((1.0,) * 40, (0,) * 40, (shared, *others), 600, 100.0))
    assert choice is not None
    assert 0 in choice.residents
