"""Products on the tile unit: the same kernels with tiles in loops, with the instructions in software, and on AMX itself."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
import tvm
from prefuse.compiler.lowering.native import compile_module
from prefuse.kernels.cost import amx as tile_costs
from prefuse.kernels.groups.group import Group, Op
from prefuse.kernels.linalg import matmul_tiles
from prefuse.kernels.microkernels import amx_blocks
from prefuse.kernels.microkernels.bf16_split import PRODUCTS, split_array
from prefuse.kernels.registry import build_kernel
from prefuse.kernels.template.contract import BuiltKernel, Refusal
from prefuse.runtime.plan import TensorType
from prefuse.runtime.precision import Precision
from prefuse.runtime.target import AMX_EMULATED, Target
from prefuse.tests.sample import dealt
from tvm.ir import GlobalVar

from ..harness import Case, check, run, target_of
from ..microkernels.amx_emulator import AMX, emulator, running_amx
from .test_matmul import gemm, product, read_twice
from .test_paired_product import product as narrow_product

__all__ = ["emulator"]
NEAR_SHARES = (0.5, 0.0)  # products walked by columns of blocks, and by rows
THREADS = (1, 2, 5)
LOST_TERM = 2.0**-102  # below it a number has no third term

rng = np.random.default_rng(5)


@pytest.fixture(autouse=True)
def tiles_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products, too, for which vectors are faster."""
    monkeypatch.setattr(matmul_tiles, "tile_product_cycles", lambda *sizes, **how: -1e9)  # less than bytes take


def tiled(case: Case, precision: Precision = "float32") -> Case:
    """The case, which must be computed on tiles."""
    unit = 1e-5 if precision == "float32-fast" else 1e-6
    atol = unit * max(float(np.abs(case.expected[0]).max(initial=0)), 1.0)
    group = replace(case.group, precision=precision)
    return replace(case, group=group, template="matmul_tiles", rtol=0.0, atol=atol, got=[])


def products() -> list[Case]:
    """Ragged and whole edges, both loop orders, batches, operands constant and not, few lines."""
    return [
        product((40, 70), (70, 50)),
        product((40, 70), (70, 50), ""),
        product((64, 96), (96, 64)),
        product((33, 64), (64, 32), "a"),
        product((1, 5), (5, 1)),
        product((16, 33), (33, 16), ""),
        product((17, 31), (31, 15)),
        product((4, 3, 37), (37, 70)),
        product((2, 3, 19, 40), (3, 40, 35), ""),
        product((3, 40), (2, 40, 33), "b"),
        product((70,), (70, 40)),
        product((2, 33, 5), (5,), ""),
        gemm(35, 33, 70, "b", (33,), transB=1, alpha=0.5, beta=2.0),
        gemm(35, 40, 70, "", (35, 1), transA=1, transB=1),
        gemm(35, 40, 70, "a", None, transA=1),
    ]


def many_rows() -> list[Case]:
    """Rows for several threads, in one matrix and in several."""
    return [product((300, 40), (40, 33)), product((2, 150, 40), (2, 40, 70), "")]


def test_products() -> None:
    check([tiled(case, "float32-fast") for case in products()], target_of(AMX_EMULATED))


@pytest.mark.parametrize("precision", ["float32", "float32-fast"])
def test_rows_outside(precision: Precision, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_tiles, "_NEAR_SHARE", 0.0)
    check([tiled(case, precision) for case in many_rows()], target_of(AMX_EMULATED))


def narrow_products() -> list[Case]:
    """Of bfloat16: rows read where they lie (whole tiles of k, a last block that overlaps), and packed ones."""
    cases = [
        narrow_product((40, 64), (64, 50)),
        narrow_product((2, 33, 96), (96, 40)),
        narrow_product((3, 35, 32), (3, 32, 33), ""),
        narrow_product((64, 1024), (1024, 32)),
        narrow_product((31, 64), (64, 40)),
        narrow_product((40, 70), (70, 50), stored="bfloat16"),
        narrow_product((40, 64), (64, 40), "a"),
        narrow_product((40, 70), (50, 70), "", transB=1),
        narrow_product((70, 40), (70, 50), transA=1),
    ]
    return [replace(case, template="matmul_tiles") for case in cases]


