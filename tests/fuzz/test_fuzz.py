"""The corpus of broken files, and other mutations each day; `python -m tests.fuzz` runs more of these, and generated models."""

from __future__ import annotations

import os
import time

import pytest

from ..sample import sample_number
from ..worker_pool import Done, Lost, run_apart
from .broken import broken_files
from .judge import GOOD, Sample, Verdict, judge
from .misfits import misfits
from .mutations import mutations

_MEMORY_BYTES, _TIMEOUT_S = 6 << 30, 60.0
_MISFITS = 30  # of so many operators that the next sample goes on with those behind them


def _faults(samples: list[Sample]) -> list[str]:
    done: list[Done[Sample, Verdict]] = list(
        run_apart(samples, judge, processes=2, timeout_s=_TIMEOUT_S, memory_bytes=_MEMORY_BYTES)
    )
    lost = [f"{one.task.name}: {one.result}" for one in done if isinstance(one.result, Lost)]
    bad = [f"{one.task.name}: {one.result}" for one in done if isinstance(one.result, Verdict) and one.result.outcome not in GOOD]
    assert len(done) == len(samples)
    return lost + bad


@pytest.mark.parametrize("kind", ["text", "proto", "built", "external", "archive", "bytes"])
def test_a_broken_file_gives_an_error(kind: str) -> None:
    samples = [sample for sample in broken_files() if sample.name.startswith(kind)]
    assert samples
    assert not _faults(samples)


def test_a_mutated_file_gives_an_error_or_the_right_answer() -> None:
    assert not _faults(list(mutations(20, sample_number())))


def test_operands_of_other_shapes_give_an_error_or_a_result() -> None:
    assert not _faults(list(misfits(_MISFITS, _MISFITS * sample_number())))


def test_a_crash_and_a_hang_cost_one_task_each() -> None:
    done = {one.task: one.result for one in run_apart(["crash", "hang", "well"], _misbehave, processes=3, timeout_s=2.0)}
    assert done["well"] == "done"
    assert isinstance(done["crash"], Lost)
    assert (done["crash"].how, done["crash"].detail) == ("crash", "exit code 3")
    assert isinstance(done["hang"], Lost)
    assert done["hang"].how == "hang"


def _misbehave(task: str) -> str:
    if task == "crash":
        os._exit(3)
    if task == "hang":
        time.sleep(60)
    return "done"
