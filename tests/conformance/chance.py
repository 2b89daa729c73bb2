"""Cases of operators that draw random numbers: judged by what the numbers must obey.

ONNX names no generator; of Bernoulli it says that implementations differ "even if a seed is specified". So what these cases hold
are the numbers of NumPy's generator, which no other can give. Their types and shapes are compared, each element is checked
to be one that the operator can give there, and the share of each outcome to be within six standard deviations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_TRAINING = "test_training_dropout"
_BERNOULLI = "test_bernoulli"
_DEVIATIONS = 6  # a sound generator is beyond them once in 10**8 runs


def is_chance(name: str) -> bool:
    """Whether the results of a case are random numbers. Of a Dropout that keeps everything they are not."""
    return name.startswith((_TRAINING, _BERNOULLI)) and "zero_ratio" not in name


def chance_difference(name: str, inputs: Sequence[Any], expected: Sequence[Any], got: Sequence[Any]) -> str:
    """What the results of such a case cannot be; empty if they can."""
    if [(np.shape(a), a.dtype) for a in got] != [(np.shape(b), b.dtype) for b in expected]:
        return "types or shapes differ"
    return _dropout(inputs, got) if name.startswith(_TRAINING) else _bernoulli(inputs, got)


def _dropout(inputs: Sequence[np.ndarray], got: Sequence[np.ndarray]) -> str:
    x, ratio, is_training = inputs
    assert is_training
    y, *masks = got
    mask = masks[0] if masks else y != 0  # the cases' operands are nowhere 0
    if not np.allclose(y, np.where(mask, x / (1 - ratio), 0), rtol=1e-6):
        return "an element is neither dropped nor scaled"
    return _share(mask, np.full(mask.shape, 1 - ratio, np.float64))


def _bernoulli(inputs: Sequence[np.ndarray], got: Sequence[np.ndarray]) -> str:
    (chances,), (y,) = inputs, got
    return _share(y.astype(bool), chances.astype(np.float64)) if set(np.unique(y)) <= {0, 1} else "an element is neither 0 nor 1"


def _share(outcome: np.ndarray, chances: np.ndarray) -> str:
    off = abs(float(np.sum(outcome - chances)))
    bound = _DEVIATIONS * float(np.sqrt(np.sum(chances * (1 - chances))))
    return "" if off <= bound else f"{int(outcome.sum())} of {outcome.size} came out, {chances.sum():.3g} are expected"
