"""Plans played back: what runs beside what, what waits for what, and the path that decides."""

from __future__ import annotations

import random

import pytest
from prefuse.compiler.predictor.replay import replay
from prefuse.runtime.plan import Copy, Host, Launch, Plan, Record, Region, Step, Wait


def launch(stream: int = 0) -> Launch:
    return Launch("k", (), (), stream=stream)


def plan(*steps: Step) -> Plan:
    return Plan("cpu:avx2,threads=1", (), (), (), (), (), steps)


def test_one_stream_is_a_sum() -> None:
    region = Region("a", 0, 4)
    found = replay(plan(launch(), Copy(region, region), Host("f", (), ())), [3.0, 0.5, 2.0])
    assert found.begins_us == (0.0, 3.0, 3.5)
    assert found.time_us == 5.5
    assert found.critical == (0, 1, 2)


def test_streams_run_beside_each_other() -> None:
    found = replay(plan(launch(0), launch(1), launch(0)), [3.0, 7.0, 2.0])
    assert found.begins_us == (0.0, 0.0, 3.0)
    assert (found.time_us, found.critical) == (7.0, (1,))


def test_a_wait_holds_its_stream_alone() -> None:
    """A prefetching copy on stream 1: the second launch needs it, the first does not; the third stream needs nobody."""
    region = Region("a", 0, 4)
    steps = (Copy(region, region, 1), Record(5, 1), launch(0), Wait(5, 0), launch(0), launch(2))
    found = replay(plan(*steps), [10.0, 0.0, 4.0, 0.0, 1.0, 2.0])
    assert found.begins_us == (0.0, 10.0, 0.0, 10.0, 10.0, 0.0)
    assert (found.time_us, found.critical) == (11.0, (0, 1, 3, 4))
    early = replay(plan(*steps), [1.0, 0.0, 4.0, 0.0, 1.0, 2.0])
    assert (early.time_us, early.critical) == (5.0, (2, 3, 4))


def test_an_event_that_is_recorded_again_is_the_later_one() -> None:
    steps = (launch(0), Record(1, 0), launch(0), Record(1, 0), Wait(1, 1), launch(1))
    assert replay(plan(*steps), [1.0, 0.0, 4.0, 0.0, 0.0, 1.0]).time_us == 6.0


def test_the_longest_path_of_random_plans() -> None:
    """Against all paths: each step ends when its longest chain of predecessors has."""
    for seed in range(50):
        number = random.Random(seed)
        steps: list[Step] = []
        recorded: list[int] = []
        for at in range(30):
            kind, stream = number.choice("lllrw"), number.randrange(3)
            if kind == "r":
                recorded.append(at)
                steps.append(Record(at, stream))
            elif kind == "w" and recorded:
                steps.append(Wait(number.choice(recorded), stream))
            else:
                steps.append(launch(stream))
        times = [float(number.randrange(5)) for _ in steps]

        def ends(at: int, steps: list[Step] = steps, times: list[float] = times) -> float:
            step = steps[at]
            before = [one for one in range(at) if steps[one].stream == step.stream][-1:]
            before += [step.event] if isinstance(step, Wait) else []
            return times[at] + max((ends(one) for one in before), default=0.0)

        found = replay(plan(*steps), times)
        assert found.ends_us == tuple(ends(at) for at in range(len(steps)))
        assert sum(times[at] for at in found.critical) == found.time_us


def test_nothing_takes_no_time() -> None:
    assert replay(plan(), []).time_us == 0.0


@pytest.mark.parametrize(
    ("steps", "times", "message"),
    [
        ((launch(),), [], "0 times for 1 steps"),
        ((launch(),), [-1.0], "step 0 takes -1.0 us"),
        ((launch(),), [float("nan")], "step 0 takes nan us"),
        ((Wait(3), Record(3)), [0.0, 0.0], "waits for event 3, which nothing has recorded"),
    ],
)
def test_what_cannot_be_played(steps: tuple[Step, ...], times: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replay(plan(*steps), times)
