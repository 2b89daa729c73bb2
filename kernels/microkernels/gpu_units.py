"""Which matrix unit a GPU has, and what numbers it multiplies."""

from __future__ import annotations

from collections.abc import Set

from ...runtime.hardware.gpu import gpu_machine, has_half_products, has_mfma
from ...runtime.target import Target
from ..codegen import amdgcn
from ..codegen.gpu_builder import GpuBuilder
from .gpu_matrix_unit import MatrixUnit
from .gpu_mfma import MfmaUnit
from .gpu_mma_sync import MmaSync
from .gpu_part_layout import CHUNK_BYTES

_LARGE = 32  # sums each way of AMD's larger instructions


def missing_unit(target: Target) -> str:
    """What a GPU lacks that products on its matrix unit need; empty where it has all."""
    if has_mfma(target.level) if target.kind == "rocm" else has_half_products(target.level):
        return ""
    return "v_mfma of bfloat16" if target.kind == "rocm" else "mma.sync of 16-bit floats with asynchronous copies"


def multiplied_as(dtypes: Set[str], target: Target, *, may_round: bool) -> amdgcn.Number:
    """What the unit multiplies operands of such types as: float32 itself where it can and bfloat16 would not be exact enough."""
    if "float16" in dtypes:
        return "f16"
    is_exact = "float32" in dtypes and not may_round
    return "f32" if is_exact and gpu_machine(target.level).float_flops else "bf16"


def number_bytes(kind: amdgcn.Number) -> int:
    return 4 if kind == "f32" else 2


def chunk_of(kind: amdgcn.Number) -> int:
    """Numbers in 16 bytes."""
    return CHUNK_BYTES // number_bytes(kind)


def new_unit(builder: GpuBuilder, target: Target, kind: amdgcn.Number, warp_rows: int, warp_columns: int) -> MatrixUnit:
    """The unit for warps that have such a part of C, by AMD's larger instructions where these divide it."""
    if target.kind == "rocm":
        return MfmaUnit(builder, kind, _LARGE if warp_rows % _LARGE == warp_columns % _LARGE == 0 else 16)
    assert kind != "f32"
    return MmaSync(builder, kind)