def test_products_of_bfloat16() -> None:
    check(narrow_products(), target_of(AMX_EMULATED))


def test_results_of_bfloat16() -> None:
    """Without Casts around it, as in models that are bfloat16 throughout: each sum is rounded once."""
    rng = np.random.default_rng(0)
    cases = []
    for m, k, n in ((40, 64, 50), (33, 70, 40)):
        arrays = {
            "a": rng.normal(size=(m, k)).astype(ml_dtypes.bfloat16),
            "b": rng.normal(size=(k, n)).astype(ml_dtypes.bfloat16),
        }
        exact = arrays["a"].astype(np.float64) @ arrays["b"].astype(np.float64)
        types = {name: TensorType(array.shape, "bfloat16") for name, array in arrays.items()}
        types |= dict.fromkeys(("m", "y"), TensorType(exact.shape, "bfloat16"))
        ops = (Op("MatMul", ("a", "b"), ("m",), {}, 13), Op("Relu", ("m",), ("y",), {}, 14))
        for some, expected in ((ops[:1], exact), (ops, np.maximum(exact, 0))):
            group = Group(some, ("a", "b"), some[-1].outputs, types, frozenset("b"))
            cases.append(Case(group, arrays, [expected], 2.0**-8, 1e-4, template="matmul_tiles"))
    check(cases, target_of(AMX_EMULATED))


def test_large_matrices_are_walked_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_tiles, "_NEAR_SHARE", 0.0)
    check(narrow_products()[:3], target_of(AMX_EMULATED))


def test_threads_do_not_change_the_result() -> None:
    one, two, three = (tiled(case) for case in [product((300, 200), (200, 170))] * 3)
    for case, threads in ((one, 1), (two, 2), (three, 5)):
        check([case], target_of(AMX_EMULATED, threads))
    np.testing.assert_array_equal(one.got[0], two.got[0])
    np.testing.assert_array_equal(one.got[0], three.got[0])


