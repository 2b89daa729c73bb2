"""Products by weights of few bits on the tile unit: against float64, in loops, in software, and on AMX itself."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
from prefuse.kernels.linalg.digit_tiles import stretches_of, tiles_of
from prefuse.kernels.linalg.fixed_point_tiles import BLOCKS, COLUMN_UNITS, SCALES
from prefuse.kernels.linalg.weight_tiles import kept_products, tile_blocks
from prefuse.kernels.microkernels.weight_packing import cut_sections, shared_sections
from prefuse.kernels.registry import build_kernel
from prefuse.kernels.template.contract import BuiltKernel
from prefuse.runtime.target import AMX_EMULATED, Target

from ..harness import Case, check, followed, run, target_of
from ..microkernels.amx_emulator import AMX, emulator, running_amx
from .test_stored_weights import case_of, rows_of, weights_of

__all__ = ["emulator"]
TEMPLATE = "fixed_point_tiles"


def tiled(case: Case, *, shares: bool = False, scales: str = BLOCKS) -> Case:
    """The case by tiles; of weights in blocks, with the form `scales`."""
    group = replace(case.group, configuration={"template": TEMPLATE, SCALES: scales}, shares_weights=shares)
    return replace(case, group=group, template=TEMPLATE, label=f"{case.label} shares {shares} {scales}", got=[])


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
        if block:
            scaled = [case_of(x, dtype, n, block, has_zero=has_zero) for has_zero in (False, True)]
            scaled.append(case_of(x, dtype, n, block, rtol=1 / 32639, precision="bfloat16"))
            found += [tiled(case, shares=number > 0, scales=COLUMN_UNITS) for number, case in enumerate(scaled)]
    found.append(tiled(case_of(rows_of(21, 700), "int8", 40, 0, rtol=1 / 127, row_bits=8)))
    found.append(tiled(case_of(rows_of(9, 700), "int4", 40, 24, rtol=1 / 127, row_bits=8), scales=COLUMN_UNITS))
    found.append(tiled(followed(case_of(rows_of(2, 20, 96), "int8", 40, 0, has_zero=True)), shares=True))
    return found


@pytest.mark.parametrize("threads", [1, 5])
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


@pytest.mark.parametrize(("longest", "bits", "block"), [(256, 8, 0), (1024, 8, 0), (1024, 4, 32), (512, 4, 1024), (1024, 8, 512)])
def test_stretches_stay_within_blocks(longest: int, bits: int, block: int) -> None:
    for depth in (7, 64, 300, 768, 1100, 2048, 11008):
        for sections in (cut_sections(depth, 50, bits, block, 1024, 32), shared_sections(depth, 50, bits, block, 16)):
            found = stretches_of(sections, block, longest)
            assert found.joined == 1 or found.length <= longest
            assert found.count * found.joined >= sections.count > (found.count - 1) * found.joined
            assert not block or block % found.length == 0
            assert found.padded >= found.length
    assert tiles_of(8, 3) == 2
    assert tiles_of(70, 3) == 14


def test_products_of_the_least_digits_are_left_out() -> None:
    assert kept_products(3, 3) == [[(0, 2), (1, 1), (2, 0)], [(1, 2), (2, 1)], [(2, 2)]]
    assert kept_products(2, 2) == [[(0, 1), (1, 0)], [(1, 1)]]
    assert kept_products(3, 1) == [[(0, 0)], [(1, 0)], [(2, 0)]]
    assert kept_products(1, 2) == [[(0, 0)], [(0, 1)]]
    assert tile_blocks(6, 32, 3, 3) == [(0, 4), (1, 2), (2, 0)]
    assert tile_blocks(2, 8, 3, 3) == [(0, 1), (1, 0), (2, 0)], "a tile of lines of two digits"


def test_scales_of_small_blocks_are_applied_to_weights_where_rows_are_many() -> None:
    for rows, block, form in ((4, 32, BLOCKS), (128, 32, COLUMN_UNITS), (128, 512, BLOCKS)):
        group = replace(case_of(rows_of(rows, 2048), "int4", 1024, block).group, configuration={"template": TEMPLATE})
        built = build_kernel(group, Target("cpu", "amx", 2))
        assert isinstance(built, BuiltKernel)
        assert next(one.taken for one in built.choices if one.name == SCALES) == form, (rows, block)


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
