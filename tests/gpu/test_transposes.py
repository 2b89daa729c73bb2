"""Transposes by blocks: tiles through shared memory, on every type, with what surrounds them, and without bank conflicts."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from prefuse.compiler.lowering.gpu.device_module import cuda_source
from prefuse.kernels.codegen.grids import DeviceFunction
from prefuse.kernels.movement.block_transpose import SIDES, pitch_of, stored_columns, vector_of
from prefuse.runtime.target import Target

from ..kernels.harness import Case, build, followed, operator
from ..sample import dealt
from .simulator import CUDA, RDNA, ROCM, check, check_in_turn

RNG = np.random.default_rng(11)
NARROW = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}


def numbers(dtype: np.dtype | type, *shape: int) -> np.ndarray:
    return RNG.integers(0, 2 if dtype == np.bool_ else 100, shape).astype(dtype)


def cases() -> list[Case]:
    """Whole and ragged tiles of every width, in two dimensions and among others."""
    small = [np.bool_, np.uint8, np.float16, NARROW["bfloat16"], np.int32, np.float32, np.int64]
    found = [operator("Transpose", numbers(dtype, 65, 40), perm=[1, 0]) for dtype in small]
    found += [operator("Transpose", numbers(dtype, 128, 64), perm=[1, 0]) for dtype in small]
    found += [
        operator("Transpose", numbers(np.float32, 2, 33, 3, 40), perm=[0, 2, 3, 1]),
        operator("Transpose", numbers(np.float32, 17, 9, 8), perm=[2, 0, 1]),
        operator("Transpose", numbers(np.int64, 3, 5, 8), perm=[1, 0, 2]),
        operator("Transpose", numbers(np.float32, 9, 2, 70), perm=[2, 1, 0]),
        operator("Transpose", numbers(np.float16, 2, 12, 5, 16), perm=[0, 2, 3, 1]),
        followed(operator("Transpose", numbers(np.float32, 40, 36), perm=[1, 0])),
        followed(operator("Transpose", numbers(np.float32, 3, 11, 37), perm=[0, 2, 1])),
        operator("DepthToSpace", numbers(np.float32, 1, 32, 9, 10), blocksize=2),
        operator("SpaceToDepth", numbers(np.float32, 1, 8, 18, 20), blocksize=2),
    ]
    return found


def test_transposes(tmp_path: Path) -> None:
    check_in_turn(cases(), tmp_path)


@pytest.mark.parametrize("target", [ROCM, RDNA], ids=str)
def test_transposes_of_amd(target: Target, tmp_path: Path) -> None:
    check(dealt(cases(), [case.label for case in cases()], target, [ROCM, RDNA]), tmp_path, target)


def source_of(case: Case) -> str:
    kernel = build(case, CUDA).function
    assert isinstance(kernel, DeviceFunction)
    return cuda_source({"kernel": kernel}, CUDA)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_whole_rows_are_loaded_and_stored_by_16_bytes(dtype: type) -> None:
    source = source_of(operator("Transpose", numbers(dtype, 2, 64, 128), perm=[0, 2, 1]))
    assert "__shared__" in source
    accesses = re.findall(r"\*\((\w+)\*\)\(p\d", source)
    assert accesses
    assert set(accesses) <= {"float4", "uint4", "int4"}
    assert not re.findall(r"[^*(]p\d\w*\[", source.partition("{")[2])


def test_few_neighbours_are_copied_without_tiles() -> None:
    assert "__shared__" not in source_of(operator("Transpose", numbers(np.float32, 4, 300), perm=[1, 0]))


@pytest.mark.parametrize(("item_bytes", "count"), [(4, 4), (4, 1), (8, 1), (2, 8), (2, 4)])
def test_a_warp_reaches_each_bank_once(item_bytes: int, count: int) -> None:
    """At each moment no two of its threads want different words of one bank (of 4 bytes; words of 8 by halves of a warp)."""
    side = SIDES.get(item_bytes, 32)
    pitch, wide = pitch_of(side, item_bytes), side // count
    for columns, is_stored in ((wide, False), (stored_columns(side, count, item_bytes), True)):
        seen = [vector_of(number, wide, columns) for number in range(side * wide)]
        assert sorted(seen) == [(row, vector) for row in range(side) for vector in range(wide)]
        together = 32 if item_bytes <= 4 else 16
        for begin in range(0, len(seen), together):
            for e in range(count):
                banks = defaultdict(set)
                for row, vector in seen[begin : begin + together]:
                    along = vector * count + e
                    byte = item_bytes * (along * pitch + row if is_stored else row * pitch + along)
                    for word in range(byte // 4, (byte + item_bytes - 1) // 4 + 1):
                        banks[word % 32].add(word)
                assert max(map(len, banks.values())) == 1, (columns, is_stored, begin, e)


def test_a_tile_without_its_barrier_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefuse.kernels.codegen.gpu_builder import GpuBuilder

    monkeypatch.setattr(GpuBuilder, "barrier", lambda self: None)
    case = operator("Transpose", numbers(np.float32, 64, 64), perm=[1, 0])
    with pytest.raises(AssertionError, match="reads what nobody wrote"):
        check([case], tmp_path, CUDA)
