"""What is not a product: estimates grow with the work, are never below what bytes take, and match counts made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from prefuse.kernels.cost.estimate import Estimate
from prefuse.kernels.cost.movement import _again_cycles, chosen_rows_cycles, copied_cycles, transposed_cycles
from prefuse.kernels.cost.pointwise import LoopBody, covering_steps, scalar_steps, vector_steps
from prefuse.kernels.cost.reduction import Reduction, reduction_cycles, scan_cycles, search_cycles
from prefuse.kernels.cost.rows import RowPass, row_cycles
from prefuse.kernels.groups.group import Op
from prefuse.kernels.registry import candidates
from prefuse.runtime.hardware.machine import row
from prefuse.runtime.target import Target

from ..harness import operator

ZEN3 = row("zen3", 8)
TARGET = Target.parse("cpu:avx2,machine=zen3,threads=1")
SUM = LoopBody(1, loads=1)
# An operator, the shape of its operand when it is small, and its attributes.
CASES: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "elementwise": ("Exp", (16, 40), {}),
    "normalization": ("Softmax", (16, 40), {"axis": -1}),
    "reduction": ("ReduceSum", (16, 40), {}),
    "arg_reduction": ("ArgMax", (16, 40), {"axis": 1}),
    "scan": ("CumSum", (16, 40), {}),
    "pooling": ("MaxPool", (1, 4, 12, 12), {"kernel_shape": [2, 2], "strides": [2, 2]}),
    "injective": ("Transpose", (16, 40), {"perm": [1, 0]}),
    "gather": ("Gather", (16, 40), {"axis": 0}),
    "resize": ("Resize", (1, 4, 12, 12), {"mode": "linear"}),
}


def estimate(template: str, times: int = 1) -> Estimate:
    """Of a case, its last dimension so many times as long."""
    op_type, shape, attributes = CASES[template]
    x = np.ones((*shape[:-1], times * shape[-1]), np.float32)
    others: dict[str, tuple[np.ndarray | None, ...]] = {
        "CumSum": (np.array(1),),
        "Gather": (np.arange(16),),
        "ReduceSum": (np.array([-1]),),
        "Resize": (None, None, np.array([*x.shape[:2], *(2 * extent for extent in x.shape[2:])])),
    }
    ranked, refused = candidates(operator(op_type, x, *others.get(op_type, ()), **attributes).group, TARGET)
    assert template in dict(ranked), refused
    return dict(ranked)[template].estimate


@pytest.mark.parametrize("template", CASES)
def test_estimates_grow_with_the_work(template: str) -> None:
    times = [estimate(template, times).wall_cycles(ZEN3) for times in (1, 4, 64)]
    assert times[0] < times[1] < times[2]
    assert times[2] > 4 * times[0]


@pytest.mark.parametrize("template", CASES)
def test_no_kernel_is_faster_than_its_bytes(template: str) -> None:
    one = estimate(template, 64)
    assert not one.is_floor
    assert one.wall_cycles(ZEN3) >= ZEN3.read_cycles(one.streamed_bytes, one.streamed_bytes)
    assert one.wall_cycles(ZEN3, streamed_from=1 << 30) >= one.streamed_bytes / ZEN3.memory_bytes


def test_a_loop_takes_what_its_slowest_unit_takes() -> None:
    assert LoopBody(8).cycles(ZEN3) == 8 / ZEN3.multiply_adds
    assert LoopBody(loads=6, stores=1).cycles(ZEN3) == 6 / ZEN3.loads
    assert LoopBody(stores=5).cycles(ZEN3) == 5 / ZEN3.stores
    assert LoopBody(1, divisions=1).cycles(ZEN3) == 0.5 * ZEN3.lanes
    assert (LoopBody(1, loads=2) + LoopBody(3, stores=1)).times(2) == LoopBody(8, loads=4, stores=2)


@pytest.mark.parametrize(
    ("extent", "expected"), [(0, (0, 0, 0)), (5, (5, 2, 2)), (8, (1, 1, 1)), (23, (9, 5, 3)), (24, (3, 3, 3))]
)
def test_steps_of_a_run(extent: int, expected: tuple[int, int, int]) -> None:
    """One by one after whole vectors, in ever shorter vectors, and with a last vector that overlaps (of 5: 4 and 4)."""
    assert (scalar_steps(extent, 8), vector_steps(extent, 8), covering_steps(extent, 8)) == expected


def test_sums_wait_for_each_other() -> None:
    """One chain of sums takes its latency for each vector; four take a fourth; short rows overlap with the next."""
    passes: Sequence[RowPass] = [RowPass(SUM, 1)]
    one, four = (row_cycles(passes, 1000, slots, ZEN3) for slots in (8, 32))
    assert one == pytest.approx(1000 * ZEN3.sum_latency, rel=0.01)
    assert four == pytest.approx(one / 4, rel=0.02)
    assert row_cycles(passes, 4, 8, ZEN3) < 4 * ZEN3.sum_latency


def test_reductions_by_hand() -> None:
    """100 rows of 64: eight vectors in four sums each. As columns, four vectors of sums meet 64 rows of each block."""
    rows = Reduction(100, 64, 64, 8, 32, is_rowwise=True)
    assert (rows.steps, rows.blocks) == (8, 100)
    cycles = reduction_cycles(rows, [SUM], LoopBody(stores=1), ZEN3)
    assert 100 * 8 * ZEN3.sum_latency / 4 < cycles < 2 * 100 * 8 * ZEN3.sum_latency / 4
    columns = replace(rows, is_rowwise=False, run=100, stride_bytes=400)
    assert (columns.steps, columns.blocks) == (256, 4)
    crowded = replace(columns, stride_bytes=4096)
    assert reduction_cycles(crowded, [SUM], LoopBody(), ZEN3) > reduction_cycles(columns, [SUM], LoopBody(), ZEN3)
    parts = replace(rows, results=1, elements=1 << 20, run=1 << 20)
    whole, cut = (reduction_cycles(replace(parts, parts=count), [SUM], LoopBody(), ZEN3) for count in (1, 128))
    assert whole + 128 * 4 * 2 < cut < 1.05 * whole  # four vectors of each part are stored, and read again
    assert (parts.has_tasks, replace(parts, parts=128).has_tasks) == (False, True)
    assert search_cycles(rows, SUM, ZEN3) > 100 * 31  # comparisons of slots, one after the other


def test_long_running_sums_wait_and_short_ones_overlap() -> None:
    long, short = (scan_cycles(shape, 1, 1, SUM, ZEN3) for shape in ((1, 10_000), (1000, 10)))
    assert long == pytest.approx(10_000 * ZEN3.sum_latency, rel=0.01)
    assert short < long / 2


def test_movement_by_hand() -> None:
    store = LoopBody(stores=1)
    assert copied_cycles((1, 8000), 1, 8, store, ZEN3) == pytest.approx(1000, abs=5)  # a store each
    assert copied_cycles((1, 8000), 100, 8, store, ZEN3) > 4 * copied_cycles((1, 8000), 1, 8, store, ZEN3)
    assert chosen_rows_cycles(10, 800, 8, store, ZEN3) == pytest.approx(1000, rel=0.2)
    near = transposed_cycles(1, (64, 64), (256, 256), 8, store, ZEN3)
    assert near >= 64 * (24 / ZEN3.multiply_adds + 4)  # three rounds of eight shuffles for each of 64 tiles
    far = transposed_cycles(1, (64, 64), (256, 4096), 8, store, ZEN3)
    assert far > near + 64 * 64 * 8 / ZEN3.l2.bytes_per_cycle / 2


def test_rows_are_taken_where_they_save_operations() -> None:
    """Rows and a normalization do nearly the same for one with a follower; powers before it rows compute once."""
    x = np.ones((64, 96), np.float32)
    alone = operator("Softmax", x, axis=-1).group
    (softmax,) = alone.ops
    kind = alone.types[softmax.outputs[0]]
    after = replace(
        alone, ops=(softmax, Op("Relu", softmax.outputs, ("r",))), outputs=("r",), types=dict(alone.types) | {"r": kind}
    )
    power = Op("Exp", softmax.inputs, ("e",))
    before = replace(alone, ops=(power, replace(softmax, inputs=("e",))), types=dict(alone.types) | {"e": kind})
    followed, prologued = (candidates(group, TARGET)[0] for group in (after, before))
    assert [name for name, _ in followed[:2]] == ["normalization", "rows"]
    assert followed[1][1].estimate.cycles < 1.2 * followed[0][1].estimate.cycles
    times = {name: one.estimate.cycles for name, one in prologued}
    assert prologued[0][0] == "rows"
    assert times["normalization"] > 1.2 * times["rows"]


def test_rounding_takes_instructions_where_there_is_none_for_it() -> None:
    x = np.ones((64, 96), np.float32)
    relu, cast = operator("Relu", x).group, operator("Cast", x, to=16).group
    cycles = [dict(candidates(group, TARGET)[0])["elementwise"].estimate.cycles for group in (relu, cast)]
    assert cycles[1] >= cycles[0] + 64 * 12  # of each vector two instructions or more


def test_a_cache_of_a_measured_size_has_no_more_sets_than_lines() -> None:
    """Its size is no multiple of anything: more sets would hold any number of lines."""
    odd = replace(ZEN3, l3=replace(ZEN3.l3, size_bytes=(16 << 20) - 12_345))
    size_bytes, lines = 1 << 20, (16 << 20) // 64 + 1
    assert _again_cycles(size_bytes, lines, 64, odd) == size_bytes / odd.memory_bytes
    assert _again_cycles(size_bytes, lines // 2, 64, odd) == size_bytes / odd.l3.bytes_per_cycle


@pytest.mark.parametrize(
    ("name", "shape", "axis", "is_parallel"),
    [("ReduceSum", (1, 1 << 20), 1, True), ("ArgMax", (1, 1 << 20), 1, False), ("ReduceSum", (4, 60000), 1, True)],
)
def test_reductions_are_parallel_where_there_are_tasks(name: str, shape: tuple[int, int], axis: int, is_parallel: bool) -> None:
    """One result of a sum is computed in parts, of a search by one thread."""
    x = np.ones(shape, np.float32)
    group = (operator(name, x, axis=axis) if name == "ArgMax" else operator(name, x, np.array([axis]))).group
    assert candidates(group, TARGET)[0][0][1].estimate.is_parallel == is_parallel
