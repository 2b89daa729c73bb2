"""`python -m tests.memory`: faults that a file knows count, and a limit that is not kept is seen."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest

from . import __main__ as command
from . import judge
from .control_group import control_group
from .judge import Verdict


def test_known_faults_are_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the file has is not run again; a graph of another version is no such thing."""
    path = tmp_path / "verdicts.json"
    wrong, name = "other bits than without a limit", command._name("graph 7:1")
    path.write_text(json.dumps({"name": name, "fault": wrong, "taken": 5, "seconds": 1.0}) + "\n")
    given = Namespace(json=path, processes=1)
    assert command._verdicts({name: (7, 1)}, _never, given) == 1
    assert wrong in capsys.readouterr().out
    path.write_text(json.dumps({"name": name, "fault": "", "taken": 5, "seconds": 1.0}) + "\n")
    assert command._verdicts({name: (7, 1)}, _never, given) == 0
    assert "not in control groups 1" in capsys.readouterr().out
    assert "version" in name


def _never(task: object) -> Verdict:
    raise AssertionError(f"{task} is run")


def test_a_program_that_keeps_no_limit_is_seen_beside_the_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it takes less than the limit and what is allowed above it."""
    verdict = Verdict("graph", "", total=60 << 20, limit=30 << 20, taken=58 << 20)
    free = {"before": 0, "hwm": 60 << 20, "maxrss": 0}
    monkeypatch.setattr(
        judge, "child", lambda group, arguments: SimpleNamespace(returncode=0, stdout=json.dumps(free), stderr="")
    )
    assert "which should save 30.00 MiB" in judge._beside_free([], verdict).fault
    assert judge._beside_free([], Verdict("graph", "", 60 << 20, 30 << 20, taken=40 << 20)).fault == ""


def test_without_control_groups_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(control_group.__wrapped__.__globals__, "_ROOT", tmp_path)  # type: ignore[attr-defined]
    with control_group(1 << 20) as group:
        assert group is None
    assert list(tmp_path.iterdir()) == []
