"""Threads that take neighbours: the same results, by vectors of 16 bytes where these begin and end with rows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from prefuse.compiler.lowering.gpu.device_module import cuda_source
from prefuse.kernels.registry import build_kernel
from prefuse.kernels.template.contract import BuiltKernel
from prefuse.runtime.target import Target

from ..kernels.elementwise.parts import Parts, joined_case, random_case
from ..kernels.harness import Case, followed, operator
from ..sample import dealt
from .simulator import CUDA, ROCM, check

RNG = np.random.default_rng(11)
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}


def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape, dtype=np.float32).astype(dtype)


def vectors() -> list[Case]:
    """Whose rows are whole vectors, of every type and of several at once."""
    x, half = normal(6, 40), normal(6, 40, dtype=np.float16)
    return [
        operator("Tanh", x, rtol=2e-6, atol=1e-6),
        operator("Add", x, normal(40)),
        operator("Mul", x, normal(6, 1)),
        operator("Where", x > 0, x, normal(1, 40)),
        operator("Add", half, normal(40, dtype=np.float16), rtol=1e-3, atol=1e-3),
        operator("Neg", normal(6, 40, dtype=ml_dtypes.bfloat16)),
        operator("Cast", x, to=16),
        operator("Cast", normal(6, 40, dtype=ml_dtypes.bfloat16), to=1),
        operator("Add", RNG.integers(0, 100, (6, 40)), RNG.integers(0, 100, 40)),
        operator("Max", RNG.integers(0, 255, (6, 48)).astype(np.uint8), RNG.integers(0, 255, 48).astype(np.uint8)),
        operator("Cast", RNG.integers(-9, 9, (6, 48)).astype(np.int8), to=1),
        operator("Not", normal(6, 40) > 0),
        operator("Transpose", normal(5, 6, 8), perm=[1, 0, 2]),
        operator("Transpose", normal(5, 6, 8), perm=[2, 0, 1]),
        operator("Concat", normal(5, 40), normal(5, 12), axis=1),
        operator("Split", normal(7, 16), outputs=2, num_outputs=2, axis=1),
        operator("Expand", normal(4, 1), np.array([3, 4, 8])),
        operator("Gather", normal(9, 16), np.array([[0, -1], [2, 1]]), axis=0),
        followed(operator("Gather", normal(9, 16), np.array([[0, -1], [2, 1]]), axis=0)),
        operator("Gather", normal(3, 9, 8, dtype=np.float16), np.array([4, 0]), axis=1),
        operator("ReduceSum", normal(5, 4, 128), np.array([2]), **CLOSE),
        operator("ReduceMean", normal(5, 4, 128, dtype=np.float16), np.array([1, 2]), rtol=1e-3, atol=1e-3),
        operator("ReduceMax", normal(3, 1028), np.array([1])),
        operator("Softmax", normal(7, 1200), rtol=2e-6, atol=1e-6),
        operator("LogSoftmax", normal(7, 72), **CLOSE),
        followed(operator("Softmax", normal(3, 272), rtol=2e-6, atol=1e-6)),
        operator("LayerNormalization", normal(6, 768), normal(768), normal(768), **CLOSE),
        operator("LayerNormalization", normal(6, 128, dtype=np.float16), normal(128, dtype=np.float16), rtol=2e-3, atol=2e-3),
        operator("GroupNormalization", normal(2, 6, 48), normal(6), normal(6), num_groups=3, **CLOSE),
    ]


def beside_vectors() -> list[Case]:
    """Rows that are no whole vectors, or begin beside them, and places that loads tell."""
    return [
        operator("Add", normal(5, 6), normal(1, 6)),
        operator("Add", normal(3, 7), normal(7)),
        operator("Slice", normal(5, 17), np.array([1]), np.array([17]), np.array([1])),
        operator("Slice", normal(5, 16), np.array([0]), np.array([8]), np.array([1])),
        operator("Concat", normal(5, 3), normal(5, 8), axis=1),
        operator("Pad", normal(5, 8), np.array([0, 3, 0, 1])),
        operator("Pad", normal(5, 8), np.array([1, 4, 0, 4])),
        operator("Slice", normal(5, 8), np.array([-1]), np.array([-9]), np.array([1]), np.array([-1])),
        operator("Gather", normal(4, 9), np.array([[3, 8, 0, 1]] * 2), axis=1),
        operator("GatherElements", normal(5, 8), RNG.integers(0, 5, (3, 8)), axis=0),
        operator("ReduceSum", normal(5, 70), np.array([1]), **CLOSE),
        operator("Softmax", normal(7, 301), rtol=2e-6, atol=1e-6),
        operator("InstanceNormalization", normal(2, 3, 7, 9), normal(3), normal(3), **CLOSE),
        operator("LayerNormalization", normal(6, 6, 66), normal(6, 66), normal(6, 66), axis=1, **CLOSE),
    ]


def halves(begin: int) -> Case:
    """Two parts of rows of 16 elements, the second of which begins in them."""
    parts = Parts(begin)
    x = parts.input((6, 32), "float32")
    one, two = (parts.slice(x, (0, place), (1, 1), (6, 16)) for place in (0, begin))
    return parts.case(parts.op("Add", (one, two), parts.values[one] + parts.values[two]), f"parts from {begin}")


def parts_of_operands() -> list[Case]:
    return [halves(16), halves(4), halves(6), halves(3), *map(random_case, range(9))]


def results_of_concats() -> list[Case]:
    return list(map(joined_case, range(22)))


@pytest.mark.parametrize("target", [CUDA, ROCM], ids=str)
@pytest.mark.parametrize("cases", [vectors, beside_vectors, parts_of_operands, results_of_concats])
def test_results(cases: Any, target: Target, tmp_path: Path) -> None:
    """Each case on one of the simulators today, on the other one tomorrow."""
    check(dealt(cases(), [case.label for case in cases()], target, [CUDA, ROCM]), tmp_path, target)


@pytest.mark.parametrize(
    ("case", "loads", "stores"),
    [
        (operator("Add", normal(64, 768), normal(768)), 2, 1),
        (operator("Tanh", normal(64, 768, dtype=np.float16)), 1, 1),
        (operator("Gather", normal(90, 768), np.zeros((4, 7), np.int64), axis=0), 1, 1),
        (operator("Transpose", normal(5, 6, 64), perm=[1, 0, 2]), 1, 1),
        (operator("LayerNormalization", normal(64, 768), normal(768), normal(768)), 5, 1),
        (operator("Softmax", normal(64, 512)), 3, 2),
        (halves(4), 2, 1),
    ],
    ids=lambda value: getattr(value, "label", ""),
)
def test_vectors_in_the_code(case: Case, loads: int, stores: int) -> None:
    """Each tensor is loaded and stored by 16 bytes alone, so many times by each thread."""
    built = build_kernel(case.group, CUDA)
    assert isinstance(built, BuiltKernel)
    source = cuda_source({"k": built.function}, CUDA)
    wide = re.findall(r"\*\((?:float4|uint4|int4)\*\)\((?:p|b)\d+_?\w* \+", source)
    body = source[source.index("k_0") :]
    assert len(re.findall(r"= \*\((?:float4|uint4|int4)\*\)\(p\d", body)) == loads, body
    assert len(re.findall(r"\*\((?:float4|uint4|int4)\*\)\(p\d[^;]*\) = ", body)) == stores, body
    assert wide
