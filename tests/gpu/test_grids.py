"""Loop nests cut into grids: what becomes a grid, what the host repeats, what is refused."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from prefuse.kernels.codegen.builder import Buffer
from prefuse.kernels.codegen.gpu_builder import GpuBuilder
from prefuse.kernels.codegen.grids import BLOCK_THREADS, GridLaunch, UncutError
from prefuse.kernels.groups.group import Group, Op
from prefuse.kernels.registry import build_kernel
from prefuse.kernels.template.contract import BuiltKernel
from prefuse.runtime.gpu.tensor_maps import TensorMap
from prefuse.runtime.plan import Grid, Kernel, Launch, TensorType
from prefuse.runtime.plan_checker import check_plan
from prefuse.runtime.plan_text import parse_plan, print_plan
from prefuse.runtime.target import Target
from tvm import tirx

from ..runtime.tiny_program import tiny_plan
from .simulator import compile_simulation

N = 300


def builder_of(*names: str) -> tuple[GpuBuilder, list[Buffer]]:
    builder = GpuBuilder()
    return builder, [builder.parameter(name, N, "float32") for name in names]


def run(builder: GpuBuilder, folder: Path, *arrays: np.ndarray) -> tuple[GridLaunch, ...]:
    """Run the nest on the simulator; the arrays are its parameters in order."""
    function = builder.function()
    library = ctypes.CDLL(str(compile_simulation({"k": function}, folder)))
    for one in function.launches:
        cells = (ctypes.c_uint64 * (len(arrays) + len(one.scalars)))(*(a.ctypes.data for a in arrays), *one.scalars)
        places = (ctypes.c_void_p * len(cells))(*(ctypes.addressof(cells) + 8 * i for i in range(len(cells))))
        assert getattr(library, f"sim_k_{one.function}")(one.blocks, one.threads, one.shared_bytes, places) == 0
    return function.launches


def test_a_parallel_loop_is_a_grid(tmp_path: Path) -> None:
    """Blocks are full but for the last, whose threads beyond the end do nothing."""
    builder, (x, y) = builder_of("x", "y")
    with builder.chunks(N, N) as i:
        builder.store(y, i, x[i] + x[i])
    a, b = np.arange(N, dtype=np.float32), np.zeros(N, np.float32)
    assert run(builder, tmp_path, a, b) == (GridLaunch(0, 2, BLOCK_THREADS),)
    np.testing.assert_array_equal(b, 2 * a)


def test_grids_run_in_order_and_what_lies_between_has_one_thread(tmp_path: Path) -> None:
    builder, (x, y) = builder_of("x", "y")
    with builder.chunks(N, N) as i:
        builder.store(y, i, x[i] * x[i])
    with builder.loop(N - 1) as i:
        builder.store(y, i + 1, y[i] + y[i + 1])
    with builder.chunks(10, N) as i:
        builder.store(y, i, y[i] - x[i])
    a, b = np.arange(N, dtype=np.float32) / 64, np.zeros(N, np.float32)
    launches = run(builder, tmp_path, a, b)
    assert [(one.blocks, one.threads) for one in launches] == [(2, 256), (1, 1), (1, 32)]
    expected = np.cumsum(a * a, dtype=np.float32)
    expected[:10] -= a[:10]
    np.testing.assert_allclose(b, expected, rtol=1e-5)


def test_the_host_runs_loops_around_grids(tmp_path: Path) -> None:
    """Nested loops give their numbers as scalars; a function serves all rounds."""
    builder, (x, y) = builder_of("x", "y")
    with builder.loop(3) as step, builder.loop(2) as half, builder.chunks(4, N) as i:
        builder.store(y, (step * 2 + half) * 4 + i, x[i] + tirx.Cast("float32", step * 10 + half))
    a, b = np.arange(N, dtype=np.float32), np.zeros(N, np.float32)
    launches = run(builder, tmp_path, a, b)
    assert [one.scalars for one in launches] == [(step, half) for step in range(3) for half in range(2)]
    assert {one.function for one in launches} == {0}
    expected = [a[i] + step * 10 + half for step in range(3) for half in range(2) for i in range(4)]
    np.testing.assert_array_equal(b[:24], np.array(expected, np.float32))


def test_registers_and_conditions_are_computed_again_in_each_grid(tmp_path: Path) -> None:
    builder, (x, y) = builder_of("x", "y")
    scale = builder.name(x[tirx.const(2, "int32")] * tirx.const(3.0, "float32"))
    for begin, bound in ((0, 5.0), (100, 7.0)):
        with builder.when(scale > tirx.const(bound, "float32")), builder.chunks(50, N) as i:
            builder.store(y, i + begin, scale)
    a, b = np.arange(N, dtype=np.float32), np.zeros(N, np.float32)
    run(builder, tmp_path, a, b)
    expected = np.zeros(N, np.float32)
    expected[:50] = 6
    np.testing.assert_array_equal(b, expected)


def test_loops_that_only_a_run_can_count_are_refused() -> None:
    builder, (x, y) = builder_of("x", "y")
    with builder.loop(tirx.Cast("int32", x[tirx.const(0, "int32")])), builder.chunks(4, N) as i:
        builder.store(y, i, x[i])
    with pytest.raises(UncutError, match="a loop whose length only a run knows"):
        builder.function()


def test_parallel_loops_that_only_a_run_can_count_are_refused() -> None:
    builder, (x, y) = builder_of("x", "y")
    with builder.loop(tirx.Cast("int32", x[tirx.const(0, "int32")]), "parallel") as i:
        builder.store(y, i, x[i])
    with pytest.raises(UncutError, match="only a run knows how many threads"):
        builder.function()


def test_registers_of_memory_that_changes_are_refused() -> None:
    builder, (x, y) = builder_of("x", "y")
    first = builder.name(y[tirx.const(0, "int32")])
    with builder.chunks(4, N) as i:
        builder.store(y, i, x[i] + first)
    with pytest.raises(UncutError, match="what memory held before"):
        builder.function()


def test_registers_that_memory_is_written_with_are_refused() -> None:
    """A loop that stores and adds up cannot be run a second time for the sum."""
    builder, (x, y) = builder_of("x", "y")
    total = builder.local(1, "float32")
    zero = tirx.const(0, "int32")
    builder.store(total, zero, tirx.const(0, "float32"))
    with builder.loop(8) as i:
        builder.store(total, zero, total[zero] + x[i])
        builder.store(y, i, total[zero])
    with builder.chunks(4, N) as i:
        builder.store(y, i + 8, total[zero])
    with pytest.raises(UncutError, match="what one grid leaves in registers"):
        builder.function()


def test_too_many_launches_are_refused() -> None:
    builder, (x, y) = builder_of("x", "y")
    with builder.loop(5000), builder.chunks(4, N) as i:
        builder.store(y, i, x[i])
    with pytest.raises(UncutError, match="5000 launches, more than 4096"):
        builder.function()


def test_threads_that_cannot_be_counted_are_refused() -> None:
    builder, (x, y) = builder_of("x", "y")
    with builder.chunks(2**31 - 1, N) as i:
        builder.store(y, tirx.floormod(i, N), x[tirx.floormod(i, N)])
    with pytest.raises(UncutError, match="more than 32-bit numbers count"):
        builder.function()


def test_a_plan_tells_its_grids() -> None:
    plan = tiny_plan("cuda:sm_90")
    grids = (Grid("add_0", 4, 256, (), 98304), Grid("add_1", 1, 32, (3, 0)), Grid("add_2", 4, 256, (1,), is_cooperative=True))
    plan = replace(plan, kernels=(replace(plan.kernels[0], grids=grids), *plan.kernels[1:]))
    text = print_plan(plan)
    assert (
        "grids (add_0 blocks 4 threads 256 shared 98304, add_1 blocks 1 threads 32 scalars (3, 0), "
        "add_2 blocks 4 threads 256 scalars (1) cooperative)"
    ) in text
    assert parse_plan(text) == plan
    assert check_plan(plan) == ()


SEEN = TensorMap(0, 2, (8, 3), (16,), (8, 2), 128)


def test_a_plan_tells_its_tensor_maps() -> None:
    plan = tiny_plan("cuda:sm_90")
    line = TensorMap(1, 4, (4,), (), (4,))
    grids = (Grid("add_0", 4, 256, (7,), 98304, (replace(SEEN, extents=(8, 1)), line)),)
    plan = replace(plan, kernels=(replace(plan.kernels[0], grids=grids), *plan.kernels[1:]))
    text = print_plan(plan)
    expected = "maps (0 of 2 [8,1] strides [16] box [8,2] swizzle 128, 1 of 4 [4] strides [] box [4] swizzle 0)"
    assert f"shared 98304 scalars (7) {expected})" in text
    assert parse_plan(text) == plan


@pytest.mark.parametrize(
    ("seen", "fault"),
    [
        (replace(SEEN, extents=(8, 300)), "sees 4800 bytes of"),
        (replace(SEEN, argument=9), "is of pointer 9"),
        (replace(SEEN, strides=(24,)), r"has strides \[24\]"),
        (replace(SEEN, strides=()), "has 2 dimensions, 0 strides"),
        (replace(SEEN, extents=(8, 0)), r"has extents \[8, 0\]"),
        (replace(SEEN, box=(8, 257)), "of more than 256 elements"),
        (replace(SEEN, box=(4, 1)), "rows of 8 bytes"),
        (replace(SEEN, box=(64, 1), swizzle_bytes=64), "rows of 128 bytes and a swizzle of 64"),
        (replace(SEEN, item_bytes=3), "elements of 3 bytes"),
        (replace(SEEN, box=(64, 256, 16), extents=(64, 9, 9), strides=(128, 256)), "a box of 524288 bytes"),
    ],
)
def test_tensor_maps_that_see_nothing(seen: TensorMap, fault: str) -> None:
    """Refused by the driver, or beyond the memory of their pointer, which has 4000 bytes."""
    plan = tiny_plan("cuda:sm_90")
    plan = replace(plan, kernels=(replace(plan.kernels[0], grids=(Grid("a", 1, 32, maps=(seen,)),)), *plan.kernels[1:]))
    assert any(re.search(fault, str(one)) for one in check_plan(plan))


def test_operands_begin_at_vectors() -> None:
    plan = tiny_plan("cuda:sm_90")
    first = plan.steps[0]
    assert isinstance(first, Launch)
    shifted = replace(first, reads=(replace(first.reads[0], offset=8), *first.reads[1:]))
    kernels = tuple(replace(kernel, grids=(Grid("a", 1, 32),)) for kernel in plan.kernels)
    faults = check_plan(replace(plan, kernels=kernels, steps=(shifted, *plan.steps[1:])))
    assert any("begins at no multiple of 16 bytes" in str(fault) for fault in faults)


def test_several_grids_may_not_run_in_place() -> None:
    plan = tiny_plan("cuda:sm_90")
    grids = (Grid("a", 1, 32), Grid("b", 1, 32))
    first = plan.steps[0]
    assert isinstance(first, Launch)
    kernels: tuple[Kernel, ...] = (replace(plan.kernels[0], grids=grids), *plan.kernels[1:])
    plan = replace(plan, kernels=kernels, steps=(replace(first, inplace=((0, 0),)), *plan.steps[1:]))
    assert any("several grids run in place" in str(fault) for fault in check_plan(plan))


@pytest.mark.parametrize(
    "grid", [Grid("a", 0, 32), Grid("a", 1, 2048), Grid("a", 2**31, 32), Grid("a", 1, 0), Grid("a", 1, 32, (), 300_000)]
)
def test_grids_that_no_device_runs(grid: Grid) -> None:
    plan = tiny_plan("cuda:sm_90")
    plan = replace(plan, kernels=(replace(plan.kernels[0], grids=(grid,)), *plan.kernels[1:]))
    assert any("no device" in str(fault) for fault in check_plan(plan))


@pytest.mark.parametrize(("target", "is_right"), [("rocm:gfx942", False), ("cuda:sm_90", True)])
def test_grids_whose_threads_amd_does_not_count(target: str, is_right: bool) -> None:
    """A dispatch there has less than 2^32 work-items."""
    plan = tiny_plan(target)
    plan = replace(plan, kernels=(replace(plan.kernels[0], grids=(Grid("a", 2**24, 256),)), *plan.kernels[1:]))
    assert any("no AMD GPU runs 16777216 blocks" in str(fault) for fault in check_plan(plan)) != is_right


@pytest.mark.parametrize(
    ("target", "template"), [(Target("rocm", "gfx942"), "matmul"), (Target("cuda", "sm_90"), "gpu_matmul")], ids=str
)
def test_another_kernel_has_grids_whose_threads_amd_counts(target: Target, template: str) -> None:
    """A block of 256 threads for each of 2^24 products is one thread too many."""
    kinds = {"x": TensorType((2**24, 1, 4), "float64"), "w": TensorType((2**24, 4, 1), "float64")}
    types = {**kinds, "y": TensorType((2**24, 1, 1), "float64")}
    group = Group((Op("MatMul", ("x", "w"), ("y",)),), ("x", "w"), ("y",), types)
    kernel = build_kernel(group, target)
    assert isinstance(kernel, BuiltKernel)
    assert kernel.template == template
