"""How far the outputs of a program are from those of the float model, in numbers that a budget bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import ml_dtypes
import numpy as np

from ....runtime.errors import OptionError
from .function_identity import identity_of

Outputs: TypeAlias = Sequence[np.ndarray]  # of one batch
MetricFunction: TypeAlias = Callable[[Outputs, Outputs], float]
MetricName: TypeAlias = Literal["relative", "cosine"]
METRICS: tuple[MetricName, ...] = get_args(MetricName)


@dataclass(frozen=True, slots=True)
class Metric:
    """`measure` tells the error of outputs [batch][output] beside what was expected of them: 0 where they are equal, inf where
    they are not finite and should be.

    Errors grow as damage to the power of `exponent`, if damage is squared error of an output. `identity` differs where functions
    do, with all that they hold.
    """

    name: str
    exponent: float
    measure: Callable[[Sequence[Outputs], Sequence[Outputs]], float]
    identity: str

    def damage(self, error: float) -> float:
        """What adds up over units, of an error: on a scale of the metric's own."""
        return float(error ** (1 / self.exponent))

    def error(self, damage: float) -> float:
        """The inverse of `damage`."""
        return float(damage**self.exponent)


def metric_of(wanted: object) -> Metric:
    """The metric that a user means: a name of `METRICS`, or a function of the outputs of a batch and the expected ones.

    Raises:
        OptionError: it is neither.
    """
    if wanted == "relative":
        return Metric("relative", 0.5, relative, "relative")
    if wanted == "cosine":
        return Metric("cosine", 1.0, cosine, "cosine")
    if not callable(wanted):
        fix = f"use {' or '.join(METRICS)}, or a function of (outputs, expected outputs) of a batch"
        raise OptionError("metric", f"{wanted!r} is no metric", fix)
    name = getattr(wanted, "__qualname__", type(wanted).__qualname__)
    return Metric(name, 0.5, _mean_of(wanted), identity_of(wanted))


def relative(found: Sequence[Outputs], expected: Sequence[Outputs]) -> float:
    """The error of the worst output, relative to its norm (2-norms over all batches). What should be infinite or NaN does not
    count; of an output of zeros it is the norm of what was found."""
    differences, squares = _squares(found, expected)
    return float(np.sqrt((differences / np.where(squares > 0, squares, 1.0)).max(initial=0.0)))


def cosine(found: Sequence[Outputs], expected: Sequence[Outputs]) -> float:
    """1 minus the mean cosine of rows (the last dimension), of the output where that is greatest. Rows of zeros count where they
    should not be such; elements that should be infinite or NaN do not."""
    losses = []
    for number in _real_outputs(expected):
        pairs = [(a[number], b[number]) for a, b in zip(found, expected, strict=True)]
        found_cosines = np.concatenate([_cosines(a, b) for a, b in pairs])
        losses.append(1.0 - float(np.mean(found_cosines)) if found_cosines.size else 0.0)
    worst = float(np.max(losses, initial=0.0))  # NaN where one is, which Python's max passes over
    return worst if np.isfinite(worst) else np.inf


def _mean_of(function: MetricFunction) -> Callable[[Sequence[Outputs], Sequence[Outputs]], float]:
    def measure(found: Sequence[Outputs], expected: Sequence[Outputs]) -> float:
        errors = [function(a, b) for a, b in zip(found, expected, strict=True)]
        for error in errors:
            if not isinstance(error, (int, float, np.number)) or error < 0:
                raise OptionError("metric", f"it gave {error!r}", "return a number from 0 on, 0 where nothing is lost")
        mean = float(np.mean(errors)) if errors else 0.0
        return mean if np.isfinite(mean) else np.inf

    return measure


def _squares(found: Sequence[Outputs], expected: Sequence[Outputs]) -> tuple[np.ndarray, np.ndarray]:
    """[output]: squared norms of the differences and of what was expected, over all batches."""
    numbers = _real_outputs(expected)
    differences, squares = np.zeros(len(numbers)), np.zeros(len(numbers))
    for actual, wanted in zip(found, expected, strict=True):
        for place, number in enumerate(numbers):
            is_known = np.isfinite(wanted[number])
            a, b = (one[number][is_known].astype(np.float64) for one in (actual, wanted))
            with np.errstate(invalid="ignore", over="ignore"):
                difference = float(((a - b) ** 2).sum())
            differences[place] += difference if np.isfinite(difference) else np.inf
            squares[place] += float((b**2).sum())
    return differences, squares


def _cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of each row of which something is to be finite, by what is; 1 where both are zero."""
    if not b.size:
        return np.zeros(0)
    x, y = (one.astype(np.float64).reshape(-1, one.shape[-1] if one.ndim else 1) for one in (a, b))
    is_known = np.isfinite(y)
    x, y = (np.where(is_known, one, 0.0)[is_known.any(axis=1)] for one in (x, y))
    norms = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    are_zero = ~(x.any(axis=1) | y.any(axis=1))
    with np.errstate(invalid="ignore"):
        found = (x * y).sum(1) / np.where(norms == 0, 1.0, norms)
    return np.where(are_zero, 1.0, found)


def _real_outputs(batches: Sequence[Outputs]) -> list[int]:
    """The places of outputs that are real numbers."""
    are_real = [array.dtype.kind == "f" or array.dtype == ml_dtypes.bfloat16 for array in batches[0]] if batches else []
    return [number for number, is_real in enumerate(are_real) if is_real]
