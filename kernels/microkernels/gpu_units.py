"""Which matrix unit a GPU has, and what numbers it multiplies."""

from __future__ import annotations

from collections.abc import Set

from ...runtime.hardware.gpu import gpu_machine, has_byte_products, has_matrix_unit, has_mfma, has_wmma
from ...runtime.target import Target
from ..codegen import amdgcn
from ..codegen.gpu_builder import GpuBuilder
from ..formats.format import Format, Storage
from .gpu_matrix_unit import MatrixUnit
from .gpu_mfma import MfmaUnit
from .gpu_mma_sync import MmaSync
from .gpu_part_layout import CHUNK_BYTES
from .gpu_wmma import WmmaUnit

BYTES = frozenset(["uint8", "int8"])
_LARGE = 32  # sums each way of CDNA's larger instructions


def missing_unit(target: Target) -> str:
    """What a GPU lacks that products on its matrix unit need; empty where it has all."""
    if has_matrix_unit(target.level):
        return ""
    return "v_mfma or v_wmma of bfloat16" if target.kind == "rocm" else "mma.sync of 16-bit floats with asynchronous copies"


def missing_bytes(target: Target) -> str:
    """What a GPU that has a matrix unit lacks to multiply bytes on it; empty where it has all."""
    return "" if has_byte_products(target.level) else "v_mfma of eight bytes a lane"


def missing_terms(target: Target, terms: int) -> str:
    """Why the unit does not multiply float32 as sums of so many bfloat16; empty where it does, or one is enough."""
    is_missing = terms > 1 and has_wmma(target.level)
    return "the matrix unit multiplies no float32, and sums of bfloat16 no faster than threads" if is_missing else ""


def multiplied_as(dtypes: Set[str], target: Target, *, may_round: bool) -> amdgcn.Number:
    """What the unit multiplies operands of such types as: float32 itself where it can and bfloat16 would not be exact enough."""
    if dtypes <= BYTES:
        return "i8"
    if "float16" in dtypes:
        return "f16"
    is_exact = "float32" in dtypes and not may_round
    return "f32" if is_exact and gpu_machine(target.level).float_flops else "bf16"


def number_bytes(kind: amdgcn.Number) -> int:
    return {"f32": 4, "i8": 1}.get(kind, 2)


def chunk_of(kind: amdgcn.Number) -> int:
    """Numbers in 16 bytes."""
    return CHUNK_BYTES // number_bytes(kind)


def new_unit(
    builder: GpuBuilder,
    target: Target,
    kind: amdgcn.Number,
    warp_rows: int,
    warp_columns: int,
    *,
    is_unsigned: bool = False,
) -> MatrixUnit:
    """The unit for warps that have such a part of C, by CDNA's larger instructions where these divide it.

    Of bytes those of A may be unsigned.
    """
    if has_wmma(target.level):
        return WmmaUnit(builder, kind, 16, is_unsigned)
    if target.kind == "rocm":
        size = _LARGE if warp_rows % _LARGE == warp_columns % _LARGE == 0 else 16
        return MfmaUnit(builder, kind, size, is_unsigned)
    assert kind != "f32"
    return MmaSync(builder, kind if kind != "i8" else "u8" if is_unsigned else "s8")


def byte_format(dtype: str, target: Target) -> Format:
    """How products of bytes, of such a type in memory, by constant signed ones are computed.

    A zero point is subtracted by the sums of weights, and so are the 128 that an unsigned byte has less for v_mfma.
    """
    offset = -128 if has_mfma(target.level) and dtype == "uint8" else 0
    return Format(f"{dtype} on the matrix unit", Storage(dtype), Storage("int8"), "int32", "tile", 4, None, offset=offset)
