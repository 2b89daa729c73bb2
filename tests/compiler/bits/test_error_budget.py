"""Bounds on the error of outputs, measured on data that calibration has not seen."""

from __future__ import annotations

import numpy as np
import pytest
from prefuse.compiler.bits.error_budget import damages, meet_budget
from prefuse.compiler.debugging.oracle import relative_error, run_model
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.quantization.batches import Batch
from prefuse.compiler.quantization.held_out import Split
from prefuse.compiler.quantization.quantizer import Calibrated, calibrate
from prefuse.runtime.errors import OptionError
from prefuse.runtime.target import Target

from ..quantization.models import batches, built, residual_network

CPU = Target.parse("cpu")


def case() -> tuple[Calibrated, list[Batch]]:
    model = residual_network()
    split = Split(batches(model, 8))
    return calibrate(import_model(model), split, CPU), split.held_out()


def test_without_a_bound_all_are_quantized() -> None:
    found, held_out = case()
    outcome = meet_budget(found, found.uniform(), held_out, None)
    assert outcome.assignment == found.uniform()
    assert outcome.error == outcome.uniform_error
    squares = np.zeros(2)
    for batch in held_out:
        expected, given = (run_model(model, batch)["y"].astype(np.float64) for model in (found.model, outcome.model))
        squares += np.sum((given - expected) ** 2), np.sum(expected**2)
    assert outcome.error == pytest.approx(np.sqrt(squares[0] / squares[1]), rel=1e-3)


def test_damages_are_those_of_units_alone() -> None:
    found, held_out = case()
    alone = damages(found, found.uniform(), held_out[:1])
    assert alone.keys() == found.uniform().keys()
    expected = run_model(found.model, held_out[0])["y"]
    for name, squared in alone.items():
        error = relative_error(run_model(found.place({name: "int8"}), held_out[0])["y"], expected)
        assert 1 / 3 < np.sqrt(squared) / error < 3, name  # of ten outputs; beside it pools read floats here, and 8 bits there


@pytest.mark.parametrize("share", [0.7, 0.3])
def test_the_most_damaging_units_go_back(share: float) -> None:
    found, held_out = case()
    uniform = meet_budget(found, found.uniform(), held_out, None).error
    reports: list[float] = []
    outcome = meet_budget(found, found.uniform(), held_out, share * uniform, lambda _, fraction: reports.append(fraction))
    assert outcome.uniform_error == uniform
    assert outcome.error <= share * uniform
    assert outcome.returned
    assert outcome.assignment.keys() | set(outcome.returned) == found.uniform().keys()
    worst = min(outcome.damage[name] for name in outcome.returned)
    assert all(outcome.damage[name] <= worst for name in outcome.assignment)
    assert reports == sorted(reports)
    assert reports[-1] == 1.0


def test_a_bound_that_nothing_meets() -> None:
    """All units are float then, and the error is that of float32."""
    found, held_out = case()
    outcome = meet_budget(found, found.uniform(), held_out, 1e-9)
    assert not outcome.assignment
    assert outcome.error < 1e-5


def test_no_bound_is_kept_that_nothing_measures() -> None:
    model = built([("MatMul", "x w", "m"), ("ArgMax", "m", "y")], [4, 32], {"w": (32, 16)})
    found = calibrate(import_model(model), batches(model, 2), CPU)
    assert meet_budget(found, found.uniform(), batches(model, 1), None).assignment
    with pytest.raises(OptionError, match="no outputs of real numbers"):
        meet_budget(found, found.uniform(), batches(model, 1), 1e-2)
