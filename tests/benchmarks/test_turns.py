"""Turns of calls on a clock that only they move: what counts, and which ratios follow."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from prefuse.benchmarks import turns
from prefuse.benchmarks.turns import Spread, block_of, compared, spread, take_turns, together


class Clock:
    """Time that passes only where something sleeps or is called."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def call(self, name: str, seconds: Callable[[], float]) -> Callable[[], None]:
        def run() -> None:
            self.calls.append(name)
            self.now += seconds()

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(turns, "time", found)
    return found


def test_an_engine_twice_as_slow_is_found_whatever_the_machine_does(clock: Clock) -> None:
    """The machine becomes ten times slower on the way: medians of all calls would not tell."""
    number = iter(range(1000))

    def seconds(factor: float) -> Callable[[], float]:
        return lambda: factor * (10.0 if next(number) > 30 else 1.0)

    blocks = {name: block_of(clock.call(name, seconds(factor)), 3) for name, factor in (("quick", 1.0), ("slow", 2.0))}
    found = take_turns(blocks, rounds=8)
    assert [len(times) for times in found["quick"]] == [3] * 8
    assert compared(found["slow"], found["quick"]).median == pytest.approx(2.0)


def test_the_order_changes_and_what_warms_up_does_not_count(clock: Clock) -> None:
    blocks = {name: block_of(clock.call(name, lambda: 1.0), 1) for name in "ab"}
    found = take_turns(blocks, rounds=6, pause=0.5, warm_up=1)
    assert found == {"a": [[1.0]] * 6, "b": [[1.0]] * 6}
    order = ["".join(clock.calls[at : at + 4 : 2]) for at in range(0, len(clock.calls), 4)]
    assert len(order) == 7
    assert set(order) == {"ab", "ba"}
    assert clock.now == 7 * 2 * (0.5 + 2.0)


def test_calls_together_are_made_once_each_at_the_same_time() -> None:
    """Each waits for the other: one that is repeated, or begins when the other has ended, would hang or be counted."""
    met, counts = threading.Barrier(2, timeout=30), [0, 0]

    def call(number: int) -> Callable[[], None]:
        def run() -> None:
            met.wait()
            counts[number] += 1

        return run

    assert together(call(0), call(1)) > 0
    assert counts == [1, 1]


def test_the_longer_of_calls_together_counts() -> None:
    """Also where it is not the first: what ends first waits."""
    slow_has_ended = threading.Event()

    def slow() -> None:
        assert not slow_has_ended.wait(0.05)
        slow_has_ended.set()

    for calls in ([slow, lambda: None], [lambda: None, slow]):
        slow_has_ended.clear()
        assert together(*calls) >= 0.05
        assert slow_has_ended.is_set()


def test_what_one_of_the_calls_raises_is_raised() -> None:
    def fail() -> None:
        raise ValueError("no such file")

    for calls in ([fail, lambda: None], [lambda: None, fail]):
        with pytest.raises(ValueError, match="no such file"):
            together(*calls)


def test_ratios_whose_quartiles_span_one_are_not_certain() -> None:
    assert spread([1.0, 2.0, 3.0]) == Spread(2.0, 1.5, 2.5)
    assert spread([1.1, 1.2, 1.3]).is_certain
    assert spread([0.8, 0.9, 0.7]).is_certain
    assert not spread([0.9, 1.2, 1.3, 0.8]).is_certain
