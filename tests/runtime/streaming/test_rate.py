"""What reading files takes of kernels: work that has no less time beside reads, and work that waits for each of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefuse.runtime.streaming import rate
from prefuse.runtime.streaming.rate import SampleFile, cores_taken, read_rates, sample_file


@pytest.fixture
def file(tmp_path: Path) -> Iterator[SampleFile]:
    with sample_file(tmp_path, 8 << 20) as found:
        if found is None:
            pytest.skip("the file system of temporary files reads through the page cache only")
        yield found


def test_a_file_is_read_at_some_rate(file: SampleFile) -> None:
    assert all(0.001 < one < 1000 for one in read_rates(file))
    assert file.read(lambda: True) == 0


def test_work_that_reads_do_not_touch(file: SampleFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sleeps: how long does not depend on who reads."""
    monkeypatch.setattr(rate, "_PAIR_SECONDS", 0.08)
    taken = sorted(cores_taken(file, lambda: time.sleep(0.02), threads=2))
    assert abs(taken[len(taken) // 2]) < 0.7


def test_work_that_takes_twice_as_long_beside_reads(file: SampleFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two threads one core is gone where both take half as much again."""
    monkeypatch.setattr(rate, "_PAIR_SECONDS", 0.08)

    def work() -> None:
        is_reading = any(thread.name == "prefuse-reads" for thread in threading.enumerate())
        time.sleep(0.03 if is_reading else 0.02)

    taken = sorted(cores_taken(file, work, threads=2))
    assert taken[len(taken) // 2] == pytest.approx(1.0, abs=0.5)
    assert all(thread.name != "prefuse-reads" for thread in threading.enumerate())
