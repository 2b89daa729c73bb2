"""What reading files takes of kernels: work that has no less time beside reads, and work that waits for each of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

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


@pytest.mark.parametrize(("beside", "cores"), [(0.02, 0.0), (0.03, 1.0), (0.04, 2.0)])
def test_cores_that_reads_take(file: SampleFile, monkeypatch: pytest.MonkeyPatch, beside: float, cores: float) -> None:
    """Of two threads one core is gone where both take half as much again; by a clock that only the work moves."""
    now = 0.0

    def work() -> None:
        nonlocal now
        now += beside if is_reading() else 0.02

    monkeypatch.setattr(rate, "time", SimpleNamespace(perf_counter=lambda: now))
    assert cores_taken(file, work, threads=2) == pytest.approx([cores] * rate._PAIRS)
    assert not is_reading()


def is_reading() -> bool:
    return any(thread.name == "prefuse-reads" for thread in threading.enumerate())
