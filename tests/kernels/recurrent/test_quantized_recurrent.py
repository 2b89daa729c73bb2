"""Recurrences by weights of int8, whose rows are rounded to uint8: the first step exactly, many steps by their error.

A first step's rows are multiples of 1/128 with a range of 255 of them, so that they are rounded to themselves, whatever the last
bits of their scale are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from prefuse.kernels.groups.group import Op
from prefuse.kernels.recurrent import products_amx, projection, stages
from prefuse.kernels.registry import build_kernel
from prefuse.kernels.template.contract import BuiltKernel
from prefuse.runtime.target import AMX_EMULATED, Target

from ..harness import Case, check, check_in_turn, run, target_of
from .test_recurrent import GATES, Arrays, operands, runtime, without
from .test_recurrent import case as float_case

LEVELS = ("avx2", "avxvnni", "avx512", "avx512vnni")
GATES_ALONE, ROUNDED = 1e-4, 4e-2


def quantized(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 numbers, and the scale of each line [directions, lines, 1]."""
    scale = (np.maximum(np.abs(weights).max(2, keepdims=True, initial=0), 1e-30) / 127).astype(np.float32)
    return np.rint(weights / scale).astype(np.int8), scale


def grid(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Rows of multiples of 1/128, from -1 to 127/128, both of which are in each row of two or more."""
    numbers = random.integers(-128, 128, shape)
    if shape[-1] > 1:
        numbers[..., 0], numbers[..., -1] = -128, 127
    return numbers / 128


def case(op: str, arrays: Arrays, expected: Sequence[np.ndarray], tolerance: float, which: str = "wr", **attributes: Any) -> Case:
    """The operator on `arrays`, the weights `which` of it as int8 behind a DequantizeLinear."""
    plain = float_case(op, arrays, expected, tolerance=tolerance, **attributes)
    held = dict(plain.arrays)
    ops = []
    for name in which:
        numbers, scale = quantized(held.pop(name))
        held |= {f"{name}_int8": numbers, f"{name}_scale": scale}
        form = {"axis": 2, "block_size": numbers.shape[2]}
        ops.append(Op("DequantizeLinear", (f"{name}_int8", f"{name}_scale"), (name,), form, 22))
    types = dict(plain.group.types)
    types |= {name: replace(types[name[0]], shape=a.shape, dtype=str(a.dtype)) for name, a in held.items() if name not in types}
    constants = frozenset(name for name in held if name[0] in "wrb")
    group = replace(plain.group, ops=(*ops, *plain.group.ops), inputs=tuple(held), types=types, constants=constants)
    return replace(plain, group=group, arrays=held, label=f"{plain.label} {which} int8")


def dequantized(arrays: Arrays, which: str = "wr") -> Arrays:
    """The same with the weights that the integers stand for."""
    found = dict(arrays)
    for name in which:
        numbers, scale = quantized(arrays[name].astype(np.float32))
        found[name] = numbers * scale.astype(np.float64)
    return found


def first_step(op: str, batch: int, inputs: int, hidden: int, direction: str = "forward", which: str = "wr", **more: Any) -> Case:
    """One step from states and inputs that 8 bits hold."""
    directions = 2 if direction == "bidirectional" else 1
    arrays = without(operands(op, 1, batch, inputs, hidden, directions), "lengths", "p", "c")
    random = np.random.default_rng(batch)
    arrays |= {"x": grid(random, arrays["x"].shape), "h": grid(random, arrays["h"].shape)}
    if op == "GRU":
        more = {"linear_before_reset": 1, **more}
    expected = runtime(op, dequantized(arrays, which), direction=direction, **more)
    return case(op, arrays, expected, GATES_ALONE, which, direction=direction, **more)


def steps(op: str, arrays: Arrays, tolerance: float = ROUNDED, which: str = "wr", **attributes: Any) -> Case:
    """Many steps, whose rounded states have the error of 8 bits, against the same weights in float."""
    return case(op, arrays, runtime(op, dequantized(arrays, which), **attributes), tolerance, which, **attributes)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("op", GATES)
def test_first_step_is_exact(op: str, level: str) -> None:
    """But for the gates' own error."""
    cases = [
        first_step(op, 1, 5, 7),
        first_step(op, 3, 16, 37, "bidirectional"),
        first_step(op, 9, 70, 130, "reverse"),
        first_step(op, 2, 6, 18, which="r"),
        first_step(op, 2, 6, 18, which="w"),
    ]
    check_in_turn(cases, level, LEVELS)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("op", GATES)
def test_steps(op: str, level: str) -> None:
    both, first = operands(op, 6, 9, 5, 19, 2), operands(op, 6, 9, 6, 18, 2, layout=1)
    cases = [
        steps(op, both, direction="bidirectional"),  # lengths, states and peepholes together
        steps(op, first, direction="bidirectional", layout=1),
        steps(op, without(both, "h", "c", "b", "p", "lengths"), direction="bidirectional", clip=0.3),
        steps(op, without(operands(op, 5, 1, 3, 2), "lengths"), which="r"),
        steps(op, without(operands(op, 4, 33, 40, 96), "lengths"), which="w"),
    ]
    check_in_turn(cases, level, LEVELS)


@pytest.mark.parametrize("level", ["avx2", "avxvnni", "avx512vnni"])
def test_nan_and_infinity_stay_in_their_rows(level: str) -> None:
    arrays = without(operands("GRU", 3, 4, 5, 19), "lengths")
    expected = [value.copy() for value in runtime("GRU", dequantized(arrays))]
    arrays["x"][1, 2, 3] = np.inf
    expected[0][1:, :, 2], expected[1][:, 2] = np.nan, np.nan
    check([case("GRU", arrays, expected, ROUNDED)], target_of(level))


def test_zeros_large_and_small_numbers() -> None:
    """Rows of zeros, of one sign, and of numbers whose range overflows or whose scale would be subnormal."""
    for rows in (np.zeros(6), np.full(6, 3.0), np.linspace(-3e38, 3e38, 6), np.full(6, 1e-42)):
        arrays = without(operands("RNN", 2, 2, 6, 5), "lengths", "h", "b") | {"x": np.broadcast_to(rows, (2, 2, 6)).copy()}
        arrays["w"] = np.abs(arrays["w"]) * (1e-30 if rows.max() > 1e30 else 1)
        check([steps("RNN", arrays)], target_of("avx512"))


def test_same_bits_on_any_threads_and_again() -> None:
    def results(count: int) -> list[np.ndarray]:
        ways = {"forward": 1, "bidirectional": 2}
        many = {name: without(operands("GRU", 3, 8, 7, 320, number), "lengths") for name, number in ways.items()}
        cases = [steps("GRU", arrays, direction=name) for name, arrays in many.items()]
        run(cases, target_of("avx512vnni", count))
        return [array for made in cases for array in made.got]

    alone = results(1)
    for threads in (1, 2, 4):
        for got, expected in zip(results(threads), alone, strict=True):
            np.testing.assert_array_equal(got, expected)


def test_other_forms_are_refused() -> None:
    """A scale for all lines of a direction."""
    made = first_step("RNN", 2, 6, 18)
    types = dict(made.group.types)
    types["r_scale"] = replace(types["r_scale"], shape=(1, 1, 1))
    refused = build_kernel(replace(made.group, types=types), Target("cpu", "avx512", 1))
    assert isinstance(refused, tuple)
    assert any("not int8 with a scale for each line" in reason for _, reason in refused)


@pytest.fixture
def tiles_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products, too, for which vectors are faster."""
    for module in (projection, stages):
        monkeypatch.setattr(module, "pays", lambda *size: size[3] > 0)


@pytest.mark.usefixtures("tiles_always")
@pytest.mark.parametrize("op", GATES)
def test_on_tiles(op: str) -> None:
    """On the unit itself: batches of half a block, a whole one and a ragged second one; one of the two weights alone."""
    both = operands(op, 4, 9, 5, 19, 2)
    cases = [
        first_step(op, 1, 1, 2),
        first_step(op, 9, 7, 37, "bidirectional"),
        first_step(op, 32, 64, 64, "reverse"),
        first_step(op, 35, 70, 33, "bidirectional"),
        first_step(op, 20, 70, 33, which="r"),
        first_step(op, 20, 70, 33, which="w"),
        steps(op, both, direction="bidirectional"),
    ]
    check(cases, target_of("amx"))


@pytest.mark.usefixtures("tiles_always")
@pytest.mark.parametrize("op", GATES)
def test_loops_of_tiles_give_the_bits_of_vectors(op: str) -> None:
    """Sums are exact; the projection of inputs is rounded after them in the same way."""
    on_tiles, on_vectors = (first_step(op, 3, 9, 18) for _ in range(2))
    kernel = build_kernel(on_tiles.group, Target("cpu", "amx", 1))
    assert isinstance(kernel, BuiltKernel)
    assert "tdpbusd" in str(kernel.function)
    assert "tdpbf16ps" not in str(kernel.function)
    run([on_tiles], target_of(AMX_EMULATED, 1))
    run([on_vectors], target_of("avx512vnni", 1))
    for got, expected in zip(on_tiles.got, on_vectors.got, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_a_single_row_is_left_to_vectors() -> None:
    machine = Target("cpu", "amx", 2).machine
    assert not products_amx.pays(1, 1536, 512, 1, machine, 4)
    assert products_amx.pays(32, 1536, 512, 1, machine, 4)
