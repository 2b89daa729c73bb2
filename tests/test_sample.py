"""The samples of the long suites."""

from __future__ import annotations

import pytest
from prefuse.tests.sample import VARIABLE, every, sample_number


def test_the_number_is_of_the_day_or_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)
    assert abs(sample_number() - 739_000) < 50_000  # days since the year 1
    monkeypatch.setenv(VARIABLE, "17")
    assert sample_number() == 17


def test_samples_in_a_row_hold_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    names = list(range(50))
    found: list[int] = []
    for number in range(100, 108):
        monkeypatch.setenv(VARIABLE, str(number))
        found += every(8, names)
    assert sorted(found) == names
