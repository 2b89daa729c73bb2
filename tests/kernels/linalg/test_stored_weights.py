"""Products by weights of few bits with scales: against float64 of the numbers that they stand for."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import ml_dtypes  # noqa: F401  (names int4 and uint4)
import numpy as np
import pytest
from prefuse.kernels.cost.stored_weights import dequantized_tiles, fixed_point_tiles
from prefuse.kernels.formats.digits import DigitUnit
from prefuse.kernels.groups.group import Group, Op
from prefuse.kernels.microkernels.weight_packing import cut_sections, shared_sections
from prefuse.kernels.registry import build_kernel
from prefuse.kernels.template.contract import BuiltKernel
from prefuse.runtime.hardware.machine import row
from prefuse.runtime.plan import TensorType
from prefuse.runtime.target import Target

from ..harness import Case, check, followed, in_turn, run, target_of, type_of
from ..symbolic import Dim, Domain, built_for, run_at, sized

THREE = ("fixed_point_matmul", "dequantized_matmul", "dequantized_rows")
TILES = ("fixed_point_tiles",)
TEMPLATES = dict.fromkeys(("avx2", "avxvnni", "avx512", "avx512vnni"), THREE) | {"amx-emulated": TILES}
DOT = DigitUnit("dot", 16)
rng = np.random.default_rng(17)


def weights_of(dtype: str, k: int, n: int, block: int, *, has_zero: bool) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Integers w [k, n], scales s, zero points o; and what they stand for in float64."""
    bits, signed = int(dtype.lstrip("uint")), dtype[0] == "i"
    low = -(1 << bits - 1) if signed else 0
    numbers = rng.integers(low, low + (1 << bits), (k, n))
    blocks = -(-k // block) if block else 1
    scales = rng.uniform(0.01, 2.0, (blocks, n)).astype(np.float32)
    zeros = rng.integers(low, low + (1 << bits), (blocks, n)) if has_zero else np.zeros((blocks, n), int)
    of_k = np.arange(k) // block if block else np.zeros(k, int)
    exact = (numbers - zeros[of_k]) * scales.astype(np.float64)[of_k]
    shape = scales.shape if block else (n,)
    arrays = {"w": numbers.astype(dtype), "s": scales.reshape(shape)}
    return arrays | ({"o": zeros.reshape(shape).astype(dtype)} if has_zero else {}), exact


def case_of(
    x: np.ndarray,
    dtype: str,
    n: int,
    block: int,
    *,
    has_zero: bool = False,
    is_turned: bool = False,
    rtol: float = 2e-6,
    row_bits: int = 0,
    **more: Any,
) -> Case:
    """x by such weights: a MatMul, or a Gemm of transposed ones."""
    arrays, exact = weights_of(dtype, x.shape[-1], n, block, has_zero=has_zero)
    wanted = x.astype(np.float64) @ exact
    scaling: dict[str, Any] = {"axis": 0, "block_size": block} if block else {"axis": 1}
    if is_turned:
        arrays = {name: np.ascontiguousarray(array.T) for name, array in arrays.items()}
        scaling["axis"] = 1 - scaling["axis"]
    attributes = {"transB": 1} if is_turned else {}
    attributes |= {"prefuse.row_bits": row_bits} if row_bits else {}
    multiply = Op("Gemm" if is_turned else "MatMul", ("x", "b"), ("y",), attributes, 23)
    ops = (Op("DequantizeLinear", tuple(arrays), ("b",), scaling, 23), multiply)
    constants = frozenset(arrays)
    arrays = {"x": x, **arrays}
    types = {name: type_of(array) for name, array in arrays.items()}
    types |= {"b": TensorType(arrays["w"].shape, "float32"), "y": TensorType(wanted.shape, "float32")}
    group = Group(ops, tuple(arrays), ("y",), types, constants, **more)
    largest = float((np.abs(x).astype(np.float64) @ np.abs(exact)).max(initial=1.0))
    label = f"{x.shape} x {n} {dtype} block {block} zero {has_zero} turned {is_turned} {more}"
    return Case(group, arrays, [wanted.astype(np.float32)], 0.0, rtol * largest, label)


def by_template(cases: list[Case], level: str) -> list[Case]:
    """Each case by each template of a level, whichever is the cheapest."""
    return [
        replace(
            case,
            group=replace(case.group, configuration={"template": template}),
            label=f"{case.label} {template}",
            template=template,
        )
        for case, template in product(cases, TEMPLATES[level])
    ]


def rows_of(*shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("level", TEMPLATES)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int4", "uint4", "uint2"])
def test_products(dtype: str, level: str) -> None:
    cases = []
    for m, k, n, block in ((1, 64, 17, 32), (5, 77, 33, 16), (3, 300, 40, 0), (1, 7, 1, 0), (19, 128, 50, 64), (2, 40, 16, 256)):
        for has_zero, is_turned in ((False, False), (True, True)):
            cases.append(case_of(rows_of(m, k), dtype, n, block, has_zero=has_zero, is_turned=is_turned))
    check(by_template(in_turn(cases, level, tuple(TEMPLATES)), level), target_of(level))


@pytest.mark.parametrize("level", TEMPLATES)
@pytest.mark.parametrize("block", [260, 264, 1000])
def test_blocks_of_odd_lengths(block: int, level: str) -> None:
    """Sums of 8-bit digits by the largest weights stay in 32 bits."""
    case = case_of(np.ones((3, block), np.float32), "uint8", 17, block, has_zero=True)
    case.arrays["w"][:], case.arrays["o"][:] = 255, 3
    exact = 252.0 * block * case.arrays["s"].astype(np.float64).reshape(1, -1)
    wanted = np.broadcast_to(exact, (3, 17)).astype(np.float32)
    cases = [replace(case, expected=[wanted], atol=2e-5 * float(wanted.max()))]
    cases.append(case_of(rows_of(2, 2 * block), "int8", 20, block))
    check(by_template(in_turn(cases, level, tuple(TEMPLATES)), level), target_of(level))


@pytest.mark.parametrize(("bits", "per_word"), [(8, 4), (4, 8), (2, 16)])
def test_sections_are_no_longer_than_they_may_be(bits: int, per_word: int) -> None:
    for block in (*range(per_word, 1200, per_word), 768, 4096, 1_000_000 // per_word * per_word):
        for longest in (128, 256, 1024):
            sections = cut_sections(3 * block, 40, bits, block, longest, 32)
            assert sections.length <= longest
            assert sections.length % per_word == block % sections.length == 0
            assert block > longest or sections.length == block


@pytest.mark.parametrize("level", TEMPLATES)
def test_surroundings(level: str) -> None:
    """Batches of rows, and an epilogue."""
    cases = [case_of(rows_of(2, 3, 48), "int4", 24, 16), followed(case_of(rows_of(4, 40), "int8", 19, 0, has_zero=True))]
    check(by_template(in_turn(cases, level, tuple(TEMPLATES)), level), target_of(level))


@pytest.mark.parametrize(("level", "template"), [*product(("avx2",), THREE), ("avxvnni", THREE[0]), ("avx512vnni", THREE[0])])
@pytest.mark.parametrize(("dtype", "block"), [("int8", 0), ("uint4", 32)])
def test_one_kernel_serves_all_numbers_of_rows(dtype: str, block: int, level: str, template: str) -> None:
    target, domain = target_of(level), Domain((Dim("T", 1, 200),), {"T": 64})
    points = {t: (case_of(rows_of(t, 96), dtype, 40, block, has_zero=bool(block)), {"T": t}) for t in (1, 2, 7, 12, 13, 64, 200)}
    group = sized(points[64][0], {"x": ("T", 96), "y": ("T", 40)}, domain)
    kernel = built_for(replace(group, configuration={"template": template}), target)
    assert kernel.template == template
    run_at(kernel, target, domain, points)


@pytest.mark.parametrize("level", TEMPLATES)
def test_fewer_bytes(level: str) -> None:
    """Two bytes have 16 bits of a section's largest element, one has 8, where precision or the user allows that."""
    x = rows_of(3, 96)
    rough = [case_of(x, dtype, 20, 32, rtol=1 / 32639, precision="bfloat16") for dtype in ("int8", "int4")]
    rough += [case_of(x, dtype, 20, 32, rtol=1 / 127, row_bits=8) for dtype in ("int8", "uint4")]
    for case in rough:
        case.group = replace(case.group, configuration={"template": TEMPLATES[level][0]})
    check(rough, target_of(level))
    for case in rough:  # and no more: else the test says nothing of bytes
        assert np.abs(case.got[0] - case.expected[0]).max() > case.atol / 1000


@pytest.mark.parametrize("level", TEMPLATES)
def test_float32_fast_keeps_its_promise(level: str) -> None:
    """2e-5 of the norm of the output."""
    cases = [
        case_of(rows_of(6, 1024), dtype, 40, block, precision="float32-fast") for dtype, block in (("int8", 0), ("int4", 32))
    ]
    for case in cases:
        case.group = replace(case.group, configuration={"template": TEMPLATES[level][0]})
    run(cases, target_of(level))
    for case in cases:
        distance = case.got[0].astype(np.float64) - case.expected[0]
        assert np.linalg.norm(distance) <= 2e-5 * np.linalg.norm(case.expected[0].astype(np.float64))


@pytest.mark.parametrize("level", TEMPLATES)
def test_largest_sums(level: str) -> None:
    """Weights and digits at the ends of their ranges: no sum of 16 or 32 bits is too small for them."""
    cases = []
    for dtype, low, high in (("uint8", 0, 255), ("int8", -128, 127), ("uint4", 0, 15), ("int4", -8, 7), ("uint2", 0, 3)):
        for weight, sign in product((low, high), (-1.0, 1.0)):
            for x in (np.full((2, 512), sign), np.where(np.arange(1024).reshape(2, 512) % 2, sign, sign * 0.50390625)):
                case = case_of(x.astype(np.float32), dtype, 9, 0)
                case.arrays["w"][...] = np.asarray(weight).astype(case.arrays["w"].dtype)
                case.expected = [(x @ np.full((512, 9), float(weight)) * case.arrays["s"]).astype(np.float32)]
                case.atol = 4e-7 * max(float(np.abs(case.expected[0]).max()), 1.0)
                cases.append(case)
    check(by_template(in_turn(cases, level, tuple(TEMPLATES)), level), target_of(level))


@pytest.mark.parametrize("level", TEMPLATES)
def test_unusual_rows(level: str) -> None:
    """Zeros, numbers of any size, and what is not finite, which makes all of its row NaN and nothing else."""
    x = rows_of(5, 64) * np.array([[0.0], [1e-36], [1e30], [1.0], [1.0]], np.float32)
    x[3, 7], x[4, 9] = np.inf, np.nan
    case = case_of(x[:3], "int8", 20, 32)
    one = case_of(x, "int8", 20, 32)
    for some in (case, one):
        some.group = replace(some.group, configuration={"template": TEMPLATES[level][0]})
    run([case, one], target_of(level))
    error = np.abs(case.got[0].astype(np.float64) - case.expected[0]).max(1)
    least = 64 * 128 * 2.0 * 2.0**-126  # elements below 2^-102 are rounded to multiples of a scale that is no subnormal number
    assert (error <= 1e-6 * np.abs(case.expected[0]).max(1) + least).all(), error
    assert np.isnan(one.got[0][3:]).all()
    assert np.isfinite(one.got[0][:3]).all()


@pytest.mark.parametrize(
    ("rows", "level", "template"),
    [
        (1, "avx512vnni", THREE[0]),
        (8, "avx512vnni", THREE[0]),
        (1, "avxvnni", THREE[0]),
        (1, "avx2", THREE[0]),
        (8, "avx2", THREE[2]),
        (512, "avx2", THREE[1]),
    ],
)
def test_the_cheaper_kernel_is_taken(rows: int, level: str, template: str) -> None:
    group = case_of(rows_of(rows, 256), "int4", 512, 32).group
    built = build_kernel(group, Target("cpu", level, 2))
    assert isinstance(built, BuiltKernel)
    assert built.template == template


def test_few_rows_meet_weights_from_memory_together() -> None:
    """Eight rows in one tile of a vector, whose sums leave no registers for totals; not in tiles of several vectors, where words
    of the rows would have none either."""
    machine = row("zen4", 16)
    tiles = fixed_point_tiles(8, shared_sections(768, 50257, 8, 0, 16), DOT, 3, machine)
    assert tiles[0] == (8, 1)
    assert (4, 2) not in tiles
    alone = fixed_point_tiles(1, shared_sections(768, 50257, 8, 0, 16), DOT, 3, machine)
    assert alone.index((1, 2)) < alone.index((1, 1)), "one row waits for memory alone: the tile with fewer cycles"


def test_padding_of_a_last_panel_is_counted() -> None:
    """It lies in memory and is unpacked as weights are: 512 columns by seven vectors of eight are 560."""
    for columns in (256, 512, 1024):
        rows, vectors = dequantized_tiles(1, columns, 256, 8, row("zen3", 8), shifted_loads=False, b_padded=True)[0]
        assert rows == 1
        assert -(-columns // (8 * vectors)) * 8 * vectors <= 1.04 * columns
