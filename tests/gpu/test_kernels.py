"""The GPU kernels of every family compute what the CPU's do, on the simulator: shapes that divide no block, several grids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prefuse.kernels.groups.configuration import TEMPLATE
from prefuse.kernels.microkernels import gpu_block_tile
from prefuse.runtime.target import Target

from ..kernels.harness import Case, followed, operator
from ..sample import dealt
from .simulator import RDNA, ROCM, check, check_in_turn

RNG = np.random.default_rng(7)
CLOSE: dict[str, Any] = {"rtol": 2e-6, "atol": 1e-6}


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, dtype=np.float32)


def with_constants(case: Case, *names: str) -> Case:
    """The case with operands that never change, which kernels may pack."""
    return replace(case, group=replace(case.group, constants=case.group.constants | set(names)))


def pointwise() -> list[Case]:
    x = np.concatenate([normal(3, 150), np.array([[np.nan, np.inf, -np.inf]] * 3, np.float32)], axis=1)
    names = ("Tanh", "Sigmoid", "Erf", "Exp", "Relu", "Abs", "Neg", "IsNaN", "Sign", "Atan", "Floor", "Softplus")
    return [
        *(operator(name, x, **CLOSE) for name in names),
        operator("Add", x, normal(1, 153)),
        operator("Where", x > 0, x, normal(3, 1)),
        operator("Cast", normal(3, 50), to=6),
        operator("Mul", normal(5, 1, 7), normal(4, 7)),
        operator("Add", normal(5, 7).astype(np.float16), normal(7).astype(np.float16), rtol=1e-3),
        operator("Mod", np.arange(-9, 9, dtype=np.int64), np.array(4)),
        operator("Div", normal(600), normal(600)),
        operator("Sqrt", np.array(2.0, np.float32)),
        operator("Not", normal(11) > 0),
    ]


def moving() -> list[Case]:
    x = normal(5, 4, 6)
    return [
        operator("Transpose", x, perm=[2, 0, 1]),
        operator("Concat", normal(5, 40), normal(5, 3), axis=1),
        operator("Slice", x, np.array([3, 1]), np.array([-6, 4]), np.array([0, 1]), np.array([-1, 2])),
        operator("Expand", normal(4, 1), np.array([3, 4, 5])),
        operator("Tile", x, np.array([2, 1, 3])),
        operator("Pad", x, np.array([1, 0, 2, 0, 3, 0])),
        operator("Split", normal(7, 6), outputs=2, num_outputs=2, axis=1),
        followed(operator("Transpose", x, perm=[1, 0, 2])),
        operator("Gather", x, np.array([[0, -1], [2, 1]]), axis=1),
        operator("GatherElements", x, RNG.integers(-5, 5, (3, 4, 6)), axis=0),
        operator("GatherND", x, np.array([[0, 1], [4, 3]])),
        operator("CumSum", x, np.array(1), **CLOSE),
        operator("Trilu", normal(3, 9, 11)),
    ]


def reducing() -> list[Case]:
    x, tall = normal(5, 4, 70), normal(300, 9)
    return [
        operator("ReduceSum", x, np.array([1]), **CLOSE),
        operator("ReduceMean", x, np.array([2]), **CLOSE),
        operator("ReduceMax", tall, np.array([0])),
        operator("ReduceLogSumExp", x, np.array([0, 2]), **CLOSE),
        operator("ReduceL2", normal(1000), rtol=1e-5),
        followed(operator("ReduceSum", x, np.array([2]), keepdims=1, rtol=1e-5, atol=1e-5)),
        operator("ArgMax", x, axis=2, keepdims=0),
        operator("ArgMin", tall, axis=0, select_last_index=1),
        *(operator("TopK", normal(3, 300), np.array([k]), outputs=2) for k in (5, 60, 200)),
        operator("Softmax", normal(7, 300), **CLOSE),
        operator("Softmax", normal(4, 30, 5), axis=1, **CLOSE),
        operator("LogSoftmax", x, rtol=1e-5, atol=1e-5),
        followed(operator("Softmax", normal(3, 270), **CLOSE)),
        operator("LayerNormalization", normal(6, 300), normal(300), normal(300), rtol=1e-5, atol=1e-5),
        operator("InstanceNormalization", normal(2, 3, 7, 9), normal(3), normal(3), rtol=1e-5, atol=1e-5),
        operator("GroupNormalization", normal(2, 6, 5), normal(6), normal(6), num_groups=3, rtol=1e-5, atol=1e-5),
        operator("GlobalAveragePool", normal(2, 3, 9, 9), **CLOSE),
        operator("MaxPool", normal(1, 3, 9, 9), kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
        operator("AveragePool", normal(1, 2, 8, 8), kernel_shape=[3, 3], pads=[1, 1, 1, 1], **CLOSE),
    ]


def products() -> list[Case]:
    loose: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
    w, r, b = normal(1, 12, 5), normal(1, 12, 4), normal(1, 24)
    return [
        operator("MatMul", normal(20, 30), normal(30, 17), **loose),
        followed(operator("MatMul", normal(70, 33), normal(33, 67), **loose)),
        with_constants(operator("MatMul", normal(3, 9, 21), normal(21, 40), **loose), "x1"),
        operator("MatMul", normal(2, 3, 9, 8), normal(2, 1, 8, 5), **loose),
        operator("MatMul", normal(8), normal(8, 5), **loose),
        operator("Gemm", normal(30, 20), normal(17, 30), normal(17), transA=1, transB=1, alpha=0.5, beta=2.0, **loose),
        operator("MatMul", np.arange(12, dtype=np.int32).reshape(3, 4), np.arange(20, dtype=np.int32).reshape(4, 5)),
        with_constants(operator("Conv", normal(2, 3, 9, 10), normal(5, 3, 3, 3), normal(5), pads=[1, 1, 1, 1], **loose), "x1"),
        with_constants(operator("Conv", normal(1, 8, 11, 11), normal(6, 8, 1, 1), strides=[2, 2], **loose), "x1"),
        with_constants(operator("Conv", normal(1, 4, 9, 9), normal(4, 1, 3, 3), group=4, dilations=[2, 2], **loose), "x1"),
        with_constants(followed(operator("Conv", normal(1, 3, 8, 8), normal(5, 3, 3, 3), **loose)), "x1"),
        with_constants(operator("ConvTranspose", normal(1, 3, 5, 5), normal(3, 4, 3, 3), strides=[2, 2], **loose), "x1"),
        with_constants(operator("GRU", normal(6, 3, 5), w, r, b, outputs=2, hidden_size=4, **loose), "x1", "x2"),
        operator("GRU", normal(5, 37, 5), w, r, b, outputs=2, hidden_size=4, **loose),
        operator("LSTM", normal(3, 2, 5), normal(1, 16, 5), normal(1, 16, 4), outputs=3, hidden_size=4, **loose),
    ]


FAMILIES = (pointwise, moving, reducing, products)


@pytest.mark.parametrize("cases", FAMILIES)
def test_kernels(cases: Callable[[], list[Case]], tmp_path: Path) -> None:
    check_in_turn(cases(), tmp_path)


@pytest.mark.parametrize("cases", FAMILIES)
@pytest.mark.parametrize("target", [ROCM, RDNA], ids=str)
def test_kernels_of_amd(target: Target, cases: Callable[[], list[Case]], tmp_path: Path) -> None:
    """Each case on one of the GPUs, with wavefronts of 64 lanes and a matrix unit or with 32 and none, tomorrow on the other."""
    today = dealt(cases(), [case.label for case in cases()], target, [ROCM, RDNA])
    check(today, tmp_path, target)


def by_threads(case: Case) -> Case:
    """The case computed without the matrix unit."""
    return replace(case, group=replace(case.group, configuration={TEMPLATE: "gpu_matmul"}), template="gpu_matmul")


@pytest.mark.parametrize("tile", gpu_block_tile._TILES, ids=str)
def test_every_tile_of_products(tile: gpu_block_tile.BlockTile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Edges in all three dimensions, transposed operands, more than one tile in each direction."""
    monkeypatch.setattr(gpu_block_tile, "_TILES", (tile,))
    shape = (tile.rows + 7, 37), (37, tile.columns + 5)
    loose: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
    plain = operator("MatMul", normal(*shape[0]), normal(*shape[1]), **loose)
    turned = operator("Gemm", normal(*shape[0][::-1]), normal(*shape[1][::-1]), transA=1, transB=1, **loose)
    check([by_threads(plain), by_threads(turned)], tmp_path)


