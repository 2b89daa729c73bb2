"""CPU seconds of tests: burnt by the test itself, by its fixture, or in a child; not those that it waits."""

from __future__ import annotations

from pathlib import Path

import pytest
from prefuse.tests.cpu_seconds import CpuSeconds, of_files

_TESTS = """
import subprocess, sys, time
import pytest

def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

@pytest.fixture
def made():
    burn(0.1)

def test_waits(): time.sleep(0.2)
def test_burns(): burn(0.1)
def test_has_something_made(made): pass
def test_starts_a_process(): subprocess.run([sys.executable, "-S", "-c", "sum(range(6_000_000))"])
"""


def test_what_tests_spend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "test_spending.py"
    file.write_text(_TESTS)
    found = CpuSeconds(2)
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={tmp_path}", "-c", str(tmp_path / "none.ini")]
    (tmp_path / "none.ini").touch()
    assert pytest.main([*options, str(file)], plugins=[found]) == 0
    seconds = {name.partition("::")[2]: spent for name, spent in found.of_tests.items()}
    assert seconds["test_waits"] < 0.1
    assert all(seconds[name] >= 0.05 for name in seconds if name != "test_waits")
    (file_seconds,) = of_files(found.of_tests).values()
    assert file_seconds == pytest.approx(sum(seconds.values()))
    shown = capsys.readouterr().out.partition("CPU seconds")[2]
    assert shown.count("test_spending.py::") == 2
    assert "test_waits" not in shown
