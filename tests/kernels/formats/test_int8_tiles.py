"""Products of bytes on the tile unit: exactly, with tiles in loops, with the instructions in software, and on AMX itself."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
import tvm
from prefuse.compiler.lowering.native import compile_module
from prefuse.kernels.convolution import convolution_tiles, implicit_gemm_amx
from prefuse.kernels.cost import amx as tile_costs
from prefuse.kernels.cost.amx import BlockWalk
from prefuse.kernels.groups.group import Group, Op
from prefuse.kernels.linalg import matmul_tiles
from prefuse.kernels.registry import build_kernel
from prefuse.kernels.template.contract import BuiltKernel, Refusal
from prefuse.kernels.template.values import read_narrow
from prefuse.runtime.plan import TensorType
from prefuse.runtime.target import AMX_EMULATED
from tvm.ir import GlobalVar

from ..convolution.channels_last_cases import channels_last
from ..harness import Case, check, check_in_turn, run, target_of, type_of
from ..microkernels.amx_emulator import AMX, emulator, running_amx
from .test_int8 import SHAPES, case_of, convolution_case, extremes, transposed_case

__all__ = ["emulator"]
TILES = (AMX_EMULATED, "amx")
ZEROS = (("uint8", None), ("uint8", 0), ("uint8", 114), ("uint8", 255), ("int8", None), ("int8", -128), ("int8", 77))
INSTRUCTION = {"uint8": "tdpbusd", "int8": "tdpbssd"}
rng = np.random.default_rng(9)


@pytest.fixture(autouse=True)
def tiles_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products, too, for which vectors are faster."""
    monkeypatch.setattr(matmul_tiles, "tile_product_cycles", lambda *sizes, **how: -1e9)  # less than bytes take
    monkeypatch.setattr(implicit_gemm_amx, "tile_convolution_cycles", lambda *sizes, **how: -1e9)  # less than bytes take


def product(dtype: str, zero: int | None, a: tuple[int, ...], b: tuple[int, ...], *, is_constant: bool = True) -> Case:
    x, w = extremes(dtype, *a), extremes("int8", *b)
    case = case_of("MatMul", x, w, zero, (x.astype(np.int64) - (zero or 0)) @ w.astype(np.int64))
    if not is_constant:
        case = replace(case, group=replace(case.group, constants=case.group.constants - {"b"}))
    return replace(case, template="matmul_tiles")


def products(dtype: str, zero: int | None) -> list[Case]:
    """Ragged and whole edges, rows read where they lie and packed, several matrices, both loop orders."""
    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        ((5, 8), (8, 17)),
        ((33, 77), (77, 50)),
        ((1, 3), (3, 9)),
        ((3, 1), (1, 1)),
        ((7, 1030), (1030, 40)),
    ]
    shapes += [((40, 128), (128, 70)), ((300, 64), (64, 40)), ((65, 192), (192, 32)), ((64, 2048), (2048, 33))]
    shapes += [((2, 3, 6, 12), (2, 1, 12, 20)), ((2, 34, 64), (2, 64, 16))]
    cases = [product(dtype, zero, a, b) for a, b in shapes]
    if zero is None:  # else the sums of B would be needed
        cases += [product(dtype, zero, (40, 70), (70, 50), is_constant=False)]
        cases += [product(dtype, zero, (3, 33, 64), (3, 64, 40), is_constant=False)]
    return cases


def convolutions(dtype: str, zero: int | None) -> list[Case]:
    """Windows in place and copied, with strides in phases, groups, and channels side by side where they are few."""
    shapes = (*SHAPES, (64, 1, 0, 1, 1), (70, 3, 1, 1, 1), (128, 1, 0, 2, 1), (64, 3, 0, 1, 1), (3, 7, 3, 2, 1), (7, 4, 2, 3, 1))
    cases = [channels_last(convolution_case(dtype, zero, *shape), template="convolution_tiles") for shape in shapes]
    first = convolution_case(dtype, zero, 3, 7, 3, 2, 1)
    return [*cases, channels_last(first, template="convolution_tiles", keep_first=("a",))]


@pytest.mark.parametrize("level", TILES)
@pytest.mark.parametrize(("dtype", "zero"), ZEROS)
def test_products(dtype: str, zero: int | None, level: str) -> None:
    check_in_turn(products(dtype, zero), level, TILES)


