"""Sizes of tensors whose elements are less than a byte, one a byte and side by side."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from prefuse.runtime.archive import ConstantSource, constants_data, constants_header
from prefuse.runtime.plan import Plan, Port, TensorType
from prefuse.runtime.plan_text import parse_plan, print_plan


@pytest.mark.parametrize(
    ("dtype", "is_packed", "bits", "size_bytes", "text"),
    [
        ("float32", False, 32, 84, "float32[3,7]"),
        ("int4", False, 8, 21, "int4[3,7]"),
        ("int4", True, 4, 11, "int4_x2[3,7]"),
        ("uint2", True, 2, 6, "uint2_x4[3,7]"),
        ("float4_e2m1fn", True, 4, 11, "float4_e2m1fn_x2[3,7]"),
    ],
)
def test_sizes(dtype: str, is_packed: bool, bits: int, size_bytes: int, text: str) -> None:
    kind = TensorType((3, 7), dtype, is_packed)
    assert (kind.bits, kind.size_bytes, str(kind)) == (bits, size_bytes, text)
    assert kind.bytes_of(0) == 0
    assert TensorType((), dtype, is_packed).size_bytes == -(-bits // 8)


def test_whole_bytes_are_never_packed() -> None:
    with pytest.raises(AssertionError, match="whole bytes"):
        TensorType((4,), "int8", True)


def test_plans_tell_both_forms_apart() -> None:
    ports = tuple(Port(name, TensorType((5,), "int4", name == "b"), name) for name in "ab")
    plan = Plan("cpu:avx2,threads=1", ports, (), (), (), (), ())
    assert "input b int4_x2[5] in b" in print_plan(plan)
    assert parse_plan(print_plan(plan)) == plan


def test_packed_constants_are_written_as_bytes() -> None:
    kind = TensorType((3,), "int4", True)
    packed, plain = np.array([0x21, 0x03], np.uint8), np.array([1, 2, 3], ml_dtypes.int4)
    source = ConstantSource("w", kind, 0, lambda: packed)
    assert b"".join(map(bytes, constants_data([source], 4))) == bytes([0x21, 0x03, 0, 0])
    assert b'"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}' in constants_header([source], 4)
    with pytest.raises(AssertionError, match="is no int4_x2"):
        list(constants_data([ConstantSource("w", kind, 0, lambda: plain)], 4))
