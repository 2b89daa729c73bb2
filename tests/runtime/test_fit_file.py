"""The file of what was measured of processors: what is kept, found and forgotten, and what is made of broken files."""

from __future__ import annotations

import json
import threading
import warnings
from pathlib import Path

import numpy as np
import prefuse
import pytest
from onnx import parser
from prefuse.runtime.errors import OptionError
from prefuse.runtime.fit_file import Fit, default_fit_file, find_fit, forget_fit, keep_fit
from prefuse.runtime.hardware.machine import core_of, row
from prefuse.runtime.target import Target, host_cpu_model

ZEN3, ZEN5 = "AuthenticAMD family 25 model 1", "AuthenticAMD family 26 model 2"
FIT = Fit("2026-01-02T03:04:05+00:00", {"memory_bytes": 7.5, "ghz": 3.25}, {"ghz": 0.01}, {"wake_cycles": "it varied"})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFUSE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "machine.json"


def test_what_is_kept_is_found(path: Path) -> None:
    """By processor and width of vectors; a later one takes the place of an earlier one."""
    assert find_fit(ZEN3, 8, path) is None
    keep_fit(Fit("before", {}), ZEN3, 8, path)
    keep_fit(FIT, ZEN3, 8, path)
    keep_fit(Fit("other", {}), ZEN5, 16, path)
    assert find_fit(ZEN3, 8, path) == FIT
    assert find_fit(ZEN5, 16, path) == Fit("other", {})
    assert find_fit(ZEN5, 8, path) is None


def test_what_is_forgotten_is_gone_and_nothing_else(path: Path) -> None:
    assert not forget_fit(ZEN3, 8, path)
    assert not path.exists()
    keep_fit(FIT, ZEN3, 8, path)
    keep_fit(FIT, ZEN5, 16, path)
    assert forget_fit(ZEN3, 8, path)
    assert not forget_fit(ZEN3, 8, path)
    assert (find_fit(ZEN3, 8, path), find_fit(ZEN5, 16, path)) == (None, FIT)


def test_writers_at_once_lose_nothing(path: Path) -> None:
    threads = [threading.Thread(target=keep_fit, args=(FIT, f"cpu {number}", 8, path)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(find_fit(f"cpu {number}", 8, path) == FIT for number in range(16))


@pytest.mark.parametrize(
    "content",
    [
        "",
        "no JSON",
        "[]",
        "{}",
        '{"format": "prefuse tuning", "version": 1, "findings": {}}',
        '{"format": "prefuse machine", "version": 0, "fits": {}}',
        '{"format": "prefuse machine", "version": 1, "fits": []}',
        '{"format": "prefuse machine", "version": 1, "fits": {"x": {"8": {"measured": "", "numbers": {"ghz": "fast"}}}}}',
        '{"format": "prefuse machine", "version": 1, "fits": {"x": {"8": {"measured": "", "numbers": {"ghz": NaN}}}}}',
        '{"format": "prefuse machine", "version": 1, "fits": {"x": {"8": {"measured": "", "numbers": {}, "more": 1}}}}',
    ],
)
def test_a_file_that_is_none_of_ours_is_a_warning(path: Path, content: str) -> None:
    """Costs are estimated without it; measuring again replaces it."""
    path.parent.mkdir()
    path.write_text(content)
    with pytest.warns(UserWarning, match="machine.json: is no .*; costs are estimated without what was measured"):
        assert find_fit("x", 8, path) is None
    keep_fit(FIT, "x", 8, path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_fit("x", 8, path) == FIT


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="cannot be written"):
        keep_fit(FIT, ZEN3, 8, tmp_path / "file" / "machine.json")


def test_equal_fits_are_equal_bytes(tmp_path: Path) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    for path, models in ((one, (ZEN3, ZEN5)), (other, (ZEN5, ZEN3))):
        for model in models:
            keep_fit(FIT, model, 8, path)
    assert one.read_bytes() == other.read_bytes()


def test_the_fit_is_of_this_processor_as_a_target_without_a_level() -> None:
    """Which is this very machine, fitted or not; what names a level or a processor is estimated by rows."""
    before = Target.parse("cpu")
    keep_fit(FIT, host_cpu_model(), before.vector_lanes)
    keep_fit(Fit("foreign", {"ghz": 1.0}), "another processor", before.vector_lanes)
    after = Target.parse("cpu")
    assert after.machine == before.machine.fitted(FIT.numbers) != before.machine
    assert after.machine.memory_bytes == 7.5
    assert after.is_host
    assert after.is_here
    lanes, loads = before.vector_lanes, before.machine.loads
    keep_fit(Fit("later", {"loads": 0.7 * loads, "multiply_adds": 0.8 * before.machine.multiply_adds}), host_cpu_model(), lanes)
    assert Target.parse("cpu").machine.loads < loads
    assert Target.parse("cpu").is_host  # what was measured of a machine does not make it another one
    assert before.is_host
    assert str(after) == str(before)
    core, lanes = core_of(host_cpu_model()), before.vector_lanes
    assert Target.parse(f"cpu,machine={core}").machine == row(core, lanes)
    assert Target.parse(f"cpu:{before.level}").machine == Target("cpu", before.level).machine
    assert Target.parse("cpu:avx2,machine=zen3").machine == row("zen3", 8)
    assert not Target.parse("cpu:avx2,machine=haswell").is_host
    assert not Target.parse("cpu:avx2,machine=haswell").is_here
    assert Target.parse("cpu:avx2").is_here
    assert Target.parse("cpu:amx").is_here  # its generic core has another name
    assert not Target.parse("cuda:sm_90").is_here


def test_a_program_of_a_fit_is_another_one_and_runs_without_it(tmp_path: Path) -> None:
    """What costs it was compiled by is a part of what a cache keeps it by, and nothing that it needs to be loaded."""
    model = tmp_path / "m.onnx"
    text = '<ir_version: 8, opset_import: ["": 18]> main (float[2,4] x, float[4] b) => (float[2,4] y) { y = Add(x, b) }'
    model.write_bytes(parser.parse_model(text).SerializeToString())

    def programs() -> set[str]:
        return {path.name for path in default_fit_file().parent.glob("*.prefuse")}

    prefuse.compile(model)
    before = programs()
    keep_fit(FIT, host_cpu_model(), Target.parse("cpu").vector_lanes)
    prefuse.compile(model).save(tmp_path / "m.prefuse")
    assert len(programs()) == len(before) + 1
    assert forget_fit(host_cpu_model(), Target.parse("cpu").vector_lanes)
    x, b = np.ones((2, 4), np.float32), np.arange(4, dtype=np.float32)
    np.testing.assert_array_equal(prefuse.load(tmp_path / "m.prefuse")(x, b), x + b)
    assert json.loads(default_fit_file().read_text())["fits"] == {}