@pytest.mark.parametrize("near_share", NEAR_SHARES)
def test_blocks_in_a_pipeline_have_the_bits_of_blocks_one_by_one(near_share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several rows after each step, and one after several steps; threads with several blocks, one and none; either loop order,
    tomorrow the other one, and then none."""
    monkeypatch.setattr(matmul_tiles, "_NEAR_SHARE", near_share)
    wide = [narrow_product((40, 2100), (2100, 70)), narrow_product((70, 1120), (1120, 40)), narrow_product((100, 416), (416, 70))]
    wide = [replace(case, template="matmul_tiles") for case in wide]
    some = [*products()[::4], *many_rows()]
    cases = [*(tiled(case, "float32-fast") for case in some), *narrow_products()[::2], *wide]
    cases = dealt(cases, [case.label for case in cases], near_share, (*NEAR_SHARES, None))
    results = []
    for least, threads in ((10**6, 1), (0, 1), (0, 5)):
        monkeypatch.setattr(amx_blocks, "LEAST_STEPS", least)
        check(now := [replace(case, got=[]) for case in cases], target_of(AMX_EMULATED, threads))
        results.append([case.got[0] for case in now])
    for other in results[1:]:
        for case, one, two in zip(cases, results[0], other, strict=True):
            np.testing.assert_array_equal(one, two, case.label)


def test_what_is_packed_at_compile_time_and_in_the_kernel_is_the_same() -> None:
    a, b = (hard_numbers((40, 70)), hard_numbers((70, 40)).T.copy().reshape(70, 40))
    cases = [operands(a, b, constants) for constants in ("", "a", "b")]
    run(cases, target_of(AMX_EMULATED))
    for case in cases[1:]:
        np.testing.assert_array_equal(case.got[0], cases[0].got[0])


def plain(case: Case) -> Case:
    """The case, with a weight that is split in the kernel."""
    return replace(case, group=replace(case.group, configuration={"weights": "plain"}), got=[])


@pytest.mark.parametrize("threads", THREADS)
def test_plain_weights_give_the_bits_of_tiles(threads: int) -> None:
    """Whole and ragged edges, fewer panels than threads, transposed weights, epilogues; and they take their own bytes.

    Each on one number of threads a day, on the next one tomorrow.
    """
    some = [
        product((40, 70), (70, 50)),
        product((64, 96), (96, 64)),
        product((1, 5), (5, 1)),
        product((17, 31), (31, 15)),
        product((130, 33), (33, 200)),
        gemm(35, 33, 70, "b", (33,), transB=1, alpha=0.5, beta=2.0),
        operands(hard_numbers((40, 70)), hard_numbers((70, 40))),
    ]
    every_case = [tiled(case) for case in some[:-1]] + [some[-1]]
    cases = dealt(every_case, [case.label for case in every_case], threads, THREADS)
    others = [plain(case) for case in cases]
    target = target_of(AMX_EMULATED, threads)
    run([*cases, *others], target)
    for case, other in zip(cases, others, strict=True):
        np.testing.assert_array_equal(case.got[0], other.got[0], case.label)
    for other in others:
        if all(np.isfinite(array).all() for array in other.arrays.values()):  # of hard numbers, the bits alone
            other.check()
        kernel = build_kernel(other.group, target)
        assert isinstance(kernel, BuiltKernel)
        assert not kernel.ignored
        assert sum(operand.pack is not None for operand in kernel.operands) == 0


def test_weights_stay_tiles_where_that_costs_no_bytes_or_rows_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two terms are as many bytes; bfloat16 is one; activations have no choice; A beyond L2 would be read for each panel."""
    fast = tiled(product((40, 70), (70, 50)), "float32-fast")
    some = [fast, narrow_product((40, 64), (64, 50)), tiled(product((40, 70), (70, 50), ""))]
    kernels = [build_kernel(plain(case).group, target_of(AMX_EMULATED)) for case in some]
    monkeypatch.setattr(matmul_tiles, "_NEAR_SHARE", 0.0)
    kernels.append(build_kernel(plain(tiled(product((40, 70), (70, 50)))).group, target_of(AMX_EMULATED)))
    for kernel in kernels:
        assert isinstance(kernel, BuiltKernel)
        assert kernel.ignored == ("weights=plain ignored: there is no such choice here",)


def operands(a: np.ndarray, b: np.ndarray, constants: str = "b", precision: Precision = "float32") -> Case:
    """The product of given matrices alone, to be computed on tiles; what is expected is not looked at."""
    case = product(a.shape, b.shape, constants, followers=False)
    return replace(tiled(case, precision), arrays={"a": a, "b": b})


# Terms ----------------------------------------------------------------------------------------------------------------


def hard_numbers(shape: tuple[int, ...]) -> np.ndarray:
    """Numbers of every size, among them those next to the largest, subnormal ones, zeros, infinities and NaN."""
    bits = rng.integers(0, 2**32, shape, np.uint32)
    array = bits.view(np.float32).copy()
    special = np.array(
        [0x7F7FFFFF, 0xFF7F8000, 0x7F7F7FFF, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF, 1, 0x80000000, 0], np.uint32
    )
    array.reshape(-1)[: special.size] = special.view(np.float32)
    return array


def test_three_terms_are_the_number_and_two_are_near() -> None:
    x = hard_numbers((100_000,))
    is_finite = np.isfinite(x)
    terms = split_array(x, 3).view(ml_dtypes.bfloat16).astype(np.float64)
    assert np.isfinite(terms[:, is_finite]).all()
    large = is_finite & (np.abs(x) >= LOST_TERM)
    np.testing.assert_array_equal(terms.sum(0)[large], x[large].astype(np.float64))
    two = split_array(x, 2).view(ml_dtypes.bfloat16).astype(np.float64).sum(0)[large]
    ordinary = np.abs(x[large]) < 3e38  # the first term of larger ones is cut off
    assert (np.abs(two - x[large]) <= np.where(ordinary, 2.0**-17, 2.0**-16) * np.abs(x[large])).all()


def test_only_the_first_term_is_not_finite() -> None:
    x = np.array([np.inf, -np.inf, np.nan, np.uint32(0x7F800001).view(np.float32)], np.float32)
    terms = split_array(x, 3).view(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(terms[0], x)
    assert not terms[1:].any()


def test_products_of_terms_share_one_with_their_neighbours() -> None:
    for terms, order in PRODUCTS.items():
        assert len(set(order)) == len(order) == terms * (terms + 1) // 2
        assert all(i + j < terms for i, j in order)
        loads = [1 + sum(one[side] != other[side] for one, other in pairwise(order)) for side in range(2)]
        assert tile_costs._TERM_PRODUCTS[terms] == (len(order), *loads)
    assert set(PRODUCTS) == set(tile_costs._TERM_PRODUCTS)


@pytest.mark.parametrize("scale", [1.0, 2.0**90, 2.0**-60])
@pytest.mark.parametrize("is_positive", [False, True])
def test_errors_of_long_sums(scale: float, is_positive: bool) -> None:
    """Three terms are no worse than float32 itself, two within 1e-5 of the sizes that are added up."""
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((32, 1000), (1000, 64)))
    if is_positive:
        a, b = np.abs(a), np.abs(b)
    a, b = a * np.float32(scale), b / np.float32(scale)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    sizes = np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64))
    exactly, fast = operands(a, b), operands(a, b, precision="float32-fast")
    run([exactly, fast], target_of(AMX_EMULATED))
    one_by_one = np.zeros_like(exact, np.float32)
    for k in range(1000):
        one_by_one += a[:, k, None] * b[k]
    own = np.abs(one_by_one - exact).max()
    assert np.abs(exactly.got[0] - exact).max() <= own
    assert (np.abs(fast.got[0] - exact) <= 1e-5 * sizes).all()
    assert np.sqrt(np.square(fast.got[0] - exact).mean() / np.square(exact).mean()) <= 1e-5


