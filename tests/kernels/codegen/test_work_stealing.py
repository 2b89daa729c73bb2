"""Threads take each iteration of a region once, whatever their speeds, and the results are those of one thread."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
import prefuse
import pytest
import tvm
from onnx import TensorProto, helper
from prefuse.compiler.lowering.native import C_CONVENTION, compile_module, link_library
from prefuse.kernels.codegen.builder import KernelBuilder
from prefuse.kernels.codegen.work_stealing import share, take_iterations
from prefuse.runtime.hardware.machine import LINE_BYTES
from prefuse.runtime.target import Target
from tvm import tirx

Take: TypeAlias = Callable[[np.ndarray, int, int, int], tuple[int, int]]  # ranges, thread, threads, least: a run

_LINE = LINE_BYTES // 8


@cache
def _library(folder: Path) -> ctypes.CDLL:
    """A library whose `take` (ranges, [thread, threads, least], taken) takes iterations once."""
    target = Target.parse("cpu:avx2")
    builder = KernelBuilder(target.machine, 1)
    ranges, counts, taken = (builder.parameter(*one) for one in (("r", _LINE, "int64"), ("c", 3, "int32"), ("t", 1, "int64")))
    builder.store(taken, 0, take_iterations(ranges[0], counts[0], counts[1], counts[2]))
    function = builder.function().with_attr("global_symbol", "take").with_attr("calling_conv", C_CONVENTION)
    path = folder / "take.so"
    path.write_bytes(link_library(compile_module(tvm.IRModule({tvm.ir.GlobalVar("take"): function}), target), target))
    return ctypes.CDLL(str(path))


@pytest.fixture(scope="module")
def take(tmp_path_factory: pytest.TempPathFactory) -> Take:
    library = _library(tmp_path_factory.mktemp("take"))

    def call(ranges: np.ndarray, thread: int, threads: int, least: int) -> tuple[int, int]:
        counts, taken = np.array([thread, threads, least], np.int32), np.zeros(1, np.int64)
        library.take(*(ctypes.c_void_p(array.ctypes.data) for array in (ranges, counts, taken)))
        return int(taken[0]) & 0xFFFFFFFF, int(taken[0]) >> 32

    return call


def _ranges(threads: int, extent: int) -> np.ndarray:
    ranges = np.zeros(threads * _LINE, np.int64)
    for thread in range(threads):
        begin, end = (int(one) for one in share(thread, threads, extent))
        ranges[thread * _LINE] = begin + (end << 32)
    return ranges


def _check(runs: Sequence[tuple[int, int]], extent: int) -> None:
    """The runs are a partition of [0, extent)."""
    runs = sorted(runs)
    assert [begin for begin, _ in runs] == [0, *(end for _, end in runs)][: len(runs)]
    assert (runs[-1][1] if runs else 0) == extent
    assert all(begin < end for begin, end in runs)


def test_shares_of_so_many_that_products_of_them_are_no_int32() -> None:
    for threads, extent in ((64, 40_000_001), (3, 2**31 - 1), (2, 2**30)):
        shares = [tuple(int(one) for one in share(tirx.const(i, "int32"), threads, extent)) for i in range(threads)]
        assert [begin for begin, _ in shares] == [0, *(end for _, end in shares[:-1])]
        assert shares[-1][1] == extent
        assert {end - begin for begin, end in shares} <= {extent // threads, extent // threads + 1}


def test_shares_of_an_extent_known_at_run_time_are_computed_in_64_bits(tmp_path: Path) -> None:
    target, threads, extent = Target.parse("cpu:avx2"), 64, 40_000_001
    builder = KernelBuilder(target.machine, 1)
    numbers, run = (builder.parameter(*one) for one in (("n", 2, "int32"), ("r", 2, "int32")))
    for place, bound in enumerate(share(builder.bind(numbers[0]), threads, builder.bind(numbers[1]))):
        builder.store(run, place, bound)
    function = builder.function().with_attr("global_symbol", "share").with_attr("calling_conv", C_CONVENTION)
    path = tmp_path / "share.so"
    path.write_bytes(link_library(compile_module(tvm.IRModule({tvm.ir.GlobalVar("share"): function}), target), target))
    library, found = ctypes.CDLL(str(path)), np.zeros(2, np.int32)
    for thread in range(threads):
        given = np.array([thread, extent], np.int32)
        library.share(*(ctypes.c_void_p(array.ctypes.data) for array in (given, found)))
        assert found.tolist() == [thread * extent // threads, (thread + 1) * extent // threads]


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("extent", [0, 1, 5, 64, 1001])
@pytest.mark.parametrize("least", [1, 4, 2000])
def test_threads_of_any_speed_take_each_iteration_once(take: Take, threads: int, extent: int, least: int) -> None:
    draw = random.Random(f"{threads} {extent} {least}")
    for _ in range(20):
        ranges, runs, speeds = _ranges(threads, extent), [], [draw.random() ** 4 for _ in range(threads)]
        running = set(range(threads))
        while running:
            thread = draw.choices(sorted(running), [speeds[one] for one in sorted(running)])[0]
            run = take(ranges, thread, threads, least)
            if run == (0, 0):
                running.discard(thread)
            else:
                runs.append(run)
        _check(runs, extent)


def test_a_thread_takes_the_first_half_of_its_own_and_the_last_half_of_anothers(take: Take) -> None:
    ranges = _ranges(2, 32)
    assert [take(ranges, 0, 2, 1) for _ in range(5)] == [(0, 8), (8, 12), (12, 14), (14, 15), (15, 16)]
    assert [take(ranges, 0, 2, 3), take(ranges, 1, 2, 3), take(ranges, 0, 2, 3)] == [(24, 32), (16, 20), (21, 24)]


def test_threads_at_once_take_each_iteration_once(take: Take) -> None:
    threads, extent = 4, 999

    def work(thread: int, ranges: np.ndarray, start: threading.Barrier) -> list[tuple[int, int]]:
        start.wait()
        return list(iter(lambda: take(ranges, thread, threads, 1), (0, 0)))

    with ThreadPoolExecutor(threads) as pool:
        for _ in range(100):
            ranges, start = _ranges(threads, extent), threading.Barrier(threads)
            done = [pool.submit(work, thread, ranges, start) for thread in range(threads)]
            _check([run for one in done for run in one.result()], extent)


def test_more_threads_than_cores_compute_the_bits_of_one() -> None:
    """Threads that wait for a core leave their shares to the others."""
    rng = np.random.default_rng(0)
    node = [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Softmax", ["y"], ["z"], axis=-1)]
    values = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [311, 96]),
        helper.make_tensor_value_info("w", TensorProto.FLOAT, [96, 203]),
    ]
    result = helper.make_tensor_value_info("z", TensorProto.FLOAT, [311, 203])
    model = helper.make_model(helper.make_graph(node, "g", values, [result]), opset_imports=[helper.make_opsetid("", 20)])
    inputs = {name: rng.standard_normal(shape, np.float32) for name, shape in (("x", (311, 96)), ("w", (96, 203)))}
    one, many = (prefuse.compile(model, threads=threads) for threads in (1, 7))
    expected = one(**inputs)
    for _ in range(50):
        np.testing.assert_array_equal(many(**inputs), expected)
