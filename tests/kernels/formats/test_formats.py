"""Numbers of less than a byte, 8-bit floats and powers of two, against ml_dtypes; shifts and remainders at their edges."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import tvm
from prefuse.compiler.lowering.native import compile_module, link_library
from prefuse.kernels.groups.group import Group, Op
from prefuse.kernels.registry import build_kernel
from prefuse.kernels.template.contract import BuiltKernel
from prefuse.runtime.plan import TensorType
from prefuse.runtime.target import Target

from ..harness import LEVELS, OPSET, check, check_in_turn, operator, run, target_of

FLOATS = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")


@pytest.mark.parametrize("level", LEVELS)
def test_every_code_of_a_float_reads_as_its_number(level: str) -> None:
    cases = []
    for name in FLOATS:
        codes = np.arange(256, dtype=np.uint8).view(name)
        cases.append(operator("Cast", codes, to=1, expected=[codes.astype(np.float32)]))
    check_in_turn(cases, level)


@pytest.mark.parametrize("level", LEVELS)
def test_rounding_to_a_narrow_float_and_back(level: str) -> None:
    """Ties, subnormals, overflow, infinities and NaN, without saturation, as ml_dtypes rounds."""
    generator = np.random.default_rng(0)
    x = np.concatenate(
        [generator.standard_normal(500) * 10.0 ** generator.integers(-9, 7, 500), [0.0, -0.0, np.inf, -np.inf, np.nan]]
    )
    x = x.astype(np.float32)
    codes = {"float8_e4m3fn": 17, "float8_e4m3fnuz": 18, "float8_e5m2": 19, "float8_e5m2fnuz": 20}
    cases = []
    for name, code in codes.items():
        with np.errstate(all="ignore"):
            expected = x.astype(name)
        cases.append(operator("Cast", x, to=code, saturate=0, expected=[expected]))
    check_in_turn(cases, level)


def test_what_codes_are_no_numbers() -> None:
    cases = []
    for name in FLOATS:
        codes = np.arange(256, dtype=np.uint8).view(name)
        numbers = codes.astype(np.float32)
        cases.append(operator("IsNaN", codes, expected=[np.isnan(numbers)]))
        cases.append(operator("IsInf", codes, expected=[np.isinf(numbers)]))
    check(cases, target_of("avx2"))


def test_integers_of_four_and_two_bits() -> None:
    cases = []
    for name in ("int4", "uint4", "int2", "uint2"):
        info = ml_dtypes.iinfo(name)
        numbers = np.arange(info.min, info.max + 1, dtype=np.int32)
        cases.append(operator("Cast", numbers.astype(name), to=6, expected=[numbers]))
    check(cases, target_of("avx2"))


def test_shifts_beyond_the_width_and_below_zero() -> None:
    x, y = np.array([-8, -8, 8, 8, -1], np.int32), np.array([32, -1, 40, 2, 31], np.int32)
    right = operator("BitShift", x, y, direction="RIGHT", variables=[1], expected=[np.array([-1, -1, 0, 2, -1], np.int32)])
    left = operator("BitShift", x, y, direction="LEFT", variables=[1], expected=[np.array([0, 0, 0, 32, -(2**31)], np.int32)])
    check([right, left], target_of("avx2"))


def test_float_remainder_has_the_sign_of_the_divisor() -> None:
    x, y = np.array([5.5, -5.5, 5.5, -5.5, 6.0], np.float32), np.array([2, 2, -2, -2, -3], np.float32)
    check([operator("Mod", x, y, variables=[1], expected=[np.mod(x, y)])], target_of("avx2"))


def test_space_to_depth_with_columns_first() -> None:
    x = np.arange(2 * 3 * 4 * 6, dtype=np.float32).reshape(2, 3, 4, 6)
    expected = x.reshape(2, 3, 2, 2, 3, 2).transpose(0, 1, 3, 5, 2, 4).reshape(2, 12, 2, 3)
    check([operator("SpaceToDepth", x, blocksize=2, mode="CRD", opset=28, expected=[expected])], target_of("avx2"))


def test_bits_seen_as_another_type() -> None:
    x = np.array([1.0, -0.0, np.nan], np.float32)
    check([operator("BitCast", x, to=6, opset=26, expected=[x.view(np.int32)])], target_of("avx2"))


@pytest.mark.parametrize("level", LEVELS)
def test_six_bit_floats(level: str) -> None:
    """Every code as its number; ties, subnormals and what is too large, rounded as ml_dtypes does, which has no NaN either."""
    numbers = np.array([*np.linspace(-9, 9, 1001), *np.linspace(-40, 40, 501), 0.0, -0.0, np.inf, -np.inf, np.nan], np.float32)
    cases = []
    for name, code in (("float6_e2m3fn", 27), ("float6_e3m2fn", 28)):
        codes = np.arange(64, dtype=np.uint8).view(name)
        cases.append(operator("Cast", codes, to=1, opset=28, expected=[codes.astype(np.float32)]))
        cases.append(operator("Cast", numbers, to=code, opset=28, expected=[numbers.astype(name)]))
    check_in_turn(cases, level)


@pytest.mark.parametrize("level", LEVELS)
def test_powers_of_two_read_as_their_numbers(level: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = np.array([*np.ldexp(1.0, np.arange(255) - 127), np.nan], np.float32)
    check([operator("Cast", codes.view("float8_e8m0fnu"), to=1, opset=24, expected=[expected])], target_of(level))


@pytest.mark.parametrize("saturate", [0, 1])
@pytest.mark.parametrize("rounding", ["up", "down", "nearest"])
def test_rounding_to_powers_of_two(rounding: str, saturate: int) -> None:
    """Against float64, from the least power to beyond the greatest; the table of ONNX's Cast for what is no number between."""
    least, most = 2.0**-127, 2.0**127
    exact = np.ldexp(1.0, np.arange(-127, 128, 5))
    x = np.concatenate([exact, exact * 1.5, exact * 1.49, exact * 1.75, exact[:-1] * 1.01, [least * 1.25, 1.9 * most]])
    x = np.concatenate([x, [0.0, least / 2, 2.0**-149, np.inf, np.nan]]).astype(np.float32)
    numbers = x.astype(np.float64)
    with np.errstate(all="ignore"):
        below = np.floor(np.log2(numbers))
        below = np.where(numbers >= np.ldexp(1.0, (below + 1).clip(-200, 200).astype(int)), below + 1, below)
        part = numbers / np.exp2(below)
    up = {"up": part > 1, "down": part < 0, "nearest": part >= 1.5}[rounding]
    code = below + up + 127
    code[numbers < least] = 0 if saturate else 255
    code[~np.isnan(numbers) & ((numbers == np.inf) | (code > 254))] = 254 if saturate else 255
    code[np.isnan(numbers)] = 255
    expected = code.astype(np.uint8).view("float8_e8m0fnu")
    case = operator("Cast", x, to=24, saturate=saturate, round_mode=rounding, opset=24, expected=[expected])
    check([case], target_of("avx2"))
    np.testing.assert_array_equal(case.got[0].view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("level", [*LEVELS, "avx512bf16"])
@pytest.mark.parametrize("count", [3, 7])
def test_bfloat16_rounds_to_even_and_keeps_nan(level: str, count: int) -> None:
    """NaNs of every payload at its ends, ties, the greatest number, zeros, denormal numbers and infinities, in vectors and alone.

    The instruction of AVX512_BF16 makes zeros of denormal numbers, of their sign.
    """
    bits = [
        0x7FFFFFFF,
        0xFFFFFFFF,
        0x7F800001,
        0x7FC00000,
        0xFFC12345,
        0x7F7FFFFF,
        0x3F808000,
        0x3F818000,
        0x3F808001,
        0xBF818000,
    ]
    bits += [0x00000000, 0x80000000, 0x00000001, 0x7F800000, 0xFF800000, 0x00018000]
    bits += [0x007FFFFF, 0x807F0000, 0x00800000]
    x = np.tile(np.array(bits, np.uint32).view(np.float32), count)
    is_flushed = (np.abs(x) < np.finfo(np.float32).tiny) & (level == "avx512bf16")
    with np.errstate(invalid="ignore"):
        expected = np.where(is_flushed, np.copysign(np.float32(0), x), x).astype(ml_dtypes.bfloat16)
    case = operator("Cast", x, expected=[expected], to=16)
    run([case], target_of(level))
    found, is_nan = case.got[0], np.isnan(x)
    np.testing.assert_array_equal(np.isnan(found.astype(np.float32)), is_nan)
    np.testing.assert_array_equal(found[~is_nan].view(np.uint16), expected[~is_nan].view(np.uint16))


@pytest.mark.parametrize("level", ["avx2", "avx512bf16"])
def test_a_literal_rounded_in_vectors_compiles(level: str) -> None:
    """What fills a Pad is one number for all lanes. Compiled only: few machines have AVX512_BF16."""
    types = {"x": TensorType((4, 37), "float32"), "pads": TensorType((4,), "int64")}
    types |= {"t": TensorType((4, 80), "float32"), "y": TensorType((4, 80), "bfloat16")}
    ops = (Op("Pad", ("x", "pads"), ("t",), {}, OPSET), Op("Cast", ("t",), ("y",), {"to": 16}, OPSET))
    group = Group(ops, ("x", "pads"), ("y",), types, frozenset(["pads"]), {"pads": np.array([0, 0, 0, 43])})
    target = Target("cpu", level, 1)
    built = build_kernel(group, target)
    assert isinstance(built, BuiltKernel)
    assert link_library(compile_module(tvm.IRModule({"k": built.function.with_attr("global_symbol", "k")}), target), target)
