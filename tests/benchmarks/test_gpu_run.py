"""The command for machines with a GPU, on a simulated one: what is carried, weights that are filled in, a run that is cut."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import prefuse
import pytest
import torch
from prefuse.benchmarks.gpu import run as gpu_run
from prefuse.benchmarks.gpu.checks import Check, compared, inputs_of
from prefuse.benchmarks.gpu.predict import peak_gflops, predictions
from prefuse.benchmarks.gpu.prepare import prepare
from prefuse.benchmarks.gpu.prepare_checks import checks, prepare_checks
from prefuse.benchmarks.gpu.run import PHASES, Run
from prefuse.benchmarks.gpu.stripped import fill_program, strip_program
from prefuse.examples.models import MODELS
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.hardware.gpu import gpu_machine
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
    run.phase("small models", lambda: PHASES["small models"].here(run))
    run.phase("programs", lambda: PHASES["programs"].here(run))
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["small models"][0]["right"]
    (line,) = found["programs"]
    assert line["graph_us"] > 0
    assert sum(one["times"] for one in line["kernels"].values()) > 4
    assert line["predicted_us"] > 0


def test_kernels_are_compared_with_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by the template and tile that it names; numbers that are not the kernel's are found."""
    need_compiler()
    monkeypatch.setattr(gpu_run, "_CALLS", 1)
    monkeypatch.setattr(gpu_run, "_ROUNDS", 1)
    wanted = [
        Check("tile", "product", (0, 70, 72, 40), "bfloat16", "gpu_mma_matmul", "16x64x64/16x16*4", is_constant=True),
        Check("turned", "product", (0, 24, 16, 32), "float16", "gpu_wgmma_matmul", "64x64x64*8", (False, True)),
        Check("heads", "attention", (1, 2, 20, 24, 16), "bfloat16", "gpu_mma_attention"),
        Check("bytes", "product", (0, 20, 16, 24), "uint8", "gpu_mma_matmul", is_constant=True),
    ]
    prepare_checks(tmp_path, "cuda-sim", wanted)
    run = Run(tmp_path, tmp_path / "found.json", time.monotonic() + 1e6)
    run.phase("checks", lambda: PHASES["checks"].here(run))
    assert [line["check"] for line in run.found["checks"]] == sorted(one.name for one in wanted)
    assert all(line["right"] and line["is_finite"] for line in run.found["checks"]), run.found["checks"]
    with pytest.raises(ValueError, match="tile=1x1x1 ignored"):
        prepare_checks(tmp_path, "cuda-sim", [replace(wanted[0], tile="1x1x1")])
    inputs = inputs_of(wanted[0], "cpu")
    exact = inputs[0].double() @ torch.from_numpy(wanted[0].constant().astype(np.float64))
    exact[69, 71] += 0.1 * exact.square().mean().sqrt()
    assert not compared(wanted[0], inputs, exact)["right"]


def test_checks_name_every_kind_once() -> None:
    found = list(checks("cuda:sm_90"))
    assert len({one.name for one in found}) == len(found)
    assert {one.template for one in found} == {"gpu_mma_matmul", "gpu_wgmma_matmul", "gpu_mma_attention", "gpu_decode_attention"}
    assert sum(one.template == "gpu_wgmma_matmul" and one.tile != "" for one in found) >= 18


_RUN_WITHOUT_COMPILER = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("tvm", "tvm_ffi", "onnx", "onnx_ir", "onnxscript", "onnxruntime", "scipy", "networkx"):
            raise ImportError(name)
sys.meta_path.insert(0, Absent())
import prefuse.benchmarks.gpu.run
from prefuse.examples.models import MODELS
MODELS["lenet5"].build()
"""


def test_the_command_needs_no_compiler_and_no_onnx() -> None:
    subprocess.run([sys.executable, "-c", _RUN_WITHOUT_COMPILER], check=True)


def test_a_cut_run_counts(carried: Path, tmp_path: Path) -> None:
    """Without time programs are named and skipped; a phase that fails says why, and those before it stay."""
    bare = tmp_path / "bare"
    shutil.copytree(carried, bare)
    (bare / "small" / "lenet5.npz").unlink()
    run = Run(carried, tmp_path / "found.json", time.monotonic())
    late = Run(carried, run.results, time.monotonic() + 1e6, run.found)
    run.phase("programs", lambda: PHASES["programs"].here(run))
    run.phase("small models", lambda: PHASES["small models"].here(Run(tmp_path, run.results, late.end)))
    late.phase("without inputs", lambda: PHASES["small models"].here(replace(late, folder=bare)))
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


def test_a_run_fails_where_anything_did() -> None:
    right = {"facts": [{"gpu": "one"}], "checks": [{"check": "a", "right": True}], "programs": []}
    assert not gpu_run.has_failed(right)
    for line in ({"fault": "torch finds no GPU"}, {"check": "b", "right": False}, {"program": "c", "skipped": "no time left"}):
        assert gpu_run.has_failed({**right, "programs": [line]})


def test_peaks_are_of_the_unit_that_a_template_uses() -> None:
    machine = gpu_machine("sm_90")
    wgmma, mma, float32 = (
        peak_gflops(machine, template, precision)
        for template, precision in (("gpu_wgmma_matmul", "bfloat16"), ("gpu_mma_matmul", "bfloat16"), ("gpu_matmul", "float32"))
    )
    assert wgmma > mma > float32 == machine.multiprocessors * machine.fma_flops * machine.ghz
