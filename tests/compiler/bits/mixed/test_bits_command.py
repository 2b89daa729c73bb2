"""`prefuse bits`, as users call it."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import prefuse
import pytest
from click.testing import CliRunner
from prefuse.compiler.cli import cli
from prefuse.compiler.pipeline import pages
from prefuse.runtime.errors import CompileError, OptionError
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.target import Target

from ...quantization.models import batches, residual_network

needs_matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib draws")


def run(*arguments: str | Path) -> str:
    """Standard output of the verb, which succeeds."""
    result = CliRunner().invoke(cli, ["bits", "--threads", "1", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "net.onnx"
    onnx.save(residual_network(), path)
    np.savez(tmp_path / "data.npz", x=np.stack([batch["x"] for batch in batches(residual_network(), 8)]))
    return path


def test_a_plan_is_found_edited_and_compiled(model: Path, tmp_path: Path) -> None:
    data, path = tmp_path / "data.npz", tmp_path / "plan.json"
    said = json.loads(run(model, "--calibration", data, "--max-error", "2e-2", "-o", path, "--json"))
    assert said["is_kept"]
    assert said["error"] <= 2e-2
    assert said["held_out"] == 2
    plan = json.loads(path.read_text())
    assert plan["units"] == said["plan"] == {row["name"]: row["choice"] for row in said["units"]}
    assert plan["notes"]["relative"] == said["error"]
    name = said["units"][3]["name"]
    plan["overrides"] = {f"*{name[-3:]}": "float32-fast"}
    path.write_text(json.dumps(plan))
    again = json.loads(run(model, "--calibration", data, "--bits", path, "--json"))
    assert next(row for row in again["units"] if row["name"] == name)["choice"] == "float32-fast"
    net = prefuse.compile(model, precision="mixed", calibration=data, bits=path, cache=False, threads=1)
    assert isinstance(net, CompiledModel)
    assert "as the plan says" in net.report()


def test_a_plan_of_the_least_error_is_written_and_compiled(model: Path, tmp_path: Path) -> None:
    """It may be one of float32, beside which nothing is searched for."""
    data, path = tmp_path / "data.npz", tmp_path / "plan.json"
    said = json.loads(run(model, "--calibration", data, "--max-error", "1e-12", "-o", path, "--json"))
    assert json.loads(path.read_text())["units"] == said["plan"]
    given = ["compile", model, "--calibration", data, "--bits", path, "--no-cache", "--threads", 1, "-o", tmp_path / "n.prefuse"]
    result = CliRunner().invoke(cli, [*map(str, given)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "as the plan says" in result.output
    path.write_text('{"*": "float32"}')
    with pytest.raises(OptionError, match="nothing is searched for beside it"):
        CliRunner().invoke(cli, ["bits", str(model), "--calibration", str(data), "--bits", str(path)], catch_exceptions=False)


def test_the_table_names_units_formats_choices_and_why(model: Path, tmp_path: Path) -> None:
    text = run(model, "--calibration", tmp_path / "data.npz", "--max-error", "1", "--set", "*=int8", "--objective", "size")
    assert "float32-fast" in text
    assert "as the plan says" in text
    assert "held-out batches" in text
    assert "predicted at other errors" in text
    assert text.count("Conv") >= 7


@needs_matplotlib
def test_drawings(model: Path, tmp_path: Path) -> None:
    png, page = tmp_path / "bits.png", tmp_path / "bits.html"
    run(model, "--calibration", tmp_path / "data.npz", "--png", png, "--html", page)
    assert png.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert "<svg" in text
    assert text.count("<tr>") == 1 + 8 + 1, "a head, the units, and all else"


def test_without_matplotlib(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said before anything is measured."""
    monkeypatch.setattr(pages, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match="pip install matplotlib"):
        CliRunner().invoke(cli, ["bits", str(model), "--png", str(tmp_path / "x.png")], catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-error", "0"], "no error"),
        (["--bits", "nowhere.json"], "cannot be read"),
        (["--calibration", "nowhere.npz"], "cannot be read"),
        (["-o", "nowhere/plan.json"], "lies in none"),
        (["--set", "nothing*=int8"], "no unit matches"),
    ],
)
def test_bad_arguments(model: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    given = ["--calibration", str(tmp_path / "data.npz"), *arguments]
    with pytest.raises(CompileError, match=message):
        CliRunner().invoke(cli, ["bits", str(model), *given], catch_exceptions=False)


def test_targets_that_this_machine_cannot_run(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "missing_features", lambda self: ("avx512f",))
    with pytest.raises(OptionError, match="this CPU lacks avx512f, and formats are chosen by what is measured"):
        CliRunner().invoke(cli, ["bits", str(model)], catch_exceptions=False)


def test_unknown_formats_are_wrong_usage(model: Path) -> None:
    result = CliRunner().invoke(cli, ["bits", str(model), "--set", "*=int3"])
    assert result.exit_code == 2
    assert "PATTERN=FORMAT" in result.output
