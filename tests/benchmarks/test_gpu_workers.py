"""Items that crash, hang or fail are faults of their own; all others are measured, in the end in new processes."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from prefuse.benchmarks.gpu.workers import supervised

_WORKER = """
import os, sys, time
from prefuse.benchmarks.gpu.workers import work
def measure(item):
    yield {"item": item, "process": os.getpid()}
    if item == "crash":
        print("an illegal access", flush=True)
        os.abort()
    if item == "hang":
        time.sleep(1000)
    if item == "fail":
        raise ValueError("no such file")
sys.exit(work(measure, sys.argv[2:], "item", int(sys.argv[1])))
"""


def command(writing: int, items: Sequence[str]) -> list[str]:
    return [sys.executable, "-c", _WORKER, str(writing), *items]


def test_faults_cost_only_their_item() -> None:
    items = ["one", "crash", "two", "fail", "three", "hang", "four"]
    lines = list(supervised(command, items, "item", 6.0, time.monotonic() + 1e3))
    measured = [line["item"] for line in lines if "process" in line]
    assert measured == items
    faults = {line["item"]: line["fault"] for line in lines if "fault" in line}
    assert faults.keys() == {"crash", "fail", "hang"}
    assert "the process ended with -6: an illegal access" in faults["crash"]
    assert faults["fail"] == "ValueError: no such file"
    assert faults["hang"] == "stopped after 6 seconds"
    assert len({line["process"] for line in lines if "process" in line}) == 4


def test_a_worker_that_never_begins_is_a_fault_of_each_item() -> None:
    lines = list(supervised(lambda writing, items: [sys.executable, "-c", "raise OSError('no torch')"], "ab", "item", 60, 1e12))
    assert [line["item"] for line in lines] == ["a", "b"]
    assert all("no torch" in line["fault"] for line in lines)


def test_the_end_is_kept() -> None:
    began = time.monotonic()
    lines = list(supervised(command, ["hang", "one"], "item", 60, began + 2))
    assert time.monotonic() - began < 15
    assert lines[-2:] == [{"item": "hang", "fault": "stopped: no time left"}, {"item": "one", "skipped": "no time left"}]