@pytest.mark.parametrize("level", TILES)
def test_rows_outside(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of rows are packed where not all of A stays in the second cache."""
    monkeypatch.setattr(matmul_tiles, "_NEAR_SHARE", 0.0)
    shapes = (((300, 40), (40, 33)), ((2, 150, 40), (2, 40, 70)), ((300, 64), (64, 70)))
    check([product("uint8", 3, a, b) for a, b in shapes], target_of(level))


@pytest.mark.parametrize("level", TILES)
@pytest.mark.parametrize(("dtype", "zero"), ZEROS)
def test_convolutions(dtype: str, zero: int | None, level: str) -> None:
    check_in_turn(convolutions(dtype, zero), level, TILES)


@pytest.mark.parametrize("level", TILES)
@pytest.mark.parametrize(("dtype", "zero"), ZEROS)
def test_transposed_convolutions(dtype: str, zero: int | None, level: str) -> None:
    """Phases whose taps meet what lies around the image, groups, and channels that fill no tile."""
    shapes = (
        (16, 32, 2, 0, 2, 1, 1),
        (12, 18, 4, 1, 2, 1, 1),
        (8, 5, 3, 1, 2, 1, 1),
        (64, 70, 3, 0, 1, 2, 1),
        (24, 12, 2, 0, 2, 1, 2),
    )
    cases = [channels_last(transposed_case(dtype, zero, *shape), template="transposed_convolution_tiles") for shape in shapes]
    check_in_turn(cases, level, TILES)


@pytest.mark.parametrize("level", TILES)
def test_weights_outermost(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockWalk, "goes_by_panel", lambda *_: True)
    case = convolution_case("uint8", 9, 70, 3, 1, 1, 1, outputs=70)
    check([channels_last(case, template="convolution_tiles")], target_of(level))


def test_bands_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Around an image in bands lie zero points, too."""
    monkeypatch.setattr(implicit_gemm_amx, "band_rows", lambda *of: 2)
    shapes = ((70, 3, 1, 1, 1), (64, 3, 0, 1, 1), (3, 7, 3, 2, 1))
    cases = [channels_last(convolution_case("uint8", 9, *shape), template="convolution_tiles") for shape in shapes]
    check(cases, target_of(AMX_EMULATED))


def test_the_instructions_give_the_bits_of_the_loops(emulator: ctypes.CDLL | None) -> None:
    """The machine code for AMX with nothing of ours in what computes the tiles: addresses, shapes and configuration included."""
    for dtype, zero in (("uint8", 114), ("int8", None)):
        cases = [*products(dtype, zero)[::2], *convolutions(dtype, zero)[::3]]
        with running_amx(emulator) as counts:
            check(cases, AMX)
        assert counts is None or counts[INSTRUCTION[dtype]] > 0
        # Sums begin at zero, or as what the zero point takes away, which is loaded.
        assert counts is None or counts["tilezero"] == (counts["tilestored"] if zero is None else 0)
        assert counts is None or counts["tileloadd"] > counts["tilestored"] > 0


# Rounding to bytes ----------------------------------------------------------------------------------------------------


def requantized(case: Case, scales: np.ndarray, bias: np.ndarray, residual: np.ndarray) -> Case:
    """The product with what follows it in a quantized model: a scale for each column (and row), bias, residual, Relu, and
    rounding to bytes whose zero is 7."""
    group, exact = case.group, case.expected[0].astype(np.float64)
    arrays = dict(case.arrays) | {"s": scales, "c": bias, "r": residual}
    literals = {"zero": np.array(7, np.float32), "least": np.array(0, np.float32), "most": np.array(255, np.float32)}
    chain: tuple[tuple[str, ...], ...] = (
        ("Mul", "y", "s"),
        ("Add", "t0", "c"),
        ("Add", "t1", "r"),
        ("Relu", "t2"),
        ("Round", "t3"),
        ("Add", "t4", "zero"),
    )
    chain += (("Clip", "t5", "least", "most"), ("Cast", "t6"))
    ops = [Op(op, tuple(inputs), (f"t{i}",), {}, 23) for i, (op, *inputs) in enumerate(chain)]
    ops[-1] = replace(ops[-1], outputs=("q",), attributes={"to": 2})
    types = dict(group.types) | {f"t{i}": group.types["y"] for i in range(7)} | {"q": TensorType(exact.shape, "uint8")}
    types |= {name: type_of(array) for name, array in (arrays | literals).items()}
    made = np.maximum(exact * scales.astype(np.float64) + bias.astype(np.float64) + residual.astype(np.float64), 0.0)
    expected = np.clip(np.rint(made) + 7, 0, 255).astype(np.uint8)
    inputs = (*group.inputs, "s", "c", "r", *literals)
    constants, known = group.constants | {"c", *literals}, dict(group.literals) | literals
    whole = Group((*group.ops, *ops), inputs, ("q",), types, constants, known)
    return replace(case, group=whole, arrays=arrays | literals, expected=[expected], label=f"{case.label} requantized")


@pytest.mark.parametrize("level", TILES)
@pytest.mark.parametrize("by_row", [False, True])
def test_scales_bias_residual_and_rounding_in_the_store(by_row: bool, level: str) -> None:
    """Sums are exact and scales powers of two, so that the rounded bytes are, ties included."""
    cases = []
    for m, k, n in ((33, 77, 50), (64, 128, 64), (1, 5, 3), (17, 64, 31)):
        case = product("uint8", 128, (m, k), (k, n))
        scales = np.exp2(rng.integers(-14, -10, (m if by_row else 1, n))).astype(np.float32)
        bias, residual = (rng.integers(-64, 64, shape).astype(np.float32) / 8 for shape in ((n,), (m, n)))
        cases.append(requantized(case, scales, bias, residual))
    check(cases, target_of(level))
    assert len(np.unique(cases[0].got[0])) > 20  # neither all clipped nor all zero


# What is written, and when --------------------------------------------------------------------------------------------


def assembly(case: Case) -> str:
    """Of the case's kernel for AMX."""
    kernel = build_kernel(case.group, AMX)
    assert isinstance(kernel, BuiltKernel)
    module = tvm.IRModule({GlobalVar("kernel"): kernel.function.with_attr("global_symbol", "kernel")})
    return str(compile_module(module, AMX).inspect_source("asm"))


@pytest.mark.parametrize("dtype", INSTRUCTION)
def test_the_inner_loops_are_tile_instructions(dtype: str) -> None:
    window = convolution_case(dtype, 3, 64, 3, 1, 1, 1)
    for case in (product(dtype, 3, (64, 256), (256, 64)), channels_last(window, template="convolution_tiles")):
        kernel = build_kernel(case.group, AMX)
        assert isinstance(kernel, BuiltKernel)
        assert kernel.template == case.template
        text = assembly(case)
        dots, loads = text.count(INSTRUCTION[dtype]), text.count("tileloadd")
        assert dots > 0
        assert "vpdpbusd" not in text
        assert "tdpbf16ps" not in text
        if case.template == "matmul_tiles":
            assert loads == dots + 4  # blocks of 2x2 tiles, whose sums begin with what the zero point takes away


@pytest.mark.parametrize(("rows", "is_streamed"), [(32, False), (128, True)])
def test_what_l1_cannot_keep_is_streamed_past_it(rows: int, is_streamed: bool) -> None:
    """Of 128 rows of 768 bytes none are in L1 when the next panel of weights is multiplied; the panel shall stay."""
    text = assembly(product("uint8", 3, (rows, 768), (768, 256)))
    assert text.count("tileloaddt1") == (2 if is_streamed else 0)
    assert text.count("tdpbusd") == 4


@pytest.mark.parametrize(("columns", "is_prefetched"), [(64, False), (768, True)])
def test_weights_that_l2_would_hold_are_prefetched_too(columns: int, is_prefetched: bool) -> None:
    """In a model they come from memory (measured: 768 x 768 bytes 92 us without, 61 with)."""
    text = assembly(product("uint8", 3, (128, 768), (768, columns)))
    assert ("prefetcht" in text) == is_prefetched


def test_an_image_is_streamed_where_each_position_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockWalk, "goes_by_panel", lambda *_: True)
    sizes = {1: (1024, 160), 3: (128, 128)}  # channels and outputs
    cases = [convolution_case("uint8", 3, a, k, k // 2, 1, 1, outputs=b, plane=(14, 14)) for k, (a, b) in sizes.items()]
    counts = [assembly(channels_last(case, template="convolution_tiles")).count("tileloaddt1") for case in cases]
    assert counts[0] > 0
    assert counts[1] == 0


def test_choice_and_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_tiles, "tile_product_cycles", tile_costs.tile_product_cycles)
    monkeypatch.setattr(implicit_gemm_amx, "tile_convolution_cycles", tile_costs.tile_convolution_cycles)

    def template(case: Case) -> str:
        built = build_kernel(case.group, AMX)
        assert isinstance(built, BuiltKernel)
        return built.template

    assert template(product("uint8", 3, (128, 768), (768, 768))) == "matmul_tiles"
    assert template(product("uint8", 3, (1, 768), (768, 768))) == "matmul"
    unknown = read_narrow(product("uint8", 3, (40, 64), (64, 40), is_constant=False).group)
    refusal = matmul_tiles.plan(unknown, AMX)
    assert isinstance(refusal, Refusal)
    assert "zero point" in refusal.reason
    loose = channels_last(convolution_case("int8", None, 64, 3, 1, 1, 1), template="convolution_tiles").group
    refusal = convolution_tiles.plan(read_narrow(replace(loose, constants=frozenset())), AMX)
    assert isinstance(refusal, Refusal)
    assert "weights that change" in refusal.reason


def test_the_longest_sums_at_their_extremes() -> None:
    """65,000 products of -255 * 128 fit 32 bits; nothing saturates on the way."""
    a, b = np.full((16, 65_000), 255, np.uint8), np.full((65_000, 16), -128, np.int8)
    case = case_of("MatMul", a, b, None, np.full((16, 16), -65_000 * 255 * 128, np.int64))
    run([one := replace(case, template="matmul_tiles")], target_of(AMX_EMULATED))
    one.check()
