"""Products by weights of few bits on the tile unit: against float64, in loops, in software, and on AMX itself."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
from prefuse.kernels.linalg.digit_tiles import stretches_of, tiles_of
from prefuse.kernels.microkernels.weight_packing import cut_sections, shared_sections
from prefuse.kernels.registry import build_kernel
from prefuse.kernels.template.contract import BuiltKernel
from prefuse.runtime.target import AMX_EMULATED, Target

from ..harness import Case, check, followed, run, target_of
from ..microkernels.amx_emulator import AMX, emulator, running_amx
from .test_stored_weights import case_of, rows_of, weights_of

__all__ = ["emulator"]
TEMPLATE = "fixed_point_tiles"


def tiled(case: Case, *, shares: bool = False) -> Case:
    group = replace(case.group, configuration={"template": TEMPLATE}, shares_weights=shares)
    return replace(case, group=group, template=TEMPLATE, label=f"{case.label} shares {shares}", got=[])


def cases() -> list[Case]:
    """Rows that fill tiles and chunks or not, one digit to three, one stretch of k and several, the last one shorter."""
    found = []
    for rows, k, n, dtype, block in (
        (8, 768, 40, "int8", 0),
        (5, 1280, 33, "int4", 0),
        (32, 64, 32, "uint8", 64),
        (33, 300, 31, "int8", 0),
        (70, 2050, 70, "int8", 0),
        (16, 512, 64, "int4", 32),
        (37, 600, 96, "uint4", 128),
        (3, 2304, 17, "int8", 256),
        (11, 20, 5, "uint2", 0),
    ):
        x = rows_of(rows, k)
        found += [tiled(case_of(x, dtype, n, block, has_zero=shares), shares=shares) for shares in (False, True)]
        found.append(tiled(case_of(x, dtype, n, block, rtol=1 / 32639, precision="bfloat16"), shares=True))
    found.append(tiled(case_of(rows_of(21, 700), "int8", 40, 0, rtol=1 / 127, row_bits=8)))
    found.append(tiled(followed(case_of(rows_of(2, 20, 96), "int8", 40, 0, has_zero=True)), shares=True))
    return found


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_products(threads: int) -> None:
    check(cases(), target_of(AMX_EMULATED, threads))


def test_the_instructions_give_the_bits_of_the_loops(emulator: ctypes.CDLL | None) -> None:
    some = cases()
    run(some, target_of(AMX_EMULATED))
    loops = [case.got[0] for case in some]
    with running_amx(emulator) as counts:
        check(some, AMX)
    assert counts is None or counts["tdpbsud"] > counts["tilezero"] == counts["tilestored"] > 0
    assert counts is None or 0 < counts["tilerelease"] <= counts["ldtilecfg"]
    for case, expected in zip(some, loops, strict=True):
        np.testing.assert_array_equal(case.got[0], expected, case.label)


def test_largest_sums() -> None:
    """Weights and digits at the ends of their ranges, over the longest stretch: no sum leaves 32 bits."""
    found = []
    for dtype, weight in (("uint8", 255), ("int8", -128), ("int8", 127), ("uint4", 15)):
        for x in (np.full((2, 2048), -1.0), np.where(np.arange(4096).reshape(2, 2048) % 2, 1.0, 0.50390625)):
            case = case_of(x.astype(np.float32), dtype, 9, 0)
            case.arrays["w"][...] = np.asarray(weight).astype(case.arrays["w"].dtype)
            case.expected = [(x @ np.full((2048, 9), float(weight)) * case.arrays["s"]).astype(np.float32)]
            case.atol = 4e-7 * float(np.abs(case.expected[0]).max())
            found.append(tiled(case))
    check(found, target_of(AMX_EMULATED))


def test_a_row_that_is_not_finite_is_nan_alone() -> None:
    x = rows_of(20, 64)
    x[3, 7], x[19, 9] = np.inf, np.nan
    case = tiled(case_of(x, "int8", 20, 0))
    run([case], target_of(AMX_EMULATED))
    is_nan = np.isnan(case.got[0])
    assert is_nan[[3, 19]].all()
    assert is_nan.sum() == 40


@pytest.mark.parametrize(("bytes_of_row", "bits", "block"), [(1, 8, 0), (3, 8, 0), (3, 4, 32), (2, 4, 1024), (3, 8, 512)])
def test_stretches_stay_within_blocks(bytes_of_row: int, bits: int, block: int) -> None:
    for depth in (7, 64, 300, 768, 1100, 2048, 11008):
        for sections in (cut_sections(depth, 50, bits, block, 1024, 32), shared_sections(depth, 50, bits, block, 16)):
            found = stretches_of(sections, block, bytes_of_row)
            assert found.joined == 1 or found.length <= (256 if bytes_of_row == 1 else 1024)
            assert found.count * found.joined >= sections.count > (found.count - 1) * found.joined
            assert not block or block % found.length == 0
            assert found.padded >= found.length
    assert tiles_of(8, 3) == 2
    assert tiles_of(70, 3) == 14


def test_eight_rows_go_by_tiles_and_one_does_not() -> None:
    for rows, template in ((1, "fixed_point_matmul"), (8, TEMPLATE), (128, TEMPLATE)):
        group = replace(case_of(rows_of(rows, 768), "int8", 3072, 0).group, shares_weights=True)
        built = build_kernel(group, Target("cpu", "amx", 2))
        assert isinstance(built, BuiltKernel)
        assert built.template == template, rows


def test_weights_are_read_as_other_kernels_read_them() -> None:
    """One packing for one row and for many: constants lie in memory once."""
    arrays, _ = weights_of("int8", 768, 96, 0, has_zero=False)
    packed = []
    for rows, template in ((1, "fixed_point_matmul"), (40, TEMPLATE)):
        case = case_of(rows_of(rows, 768), "int8", 96, 0)
        group = replace(case.group, shares_weights=True, configuration={"template": template})
        built = build_kernel(group, Target("cpu", AMX_EMULATED, 2))
        assert isinstance(built, BuiltKernel)
        assert built.template == template
        packed.append({one.name: str(one.pack) for one in built.operands if one.pack is not None})
    assert packed[0] == packed[1]
    assert set(packed[0]) == set(arrays)
