"""What this machine can do at most: a few kernels of our own, compiled and timed as any program is."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from tvm import tirx

from ...kernels.codegen.builder import KernelBuilder
from ...kernels.formats.format import BF16_DOT, F32, Format
from ...kernels.formats.multiply_add import multiply_add_of
from ...kernels.microkernels.amx_unit import BF16_TILES, COLUMNS, DEPTH, ROWS, TILE_WORDS, WORDS, TileDot, tile_unit
from ...runtime.executor import CompiledModel
from ...runtime.hardware.gpu import GpuMachine, gpu_machine
from ...runtime.plan import ARENA, CALLER, CONSTANTS, Buffer, Kernel, Launch, Plan, Port, Region, Role, Space, TensorType
from ...runtime.profile import Limits
from ...runtime.program_file import Program
from ...runtime.target import Target
from .program import build_library

SUMS = 12  # accumulators a thread: more than the latency of an FMA times the number of FMA units
ROUNDS = 200_000  # multiply-adds on each of them: about a millisecond
TILE_SUMS = 6  # accumulator tiles; the other two tile registers are multiplied
TILE_ROUNDS = 10_000  # products added to each of them: about a third of a millisecond
_RESULTS = ROWS * COLUMNS  # floats that a thread stores, at most
_ELEMENTS = 1 << 25  # float32 copied: 128 MiB, more than caches hold
_RUNS = 5


def _assumed_limits(gpu: GpuMachine) -> Limits:
    """By the row of a GPU: multiply-adds of float32, and 16-bit floats on the matrix unit."""
    clocks = gpu.multiprocessors * gpu.ghz * 1e9
    method = f"as the cost model has them of {gpu.name}: not measured"
    half = max(gpu.half_flops, gpu.warpgroup_flops) * clocks
    return Limits(gpu.fma_flops * clocks, gpu.memory_gbs * 1e9, method, bfloat16_flops_per_second=half)


def measure_limits(target: Target) -> Limits:
    """The most flops and bytes a second on the threads of a target, each the best of a few runs; takes about a second.

    Multiply-adds work on registers alone, and so do products of pairs of bfloat16 where the target has AVX512_BF16, and of tiles
    where it has AMX. The copy counts what it reads and what it writes, not that a cache may read a line before it is written.
    Those of a GPU are what the cost model assumes, and nothing is measured.
    """
    if target.is_gpu:
        return _assumed_limits(gpu_machine(target.level))
    net = _program(target)
    plan = net.plan
    stamps = net.profile(np.ones(_ELEMENTS, np.float32), runs=_RUNS).stamps_ns
    copy_ns, *compute_ns = np.diff(stamps, axis=1).min(axis=0).tolist()
    moved = plan.kernels[0].bytes_moved
    rates = {kernel.symbol: kernel.flops / time_ns * 1e9 for kernel, time_ns in zip(plan.kernels[1:], compute_ns, strict=True)}
    method = (
        f"measured now on {target.threads} thread{'s' * (target.threads > 1)}: {SUMS} vectors of multiply-adds in registers, "
        f"{f'products of tiles added to {TILE_SUMS}, ' * target.has_tiles}a copy of {4 * _ELEMENTS >> 20} MiB; "
        f"the best of {_RUNS} runs"
    )
    return Limits(
        rates["multiply_add"],
        moved / copy_ns * 1e9,
        method,
        bfloat16_flops_per_second=rates.get("multiply_pairs", 0.0),
        tile_flops_per_second=rates.get("multiply_tiles", 0.0),
    )


@cache
def _program(target: Target) -> CompiledModel:
    plan = _plan(target)
    functions = {"copy": _copy(target), "multiply_add": multiply_add_kernel(target, F32)}
    if BF16_DOT.runs_on(target):
        functions["multiply_pairs"] = multiply_add_kernel(target, BF16_DOT)
    if target.has_tiles:
        functions["multiply_tiles"] = multiply_tiles_kernel(target)
    library = build_library(plan, functions, target, profile=True)
    return CompiledModel(Program(plan, library, np.empty(0, np.uint8), {"name": "limits"}))


def _plan(target: Target) -> Plan:
    """The copy from the caller to the arena, then the multiply-adds, whose operands are ones."""
    results = target.threads * _RESULTS
    size_bytes, result_bytes = 4 * _ELEMENTS, 4 * results
    x, h, y = Region("x", 0, size_bytes), Region("h", 0, size_bytes), Region("y", 0, result_bytes)
    sums = target.threads * SUMS * target.vector_lanes * ROUNDS
    computing = {"multiply_add": 2 * sums}  # flops
    if BF16_DOT.runs_on(target):
        computing["multiply_pairs"] = 4 * sums
    if target.has_tiles:
        computing["multiply_tiles"] = 2 * target.threads * TILE_SUMS * TILE_ROUNDS * ROWS * COLUMNS * DEPTH
    return Plan(
        target=str(target),
        inputs=(Port("x", TensorType((_ELEMENTS,), "float32"), "x"),),
        outputs=(Port("y", TensorType((results,), "float32"), "y"),),
        spaces=(Space(ARENA, size_bytes), Space(CONSTANTS), Space(CALLER)),
        buffers=(
            Buffer("x", Role.INPUT, size_bytes, CALLER),
            Buffer("y", Role.OUTPUT, result_bytes, CALLER),
            Buffer("h", Role.ACTIVATION, size_bytes, ARENA, 0),
        ),
        kernels=(
            Kernel("copy", "copy", 2, 0, 2 * size_bytes),
            *(Kernel(name, name, 2, flops, size_bytes + result_bytes) for name, flops in computing.items()),
        ),
        steps=(Launch("copy", (x,), (h,), label="copy"), *(Launch(name, (x,), (y,), label=name) for name in computing)),
    )


def _copy(target: Target) -> Any:
    builder = KernelBuilder(target.machine, target.threads)
    source, result = (builder.parameter(name, _ELEMENTS, "float32") for name in ("x", "h"))
    block = 64 * target.vector_lanes
    with builder.chunks(_ELEMENTS // block, _ELEMENTS) as chunk:
        builder.vector_loop(
            block, target.vector_lanes, lambda i: builder.store(result, chunk * block + i, source[chunk * block + i])
        )
    return builder.function()


def multiply_add_program(target: Target, number_format: Format) -> tuple[CompiledModel, int]:
    """A program of one input, a vector of ones, that makes multiply-adds of a format in registers; and how many, words of several
    neighbours counted as so many."""
    kernel = multiply_add_kernel(target, number_format)
    macs = target.threads * SUMS * target.vector_lanes * ROUNDS * number_format.k_pack
    return _register_program(target, kernel, 2 * target.vector_lanes, number_format.sums), macs


def multiply_tiles_program(target: Target, product: TileDot) -> tuple[CompiledModel, int]:
    """The same of products of tiles."""
    macs = target.threads * TILE_SUMS * TILE_ROUNDS * ROWS * COLUMNS * product.depth
    return _register_program(target, multiply_tiles_kernel(target, product), TILE_WORDS, product.sums), macs


def _register_program(target: Target, kernel: Any, words: int, sums: str) -> CompiledModel:
    """A kernel of so many words and a result for each thread, as a program."""
    x, y = Region("x", 0, 4 * words), Region("y", 0, 4 * target.threads * _RESULTS)
    plan = Plan(
        target=str(target),
        inputs=(Port("x", TensorType((words,), "int32"), "x"),),
        outputs=(Port("y", TensorType((target.threads * _RESULTS,), sums), "y"),),
        spaces=(Space(ARENA, 0), Space(CONSTANTS), Space(CALLER)),
        buffers=(Buffer("x", Role.INPUT, x.size_bytes, CALLER), Buffer("y", Role.OUTPUT, y.size_bytes, CALLER)),
        kernels=(Kernel("multiply", "multiply", 2),),
        steps=(Launch("multiply", (x,), (y,), label="multiply"),),
    )
    library = build_library(plan, {"multiply": kernel}, target, profile=True)
    return CompiledModel(Program(plan, library, np.empty(0, np.uint8), {"name": "multiply-adds"}))


def multiply_add_kernel(target: Target, number_format: Format) -> Any:
    """Sums of products of a format; neighbours along k are an int32."""
    lanes, kind = target.vector_lanes, number_format.sums
    combine = multiply_add_of(number_format)
    builder = KernelBuilder(target.machine, target.threads)
    source = builder.parameter("x", _ELEMENTS, "int32" if number_format.k_pack > 1 else kind)
    result = builder.parameter("y", target.threads * _RESULTS, kind)
    cells = range(0, SUMS * lanes, lanes)
    with builder.chunks(target.threads, target.threads * ROUNDS) as thread:
        sums = builder.local(SUMS * lanes, kind)
        for at in cells:
            with builder.loop(lanes, "vectorized", "lane") as lane:
                builder.store(sums, at + lane, tirx.const(0, kind))
        with builder.loop(ROUNDS, name="round"):
            for at in cells:
                with builder.loop(lanes, "vectorized", "lane") as lane:
                    builder.store(sums, at + lane, combine(sums[at + lane], source[lane], source[lanes + lane]))
        for at in cells:
            with builder.loop(lanes, "vectorized", "lane") as lane:
                builder.store(result, thread * _RESULTS + at + lane, sums[at + lane])
    return builder.function()


def multiply_tiles_kernel(target: Target, product: TileDot = BF16_TILES) -> Any:
    """Products of one pair of tiles, added to several in turns: a product waits for the one before it on its sums."""
    builder = KernelBuilder(target.machine, target.threads)
    unit = tile_unit(builder, target, product)
    source = builder.parameter("x", _ELEMENTS, "uint32")
    result = builder.parameter("y", target.threads * _RESULTS, product.sums)
    with builder.chunks(target.threads, target.threads * ROUNDS) as thread:
        unit.configure()
        for operand in (TILE_SUMS, TILE_SUMS + 1):
            unit.load(operand, source, 0, WORDS)
        for tile in range(TILE_SUMS):
            unit.zero(tile)
        with builder.loop(TILE_ROUNDS, name="round"):
            for tile in range(TILE_SUMS):
                unit.dot(tile, TILE_SUMS, TILE_SUMS + 1)
        unit.store(0, result, thread * _RESULTS, COLUMNS)
        unit.release()
    return builder.function()
