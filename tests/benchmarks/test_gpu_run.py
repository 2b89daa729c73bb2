"""The command for machines with a GPU, on a simulated one: what is carried, weights that are filled in, a run that is cut."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import prefuse
import pytest
from prefuse.benchmarks.gpu import run as gpu_run
from prefuse.benchmarks.gpu.predict import predictions
from prefuse.benchmarks.gpu.prepare import prepare
from prefuse.benchmarks.gpu.run import Run, programs, small_models
from prefuse.benchmarks.gpu.stripped import fill_program, strip_program
from prefuse.examples.models import MODELS
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.program_file import read_program

from ..gpu.simulator import need_compiler


@pytest.fixture(scope="module")
def carried(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LeNet, small and full-size, for the simulator."""
    need_compiler()
    folder = tmp_path_factory.mktemp("carried")
    size_bytes = prepare(folder, "cuda-sim", ("lenet5",), ("lenet5",), (1,), ("float32",))
    assert 0 < size_bytes == sum(path.stat().st_size for path in folder.rglob("*.*"))
    return folder


def test_predictions_of_a_program() -> None:
    """Every launch is counted once, with what the model says of it."""
    need_compiler()
    (row,) = predictions("cuda-sim", ("lenet5",), (2,), ("float32",))
    assert (row["model"], row["batch"], row["precision"]) == ("lenet5", 2, "float32")
    assert row["grids"] >= row["launches"] == sum(one["launches"] for one in row["templates"].values()) > 4
    assert 0 < sum(one["us"] for one in row["templates"].values()) == pytest.approx(row["predicted_us"], abs=1)
    assert row["products_tflops"] > 0 <= row["products_share_of_peak"] < 1


def test_all_phases_are_kept(carried: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_run, "_CALLS", 1)  # of a simulator, which takes a second for each
    monkeypatch.setattr(gpu_run, "_ROUNDS", 2)
    run = Run(carried, tmp_path / "found.json", time.monotonic() + 1e6)
    run.phase("small models", lambda: small_models(run))
    run.phase("programs", lambda: programs(run))
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["small models"][0]["right"]
    (line,) = found["programs"]
    assert line["graph_us"] > 0
    assert sum(one["times"] for one in line["kernels"].values()) > 4
    assert line["predicted_us"] > 0


def test_a_cut_run_counts(carried: Path, tmp_path: Path) -> None:
    """Without time programs are named and skipped; a phase that fails says why, and those before it stay."""
    run = Run(carried, tmp_path / "found.json", time.monotonic())
    run.phase("programs", lambda: programs(run))
    run.phase("small models", lambda: small_models(Run(tmp_path, run.results, run.end)))
    (carried / "small" / "lenet5.npz").rename(tmp_path / "hidden.npz")
    run.phase("without inputs", lambda: small_models(run))
    (tmp_path / "hidden.npz").rename(carried / "small" / "lenet5.npz")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["programs"] == [{"program": "lenet5-float32-b1", "skipped": "no time left"}]
    assert found["small models"] == []
    assert "FileNotFoundError" in found["without inputs"][0]["fault"]


def test_weights_are_filled_in_alike(carried: Path, tmp_path: Path) -> None:
    """The plan and the code are the same, the weights seeded numbers that keep results finite."""
    (path,) = (carried / "full").iterdir()
    for name in ("one", "other"):
        fill_program(path, tmp_path / f"{name}.prefuse")
    one, other = (read_program(tmp_path / f"{name}.prefuse") for name in ("one", "other"))
    assert (one.constants == other.constants).all()
    assert one.plan == other.plan
    strip_program(one, tmp_path / "again.zip")
    net = prefuse.load(tmp_path / "one.prefuse")
    assert isinstance(net, CompiledModel)
    y = np.asarray(net(*(x.numpy() for x in MODELS["lenet5"].build()[1])))
    assert np.abs(y).max() < 1e6
