"""Recurrences with weights of bfloat16, against torch in float64 and ONNX Runtime on the very numbers.

Where rows are rounded, too (a batch of more than two, in bfloat16, on CPUs with dot products of pairs), results are exact, but
for the gates' own errors, only if what is multiplied is narrow already: the first step of given states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from prefuse.kernels.registry import build_kernel
from prefuse.kernels.template.contract import BuiltKernel

from ..harness import check, run, target_of
from .test_recurrent import GATES, case, of_runtime, of_torch, operands, runtime, without

LEVELS = ("avx2", "avx512", "avx512bf16")
PAIRS = "avx512bf16"  # the level that has dot products of pairs
GATES_ALONE = 4e-5  # what gates have for an error where rows are rounded
ROUNDED = 8e-3  # what rounding the rows of each step may cost
NARROW: dict[str, Any] = {"narrow": "wr", "precision": "bfloat16"}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("op", GATES)
def test_weights_alone(op: str, level: str) -> None:
    """Two rows at most, or a user who wants float32: nothing is rounded but the weights."""
    check(
        [
            of_torch(op, 1, 1, 1, 1, **NARROW),
            of_torch(op, 3, 1, 7, 37, "bidirectional", narrow_numbers="x", **NARROW),
            of_torch(op, 2, 9, 6, 18, narrow="wr"),
        ],
        target_of(level),
    )


@pytest.mark.parametrize("op", GATES)
def test_first_step_of_narrow_states(op: str) -> None:
    given: dict[str, Any] = {**NARROW, "narrow_numbers": "xh", "tolerance": GATES_ALONE}
    check(
        [
            of_torch(op, 1, 3, 2, 5, **given),
            of_torch(op, 1, 9, 7, 37, "bidirectional", **given),
            of_torch(op, 1, 5, 70, 130, "reverse", **given),
        ],
        target_of(PAIRS),
    )


@pytest.mark.parametrize("op", GATES)
def test_steps(op: str) -> None:
    options: dict[str, Any] = {**NARROW, "tolerance": ROUNDED}
    both, first = operands(op, 6, 9, 5, 19, 2), operands(op, 6, 9, 6, 18, 2, layout=1)
    check(
        [
            of_torch(op, 6, 11, 16, 64, "bidirectional", **options),
            of_runtime(op, both, direction="bidirectional", **options),  # lengths, states and peepholes together
            of_runtime(op, first, direction="bidirectional", layout=1, **options),
            of_runtime(op, without(both, "h", "c", "b", "p", "lengths"), direction="bidirectional", **options),
            of_torch(op, 3, 5, 7, 21, dtype=ml_dtypes.bfloat16, tolerance=4e-2),
        ],
        target_of(PAIRS),
    )


@pytest.mark.parametrize("level", ["avx512", PAIRS])
def test_nan_and_infinity_stay_in_their_rows(level: str) -> None:
    arrays = without(operands("GRU", 3, 4, 5, 19), "lengths")
    expected = [value.copy() for value in runtime("GRU", arrays)]
    arrays["x"][1, 2] = np.nan
    expected[0][1:, :, 2], expected[1][:, 2] = np.nan, np.nan
    unbounded = without(operands("RNN", 1, 3, 5, 19), "lengths", "h") | {"h": np.zeros((1, 3, 19))}
    unbounded["h"][0, 1, 18] = np.inf
    results = runtime("RNN", unbounded, activations=["Relu"])
    check(
        [
            case("GRU", arrays, expected, tolerance=2e-2, **NARROW),
            case("RNN", unbounded, results, tolerance=2e-2, activations=("Relu",), **NARROW),
        ],
        target_of(level),
    )


def test_same_bits_on_any_threads() -> None:
    def results(count: int) -> list[np.ndarray]:
        cases = [of_torch("GRU", 3, 8, 7, 320, direction, **NARROW) for direction in ("forward", "bidirectional")]
        run(cases, target_of(PAIRS, count))
        return [array for made in cases for array in made.got]

    alone = results(1)
    for threads in (2, 4):
        for got, expected in zip(results(threads), alone, strict=True):
            np.testing.assert_array_equal(got, expected)


def test_weights_that_are_asked_for_ahead() -> None:
    """Those of a direction are more than a second-level cache holds."""
    check(
        [of_torch("RNN", 1, 3, 4, 740, narrow="wr", precision="bfloat16", narrow_numbers="xh", tolerance=GATES_ALONE)],
        target_of(PAIRS),
    )
    check([of_torch("RNN", 1, 3, 4, 530)], target_of("avx512"))


@pytest.mark.parametrize(("activation", "exact"), [("Tanh", np.tanh), ("Sigmoid", lambda x: (1 + np.tanh(x / 2)) / 2)])
def test_errors_of_gates(activation: str, exact: Callable[[np.ndarray], np.ndarray]) -> None:
    """Where rows are rounded gates have an error of 2e-5, and no worse one where they end. The units read their bias alone."""
    bias = np.concatenate([np.linspace(-20, 20, 505), [-1e38, -np.inf, 1e38, np.inf, 1e-30, np.nan, 0.0]]).astype(np.float32)
    zeros = {name: np.zeros(shape) for name, shape in (("x", (1, 3, 2)), ("w", (1, 512, 2)), ("r", (1, 512, 512)))}
    arrays = {**zeros, "b": np.concatenate([bias, np.zeros(512)])[None]}
    result = np.broadcast_to(exact(bias.astype(np.float64)), (1, 1, 3, 512))
    given = case("RNN", arrays, [result, result[0]], tolerance=2e-5, activations=(activation,), **NARROW)
    check([given], target_of(PAIRS))


def test_input_that_is_asked_for_ahead() -> None:
    """As it is where the second-level cache holds none of it."""
    target = target_of(PAIRS)
    target = replace(target, machine=replace(target.machine, l2=replace(target.machine.l2, size_bytes=0)))
    rough: dict[str, Any] = {**NARROW, "tolerance": ROUNDED, "direction": "bidirectional"}
    cases = [of_runtime("GRU", operands("GRU", 6, 9, 5, 19, 2), **rough), of_torch("GRU", 3, 5, 7, 37, "reverse")]
    for made in cases:
        built = build_kernel(made.group, target)
        assert isinstance(built, BuiltKernel)
        assert "prefetch" in str(built.function)
    check(cases, target)