@pytest.mark.parametrize("precision", ["float32", "float32-fast"])
def test_infinities_nan_and_overflow_are_those_of_float32(precision: Precision) -> None:
    """Their terms alone would give NaN: infinity times the zero that is the second term of 1."""
    a, b = (rng.integers(1, 5, shape).astype(np.float32) for shape in ((70, 40), (40, 50)))
    a[3, 5], a[4, 6], a[5, 0] = np.inf, -np.inf, np.nan
    a[40], b[0, :7] = 0.0, -1.0
    a[40, 0], a[41, 1], a[69, 39] = np.float32(3.4e38), np.float32(3.4e38), np.inf
    b[0, 45], b[1, 44], b[1, 3], b[2, 0] = 1.0, 1.0, np.inf, np.float32(-3.39e38)
    case, bare = operands(a, b, precision=precision), operands(a, b, "", precision)
    run([case, bare], target_of(AMX_EMULATED))
    with np.errstate(all="ignore"):
        expected = np.zeros((70, 50), np.float32)
        for k in range(40):
            expected = (a[:, k, None].astype(np.float64) * b[k] + expected).astype(np.float32)
    assert 0 < np.isnan(expected).sum() < np.isinf(expected).sum()
    with np.errstate(all="ignore"):
        sizes = np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64))  # what large terms that cancel leave has their error
    is_finite = np.isfinite(expected)
    for got in (case.got[0], bare.got[0]):
        np.testing.assert_array_equal(got[~is_finite], expected[~is_finite])
        assert (np.abs(got[is_finite].astype(np.float64) - expected[is_finite]) <= 2e-5 * sizes[is_finite]).all()


# The instructions -----------------------------------------------------------------------------------------------------


def assembly(case: Case) -> list[str]:
    kernel = build_kernel(case.group, AMX)
    assert isinstance(kernel, BuiltKernel)
    assert kernel.template == "matmul_tiles"
    module = tvm.IRModule({GlobalVar("kernel"): kernel.function.with_attr("global_symbol", "kernel")})
    return str(compile_module(module, AMX).inspect_source("asm")).splitlines()


@pytest.mark.parametrize(("precision", "products", "loads"), [("float32-fast", 12, 8), ("float32", 24, 14)])
def test_the_inner_loop_is_tile_instructions_alone(precision: Precision, products: int, loads: int) -> None:
    """A step of 32 k of a block: its loads and products, nothing that moves tiles to memory and back."""
    text = assembly(tiled(product((64, 32 * 7), (32 * 7, 64)), precision))
    operations = [line.split()[0] for line in text if re.match(r"\s+(tile|tdp|ldtile)", line)]
    counts = {name: operations.count(name) for name in set(operations)}
    steps = counts["tdpbf16ps"] // products  # LLVM may unroll
    expected = {"ldtilecfg": 1, "tilezero": 4, "tilestored": 4, "tilerelease": 1}
    assert counts == expected | {"tileloadd": loads * steps, "tdpbf16ps": products * steps}
    first = next(i for i, line in enumerate(text) if "tileloadd" in line)
    last = max(i for i, line in enumerate(text) if "tdpbf16ps" in line)
    assert not [line for line in text[first:last] if re.search(r"\bv|call|tilestored", line)], "something between the products"


