"""Recurrences whose steps are one grid, on the simulators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from prefuse.kernels.codegen.grids import DeviceFunction
from prefuse.kernels.recurrent import recurrent_gpu
from prefuse.kernels.template.contract import Refusal
from prefuse.runtime.hardware.gpu import gpu_machine
from prefuse.runtime.target import Target

from ...kernels.harness import Case, build
from ...kernels.recurrent.test_recurrent import GATES, case, in_other_orders, of_runtime, of_torch, operands, runtime, without
from ...sample import dealt
from ..simulator import CUDA, RDNA, ROCM, SimulatedFaultError, check

TARGETS = (CUDA, ROCM, RDNA)


def on_gpu(one: Case) -> Case:
    return replace(one, template="gpu_recurrent")


def cases(op: str) -> list[Case]:
    """Several rows and row blocks, hidden units that fill no block, both directions, lengths, states, layouts, types."""
    both, first = operands(op, 4, 9, 5, 19, 2), operands(op, 4, 5, 5, 19, 2, layout=1)
    made = [
        of_torch(op, 3, 1, 8, 32),
        of_torch(op, 2, 9, 7, 37),
        of_torch(op, 3, 5, 7, 37, "bidirectional"),
        of_torch(op, 3, 2, 5, 17, "reverse"),
        of_torch(op, 2, 3, 10, 130),
        of_torch(op, 1, 1, 1, 1),
        of_torch(op, 3, 5, 7, 21, constants=""),
        of_torch(op, 3, 5, 7, 21, dtype=ml_dtypes.bfloat16, tolerance=4e-2),
        of_runtime(op, both, direction="bidirectional"),
        of_runtime(op, first, direction="bidirectional", layout=1),
        of_runtime(op, without(both, "lengths", "h", "c", "b", "p"), direction="bidirectional", wanted="y"),
    ]
    return [on_gpu(one) for one in (*made, *in_other_orders(op))]


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("op", GATES)
def test_against_torch_and_onnx_runtime(op: str, target: Target, tmp_path: Path) -> None:
    made = cases(op)
    check(dealt(made, [one.label + str(i) for i, one in enumerate(made)], target, TARGETS), tmp_path, target)


def test_two_stages_of_a_step_meet_twice(tmp_path: Path) -> None:
    one = operands("GRU", 5, 6, 5, 40, 2)
    check([on_gpu(of_runtime("GRU", one, direction="bidirectional"))], tmp_path)


def launches(one: Case, target: Target = CUDA) -> list[tuple[int, bool]]:
    function = build(on_gpu(one), target).function
    assert isinstance(function, DeviceFunction)
    return [(grid.blocks, grid.is_cooperative) for grid in function.launches]


@pytest.mark.parametrize(("direction", "blocks"), [("forward", 12), ("bidirectional", 24)])
def test_all_steps_of_all_directions_are_one_grid(direction: str, blocks: int) -> None:
    assert launches(of_torch("GRU", 7, 2, 20, 96, direction)) == [(blocks, True)]


@pytest.mark.parametrize("level", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_120"])
def test_all_blocks_run_at_once_on_the_smallest_gpu_of_an_architecture(level: str) -> None:
    ((blocks, _),) = launches(of_torch("LSTM", 2, 1, 8, 512), Target("cuda", level))
    assert gpu_machine(level).fewest // 2 < blocks <= gpu_machine(level).fewest


@pytest.mark.parametrize(("level", "least"), [("sm_80", 96), ("sm_90", 128)])
def test_weights_stay_in_blocks_of_gpus_that_are_alike(level: str, least: int) -> None:
    """H20 has 78 multiprocessors, H100 114 or more: of so few blocks none would hold its weights."""
    ((blocks, _),) = launches(of_torch("LSTM", 2, 1, 8, 768 if level == "sm_80" else 1024), Target("cuda", level))
    assert least <= blocks <= gpu_machine(level).multiprocessors


def test_blocks_of_one_step_do_not_meet() -> None:
    assert launches(of_torch("LSTM", 1, 2, 20, 96)) == [(12, False)]


@pytest.mark.parametrize("most", [12000, 17000, 22000], ids="{} bytes".format)
def test_weights_too_large_for_shared_memory_are_read_from_memory(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None, those of the inputs alone, and those of the states alone are kept."""
    monkeypatch.setattr(recurrent_gpu, "_MOST_BYTES", most)
    check([on_gpu(of_torch("LSTM", 3, 2, inputs, 40)) for inputs in (5, 70)], tmp_path)


def test_inputs_longer_than_what_is_loaded_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent_gpu, "_INPUT_DEPTH", 8)
    monkeypatch.setattr(recurrent_gpu, "_INPUT_ROWS", 3)
    check([on_gpu(of_torch("GRU", 3, 3, inputs, 12)) for inputs in (7, 8, 29)], tmp_path)


def test_a_missing_meeting_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that go on with what others have not written yet give wrong states."""
    monkeypatch.setattr("prefuse.kernels.codegen.gpu_builder.GpuBuilder.grid_barrier", lambda self: self.barrier())
    with pytest.raises((AssertionError, SimulatedFaultError)):
        check([on_gpu(of_torch("GRU", 4, 2, 5, 40))], tmp_path)


def no_steps() -> Case:
    arrays = without(operands("GRU", 2, 3, 4, 5), "lengths")
    return case("GRU", arrays | {"x": arrays["x"][:0]}, [np.zeros((0, 1, 3, 5)), arrays["h"]])


def no_inputs() -> Case:
    arrays = without(operands("GRU", 2, 3, 4, 5), "lengths")
    empty = arrays | {"x": arrays["x"][:, :, :0], "w": arrays["w"][:, :, :0]}
    return case("GRU", empty, runtime("GRU", arrays | {"x": arrays["x"] * 0}))


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (no_steps, "nothing to compute"),
        (no_inputs, "nothing to compute"),
        (lambda: of_torch("GRU", 2, 1, 3, 8, dtype=np.float64), "multiply float32"),
    ],
)
def test_refusals(made: Callable[[], Case], reason: str) -> None:
    refused = recurrent_gpu.plan(made().group, CUDA)
    assert isinstance(refused, Refusal)
    assert reason in refused.reason


def test_a_state_that_shared_memory_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent_gpu, "_block_bytes", lambda machine: 1000)
    refused = recurrent_gpu.plan(of_torch("RNN", 1, 4, 1, 300).group, CUDA)
    assert isinstance(refused, Refusal)
    assert "does not hold the state of 300 units" in refused.reason
