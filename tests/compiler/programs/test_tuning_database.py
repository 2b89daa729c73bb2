"""The files of findings: what is looked up, how they are written, and what is made of broken ones."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from prefuse.compiler.programs import tuning_database
from prefuse.compiler.programs.options import parse_options
from prefuse.compiler.programs.tuning_database import (
    SHIPPED,
    Finding,
    Section,
    add_findings,
    default_database,
    digest_of,
    known_configurations,
    read_database,
)
from prefuse.runtime.errors import OptionError
from prefuse.runtime.hardware.machine import core_of
from prefuse.runtime.target import Target, host_cpu_model

TARGET = Target("cpu", "avx2", 3)
HERE = Section.here(TARGET, "float32")
FOUND = Finding({"tile": "6x4"}, 1.0, 2.0, True)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFUSE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "tuning.json"


def test_what_is_written_is_read(path: Path) -> None:
    unfinished = Finding({}, 3.5, 3.5, False, ("tile=1x1", "tile=2x2"))
    add_findings(path, HERE, {"p": FOUND})
    add_findings(path, HERE, {"q": unfinished})
    add_findings(path, Section.here(TARGET, "bfloat16"), {"p": unfinished})
    assert read_database(path) == {
        HERE: {"p": FOUND, "q": unfinished},
        Section.here(TARGET, "bfloat16"): {"p": unfinished},
    }


def test_equal_findings_are_equal_bytes(tmp_path: Path) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    add_findings(one, HERE, {"p": FOUND, "q": FOUND})
    add_findings(other, HERE, {"q": FOUND})
    add_findings(other, HERE, {"p": FOUND})
    assert one.read_bytes() == other.read_bytes()


def test_writers_at_once_lose_nothing(path: Path) -> None:
    names = [f"p{number}" for number in range(16)]
    threads = [threading.Thread(target=add_findings, args=(path, HERE, {name: FOUND})) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(read_database(path)[HERE]) == sorted(names)
    assert {one.name for one in path.parent.iterdir()} == {"tuning.json", ".tuning.json.lock"}


def test_only_findings_for_this_machine_target_and_precision_count(path: Path) -> None:
    add_findings(path, HERE, {"p": FOUND})
    assert known_configurations(path, TARGET, "float32") == {"p": {"tile": "6x4"}}
    assert known_configurations(path, Target("cpu", "avx2", 2), "float32") == {}
    assert known_configurations(path, TARGET, "bfloat16") == {}
    add_findings(path, Section("another", str(TARGET), "float32"), {"q": FOUND})
    assert known_configurations(path, TARGET, "float32") == {"p": {"tile": "6x4"}}
    assert known_configurations(path, Target("cuda", "sm_90"), "float32") == {}


def test_what_one_thread_has_measured_counts_for_more_but_how_work_is_dealt(path: Path) -> None:
    alone = Section.here(Target("cpu", "avx2", 1), "float32")
    add_findings(path, alone, {"p": Finding({"tile": "2x2", "split": "m", "block": "3"}, 1.0, 2.0, True), "q": FOUND})
    assert known_configurations(path, TARGET, "float32") == {"p": {"tile": "2x2"}, "q": {"tile": "6x4"}}
    add_findings(path, HERE, {"p": Finding({"split": "n"}, 1.0, 2.0, True), "q": Finding({}, 1.0, 1.0, True)})
    assert known_configurations(path, TARGET, "float32") == {"p": {"split": "n"}}
    assert set(known_configurations(path, Target("cpu", "avx2", 1), "float32")) == {"p", "q"}


def test_the_users_file_is_over_the_shipped_table(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tuning_database, "SHIPPED", tmp_path / "shipped.json")
    add_findings(tmp_path / "shipped.json", HERE, {"p": FOUND, "q": FOUND, "r": FOUND})
    assert set(known_configurations(True, TARGET, "float32")) == {"p", "q", "r"}  # there is no file of the user
    own = Finding({}, 1.0, 1.0, True)
    add_findings(default_database(), HERE, {"p": Finding({"tile": "2x2"}, 1.0, 2.0, True), "q": own})
    assert known_configurations(True, TARGET, "float32") == {"p": {"tile": "2x2"}, "r": {"tile": "6x4"}}
    add_findings(path, HERE, {"r": own})
    assert set(known_configurations(path, TARGET, "float32")) == {"p", "q"}
    assert known_configurations(False, TARGET, "float32") == {}


BROKEN = [
    b"{",
    b"[]",
    b"\xff",
    b'{"format": "prefuse tuning", "version": 99, "findings": {}}',
    b'{"format": "prefuse tuning", "version": 1}',
    b'{"format": "prefuse tuning", "version": 1, "findings": 3}',
    b'{"format": "prefuse tuning", "version": 1, "findings": {"c": {"t": {"float32": {"p": {"configuration": {}}}}}}}',
]


def _with(**changes: object) -> bytes:
    finding: dict[str, Any] = {"configuration": {}, "time_us": 1, "own_time_us": 1, "is_complete": True, **changes}
    findings = {HERE.cpu: {HERE.target: {HERE.precision: {"p": finding}}}}
    return json.dumps({"format": "prefuse tuning", "version": 1, "findings": findings}).encode()


BROKEN += [
    _with(configuration={"tile": 3}),
    _with(configuration=["tile"]),
    _with(time_us="1"),
    _with(is_complete=1),
    _with(tried=[1]),
    _with(tried=3),
    _with(extra=1),
]


@pytest.mark.parametrize("content", BROKEN)
def test_a_broken_file_is_an_error_that_names_it(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(OptionError, match=r"tuning\.json"):
        known_configurations(path, TARGET, "float32")
    with pytest.raises(OptionError, match=r"tuning\.json"):
        add_findings(path, HERE, {"p": FOUND})
    assert path.read_bytes() == content


def test_a_broken_default_file_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And the shipped table counts."""
    monkeypatch.setattr(tuning_database, "SHIPPED", tmp_path / "shipped.json")
    add_findings(tmp_path / "shipped.json", HERE, {"p": FOUND})
    default_database().parent.mkdir()
    default_database().write_bytes(b"{")
    with pytest.warns(UserWarning, match=r"tuning\.json"):
        assert known_configurations(True, TARGET, "float32") == {"p": {"tile": "6x4"}}


