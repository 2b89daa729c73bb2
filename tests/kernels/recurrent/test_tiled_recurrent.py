"""GRU, LSTM and RNN with their products on the tile unit: against float64 and ONNX Runtime, and the machine code in software."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
from prefuse.kernels.cost.amx import tile_step_cycles, vector_step_cycles
from prefuse.kernels.recurrent import products_amx, projection, stages
from prefuse.kernels.registry import build_kernel
from prefuse.kernels.template.contract import BuiltKernel
from prefuse.runtime.precision import Precision
from prefuse.runtime.target import AMX_EMULATED
from prefuse.tests.sample import dealt, every

from ..harness import Case, check, run, target_of
from ..microkernels.amx_emulator import AMX, emulator, running_amx
from .test_recurrent import GATES, of_runtime, of_torch, operands, without

__all__ = ["emulator"]
SPLIT: tuple[Precision, ...] = ("float32", "float32-fast")  # those whose operands are split into terms
UNITS: dict[Precision, float] = {"float32": 2e-6, "float32-fast": 2e-5, "bfloat16": 1e-2}


@pytest.fixture(autouse=True)
def tiles_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products, too, for which vectors are faster."""
    for module in (projection, stages):
        monkeypatch.setattr(module, "pays", lambda *size: size[3] > 0)


def check_on_tiles(cases: list[Case], emulator: ctypes.CDLL | None) -> None:
    """The machine code itself, as plain loops take long to compile."""
    with running_amx(emulator) as counts:
        check(cases, AMX)
    assert counts is None or not cases or counts["tdpbf16ps"] > 0


def of_precision(precision: Precision, case: Case) -> Case:
    unit = UNITS[precision]
    return replace(case, group=replace(case.group, precision=precision), rtol=unit, atol=unit, got=[])


@pytest.mark.parametrize("precision", SPLIT)
@pytest.mark.parametrize("op", GATES)
def test_shapes(emulator: ctypes.CDLL | None, op: str, precision: Precision) -> None:
    """Batches of half a block, a whole one and a ragged second one; hidden units and inputs that divide tiles or do not.

    Each in one precision a day, in the other one tomorrow.
    """
    cases = [
        of_torch(op, 2, 1, 1, 1),
        of_torch(op, 3, 9, 7, 37, "bidirectional"),
        of_torch(op, 2, 32, 32, 64, "bidirectional"),
        of_torch(op, 2, 35, 40, 33, "reverse"),
    ]
    chosen = dealt(cases, [case.label for case in cases], precision, SPLIT)
    check_on_tiles([of_precision(precision, case) for case in chosen], emulator)


@pytest.mark.parametrize("op", GATES)
def test_attributes(emulator: ctypes.CDLL | None, op: str) -> None:
    both = operands(op, 4, 9, 5, 19, 2)
    first = operands(op, 3, 9, 5, 19, 2, layout=1)
    cases = [
        of_runtime(op, both, direction="bidirectional", clip=0.3),  # lengths, states and peepholes together
        of_runtime(op, first, direction="bidirectional", layout=1),
        of_runtime(op, without(both, "h", "c", "b", "p", "lengths"), direction="bidirectional"),
    ]
    check_on_tiles([of_precision("float32-fast", case) for case in cases], emulator)


@pytest.mark.parametrize("op", GATES)
def test_weights_of_bfloat16(emulator: ctypes.CDLL | None, op: str) -> None:
    cases = [of_torch(op, 3, 9, 7, 37, "bidirectional", narrow="wr"), of_torch(op, 2, 33, 64, 32, narrow="wr")]
    check_on_tiles([of_precision("bfloat16", case) for case in cases], emulator)


def test_many_steps_keep_the_promise_of_two_terms(emulator: ctypes.CDLL | None) -> None:
    check_on_tiles([of_precision("float32-fast", of_torch("GRU", 60, 16, 32, 64))], emulator)


def test_nan_stays_in_its_row(emulator: ctypes.CDLL | None) -> None:
    case = of_precision("float32-fast", of_torch("GRU", 3, 20, 5, 19))
    x, (y, last) = case.arrays["x"].copy(), (value.copy() for value in case.expected)
    x[1, 2] = np.nan
    y[1:, :, 2], last[:, 2] = np.nan, np.nan
    check_on_tiles([replace(case, arrays={**case.arrays, "x": x}, expected=[y, last])], emulator)


@pytest.mark.parametrize("threads", every(2, [2, 3]))
def test_same_bits_on_any_threads(emulator: ctypes.CDLL | None, threads: int) -> None:
    def results(count: int) -> list[np.ndarray]:
        cases = [of_precision("float32-fast", of_torch("GRU", 2, 20, 7, 320, d)) for d in ("forward", "bidirectional")]
        with running_amx(emulator):
            run(cases, replace(AMX, threads=count))
        return [array for case in cases for array in case.got]

    for got, alone in zip(results(threads), results(1), strict=True):
        np.testing.assert_array_equal(got, alone)


@pytest.mark.parametrize("precision", UNITS)
def test_the_instructions_give_the_bits_of_the_loops(emulator: ctypes.CDLL | None, precision: Precision) -> None:
    narrow = "wr" if precision == "bfloat16" else ""
    cases = [of_precision(precision, of_torch("RNN", 2, 20, 40, 37, narrow=narrow)) for _ in range(2)]
    run([cases[0]], target_of(AMX_EMULATED))
    with running_amx(emulator) as counts:
        run([cases[1]], AMX)
    assert counts is None or counts["tdpbf16ps"] > 0
    for got, expected in zip(cases[1].got, cases[0].got, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_a_batch_of_one_is_left_to_vectors() -> None:
    for terms in (1, 2, 3):
        assert tile_step_cycles(1, 1536, 512, terms, AMX.machine) > vector_step_cycles(1, 1536, 512, AMX.machine)
        assert tile_step_cycles(32, 1536, 512, terms, AMX.machine) < vector_step_cycles(32, 1536, 512, AMX.machine)


def test_steps_without_inputs_are_left_to_vectors() -> None:
    """Their weights have no panels."""
    assert not products_amx.pays(12, 64, 0, 3, AMX.machine)


def test_weights_that_change_and_other_types_are_left_to_vectors() -> None:
    for case in (of_torch("RNN", 2, 9, 7, 37, constants=""), of_torch("RNN", 2, 9, 7, 37, dtype=np.float64)):
        kernel = build_kernel(case.group, AMX)
        assert isinstance(kernel, BuiltKernel)
        assert "tdpbf16ps" not in str(kernel.function)