def test_a_kernel_says_how_many_products_of_tiles_make_one() -> None:
    kernels = [
        build_kernel(tiled(product((64, 64), (64, 64)), precision).group, AMX) for precision in ("float32", "float32-fast")
    ]
    kernels.append(build_kernel(narrow_product((40, 64), (64, 50)).group, AMX))
    assert [kernel.multiplies for kernel in kernels if isinstance(kernel, BuiltKernel)] == ["tiles6", "tiles3", "tiles1"]


def test_few_lines_take_half_a_block() -> None:
    text = "\n".join(assembly(tiled(product((16, 32), (32, 16)))))
    assert [text.count(name) for name in ("tilezero", "tdpbf16ps", "tilestored")] == [1, 6, 1]


@pytest.mark.parametrize("precision", ["float32", "float32-fast"])
def test_the_instructions_give_the_bits_of_the_loops(emulator: ctypes.CDLL | None, precision: Precision) -> None:
    """The machine code for AMX with nothing of ours in what computes the tiles: addresses, shapes and configuration included."""
    cases = [*(tiled(case, precision) for case in [*products()[::3], *many_rows()]), *narrow_products()[::2]]
    cases.append(operands(hard_numbers((40, 70)), hard_numbers((70, 40)), precision=precision))
    run(cases, target_of(AMX_EMULATED))
    loops = [case.got[0] for case in cases]
    with running_amx(emulator) as counts:
        check(cases[:-1], AMX)
        run(cases[-1:], AMX)
    assert counts is None or counts["tdpbf16ps"] > counts["tileloadd"] > counts["tilezero"] == counts["tilestored"] > 0
    assert counts is None or 0 < counts["tilerelease"] <= counts["ldtilecfg"]
    for case, expected in zip(cases, loops, strict=True):
        np.testing.assert_array_equal(case.got[0], expected, case.label)


# Choice ---------------------------------------------------------------------------------------------------------------


def test_small_products_are_left_to_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_tiles, "tile_product_cycles", tile_costs.tile_product_cycles)

    def template(case: Case, precision: Precision = "float32", target: Target = AMX) -> str:
        built = build_kernel(replace(case.group, precision=precision), target)
        assert isinstance(built, BuiltKernel)
        return built.template

    large, one_row = product((128, 768), (768, 768)), product((1, 768), (768, 768))
    assert template(large) == template(large, "float32-fast") == "matmul_tiles"
    assert template(one_row) == template(one_row, "float32-fast") == "matmul"
    assert template(large, target=Target("cpu", "avx512", 2)) == "matmul"
    assert template(narrow_product((128, 768), (768, 768)), "bfloat16") == "matmul_tiles"
    assert template(narrow_product((1, 768), (768, 768)), "bfloat16") == "matmul"


def test_refusals() -> None:
    for case, reason in (
        (product((40, 40), (40, 40), dtype="float64"), "no product of float64"),
        (product((40, 0), (0, 40)), "nothing to multiply"),
    ):
        refusal = matmul_tiles.plan(case.group, AMX)
        assert isinstance(refusal, Refusal)
        assert reason in refusal.reason


def test_the_split_in_a_kernel_is_that_of_the_constants() -> None:
    """A row of A times the unit matrix gives back the sum of its terms."""
    a = hard_numbers((64, 64))
    a = np.where(np.isfinite(a) & (np.abs(a) > LOST_TERM), a, np.float32(1))
    case = operands(a, np.eye(64, dtype=np.float32))
    run([case], target_of(AMX_EMULATED))
    np.testing.assert_array_equal(case.got[0], a)


def test_a_constant_that_the_epilogue_reads_too() -> None:
    cases = [read_twice("Gemm"), read_twice(operands="wx"), replace(read_twice(dtype="bfloat16"), template="matmul_tiles")]
    check([*map(tiled, cases[:2]), cases[2]], target_of(AMX_EMULATED))
