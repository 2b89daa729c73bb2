"""Paging policies and the exact optimum, beside which ours stands."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import numpy as np
import pytest
from click.testing import CliRunner
from prefuse.benchmarks.prefetch.__main__ import last_call_bytes, main, optimum_ratios
from prefuse.benchmarks.prefetch.baselines import POLICIES, Policy, on_demand, unrolled
from prefuse.benchmarks.prefetch.cases import small_cases
from prefuse.benchmarks.prefetch.exact import Exact
from prefuse.passes.plan.prefetch.problem import Object, Problem, Step, Tier, Use
from prefuse.passes.plan.prefetch.replay import replay


def weights(reads: str, limit_bytes: int) -> Problem:
    """Steps of a second that read weights of a byte, named by letters; a copy takes a second, too."""
    uses = {name: tuple(Use(step) for step, read in enumerate(reads) if read == name) for name in sorted(set(reads))}
    objects = tuple(Object(1, used, True, True) for used in uses.values())
    return Problem((Step(1.0),) * len(reads), objects, limit_bytes, (Tier(1.0, 1.0),))


@pytest.mark.parametrize(("policy", "copies"), [("lru", 5), ("belady", 4), ("size", 4)])
def test_policies_by_hand(policy: Policy, copies: int) -> None:
    """Round and round over three weights in a memory for two: LRU misses until a is dead, Belady every second time."""
    problem = weights("abcabc", 2)
    replayed = replay(problem, on_demand(problem, policy, is_serial=True))
    assert (replayed.bytes_in, replayed.seconds, replayed.faults) == (copies, 6.0 + copies, ())
    ahead = replay(problem, on_demand(problem, policy, is_serial=False))
    assert (ahead.bytes_in, ahead.faults) == (copies, ())
    assert ahead.seconds < replayed.seconds


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_are_right(policy: Policy) -> None:
    """Results go out for room, and their schedules stay within the limit."""
    rng = Random(1)
    steps = 30
    objects = [
        Object(rng.randint(1, 4), (Use(k, True), Use(rng.randrange(k + 1, steps + 1))), False, False) for k in range(steps)
    ]
    call = Problem((Step(1.0),) * (steps + 1), tuple(objects), 12, (Tier(2.0, 2.0),), is_periodic=True)
    limit = max(call.step_bytes())
    problem = unrolled(Problem(call.steps, call.objects, limit, call.tiers, is_periodic=True), 2)
    assert len(problem.objects) == 2 * steps
    for is_serial in (True, False):
        replayed = replay(problem, on_demand(problem, policy, is_serial=is_serial))
        assert replayed.faults == ()
        assert replayed.bytes_out
        assert replayed.peak_bytes <= limit


def test_what_is_kept_stays_one_object() -> None:
    problem = Problem((Step(1.0),), (Object(1, (Use(0),), True, True), Object(2, (Use(0, True),))), 3, (Tier(1.0, 1.0),), True)
    found = unrolled(problem, 3)
    assert found.objects[0].uses == (Use(0), Use(1), Use(2))
    assert [item.uses for item in found.objects[1:]] == [(Use(0, True),), (Use(1, True),), (Use(2, True),)]


@pytest.mark.parametrize(
    ("reads", "limit", "seconds"), [("ab", 2, 3.0), ("ab", 1, 4.0), ("abab", 1, 8.0), ("abcabc", 2, 7.0), ("aaab", 1, 6.0)]
)
def test_exact_by_hand(reads: str, limit: int, seconds: float) -> None:
    assert Exact(weights(reads, limit)).seconds == seconds


def test_ours_is_near_the_optimum() -> None:
    ratios = optimum_ratios(500)
    assert min(ratios) > 1 - 1e-9
    assert np.mean(ratios) <= 1.02
    assert max(ratios) <= 1.2


def test_bytes_of_policies_are_those_of_the_last_call() -> None:
    """Two weights that fit come in once, in the first call."""
    problem = unrolled(weights("abab", 2), 2)
    found = on_demand(problem, "lru", is_serial=True)
    assert replay(problem, found).bytes_in == 2
    assert last_call_bytes(problem, found, first=4) == (0, 0)
    small = unrolled(weights("abc", 2), 2)
    assert last_call_bytes(small, on_demand(small, "lru", is_serial=True), first=3) == (2, 0)


def test_small_cases_do_not_fit() -> None:
    for problem in small_cases(20):
        assert max(problem.step_bytes()) <= problem.limit_bytes < sum(item.size_bytes for item in problem.objects)


def test_table_and_json(tmp_path: Path) -> None:
    """A trace of three kernels that share one tensor, on a machine that has room for all."""
    (tmp_path / "tensors_tiny.txt").write_text("1:100:1 2:50:0\n1;1;2;A\n1;;;B\n2;1,2;;C\n")
    arguments = ["--data", str(tmp_path), "--only", "tiny", "--small", "3", "--json", str(tmp_path / "out.json")]
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "out.json").read_text())
    small, rows = found["rows"].pop(), found["rows"]
    assert [row["policy"] for row in rows].count("prefuse") == 2
    assert all(row["seconds"] == pytest.approx(0.004) and len(row["digest"]) == 64 for row in rows)
    assert len(small["over_optimum"]) == 3
    assert "Belady, ahead" in done.output
