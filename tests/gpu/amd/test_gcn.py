"""The machine code of AMD's matrix unit: accesses of 16 bytes, nothing spilled, loads far from their waits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from prefuse.compiler.lowering.gpu import rocm_compiler
from prefuse.compiler.lowering.gpu.rocm_compiler import compile_rocm
from prefuse.kernels.codegen import amdgcn
from prefuse.kernels.cost.gpu_product import MmaTile, ProductSize, tiled_products
from prefuse.kernels.groups.configuration import TEMPLATE
from prefuse.kernels.groups.group import Group
from prefuse.kernels.registry import build_kernel
from prefuse.kernels.template.contract import BuiltKernel
from prefuse.kernels.template.values import read_narrow
from prefuse.runtime.hardware.gpu import gpu_machine

from ...kernels.attention.attention_cases import attend
from ...kernels.convolution.channels_last_cases import convolution
from ...kernels.harness import operator
from ...kernels.recurrent.test_recurrent import of_torch
from ...sample import every
from ..simulator import ROCM
from ..test_byte_products import product as byte_product
from .gcn import Code, code_of, read_assembly

SIZE = ProductSize(1, 2048, 2048, 8192)  # so many parts of k that a loop is left of them
FEW = 12  # matrix instructions that hide a load


@pytest.fixture(autouse=True)
def no_linker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assembly needs none."""
    monkeypatch.setattr(rocm_compiler, "_link", bytes)


def product_of(dtype: Any, *, along_k: bool, constant: bool = False, tile: str = "") -> Group:
    """C = A B; B lies along k (transposed), or along its columns."""
    m, n, k = SIZE.m, SIZE.n, SIZE.k
    a, b, c = np.empty((m, k), dtype), np.empty((n, k) if along_k else (k, n), dtype), np.empty((m, n), dtype)
    group = operator("Gemm", a, b, expected=[c], transB=int(along_k)).group
    configuration = {"tile": tile} if tile else {}
    return replace(group, constants=frozenset(["x1"]) if constant else frozenset(), configuration=configuration)


def codes(groups: dict[str, Group]) -> dict[str, Code]:
    """The machine code of each group's first grid."""
    built = {name: build_kernel(group, ROCM) for name, group in groups.items()}
    functions = {name: kernel.function for name, kernel in built.items() if isinstance(kernel, BuiltKernel)}
    found = read_assembly(compile_rocm(functions, ROCM).assembly)
    return {name: found[f"{name}_0"] for name in groups}


def tiles(item_bytes: int) -> dict[str, MmaTile]:
    ways = tiled_products(replace(SIZE, item_bytes=item_bytes), gpu_machine(ROCM.level))
    return {str(way.tile): way.tile for way in ways}


@pytest.mark.parametrize(("dtype", "kind"), [(ml_dtypes.bfloat16, "bf16"), (np.float16, "f16"), (np.float32, "f32")])
@pytest.mark.parametrize("along_k", [True, False])
def test_every_tile(dtype: Any, kind: amdgcn.Number, along_k: bool) -> None:
    """Nothing spilled, and all loads of a part before all of its products, which are what its tile needs."""
    offered = dict(every(2, list(tiles(np.dtype(dtype).itemsize).items())))
    groups = {f"k{i}": product_of(dtype, along_k=along_k, tile=name) for i, name in enumerate(offered)}
    for tile, code in zip(offered.values(), codes(groups).values(), strict=True):
        for fact in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"):
            assert code.fact(fact) == 0, (tile, fact)
        assert code.fact("vgpr_count") + code.fact("agpr_count") <= 256  # two wavefronts a SIMD
        assert code.count("scratch_") == code.count("flat_") == code.count("v_accvgpr") == 0
        assert code.count("global_load") == code.count("global_load_dwordx4") > 0
        assert code.count("global_store") == code.count("global_store_dwordx4" if kind == "f32" else "global_store_dwordx2")
        loop, size = code.loop(), 32 if tile.warp_rows % 32 == tile.warp_columns % 32 == 0 else 16
        k = 64 // size * amdgcn.Mfma(kind, size).numbers
        products = tile.warp_rows * tile.warp_columns * tile.depth // (size * size * k)
        assert loop.count("v_mfma") == loop.count(f"v_mfma_f32_{size}x{size}x{k}_{kind}")
        parts = loop.count("v_mfma") // products  # LLVM unrolls some loops
        assert loop.count("v_mfma") == parts * products > 0
        assert loop.count("s_barrier") == parts
        assert min(loop.load_distances()) == products
        others = sum(number for name, number in loop.kinds().items() if name.startswith("v_") and not name.startswith("v_mfma"))
        assert others < 5 * loop.count("v_mfma") + 20 * parts


