"""Errors of outputs, beside what they are by hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
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
    assert cosine([[X, broken]], [[X, X]]) == cosine([[broken, X]], [[X, X]]) == np.inf, "in any output"
    assert relative([[np.arange(3)]], [[np.arange(3) + 1]]) == 0


def test_cosine_is_the_mean_over_rows() -> None:
    turned = X[:, ::-1] * np.array([1, -1], np.float32)
    assert cosine([[X]], [[2 * X]]) == pytest.approx(0, abs=1e-12)
    assert cosine([[turned]], [[X]]) == pytest.approx(1)
    assert cosine([[np.stack([X[0], turned[1]])]], [[X]]) == pytest.approx(0.5)
    assert cosine([[np.zeros_like(X)]], [[np.zeros_like(X)]]) == 0
    assert cosine([[np.zeros_like(X)]], [[X]]) == 1


def test_bfloat16_is_a_real_number() -> None:
    narrow = X.astype(ml_dtypes.bfloat16)
    assert relative([[np.zeros_like(narrow)]], [[narrow]]) == 1
    assert cosine([[-narrow]], [[narrow]]) == pytest.approx(2)


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


def test_what_should_not_be_finite_does_not_count_in_cosines() -> None:
    odd = X.copy()
    odd[0, 0] = np.inf
    assert cosine([[odd]], [[odd]]) == pytest.approx(0, abs=1e-12)
    assert cosine([[np.where(np.isfinite(odd), odd, 7)]], [[odd]]) == pytest.approx(0, abs=1e-12)
    assert cosine([[X]], [[np.full_like(X, np.nan)]]) == 0
    assert cosine([[np.zeros((0, 3), np.float32), X]], [[np.zeros((0, 3), np.float32), X]]) == pytest.approx(0, abs=1e-12)
    assert cosine([[np.zeros((3, 0), np.float32)]], [[np.zeros((3, 0), np.float32)]]) == 0


def made(source: str) -> Any:
    """The function `f` of a source, which is compiled anew."""
    space: dict[str, Any] = {"np": np}
    exec(compile(source, "metrics", "exec"), space)
    return space["f"]


CLOSURE = """
def outer(limit):
    def measure(a, b):
        return max((lambda c: c * limit)(number) for number in (1, 2))
    return measure
f = outer({})
"""


class Scaled:
    """A metric with a state."""

    def __init__(self, factor: object) -> None:
        self.factor = factor

    def __call__(self, outputs: object, expected: object) -> float:
        return 0.0


def identity(function: object) -> str:
    return metric_of(function).identity


def test_identities_are_those_of_code_and_of_what_it_holds() -> None:
    assert identity(made(CLOSURE.format(1))) == identity(made(CLOSURE.format(1))), "of nested code, too"
    sources = [CLOSURE.format(1), CLOSURE.format(2), "f = lambda a, b: 1", "f = lambda a, b, *, c=1: 1"]
    sources += ["f = lambda a, b, *, c=2: 1", "k = 1\nf = lambda a, b: k", "k = 2\nf = lambda a, b: k"]
    functions = [*map(made, sources), *(partial(made(sources[2]), c=number) for number in (1, 2))]
    functions += [Scaled(np.arange(3)), Scaled(np.arange(4)), Scaled(1), Scaled(1).__call__, Scaled(2).__call__]
    assert len({identity(function) for function in functions}) == len(functions)
    assert identity(Scaled(np.arange(3))) == identity(Scaled(np.arange(3)))
    assert identity(partial(made(sources[2]), c=1)) == identity(partial(made(sources[2]), c=1))


def test_what_has_no_text_is_equal_to_nothing_else() -> None:
    held = object()
    assert identity(Scaled(held)) != identity(Scaled(held))


class Unknown:
    """Something whose state nobody asks for."""

    number = 1


def test_globals_of_unknown_kinds_make_a_function_equal_to_nothing_else() -> None:
    """They may change: a tensor, or an object of a class of the user's."""
    for held in (torch.ones(3), Unknown()):
        function = made("f = lambda a, b: held.number")
        function.__globals__["held"] = held
        assert identity(function) != identity(function)
    named = made("f = lambda a, b: norm(a[0] - b[0])")
    named.__globals__["norm"] = np.linalg.norm
    assert identity(named) == identity(named), "NumPy's own functions are known by their names"
