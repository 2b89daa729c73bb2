"""Files of measurements: what is broken is an error that names the file, and what cannot be read is not replaced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from prefuse.compiler.bits.mixed.plan import plan_of
from prefuse.compiler.programs.run_database import read_runs
from prefuse.compiler.programs.tuning_database import read_database
from prefuse.runtime.errors import OptionError
from prefuse.runtime.fit_file import Fit, find_fit, forget_fit, keep_fit


@pytest.mark.parametrize("read", [read_database, read_runs, plan_of])
def test_nests_too_deep_for_python(read: Callable[[Path], object], tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(OptionError, match="is no JSON"):
        read(tmp_path / "deep.json")


def test_integers_too_large_for_floats(tmp_path: Path) -> None:
    path, huge = tmp_path / "m.json", 10**400
    path.write_text(f"""{{"format": "prefuse machine", "version": 1, "fits": {{"x": {{"8": {{"measured": "",
        "numbers": {{"ghz": {huge}}}}}}}}}}}""")
    with pytest.warns(UserWarning, match="costs are estimated without"):
        assert find_fit("x", 8, path) is None
    assert not forget_fit("x", 8, path)
    assert str(huge) not in path.read_text()
    run = f'{{"template": "t", "near_us": {huge}, "far_us": 1, "estimated_us": 1}}'
    path.write_text(
        f'{{"format": "prefuse runs", "version": 1, "places": {{"c": {{"t": {{"runs": {{"p": {run}}}, "coldness": null}}}}}}}}'
    )
    with pytest.raises(OptionError, match="no file of this version"):
        read_runs(path)


def test_what_cannot_be_read_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.json"
    keep_fit(Fit("then", {"ghz": 3.0}), "x", 8, path)
    before = path.read_text()

    def broken(self: Path) -> NoReturn:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", broken)
        with pytest.raises(OptionError, match="Input/output error"):
            keep_fit(Fit("now", {"ghz": 2.0}), "x", 16, path)
    assert path.read_text() == before
