"""The samples of the long suites."""

from __future__ import annotations

from pathlib import Path

import pytest
from prefuse.tests.sample import (
    DAILY,
    DAYS,
    DEAR,
    EXAMPLES,
    SHARES,
    VARIABLE,
    WHOLE,
    dealt,
    every,
    examples,
    is_dear,
    sample_number,
    today,
)

FOLDER = Path(__file__).parent


def test_the_number_is_of_the_day_or_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)
    assert abs(sample_number() - 739_000) < 50_000  # days since the year 1
    monkeypatch.setenv(VARIABLE, "17")
    assert sample_number() == 17


def test_samples_in_a_row_hold_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WHOLE, raising=False)
    monkeypatch.delenv(SHARES, raising=False)
    names = list(range(50))
    found: list[int] = []
    for number in range(100, 108):
        monkeypatch.setenv(VARIABLE, str(number))
        found += every(8, names)
    assert sorted(found) == names


def test_a_case_runs_in_one_way_a_day_and_in_all_in_as_many_days(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WHOLE, raising=False)
    monkeypatch.delenv(SHARES, raising=False)
    ways, cases = ("a", "b", "c"), list(range(20))
    labels = [str(case // 4) for case in cases]
    found: list[tuple[str, int]] = []
    for number in range(100, 103):
        monkeypatch.setenv(VARIABLE, str(number))
        today = [(way, case) for way in ways for case in dealt(cases, labels, way, ways)]
        assert sorted(case for _, case in today) == cases
        assert {way for way, _ in today} == set(ways)
        found += today
    assert sorted(found) == [(way, case) for way in ways for case in cases]


def test_the_whole_is_every_case_in_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WHOLE, "1")
    assert dealt("xyz", "xyz", "b", ("a", "b")) == ["x", "y", "z"]


def test_a_run_of_all_tests_draws_fewer_random_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(EXAMPLES, raising=False)
    for shares, count in (("", 100), ("1", -(-100 // DAYS))):
        monkeypatch.setenv(SHARES, shares)
        assert examples(100) == count
    monkeypatch.setenv(EXAMPLES, "3000")
    assert examples(100) == 3000


def test_each_unit_has_one_turn_in_a_week_of_like_days(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WHOLE, raising=False)
    units, found, sizes = list(range(40)), list[int](), set[int]()
    for number in range(100, 100 + DAYS):
        monkeypatch.setenv(VARIABLE, str(number))
        found += today(units)
        sizes.add(len(today(units)))
    assert sorted(found) == units
    assert max(sizes) - min(sizes) <= 1
    monkeypatch.setenv(WHOLE, "1")
    assert today(units) == set(units)


def test_tests_that_take_turns_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they would divide themselves; but of lists that no day holds they take a part."""
    monkeypatch.delenv(WHOLE, raising=False)
    monkeypatch.setenv(SHARES, "1")
    names = list(range(200))
    assert every(4, names) == dealt(names, list("ab" * 100), "x", ("x", "y")) == names
    assert len(every(20, names)) == 10


def test_the_rules_name_files_that_are_there() -> None:
    """And what is most likely to show a fault takes no turns."""
    paths = [path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("test_*.py")]
    assert all(any(path.startswith(start) for path in paths) for start in DEAR)
    assert set(DAILY) <= set(paths)
    daily = {"test_house.py", "compiler/test_cli_faults.py", "programs/test_end_to_end.py", "runtime/test_program_file.py"}
    assert not [path for path in daily if path not in paths or is_dear(path)]
    assert is_dear("compiler/bits/test_pareto.py")