def test_products_of_narrow_floats_add_up_in_float32(tmp_path: Path) -> None:
    a, b = np.full((3, 4000), 0.1, np.float16), np.full((4000, 2), 0.1, np.float16)
    expected = (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float16)
    check([by_threads(operator("MatMul", a, b, expected=[expected], rtol=1e-3))], tmp_path)


def test_signs_of_zeros(tmp_path: Path) -> None:
    x = np.array([0.0, -0.0, 1.0, -1.0], np.float32)
    cases = [operator("Mul", x, np.array(-0.0, np.float32)), operator("Sub", x, np.array(-0.0, np.float32))]
    check(cases, tmp_path)
    for case in cases:
        np.testing.assert_array_equal(np.signbit(case.got[0]), np.signbit(case.expected[0]))


def test_a_block_for_every_multiprocessor() -> None:
    """Large products take large tiles, small ones enough blocks, and single rows no tall tile."""

    def nothing(*_: object) -> None:
        return None

    def rows(m: int, n: int, batch: int = 1) -> int:
        product = gpu_block_tile.GpuProduct(batch, m, n, 64, "float32", nothing, nothing, nothing, True, False)
        return gpu_block_tile.choose_tile(product).rows

    assert (rows(4096, 4096), rows(128, 768), rows(1, 4096), rows(32, 32, batch=500)) == (64, 16, 16, 32)
