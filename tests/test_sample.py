"""The samples of the long suites."""

from __future__ import annotations

import pytest
from prefuse.tests.sample import VARIABLE, WHOLE, dealt, every, sample_number, share


def test_the_number_is_of_the_day_or_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)
    assert abs(sample_number() - 739_000) < 50_000  # days since the year 1
    monkeypatch.setenv(VARIABLE, "17")
    assert sample_number() == 17


def test_samples_in_a_row_hold_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WHOLE, raising=False)
    names = list(range(50))
    found: list[int] = []
    for number in range(100, 108):
        monkeypatch.setenv(VARIABLE, str(number))
        found += every(8, names)
    assert sorted(found) == names


def test_a_case_runs_in_one_way_a_day_and_in_all_in_as_many_days(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WHOLE, raising=False)
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


def test_a_quarter_of_the_cases_is_drawn_and_all_of_them_in_some_days(monkeypatch: pytest.MonkeyPatch) -> None:
    cases, found = list(range(9)), set[int]()
    for number in range(100, 116):
        monkeypatch.setenv(VARIABLE, str(number))
        today = share("test_it", cases, [f"test_it[{case}]" for case in cases])
        assert today == share("test_it", cases, [f"test_it[{case}]" for case in cases])
        assert len(today) == 3
        assert today == sorted(today)
        found |= set(today)
    assert found == set(cases)


@pytest.mark.parametrize(("cases", "drawn"), [(1, 1), (2, 1), (3, 2), (8, 2), (9, 3), (100, 25)])
def test_of_few_cases_more_than_a_quarter_is_drawn(cases: int, drawn: int) -> None:
    names = [f"test_it[{case}]" for case in range(cases)]
    assert len(share("test_it", names, names)) == drawn
