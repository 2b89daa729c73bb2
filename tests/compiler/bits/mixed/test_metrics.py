"""Errors of outputs, beside what they are by hand."""

from __future__ import annotations

import numpy as np
import pytest
from prefuse.compiler.bits.mixed.metrics import cosine, metric_of, relative
from prefuse.runtime.errors import OptionError

X = np.array([[3.0, 4.0], [0.0, 2.0]], np.float32)


def test_relative_is_that_of_the_worst_output_over_all_batches() -> None:
    assert relative([[X, X]], [[X, X]]) == 0
    shifted = X + np.float32(1)
    assert relative([[X, shifted]], [[X, X]]) == pytest.approx(2 / 29**0.5)
    assert relative([[X], [shifted]], [[X], [X]]) == pytest.approx(2 / 58**0.5)
    assert relative([[X]], [[np.zeros_like(X)]]) == pytest.approx(29**0.5), "of an output of zeros, its norm"


def test_what_is_not_finite() -> None:
    """Where it should not be, the error is infinite; where it should, it does not count. Nor do integers."""
    broken = X.copy()
    broken[0, 0] = np.nan
    assert relative([[broken]], [[X]]) == np.inf
    assert relative([[X]], [[broken]]) == 0
    assert cosine([[broken]], [[X]]) == np.inf
    assert relative([[np.arange(3)]], [[np.arange(3) + 1]]) == 0


def test_cosine_is_the_mean_over_rows() -> None:
    turned = X[:, ::-1] * np.array([1, -1], np.float32)
    assert cosine([[X]], [[2 * X]]) == pytest.approx(0, abs=1e-12)
    assert cosine([[turned]], [[X]]) == pytest.approx(1)
    assert cosine([[np.stack([X[0], turned[1]])]], [[X]]) == pytest.approx(0.5)
    assert cosine([[np.zeros_like(X)]], [[np.zeros_like(X)]]) == 0
    assert cosine([[np.zeros_like(X)]], [[X]]) == 1


def test_functions_are_metrics() -> None:
    metric = metric_of(lambda outputs, expected: float(np.abs(outputs[0] - expected[0]).max()))
    assert metric.measure([[X], [X + 1]], [[X], [X]]) == 0.5
    assert metric.identity != metric_of(lambda outputs, expected: 0.0).identity
    assert metric_of("relative").damage(0.1) == pytest.approx(0.01)
    assert metric_of("cosine").error(metric_of("cosine").damage(0.1)) == pytest.approx(0.1)
    assert metric_of(lambda outputs, expected: np.inf).measure([[X]], [[X]]) == np.inf
    with pytest.raises(OptionError, match="no metric"):
        metric_of("accuracy")
    with pytest.raises(OptionError, match="it gave -1"):
        metric_of(lambda outputs, expected: -1).measure([[X]], [[X]])
