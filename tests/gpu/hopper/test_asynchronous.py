"""Copies by tensor maps, mbarriers and warpgroups' products, simulated: by the documented layouts, and faults that are found."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from prefuse.kernels.codegen import ptx, ptx_hopper
from prefuse.kernels.codegen.builder import Expr
from prefuse.kernels.codegen.gpu_builder import GpuBuilder
from prefuse.kernels.codegen.ptx_hopper import WARPGROUP, u32
from prefuse.runtime.gpu.driver import KernelLaunch
from prefuse.runtime.gpu.simulated_driver import encode_simulated
from prefuse.runtime.gpu.tensor_maps import TensorMap
from prefuse.runtime.target import Target
from tvm import tirx

from ..simulator import compile_simulation

TARGET = Target("cuda", "sm_90")
RNG = np.random.default_rng(3)
NARROW: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
ROWS, STAGES, PARTS = 64, 2, 3
ORDERS = (0, 1, 2, 3)  # threads forwards and copies late, threads backwards and copies at once, at random


def i32(value: int) -> Expr:
    return tirx.const(value, "int32")


class Kernels:
    """Kernels of one grid each, compiled together."""

    def __init__(self, builders: Mapping[str, GpuBuilder], folder: Path) -> None:
        functions = {name: builder.function() for name, builder in builders.items()}
        self.library = ctypes.CDLL(str(compile_simulation(functions, folder, TARGET)))
        self.library.sim_fault.restype = ctypes.c_char_p
        self.grids = {name: function.launches[0] for name, function in functions.items()}

    def run(self, name: str, *arrays: np.ndarray, order: int = 0) -> str:
        """What it did wrong, or nothing."""
        grid = self.grids[name]
        cells = (ctypes.c_uint64 * len(arrays))(*(array.ctypes.data for array in arrays))
        launch = KernelLaunch.of(0, (grid.blocks, grid.threads, grid.shared_bytes), cells, name, grid.maps)
        launch.encode_maps(encode_simulated)
        self.library.sim_order(order)
        code = getattr(self.library, f"sim_{name}_0")(grid.blocks, grid.threads, grid.shared_bytes, launch.places)
        fault = bytes(self.library.sim_fault()).decode()
        assert (code == 719) == bool(fault)
        return fault


@dataclass(frozen=True)
class Piped:
    """64 x n sums of A and B, whose parts pass through two stages: a warp copies, a warpgroup multiplies. What may be wrong of it
    has a default that is right."""

    kind: ptx.Half = "bf16"
    columns: int = 16
    row_bytes: int = 128  # of shared memory, exchanged over as many
    a_along_k: bool = True
    b_along_k: bool = True
    is_packed: bool = False  # B lies in memory as in stages, and comes by plain bulk copies
    has_init_fence: bool = True
    has_init_barrier: bool = True
    waits_for_room: bool = True
    waits_for_copies: bool = True
    flips_parity: bool = False
    expected: float = 1.0  # of the bytes that come
    frees_early: bool = False
    arrivals: int = 4  # of the four warps, before a stage is free
    map_row_bytes: int = 0
    stride_rows: int = 8
    has_product_fence: bool = True
    waits_for_products: bool = True

    @property
    def depth(self) -> int:
        """Of k in a part; lines of a box that lies along lines."""
        return self.row_bytes // 2

    @property
    def k(self) -> int:
        return PARTS * self.depth

    def lines(self, *, is_a: bool) -> int:
        return ROWS if is_a else self.columns

    def along_k(self, *, is_a: bool) -> bool:
        return self.a_along_k if is_a else self.b_along_k

    def part_bytes(self, *, is_a: bool) -> int:
        return self.lines(is_a=is_a) * self.row_bytes

    @property
    def stage_bytes(self) -> int:
        return self.part_bytes(is_a=True) + -(-self.part_bytes(is_a=False) // 1024) * 1024

    def map_of(self, *, is_a: bool) -> TensorMap:
        lines, swizzle = self.lines(is_a=is_a), self.map_row_bytes or self.row_bytes
        if self.along_k(is_a=is_a):
            return TensorMap(0, 2, (self.k, lines), (2 * self.k,), (self.depth, lines), swizzle)
        return TensorMap(0, 2, (lines, self.k), (2 * lines,), (min(self.depth, lines), self.depth), swizzle)

    def build(self) -> GpuBuilder:
        builder = GpuBuilder()
        _, b = builder.parameter("a", ROWS * self.k, "uint16"), builder.parameter("b", self.columns * self.k, "uint16")
        sums = builder.parameter("c", ROWS * self.columns, "float32")
        maps = [builder.tensor_map("a", self.map_of(is_a=True))]
        maps += [] if self.is_packed else [builder.tensor_map("b", self.map_of(is_a=False))]
        with builder.blocks(2, WARPGROUP + 32) as (_, thread):
            shared = builder.dynamic_shared(STAGES * self.stage_bytes + 1024 + 64, "uint8")
            base = builder.bind((ptx.shared_address(shared) + u32(1023)) & u32(0xFFFFFC00))
            bars = builder.bind(base + u32(STAGES * self.stage_bytes))
            self._initialise(builder, bars, thread)
            done = builder.local(1, "uint32", "done")
            with builder.when(tirx.EQ(thread, WARPGROUP)), builder.loop(PARTS, name="part") as part:
                self._copy(builder, done, base, bars, part, maps, b)
            with builder.when(thread < WARPGROUP):
                self._multiply(builder, done, base, bars, thread, sums)
        builder.order_parameters(["a", "b", "c"])
        return builder

    def _initialise(self, builder: GpuBuilder, bars: Expr, thread: Expr) -> None:
        with builder.when(tirx.EQ(thread, 0)):
            for stage in range(STAGES):
                builder.do(ptx_hopper.init_mbarrier(bars + u32(8 * stage), 1))
                builder.do(ptx_hopper.init_mbarrier(bars + u32(8 * (STAGES + stage)), self.arrivals))
            if self.has_init_fence:
                builder.do(ptx_hopper.fence_mbarriers())
        if self.has_init_barrier:
            builder.barrier()

    def _copy(self, builder: GpuBuilder, done: Any, base: Expr, bars: Expr, part: Expr, maps: list[Expr], b: Any) -> None:
        stage, turn = builder.bind(tirx.floormod(part, STAGES)), tirx.floordiv(part, STAGES)
        full = builder.bind(bars + u32(stage * 8))
        if self.waits_for_room:
            ptx_hopper.wait(builder, done, full + u32(8 * STAGES), u32(tirx.floormod(turn + 1, 2)))
        sizes = [self.part_bytes(is_a=is_a) for is_a in (True, False)]
        expected = sizes[0] if self.expected < 1 else int(sum(sizes) * self.expected)
        builder.do(ptx_hopper.arrive_and_expect(full, expected))
        to = builder.bind(base + u32(stage * self.stage_bytes))
        for is_a, tensor_map in zip((True, False), maps, strict=False):
            at = to if is_a else to + u32(sizes[0])
            along_k = self.along_k(is_a=is_a)
            for box in range(1 if along_k else -(-self.lines(is_a=is_a) // self.depth)):
                place = [part * self.depth, i32(0)] if along_k else [i32(box * self.depth), part * self.depth]
                builder.do(ptx_hopper.copy_tensor(at + u32(box * self.depth * self.row_bytes), tensor_map, place, full))
        if self.is_packed:
            source = b[part * (sizes[1] // 2)]
            builder.do(ptx_hopper.copy_bulk(to + u32(sizes[0]), source, sizes[1], full))

    def _multiply(self, builder: GpuBuilder, done: Any, base: Expr, bars: Expr, thread: Expr, results: Any) -> None:
        sums = builder.local(self.columns // 2, "float32", "sums")
        cells = [sums[i32(i)] for i in range(self.columns // 2)]
        with builder.loop(PARTS, name="part") as part:
            stage, turn = builder.bind(tirx.floormod(part, STAGES)), tirx.floordiv(part, STAGES)
            full = builder.bind(bars + u32(stage * 8))
            if self.waits_for_copies:
                ptx_hopper.wait(builder, done, full, u32(tirx.floormod(turn + self.flips_parity, 2)))
            at = builder.bind(base + u32(stage * self.stage_bytes))
            if self.has_product_fence:
                builder.do(ptx_hopper.fence_warpgroup())
            for step in range(self.depth // 16):
                a, b = (self._described(at, step, is_a=is_a) for is_a in (True, False))
                keeps = part > 0 if step == 0 else tirx.const(True, "bool")
                along = {"a_along_k": self.a_along_k, "b_along_k": self.b_along_k}
                builder.do(ptx_hopper.multiply(cells, a, b, self.kind, keeps, **along))
            builder.do(ptx_hopper.commit_products())
            if self.frees_early:
                self._arrive(builder, full, thread)
            if self.waits_for_products:
                builder.do(ptx_hopper.wait_for_products(0))
            if not self.frees_early:
                self._arrive(builder, full, thread)
        warp, lane = tirx.floordiv(thread, 32), tirx.floormod(thread, 32)
        for i, cell in enumerate(cells):
            row = warp * 16 + tirx.floordiv(lane, 4) + i // 2 % 2 * 8
            builder.store(results, row * self.columns + (i // 4 * 8 + tirx.floormod(lane, 4) * 2 + i % 2), cell)

    def _arrive(self, builder: GpuBuilder, full: Expr, thread: Expr) -> None:
        with builder.when(tirx.EQ(tirx.floormod(thread, 32 if self.arrivals == 4 else WARPGROUP), 0)):
            builder.do(ptx_hopper.arrive(full + u32(8 * STAGES)))

    def _described(self, stage: Expr, step: int, *, is_a: bool) -> Expr:
        begin, swizzle = 0 if is_a else self.part_bytes(is_a=True), self.row_bytes
        if self.along_k(is_a=is_a):
            at = stage + u32(begin + step * 32)
            return ptx_hopper.descriptor(at, leading=16, stride=self.stride_rows * self.row_bytes, swizzle_bytes=swizzle)
        at = stage + u32(begin + step * 16 * self.row_bytes)
        leading = self.depth * self.row_bytes
        return ptx_hopper.descriptor(at, leading=leading, stride=8 * self.row_bytes, swizzle_bytes=swizzle)

    @cached_property
    def operands(self) -> tuple[np.ndarray, np.ndarray]:
        """Of integers, so that sums are exact; A is 64 x k, B is k x n."""
        return RNG.integers(-8, 9, (ROWS, self.k)), RNG.integers(-8, 9, (self.k, self.columns))

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        a, b = (one.astype(NARROW[self.kind]) for one in self.operands)
        first, second = a if self.a_along_k else a.T, b.T if self.b_along_k else b
        second = np.ascontiguousarray(second).view(np.uint16)
        if self.is_packed:
            second = packed(second.reshape(self.columns, PARTS, self.depth).swapaxes(0, 1), self.row_bytes)
        results = np.full((ROWS, self.columns), np.nan, np.float32)
        return np.ascontiguousarray(first).view(np.uint16), second, results


def packed(parts: np.ndarray, row_bytes: int) -> np.ndarray:
    """Each part, rows of `row_bytes`, as the swizzle leaves it: chunk c of row r is where c ^ r is (of rows of 128 bytes)."""
    rows = np.ascontiguousarray(parts).reshape(len(parts), -1, row_bytes // 16, 8)
    number, chunk = np.arange(rows.shape[1])[:, None], np.arange(row_bytes // 16)[None]
    assert row_bytes == 128
    return np.ascontiguousarray(rows[:, number, chunk ^ number % 8])


RIGHT = {
    **{
        f"rows{row_bytes}_{int(along_k)}": Piped(
            row_bytes=row_bytes, columns=128 if row_bytes == 128 else 64, a_along_k=along_k, b_along_k=along_k
        )
        for row_bytes in (128, 64, 32)
        for along_k in (True, False)
    },
    "half": Piped("f16", a_along_k=False),
    "along_lines_of_b": Piped(b_along_k=False, columns=64),
    "packed": Piped(is_packed=True, columns=24),
}
READS_EARLY = "wgmma reads what"
FAULTS: dict[str, tuple[Piped, str]] = {
    "copies_not_waited_for": (Piped(waits_for_copies=False), READS_EARLY),
    "wrong_parity": (Piped(flips_parity=True), f"{READS_EARLY}|waits for ever"),
    "fewer_bytes_expected": (Piped(expected=0.5), f"{READS_EARLY}|waits for ever|overwrites what"),
    "more_bytes_expected": (Piped(expected=2), "waits for ever at an mbarrier"),
    "stage_freed_early": (Piped(frees_early=True), "overwrites what (the matrix unit still reads|another thread read)"),
    "room_not_waited_for": (Piped(waits_for_room=False), "overwrites what|more arrivals at an mbarrier than it counts"),
    "one_warp_arrives_for_four": (Piped(arrivals=1), "overwrites what (the matrix unit still reads|another thread read)"),
    "no_fence_of_mbarriers": (Piped(has_init_fence=False), "a copy completes on an mbarrier whose initialisation is not fenced"),
    "no_barrier_behind_them": (Piped(has_init_barrier=False), "an mbarrier that another thread initialised|no mbarrier was"),
    "no_fence_of_products": (Piped(has_product_fence=False), "wgmma behind accesses of its registers"),
    "products_not_waited_for": (Piped(waits_for_products=False), "overwrites what|not equal"),
    "wrong_swizzle": (Piped(row_bytes=64, map_row_bytes=128), "not equal"),
    "wrong_stride": (Piped(stride_rows=4), "not equal"),
}


@pytest.fixture(scope="module")
def pipes(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    cases = {**RIGHT, **{name: case for name, (case, _) in FAULTS.items()}}
    return Kernels({name: case.build() for name, case in cases.items()}, tmp_path_factory.mktemp("pipes"))


def outcome(kernels: Kernels, name: str, case: Piped, order: int) -> str:
    """Nothing if all is right."""
    *operands, results = case.arrays()
    if fault := kernels.run(name, *operands, results, order=order):
        return fault
    a, b = case.operands
    return "" if np.array_equal(results, a @ b) else "not equal"


@pytest.mark.parametrize("name", RIGHT)
def test_products_of_what_copies_bring(name: str, pipes: Kernels) -> None:
    for order in ORDERS:
        assert outcome(pipes, name, RIGHT[name], order) == ""


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found_in_any_order(name: str, pipes: Kernels) -> None:
    case, expected = FAULTS[name]
    for order in ORDERS:
        found = outcome(pipes, name, case, order)
        assert re.match(expected, found), f"order {order}: {found or 'nothing'}"


def copied(seen: TensorMap, place: tuple[int, ...]) -> GpuBuilder:
    """One box of a tensor, as shared memory has it."""
    builder = GpuBuilder()
    words = int(np.prod(seen.box)) * seen.item_bytes // 4
    _, y = builder.parameter("x", 4096, "uint32"), builder.parameter("y", words, "uint32")
    tensor_map = builder.tensor_map("x", seen)
    with builder.blocks(1, 32) as (_, thread):
        box, bar = builder.shared(1024 + 256, "uint32"), builder.shared(2, "uint64")
        to, full = ptx.shared_address(box), builder.bind(ptx.shared_address(bar))
        done = builder.local(1, "uint32", "done")
        with builder.when(tirx.EQ(thread, 0)):
            builder.do(ptx_hopper.init_mbarrier(full, 1))
            builder.do(ptx_hopper.fence_mbarriers())
            builder.do(ptx_hopper.arrive_and_expect(full, 4 * words))
            builder.do(ptx_hopper.copy_tensor(to, tensor_map, [i32(one) for one in place], full))
        builder.barrier()
        ptx_hopper.wait(builder, done, full, u32(0))
        with builder.loop(-(-words // 32)) as turn, builder.when(turn * 32 + thread < words):
            builder.store(y, turn * 32 + thread, box[turn * 32 + thread])
    builder.order_parameters(["x", "y"])
    return builder


BOXES: dict[str, tuple[TensorMap, tuple[int, ...]]] = {
    "line": (TensorMap(0, 4, (100,), (), (32,)), (80,)),
    "plane": (TensorMap(0, 2, (24, 50), (64,), (16, 7)), (-3, 46)),
    "swizzled": (TensorMap(0, 2, (64, 33), (144,), (64, 20), 128), (0, 20)),
    "half_swizzled": (TensorMap(0, 4, (16, 33), (80,), (16, 12), 64), (4, 5)),
    "space": (TensorMap(0, 4, (8, 7, 9), (32, 256), (4, 3, 5)), (2, -1, 6)),
    "images": (TensorMap(0, 2, (8, 6, 5, 4), (16, 96, 480), (8, 4, 3, 2), 0), (0, 4, 3, -1)),
    "more": (TensorMap(0, 1, (16, 3, 3, 3, 3), (16, 48, 144, 432), (16, 2, 2, 2, 2)), (0, 2, 1, -1, 2)),
}


def box_of(content: np.ndarray, seen: TensorMap, place: tuple[int, ...]) -> np.ndarray:
    """The bytes that a copy brings, by NumPy."""
    shape, strides = seen.extents[::-1], (*seen.strides[::-1], seen.item_bytes)
    items = np.ndarray(shape, f"V{seen.item_bytes}", content.tobytes(), strides=strides)
    grid = np.meshgrid(*(np.arange(n) + first for n, first in zip(seen.box[::-1], place[::-1], strict=True)), indexing="ij")
    inside = np.logical_and.reduce([(i >= 0) & (i < n) for i, n in zip(grid, shape, strict=True)])
    found = items[tuple(np.clip(i, 0, n - 1) for i, n in zip(grid, shape, strict=True))]
    found = np.where(inside, found, np.zeros((), found.dtype))
    chunks = np.ascontiguousarray(found).view(np.uint8).reshape(-1, 16)
    number = np.arange(len(chunks))
    exchanged: np.ndarray = chunks[number ^ (number >> 3 & (seen.swizzle_bytes // 16 - 1 if seen.swizzle_bytes else 0))]
    return exchanged


def test_boxes_of_tensors(tmp_path: Path) -> None:
    """Of one to five dimensions, beyond each edge, which are zeros; chunks are exchanged as the address says."""
    kernels = Kernels({name: copied(*box) for name, box in BOXES.items()}, tmp_path)
    content = RNG.integers(1, 2**32, 4096, np.uint32)
    for name, (seen, place) in BOXES.items():
        expected = box_of(content, seen, place)
        for order in ORDERS:
            y = np.zeros(expected.size // 4, np.uint32)
            assert kernels.run(name, content, y, order=order) == ""
            np.testing.assert_array_equal(y.view(np.uint8).reshape(-1, 16), expected, err_msg=name)


@dataclass(frozen=True)
class Stored:
    """A product of what threads store to shared memory themselves, 8 lines by 8 of k after the other, not exchanged."""

    has_fence: bool = True
    count: int = WARPGROUP

    def build(self) -> GpuBuilder:
        builder = GpuBuilder()
        a, b = builder.parameter("a", 64 * 16, "uint16"), builder.parameter("b", 8 * 16, "uint16")
        c = builder.parameter("c", 64 * 8, "float32")
        with builder.blocks(1, WARPGROUP) as (_, thread):
            base = builder.bind(ptx.shared_address(builder.dynamic_shared(4096, "uint8")))
            line, half = builder.bind(tirx.floordiv(thread, 2)), builder.bind(tirx.floormod(thread, 2))
            self._store(builder, base, a, line, half)
            with builder.when(thread < 16):
                self._store(builder, base + u32(64 * 32), b, line, half)
            if self.has_fence:
                builder.do(ptx_hopper.fence_async())
            builder.do(ptx_hopper.meet(1, self.count))
            sums = builder.local(4, "float32", "sums")
            cells = [sums[i32(i)] for i in range(4)]
            first, second = (
                ptx_hopper.descriptor(base + u32(at), leading=128, stride=256, swizzle_bytes=0) for at in (0, 64 * 32)
            )
            builder.do(ptx_hopper.fence_warpgroup())
            no = tirx.const(False, "bool")
            builder.do(ptx_hopper.multiply(cells, first, second, "f16", no, a_along_k=True, b_along_k=True))
            builder.do(ptx_hopper.commit_products())
            builder.do(ptx_hopper.wait_for_products(0))
            for i, cell in enumerate(cells):
                row = tirx.floordiv(thread, 32) * 16 + tirx.floordiv(tirx.floormod(thread, 32), 4) + i // 2 * 8
                builder.store(c, row * 8 + tirx.floormod(thread, 4) * 2 + i % 2, cell)
        builder.order_parameters(["a", "b", "c"])
        return builder

    def _store(self, builder: GpuBuilder, base: Expr, source: Any, line: Expr, half: Expr) -> None:
        at = base + u32(tirx.floordiv(line, 8) * 256 + half * 128 + tirx.floormod(line, 8) * 16)
        numbers = [tirx.Cast("uint32", source[line * 16 + half * 8 + i]) for i in range(8)]
        words = [low | (high << u32(16)) for low, high in zip(numbers[::2], numbers[1::2], strict=True)]
        builder.do(ptx.store_shared(at, words))


def test_what_threads_store_is_fenced(tmp_path: Path) -> None:
    cases = {
        "right": (Stored(), ""),
        "no_fence": (Stored(has_fence=False), "the async proxy comes to what a thread wrote, with no fence.proxy.async between"),
        "too_few": (Stored(count=96), "wgmma reads what is not known to be written|some threads|wgmma reads what nobody wrote"),
    }
    kernels = Kernels({name: case.build() for name, (case, _) in cases.items()}, tmp_path)
    a, b = (RNG.integers(-9, 9, shape).astype(np.float16) for shape in ((64, 16), (8, 16)))
    for name, (_, expected) in cases.items():
        for order in ORDERS:
            c = np.full((64, 8), np.nan, np.float32)
            found = kernels.run(name, a, b, c, order=order)
            assert re.match(expected or "$", found), f"{name}: {found}"
            if not expected:
                np.testing.assert_array_equal(c, a.astype(np.float32) @ b.T.astype(np.float32))


def test_registers_of_a_block(tmp_path: Path) -> None:
    """Twelve warps may have 168 each, or 24 and 240, and not 256."""
    builders = {}
    for name, counts in {"equal": (168,) * 3, "unequal": (24, 240, 240), "many": (256,) * 3}.items():
        builders[name] = builder = GpuBuilder()
        y = builder.parameter("y", 3 * WARPGROUP, "float32")
        with builder.blocks(1, 3 * WARPGROUP) as (_, thread):
            for group, count in enumerate(counts):
                with builder.when(tirx.EQ(tirx.floordiv(thread, WARPGROUP), group)):
                    builder.do(ptx_hopper.set_registers(count, "inc" if count > 168 else "dec"))
            builder.store(y, thread, tirx.const(1, "float32"))
    kernels, y = Kernels(builders, tmp_path), np.zeros(3 * WARPGROUP, np.float32)
    assert kernels.run("equal", y) == kernels.run("unequal", y) == ""
    assert (y == 1).all()
    assert kernels.run("many", y).startswith("the warps of a block ask for more registers than there are")
