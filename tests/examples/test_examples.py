"""Every numbered example runs, stays short, and the demo and the benchmarks work at small sizes."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from prefuse.benchmarks import decode, generation
from prefuse.benchmarks.__main__ import main, summary
from prefuse.benchmarks.harness import Measurement, Result
from prefuse.examples import demo
from prefuse.tests.sample import every

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFUSE_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("path", every(2, EXAMPLES), ids=lambda path: path.stem)
def test_example_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The others tomorrow."""
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_under_60_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 60


def test_examples_are_counted() -> None:
    assert [path.name[:3] for path in EXAMPLES] == [f"0{number}_" for number in range(1, 10)]


def test_demo_checks_and_times_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--model", "resnet50", "--small", "--rounds", "1"]) == 0
    output = capsys.readouterr().out
    assert "prefuse" in output
    assert "arena" in output


def test_a_decoder_is_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "steps.json"
    decode.main(["--small", "--rounds", "1", "--json", str(path)], standalone_mode=False)
    steps = json.loads(path.read_text())["rows"]
    assert [step["precision"] for step in steps] == ["float32", "bfloat16"]
    for step in steps:  # two layers of 32 float32 keys and as many values, and nothing else of the caches
        assert (step["written_bytes"], step["copies"]) == (2 * 2 * 4 * 32, 0)
        assert step["floor"]["share"]["median"] > 0
        assert len(step["floor"]["rounds_ms"]["step"]) == 1


def test_texts_are_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "texts.json"
    arguments = [
        "--small",
        "--no-peer",
        "--format",
        "int8",
        "--batch",
        "2",
        "--rounds",
        "1",
        "--tokens",
        "8",
        "--json",
        str(path),
    ]
    generation.main(arguments, standalone_mode=False)
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["format"], row["batch"]) == ("int8", 2)
    assert row["floor"]["step_ms"] > 0
    assert row["floor"]["floor_ms"] > 0
    assert row["floor"]["size_bytes"] > 0


def test_benchmarks_say_where_we_are_behind() -> None:
    """Each engine of ours beside the fastest peer, round by round; one that failed has no speed."""

    def rows(model: str, **rounds: tuple[float, ...]) -> Measurement:
        return Measurement([Result(model, name, round_ms=times) for name, times in rounds.items()])

    measured = {
        "quick": rows("quick", prefuse=(1.0, 2.0), onnxruntime=(4.0, 8.0), openvino=(5.0, 10.0)),
        "slow": rows("slow", prefuse=(2.0, 4.0), onnxruntime=(1.0, 2.0), openvino=(9.0, 9.0)),
        "failed": Measurement([Result("failed", "prefuse", failure="refused"), Result("failed", "openvino", round_ms=(1.0,))]),
    }
    assert list(summary(measured, ("prefuse", "onnxruntime", "openvino"))) == [
        "prefuse: 1.41 times as fast as the best peer (geometric mean of 2 models)",
        "prefuse is behind in slow 0.50",
    ]


def test_benchmarks_name_unknown_models() -> None:
    result = CliRunner().invoke(main, ["lenet6"])
    assert result.exit_code == 2
    assert "unknown model 'lenet6'; use all, lenet5" in result.stderr


def test_benchmarks_compare_engines(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    command = [sys.executable, "-m", "benchmarks", "lenet5", "--small", "--seconds", "0.1", "--json", str(path)]
    command += ["--engines", "prefuse,onnxruntime,torch", "--threads", "1"]
    result = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    rows = {row["engine"]: row for row in json.loads(path.read_text())["rows"]}
    assert list(rows) == ["prefuse", "onnxruntime", "torch"]
    for row in rows.values():
        assert row["failure"] == ""
        assert row["error"] < 1e-5
        assert 0 < row["p10_ms"] <= row["median_ms"] <= row["p90_ms"]
        assert 0 < row["imported_bytes"] < row["peak_bytes"]
        assert row["compile_seconds"] > 0
