"""Files of results: strict JSON, and each row with the run that it is of."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from prefuse.benchmarks.record import Record, provenance, record


def strictly(text: str) -> Any:
    """As parsers read it that know the standard alone."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


@dataclass(frozen=True)
class Row:
    model: str
    error: float
    rounds: tuple[float, ...] = ()


def test_rows_have_the_run_they_are_of(tmp_path: Path) -> None:
    """A row of the same name takes the place of the older one; a run without rows is left out."""
    path = tmp_path / "results.json"
    Record(path, {"commit": "first"}, ("model",)).add(Row("a", 1.0), Row("b", 2.0))
    Record(path, {"commit": "second"}, ("model",)).add({"model": "b", "error": 3.0})
    found = strictly(path.read_text())
    assert [(row["model"], row["error"], found["runs"][row["run"]]["commit"]) for row in found["rows"]] == [
        ("a", 1.0, "first"),
        ("b", 3.0, "second"),
    ]
    Record(path, {"commit": "third"}, ("model",)).add(Row("a", 4.0))
    found = strictly(path.read_text())
    assert [run["commit"] for run in found["runs"]] == ["second", "third"]
    assert [found["runs"][row["run"]]["commit"] for row in found["rows"]] == ["second", "third"]
    assert list(tmp_path.iterdir()) == [path]


def test_what_json_has_not_is_null(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    Record(path, {"settings": {"most": float("inf")}}, ("model",)).add(Row("a", float("nan"), (np.float64(0.5), float("inf"))))
    found = strictly(path.read_text())
    assert found["runs"] == [{"settings": {"most": None}}]
    assert found["rows"] == [{"run": 0, "model": "a", "error": None, "rounds": [0.5, None]}]


def test_files_of_an_older_form_are_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text('[{"model": "a"}]')
    with pytest.raises(click.BadParameter, match="older form"):
        record(path, 1, {})


def test_a_run_says_which_code_machine_and_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "timm/resnet18", "--json", str(tmp_path / "r.json"), f"--folder={tmp_path}/kept"])
    found = provenance(2, ("onnxruntime", "no-such-thing"))
    assert found.keys() >= {"commit", "date", "cpu", "memory_bytes", "kernel", "governor", "python", "threads", "target", "fit"}
    assert found["command"][1:] == ["timm/resnet18", "--json", "r.json", "--folder=kept"]  # type: ignore[index]
    assert found["versions"]["no-such-thing"] == "not installed"  # type: ignore[index]
    assert str(tmp_path) not in json.dumps(found)
    monkeypatch.setattr(subprocess, "run", lambda *given, **named: (_ for _ in ()).throw(OSError("no git")))
    assert str(provenance(1)["commit"]).startswith("files ")


def test_rows_of_other_settings_stay(tmp_path: Path) -> None:
    """One thread beside two, and the same model beside busy processes."""
    path = tmp_path / "results.json"
    for threads, beside in ((1, 0), (2, 0), (2, 1), (2, 1)):
        Record(path, {"threads": threads, "settings": {"beside": beside}}, ("model",)).add(Row("a", float(threads)))
    found = strictly(path.read_text())
    assert [(found["runs"][row["run"]]["threads"], found["runs"][row["run"]]["settings"]["beside"]) for row in found["rows"]] == [
        (1, 0),
        (2, 0),
        (2, 1),
    ]
