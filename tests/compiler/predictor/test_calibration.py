"""The programs that a machine's share of coldness is fitted on, and the fit by times that are made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
import pytest
from prefuse.compiler.driver import compile_model, plan_model
from prefuse.compiler.predictor import calibration
from prefuse.compiler.predictor.calibration import ProgramRun, encoder, fit_coldness, residual
from prefuse.compiler.predictor.isolated import IsolatedRun, Timing
from prefuse.compiler.predictor.predictor import Predictor
from prefuse.compiler.programs.options import Options, parse_options
from prefuse.runtime.precision import Precision


@pytest.fixture
def options() -> Options:
    return parse_options("cpu:avx2", "float32", {"threads": 2, "tuning": False, "profile": True})


def small_encoder() -> ir.Model:
    return encoder(rows=8, heads=2, layers=1)


def small_residual() -> ir.Model:
    return residual(size=16, stages=((8, 1),))


def test_programs_are_of_products_convolutions_and_rows(options: Options) -> None:
    templates = [
        {item.kernel.template for item in plan_model(make(), options).lowered} for make in (small_encoder, small_residual)
    ]
    assert templates[0] >= {"matmul", "attention"}
    assert any(name.startswith("convolution") for name in templates[1])
    assert len(encoder().graph.initializers) > 40  # and the large ones can be built


@pytest.mark.parametrize("make", [small_encoder, small_residual])
def test_a_program_is_timed(make: object, options: Options, tmp_path: Path) -> None:
    assert callable(make)
    path = tmp_path / "small.prefuse"
    compile_model(make(), options, name="small", output=path)
    assert ProgramRun(path, 0.0).answer() > 0


def test_the_share_is_fitted_and_kept(options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches take 1 us near and 3 us far; programs 1.25 times the near launches, and three times that when other work runs."""
    monkeypatch.setattr(calibration, "encoder", small_encoder)
    monkeypatch.setattr(calibration, "residual", small_residual)
    monkeypatch.setattr(Predictor, "_farness", lambda *_: 0.5)
    precisions: tuple[Precision, ...] = ("float32", "bfloat16")
    programs = [(make, precision) for make in (small_encoder, small_residual) for precision in precisions]
    counts = [len(plan_model(make(), replace(options, precision=precision)).lowered) for make, precision in programs]
    launches = iter([factor * count for count, factors in zip(counts, ((1, 3), (3, 1)) * 2, strict=True) for factor in factors])
    predictor = Predictor(options.target, tmp_path / "runs.json", times)
    assert fit_coldness(predictor, lambda run: 1.25 * next(launches)) == pytest.approx(0.25)
    assert Predictor(options.target, tmp_path / "runs.json").coldness == pytest.approx(0.25)


def times(_: IsolatedRun) -> Timing:
    return Timing(1.0, 3.0)


def test_without_programs_there_is_no_share(options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "encoder", small_encoder)
    monkeypatch.setattr(calibration, "residual", small_residual)
    predictor = Predictor(options.target, tmp_path / "runs.json", times)
    assert fit_coldness(predictor, lambda run: None) is None
    assert not predictor.is_fitted