@pytest.mark.parametrize("narrow", ["", "xwry"])
def test_every_tile_of_convolutions(narrow: str) -> None:
    """Padding costs a mask and no branch; taps are found with few operations; loads are begun before all products of a part."""
    item_bytes = 2 if narrow else 4
    group = convolution((4, 512, 14, 14), 512, 3, 1, 1, narrow=narrow).group
    offered = dict(every(3, list(tiles(item_bytes).items())))
    configured = {TEMPLATE: "gpu_mma_convolution"}
    groups = {f"k{i}": replace(group, configuration={**configured, "tile": name}) for i, name in enumerate(offered)}
    for tile, code in zip(offered.values(), codes(groups).values(), strict=True):
        for fact in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"):
            assert code.fact(fact) == 0, (tile, fact)
        loop, size = code.loop(), 32 if tile.warp_rows % 32 == tile.warp_columns % 32 == 0 else 16
        k = 64 // size * amdgcn.Mfma("bf16" if narrow else "f32", size).numbers
        products = tile.warp_rows * tile.warp_columns * tile.depth // (size * size * k)
        assert loop.count("v_mfma") == products
        assert min(loop.load_distances()) == products
        assert loop.count("global_load") == loop.count("global_load_dwordx4") > 0
        assert loop.count("s_barrier") == 1
        assert loop.count("v_div") == loop.count("v_mul_hi") == 0
        others = sum(number for name, number in loop.kinds().items() if name.startswith("v_") and "mfma" not in name)
        assert others <= products + 24 + 5 * loop.count("global_load")


def test_attention() -> None:
    """Nothing spilled; loads of a part before all of its products; of each score few operations beside these. One case a day."""
    sizes = (8, 12, 512, 512, 64, 64)
    cases = {"half": attend(sizes, "float16"), "exact": attend(sizes), "deep": attend((8, 12, 512, 512, 128, 128))}
    products = {"half": (32, 32), "exact": (64, 16), "deep": (128, 16)}  # of a part of the keys, and scores of a lane
    for name, code in codes({name: cases[name].group for name in every(3, list(cases))}).items():
        for fact in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"):
            assert code.fact(fact) == 0, (name, fact)
        assert code.count("scratch_") == code.count("flat_") == 0
        assert code.count("global_load") == code.count("global_load_dwordx4") > 0
        assert code.count("global_store") == code.count("global_store_dwordx2" if name == "half" else "global_store_dwordx4") > 0
        loop, (multiplied, scores) = code.loop(), products[name]
        assert loop.count("v_mfma") == multiplied
        assert min(loop.load_distances()) == multiplied
        assert loop.count("s_barrier") == 1
        assert loop.count("v_exp") == scores + 1
        others = sum(number for kind, number in loop.kinds().items() if kind.startswith("v_") and "mfma" not in kind)
        assert others < 12 * scores


def test_attention_of_one_query() -> None:
    """Keys and values 16 bytes a load, nothing spilled."""
    cases = {"half": attend((1, 12, 1, 1024, 64, 64), "bfloat16"), "exact": attend((1, 8, 1, 1024, 128, 128))}
    for name, code in codes({name: case.group for name, case in cases.items()}).items():
        for fact in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"):
            assert code.fact(fact) == 0, (name, fact)
        assert code.count("scratch_") == code.count("flat_") == 0
        assert code.count("global_load") == code.count("global_load_dwordx4") >= 1 + 4 + 4


