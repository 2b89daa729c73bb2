"""The file of kernels measured alone: what is read back, and what is made of broken ones."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from prefuse.compiler.programs.run_database import Measured, Place, Run, add_runs, default_run_file, known_runs, read_runs
from prefuse.runtime.errors import OptionError
from prefuse.runtime.target import Target

HERE = Place.here(Target("cpu", "avx2", 3))
RUN = Run("matmul", 10.0, 14.0, 11.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "runs.json"


def test_what_is_written_is_read(path: Path) -> None:
    other = Place("another", "cpu:avx512,threads=1")
    add_runs(path, HERE, {"p": Run("matmul", 1.0, 2.0, 0.0)})
    add_runs(path, HERE, {"p": RUN, "q": RUN}, 0.25)
    add_runs(path, HERE, {})
    add_runs(path, other, {"p": RUN})
    assert read_runs(path) == {HERE: Measured({"p": RUN, "q": RUN}, 0.25), other: Measured({"p": RUN})}
    assert known_runs(path, Place("a third", "cpu:avx2,threads=1")) == Measured()


def test_the_default_is_in_the_users_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PREFUSE_CACHE", str(tmp_path))
    assert default_run_file() == tmp_path / "runs.json"
    assert known_runs(default_run_file(), HERE) == Measured()


def test_threads_of_a_place_count(path: Path) -> None:
    add_runs(path, HERE, {"p": RUN})
    assert known_runs(path, Place.here(Target("cpu", "avx2", 1))) == Measured()


def test_writers_at_once_lose_nothing(path: Path) -> None:
    threads = [threading.Thread(target=add_runs, args=(path, HERE, {f"p{number}": RUN})) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(known_runs(path, HERE).runs) == 8


def test_a_time_between_near_and_far() -> None:
    assert [RUN.between(share) for share in (0.0, 0.5, 1.0)] == [10.0, 12.0, 14.0]
    assert Run("copy", 10.0, 9.0, 0.0).between(1.0) == 10.0  # no launch gains by being far


def test_the_shorter_times_of_two_count() -> None:
    found = Run("matmul", 10.0, 20.0, 5.0).lesser(Run("matmul", 12.0, 14.0, 6.0))
    assert found == Run("matmul", 10.0, 14.0, 6.0)


def broken(change: Any) -> str:
    """The text of a file with one run, changed."""
    data = {"format": "prefuse runs", "version": 1, "places": {"cpu": {"t": {"runs": {"p": vars_of(RUN)}, "coldness": 0.5}}}}
    change(data, data["places"]["cpu"]["t"])  # type: ignore[index]
    return json.dumps(data)


def vars_of(run: Run) -> dict[str, object]:
    return {"template": run.template, "near_us": run.near_us, "far_us": run.far_us, "estimated_us": run.estimated_us}


@pytest.mark.parametrize(
    "change",
    [
        lambda data, place: data.update(version=2),
        lambda data, place: data.update(format="prefuse tuning"),
        lambda data, place: data.pop("places"),
        lambda data, place: place["runs"]["p"].update(near_us=-1.0),
        lambda data, place: place["runs"]["p"].update(far_us="long"),
        lambda data, place: place["runs"]["p"].update(estimated_us=True),
        lambda data, place: place["runs"]["p"].update(template=3),
        lambda data, place: place["runs"]["p"].update(colour="red"),
        lambda data, place: place.update(coldness=1.5),
        lambda data, place: place.update(coldness="cold"),
        lambda data, place: place.update(runs=[]),
    ],
)
def test_what_is_no_file_of_ours(change: Any, path: Path) -> None:
    path.parent.mkdir()
    path.write_text(broken(change))
    with pytest.raises(OptionError, match="no file of this version"):
        read_runs(path)
    with pytest.warns(UserWarning, match="predicting without it"):
        assert known_runs(path, HERE) == Measured()
    add_runs(path, HERE, {"p": RUN})
    assert read_runs(path) == {HERE: Measured({"p": RUN})}


def test_what_is_no_json(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("{")
    with pytest.raises(OptionError, match="is no JSON"):
        read_runs(path)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be read"):
        read_runs(tmp_path)
    with pytest.raises(OptionError, match="cannot be written"):
        add_runs(tmp_path, HERE, {"p": RUN})
