"""Traces of training steps, and how near the ceiling schedules of them are."""

from __future__ import annotations

from pathlib import Path

import prefuse
import pytest
from prefuse.benchmarks.prefetch.baselines import on_demand, unrolled
from prefuse.benchmarks.prefetch.traces import g10_tiers, gpt2, read_g10
from prefuse.passes.plan.prefetch.bounds import ceiling, cut_bound
from prefuse.passes.plan.prefetch.problem import Object, Problem, Step, Use
from prefuse.passes.plan.prefetch.replay import replay
from prefuse.passes.plan.prefetch.scheduler import schedule

DATA = Path(prefuse.__path__[0]).parent / "shared" / "data" / "g10"


def test_form_of_g10(tmp_path: Path) -> None:
    """What is read first is kept between steps; what is written first is born."""
    path = tmp_path / "tensors_tiny.txt"
    path.write_text("4:100:1 7:50:0 9:20:1\n1.5;4;7;Conv\n2;7,9;9;Update\n")
    problem = read_g10(path, g10_tiers(False), 1000)
    weight = Object(100, (Use(0),), True, True)
    state = Object(20, (Use(1, True),), True, True)
    assert problem.objects == (weight, Object(50, (Use(0, True), Use(1))), state)
    assert problem.steps == (Step(0.0015), Step(0.002))
    assert (problem.limit_bytes, problem.is_periodic) == (1000, True)


def test_gpt2_has_its_parameters() -> None:
    """774M of them, with two moments each; six operations a token and parameter, and those of attention."""
    problem = gpt2(1, 15e12)
    kept = sum(item.size_bytes for item in problem.objects if item.is_kept)
    assert kept == pytest.approx(3 * 4 * 774e6, rel=1e-3)
    assert problem.compute_seconds > 6 * 774e6 * 1024 / 15e12
    assert problem.compute_seconds < 1.2 * gpt2(1, 15e12, bytes_per_second=1e15).compute_seconds
    assert gpt2(4, 15e12).compute_seconds == pytest.approx(4 * problem.compute_seconds, rel=0.05)


@pytest.mark.parametrize(
    ("batch", "tflops", "of_ceiling", "of_lru"), [(1, 15, 1.05, 0.64), (4, 15, 1.05, 0.64), (4, 60, 1.3, 0.64)]
)
def test_gpt2_is_near_the_ceiling(batch: int, tflops: int, of_ceiling: float, of_lru: float) -> None:
    """8 GB for 12 to 21 GiB, at 26.2 GB/s each way."""
    problem = gpt2(batch, tflops * 1e12)
    replayed = replay(problem, schedule(problem))
    assert replayed.faults == ()
    assert replayed.seconds <= of_ceiling * ceiling(problem).seconds
    assert replayed.seconds <= of_lru * last_call(unrolled(problem, 2), len(problem.steps))


def last_call(problem: Problem, count: int) -> float:
    """Seconds of the last steps, paged on demand by LRU."""
    replayed = replay(problem, on_demand(problem, "lru", is_serial=True))
    assert replayed.faults == ()
    return sum(replayed.stalls[-count:]) + sum(step.seconds for step in problem.steps[-count:])


@pytest.mark.parametrize(("name", "published"), [("BERT_Base", 0.997), ("ResNet152", 0.984)])
def test_g10_is_beaten(name: str, published: float) -> None:
    """The share of the ideal time, with 128 GiB of host memory and an SSD of 3.2 GB/s."""
    path = DATA / f"tensors_{name}.txt"
    if not path.is_file():
        pytest.skip(f"published trace {path.name} is not in {DATA}")
    problem = read_g10(path, g10_tiers(True))
    replayed = replay(problem, schedule(problem))
    assert replayed.faults == ()
    assert replayed.seconds >= cut_bound(problem) * (1 - 1e-9)
    assert problem.compute_seconds / replayed.seconds >= published
