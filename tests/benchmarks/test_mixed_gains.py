"""benchmarks/mixed_gains.py: a gain is of other times than those that chose."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import prefuse
import pytest
from prefuse.benchmarks import mixed_gains
from prefuse.benchmarks.mixed_gains import rival
from prefuse.compiler.bits.mixed.choice import Measured
from prefuse.compiler.bits.mixed.findings import Findings
from prefuse.runtime.executor import CompiledModel


def findings(*programs: Measured, name: str, max_error: float = 1e-2) -> Findings:
    chosen = next(one for one in programs if one.name == name)
    found = SimpleNamespace(programs=programs, name=name, chosen=chosen, max_error=max_error, model=lambda precision: name)
    found.__dict__.update(calibrated=None, formats={"a": "int8"}, predicted_us=1.0, error=5e-3, seconds=1.0)
    return cast("Findings", found)


MIXED, NARROW, BROAD = (
    Measured("mixed", 5e-3, 100.0, 1, is_uniform=False),
    Measured("bfloat16", 6e-3, 130.0, 1, is_uniform=True),
    Measured("int8", 5e-2, 50.0, 1, is_uniform=True),
)


def test_the_rival_is_the_fastest_of_one_format_within_the_error() -> None:
    assert rival(findings(MIXED, NARROW, BROAD, name="mixed")) == NARROW
    assert rival(findings(MIXED, BROAD, name="mixed")) == MIXED


def test_programs_are_timed_again_when_the_search_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search saw 1.3; both are as fast."""
    monkeypatch.setattr(mixed_gains, "_options", lambda task: SimpleNamespace(precision="bfloat16"))
    monkeypatch.setattr(mixed_gains, "candidates", lambda calibrated: {})
    monkeypatch.setattr(mixed_gains, "placed", lambda calibrated, formats, precision: "bfloat16")
    monkeypatch.setattr(mixed_gains, "_unseen", lambda task: [])
    monkeypatch.setattr(prefuse, "compile", lambda *given, **named: object.__new__(CompiledModel))
    monkeypatch.setattr(mixed_gains, "_compiled", lambda model, task: lambda **inputs: np.ones(1))
    monkeypatch.setattr(mixed_gains, "take_turns", lambda blocks, rounds: {name: [[0.001]] * rounds for name in blocks})
    task: Any = SimpleNamespace(model="net", inputs={}, onnx_path="net.onnx", threads=1)
    found = mixed_gains._gain(task, findings(MIXED, NARROW, name="mixed"), 0.0, rounds=5)
    assert found.gain_in_search == pytest.approx(1.3)
    assert found.gain.median == pytest.approx(1.0)
    assert list(found.rounds_ms) == ["mixed", "bfloat16"]