def test_a_file_that_is_not_there_is_an_error(path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be read"):
        known_configurations(path, TARGET, "float32")
    with pytest.raises(OptionError, match="neither a file"):
        known_configurations(3, TARGET, "float32")


def test_options_tell_configurations_apart(path: Path) -> None:
    add_findings(path, HERE, {"p": FOUND})
    plain, tuned = (str(parse_options("cpu:avx2,threads=3", "float32", {"tuning": tuning})) for tuning in (False, path))
    assert plain != tuned
    assert digest_of({"p": {"a": "1", "b": "2"}}) == digest_of({"p": {"b": "2", "a": "1"}})
    assert digest_of({"p": {"a": "1"}}) != digest_of({"p": {"a": "2"}})
    assert digest_of({}) == ""


def test_times_change_no_program(path: Path) -> None:
    """Measuring again with the same winner must not make compiled programs worthless."""
    add_findings(path, HERE, {"p": FOUND})
    arguments: dict[str, Any] = {"target": "cpu:avx2,threads=3", "precision": "float32", "extra": {"tuning": path}}
    before = str(parse_options(**arguments))
    add_findings(path, HERE, {"p": Finding({"tile": "6x4"}, 1.5, 2.5, False, ("tile=6x4",)), "q": Finding({}, 1, 1, True)})
    assert str(parse_options(**arguments)) == before


def test_the_shipped_table_is_well_formed() -> None:
    for findings in read_database(SHIPPED).values():
        for problem, finding in findings.items():
            assert finding.is_complete, problem
            assert finding.time_us <= finding.own_time_us


def test_programs_for_another_machine_are_others() -> None:
    """Their tiles and algorithms are: what one was tuned for is part of what a cache keeps it by."""
    texts = {
        str(parse_options(target, "float32", {"tuning": False, "threads": 1})) for target in ("cpu:avx2", "cpu:avx2,machine=zen3")
    }
    assert len(texts) == 2


def test_another_processor_has_none_of_what_won_here(tmp_path: Path) -> None:
    path, other = tmp_path / "found.json", "haswell" if core_of(host_cpu_model()) != "haswell" else "zen3"
    add_findings(path, HERE, {"p": FOUND})
    assert known_configurations(path, TARGET, "float32") == {"p": {"tile": "6x4"}}
    assert known_configurations(path, Target.parse(f"cpu:avx2,machine={other}", 3), "float32") == {}
