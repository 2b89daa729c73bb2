"""Which tests and files take the most CPU seconds: `make test DURATIONS=40`, or `pytest --cpu-seconds=40`.

Seconds on the clock say little where processes share cores. These are of the process with all its threads, in user and system
mode, and of its children that have ended; what fixtures of modules take counts for the test that asks for them first.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator, Mapping
from typing import Any

import pytest

_COLLECTING = "cpu_seconds_until_collected"


def cpu_seconds() -> float:
    """Of this process, and of its children that have ended."""
    return sum(os.times()[:4])


class CpuSeconds:
    """A plugin that measures every test, and shows the `most` dearest tests and files in the summary.

    Reports carry the seconds, so that they come from the processes of pytest-xdist, too.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._last = cpu_seconds()
        self._collecting = list[float]()  # of each process: from its start until it knows all tests
        self.of_tests: defaultdict[str, float] = defaultdict(float)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._last = cpu_seconds()
        if (output := getattr(session.config, "workeroutput", None)) is not None:
            output[_COLLECTING] = self._last
        else:
            self._collecting.append(self._last)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A process of pytest-xdist has ended; one that crashed says nothing."""
        self._collecting += [seconds for seconds in [getattr(node, "workeroutput", {}).get(_COLLECTING)] if seconds]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Each phase of a test has what was spent since the phase before it ended."""
        report = yield
        now = cpu_seconds()
        report.cpu_seconds = now - self._last  # type: ignore[attr-defined]  # reports carry what they are given
        self._last = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.of_tests[report.nodeid] += getattr(report, "cpu_seconds", 0.0)  # none where a process crashed

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        processes = ", ".join(f"{seconds:.1f}" for seconds in self._collecting)
        terminalreporter.section("CPU seconds")
        terminalreporter.write_line(f"{sum(self.of_tests.values()):.1f} in tests; collecting them, by process: {processes}")
        for title, found in (("files", of_files(self.of_tests)), ("tests", self.of_tests)):
            terminalreporter.write_line(f"{title}:")
            for name, seconds in sorted(found.items(), key=lambda one: -one[1])[: self._most]:
                terminalreporter.write_line(f"{seconds:8.2f}  {name}")


def of_files(of_tests: Mapping[str, float]) -> dict[str, float]:
    """Sums over the tests of each file."""
    found: defaultdict[str, float] = defaultdict(float)
    for name, seconds in of_tests.items():
        found[name.partition("::")[0]] += seconds
    return found