def test_recurrences() -> None:
    """Nothing of the block that stays for all steps is spilled."""
    cases = {
        "gru": of_torch("GRU", 24, 1, 256, 512, "bidirectional"),
        "lstm": of_torch("LSTM", 128, 32, 512, 1024),
    }
    for name, code in codes({name: case.group for name, case in cases.items()}).items():
        for fact in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"):
            assert code.fact(fact) == 0, f"{name}: {fact}"


def test_large_products() -> None:
    """The tiles that large products take: loads behind enough products, chunks along k loaded 16 bytes at a time, few others."""
    for dtype in (ml_dtypes.bfloat16, np.float16):
        groups = {"packed": product_of(dtype, along_k=False, constant=True), "rows": product_of(dtype, along_k=True)}
        for code in codes(groups).values():
            loop = code.loop()
            assert loop.count("v_mfma") >= 16
            assert min(loop.load_distances()) >= FEW
            assert loop.count("ds_read") == loop.count("ds_read_b128")
            assert loop.count("ds_write") == loop.count("ds_write_b128")
            others = sum(number for name, number in loop.kinds().items() if name.startswith("v_") and "mfma" not in name)
            assert others < 1.5 * loop.count("v_mfma")


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_products_of_bytes(dtype: str) -> None:
    """Loads behind enough products, also of unsigned bytes, whose upper bit is turned between LDS and the products."""
    case = byte_product(np.zeros((256, 8192), dtype), np.zeros((8192, 256), np.int8), tile="128x128x64/64x64*2")
    (code,) = codes({"k": read_narrow(case.group)}).values()
    loop = code.loop()
    assert loop.count("v_mfma") == loop.count("v_mfma_i32") >= 16
    assert min(loop.load_distances()) >= FEW
    others = sum(number for name, number in loop.kinds().items() if name.startswith("v_") and "mfma" not in name)
    assert others < 2.5 * loop.count("v_mfma")


def test_small_products() -> None:
    """Few blocks hide nothing for each other: their parts are deeper, so that more products stand between a load and its wait."""
    few = ProductSize(1, 128, 768, 768)
    best = [way.tile for way in tiled_products(few, gpu_machine(ROCM.level)) if way.splits == 1][:3]
    assert {tile.depth for tile in best} == {128}
    groups = {f"k{i}": product_of(ml_dtypes.bfloat16, along_k=True, tile=str(tile)) for i, tile in enumerate(best)}
    for tile, code in zip(best, codes(groups).values(), strict=True):
        assert min(code.loop().load_distances()) >= (FEW if tile.rows > 16 else 8)


def test_without_pins_loads_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compiler does by itself: so the distances above can fail."""
    monkeypatch.setattr("prefuse.kernels.microkernels.gpu_mfma.MfmaUnit.pin", lambda self: None)
    (code,) = codes({"k": product_of(ml_dtypes.bfloat16, along_k=True)}).values()
    assert min(code.loop().load_distances()) < FEW


def test_distances() -> None:
    text = """
    global_load_dwordx4 v[0:3], v[4:5], off
    v_mfma_f32_32x32x8_f16 v[0:15], v[0:1], v[2:3], v[0:15]
    global_store_dword v[0:1], v2, off
    global_load_dwordx4 v[0:3], v[4:5], off
    v_mfma_f32_32x32x8_f16 v[0:15], v[0:1], v[2:3], v[0:15]
    s_waitcnt lgkmcnt(0)
    v_mfma_f32_32x32x8_f16 v[0:15], v[0:1], v[2:3], v[0:15]
    s_waitcnt vmcnt(1) lgkmcnt(0)
    v_mfma_f32_32x32x8_f16 v[0:15], v[0:1], v[2:3], v[0:15]
    """
    assert code_of(text, {}).load_distances() == [3, 6, 3]
    assert code_of(text + "s_waitcnt vmcnt(0)\n", {}).load_distances() == [3, 3, 3, 3]
