"""Which format the operands of a product go by, and what groups tell of how their operands are stored."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from prefuse.kernels.formats.format import (
    BF16_DOT,
    BF16_PAIRS,
    BF16X1,
    BF16X2,
    BF16X3,
    F32,
    F32_BF16_PAIRS,
    FORMATS,
    U8_DOT,
    U8_MADD,
    Format,
    Storage,
    format_for,
    formats_for,
    is_plain,
    plain,
)
from prefuse.kernels.groups.group import Group
from prefuse.kernels.problem import problem_of
from prefuse.kernels.registry import build_kernel
from prefuse.runtime.plan import TensorType
from prefuse.runtime.target import Target

from ..harness import operator

AVX2, AVX512BF16, AMX = (Target("cpu", level) for level in ("avx2", "avx512bf16", "amx"))
GPU = Target("cuda", "sm_90")
CONVERTED = plain("bfloat16", "bfloat16", "float32")


@pytest.mark.parametrize(
    ("a", "b", "target", "expected"),
    [
        ("float32", "float32", AVX2, (F32,)),
        ("bfloat16", "bfloat16", AVX2, (BF16_PAIRS, CONVERTED)),
        ("bfloat16", "bfloat16", AVX512BF16, (BF16_DOT, BF16_PAIRS, CONVERTED)),
        ("bfloat16", "bfloat16", GPU, (CONVERTED,)),
        ("float32", "bfloat16", AVX512BF16, (F32_BF16_PAIRS, plain("float32", "bfloat16", "float32"))),
        ("bfloat16", "float32", AVX512BF16, (plain("bfloat16", "float32", "float32"),)),
        ("int32", "int32", AVX2, (plain("int32"),)),
        ("uint8", "int8", AVX2, (U8_MADD, plain("uint8", "int8", "int32"))),
        ("uint8", "int8", AVX512BF16, (U8_DOT, U8_MADD, plain("uint8", "int8", "int32"))),
        ("int8", "int8", GPU, (plain("int8", "int8", "int32"),)),
        ("int8", "uint8", AVX2, (plain("int8", "uint8", "int32"),)),
        ("int16", "int8", AVX2, ()),
        ("float64", "float32", AVX2, ()),
    ],
)
def test_formats_for_operands(a: str, b: str, target: Target, expected: tuple[Format, ...]) -> None:
    assert formats_for(Storage(a), Storage(b), target) == expected
    assert format_for(Storage(a), Storage(b), target, is_plain) == next((one for one in expected if one.k_pack == 1), None)


def test_tiles_are_for_those_who_ask() -> None:
    narrow, wide = Storage("bfloat16"), Storage("float32")
    assert formats_for(narrow, narrow, AMX, unit="tile") == (BF16X1,)
    assert formats_for(wide, wide, AMX, unit="tile") == (BF16X2, BF16X3)
    assert formats_for(wide, wide, AVX512BF16, unit="tile") == ()


def test_rows_of_the_table() -> None:
    """Each has a name of its own, by which its multiply-add is found; sums of integers alone may have any length."""
    assert len({one.name for one in FORMATS}) == len(FORMATS)
    for one in FORMATS:
        assert (one.longest_chain is None) == ("int" in one.sums)
        assert one.packs_a == (one.k_pack > 1 and one.a.dtype in ("bfloat16", "uint8", "int8"))
    with pytest.raises(AssertionError, match="fills no words"):
        replace(BF16_DOT, k_pack=4)
    assert Format("s4", Storage("int4", is_packed=True), Storage("int4", is_packed=True), "int32", "dot", 8).packs_a


def group_of_product() -> Group:
    return operator("MatMul", np.zeros((3, 4), np.float32), np.zeros((4, 5), np.float32)).group


def test_scales_make_another_kernel() -> None:
    """Groups of equal types whose operands are stored otherwise have another key, another problem, and no format yet."""
    bare = group_of_product()
    scaled = replace(bare, formats={"x1": Storage("float32", "channel")})
    assert bare.storage("x1") == Storage("float32")
    assert scaled.storage("x1").scales == "channel"
    assert bare.key() != scaled.key()
    assert problem_of(bare) != problem_of(scaled)
    assert "float32[4,5] by channel" in problem_of(scaled)
    for target, template, reason in (
        (AVX2, "matmul", "no product of float32"),
        (AMX, "matmul_tiles", "no product of float32 as float32 on the tile unit"),
        (AVX2, "strassen_matmul", "reads operands without scales"),
    ):
        built = build_kernel(scaled, target)
        assert isinstance(built, tuple)
        assert (template, reason) in built


def test_zero_points_make_another_kernel() -> None:
    """Which operand has one counts, not what it is called."""
    operands, result = (np.zeros((3, 4), np.uint8), np.zeros((4, 5), np.int8)), np.zeros((3, 5), np.int32)
    bytes_alone = operator("MatMul", *operands, expected=[result], variables=[1]).group
    types = {**bytes_alone.types, "z": TensorType((), "uint8"), "zero": TensorType((), "uint8")}
    one, same, other = (
        replace(bytes_alone, types=types, zero_points=zeros) for zeros in ({"x0": "z"}, {"x0": "zero"}, {"x1": "z"})
    )
    assert one.key() == same.key()
    assert len({bytes_alone.key(), one.key(), other.key()}) == 3
    assert "uint8[3,4] less a zero point" in problem_of(one) == problem_of(same)
    assert len({problem_of(bytes_alone), problem_of(one), problem_of(other)}) == 3
    assert (one.value_order()["z"], same.value_order()["zero"]) == (3, 3)


def test_packed_types_are_stored_so() -> None:
    kind = TensorType((4, 5), "int4", True)
    group = replace(group_of_product(), types={**group_of_product().types, "x1": kind})
    assert group.storage("x1") == Storage("int4", is_packed=True)
    assert group.storage("x1").bits == 4
