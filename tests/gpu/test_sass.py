"""The machine code of products: matrix unit, asynchronous copies of 16 bytes, nothing spilled, little else in loops."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from prefuse.compiler.lowering.gpu.cuda_compiler import architecture_for, compile_cuda, find_nvcc
from prefuse.compiler.lowering.gpu.device_module import cuda_source
from prefuse.kernels.cost.gpu_product import ProductSize, tiled_products
from prefuse.kernels.cost.gpu_warpgroup_product import part_clocks, warpgroup_ways
from prefuse.kernels.groups.group import Group
from prefuse.kernels.registry import build_kernel
from prefuse.kernels.template.contract import BuiltKernel
from prefuse.kernels.template.values import read_narrow
from prefuse.runtime.hardware.gpu import gpu_machine
from prefuse.runtime.target import Target

from ..kernels.attention.attention_cases import attend
from ..kernels.convolution.channels_last_cases import convolution
from ..kernels.formats.test_int8 import case_of
from ..kernels.harness import operator
from .sass import Code, disassemble

TARGET = Target("cuda", "sm_80")


def products_of(dtype: np.dtype[Any], m: int, n: int, k: int, *, constant: bool) -> Group:
    a, b, c = np.empty((m, k), dtype), np.empty((k, n), dtype), np.empty((m, n), dtype)
    group = operator("MatMul", a, b, expected=[c]).group
    return replace(group, constants=frozenset(["x1"]) if constant else frozenset())


def codes(groups: dict[str, Group], folder: Path, target: Target = TARGET) -> dict[str, Code]:
    """The machine code of each group's first grid."""
    if not find_nvcc():
        pytest.skip("nvcc is not here")
    built = {name: build_kernel(group, target) for name, group in groups.items()}
    functions = {name: kernel.function for name, kernel in built.items() if isinstance(kernel, BuiltKernel)}
    source = cuda_source(functions, target)
    found = disassemble(compile_cuda(source, architecture_for(source, target.level)), folder)
    return {name: found[f"{name}_0"] for name in groups}


def test_products(tmp_path: Path) -> None:
    groups = {
        "large": products_of(np.dtype(ml_dtypes.bfloat16), 2048, 2048, 2048, constant=False),
        "exact": products_of(np.dtype(np.float32), 2048, 2048, 2048, constant=True),
    }
    found = codes(groups, tmp_path)
    for code in found.values():
        assert code.count("LDL") == code.count("STL") == 0
        assert code.count("LDGSTS") == code.count("LDGSTS.E.BYPASS") == code.count("LDGSTS.E.BYPASS.LTC128B.128")
        assert code.count("LDSM") == code.count("LDSM.16")
    best = tiled_products(ProductSize(1, 2048, 2048, 2048), gpu_machine("sm_80"))[0].tile
    loop = found["large"].loop()
    kinds = loop.kinds()
    per_warp = best.warp_rows // 16 * best.warp_columns // 8 * best.depth // 16
    assert kinds["HMMA"] == per_warp
    assert kinds["BAR"] == 1
    assert kinds["LDSM"] == (best.warp_rows + best.warp_columns) // 16 * best.depth // 16
    others = sum(kinds[name] for name in ("IMAD", "IADD3", "LOP3", "LEA", "ISETP", "SEL", "MOV", "SHF"))
    assert others < kinds["HMMA"]
    assert found["large"].count("STG.E") == found["large"].count("STG")
    assert found["exact"].count("LDG.E.128") > 0
    assert found["exact"].count("LDG.E.128") == found["exact"].count("LDG.E.") - found["exact"].count("LDG.E.SYS")
    assert found["exact"].count("STG.E.64") == found["exact"].count("STG")


def test_products_of_warpgroups(tmp_path: Path) -> None:
    """The main loop of a consumer is the products of one part, one after the other; sums stay in registers, of which the roles
    have different numbers."""
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    sizes = {"square": (4096, 4096, 4096), "bert": (8192, 768, 768)}
    groups = {
        name: replace(products_of(bfloat16, *size, constant=name == "bert"), configuration={"template": "gpu_wgmma_matmul"})
        for name, size in sizes.items()
    }
    found = codes(groups, tmp_path, Target("cuda", "sm_90"))
    machine = gpu_machine("sm_90")
    for name, code in found.items():
        tile = warpgroup_ways(ProductSize(1, *sizes[name]), machine)[0].tile
        assert tile.columns >= 192
        clocks = part_clocks(tile, machine)
        assert clocks["matrix unit"] >= 0.9 * max(clocks.values())
        loop = code.loop()
        assert loop.text.count(f"HGMMA.64x{tile.columns}x16.F32.BF16") == code.count("HGMMA") == 4
        assert code.count("LDL") == code.count("STL") == code.count("HMMA") == 0
        assert code.count("USETMAXREG") == 2
        assert loop.count("WARPGROUP.DEPBAR") == 1
        assert loop.count("LDS") == loop.count("STS") == loop.count("BAR") == 0
        assert len(loop.instructions) < 0.25 * clocks["matrix unit"]  # of four warps each, which begin one a clock
        assert code.count("STG") == tile.columns // 4
    assert found["square"].count("UTMALDG.2D") == found["square"].count("UTMALDG") > 0
    assert found["bert"].count("UBLKCP") > 0


def test_products_of_bytes(tmp_path: Path) -> None:
    """As those of 16-bit floats, by instructions that take twice as many numbers."""
    a, b = np.empty((2048, 2048), np.uint8), np.empty((2048, 2048), np.int8)
    group = read_narrow(case_of("MatMul", a, b, 3, np.empty((2048, 2048))).group)
    (code,) = codes({"bytes": group}, tmp_path).values()
    best = tiled_products(ProductSize(1, 2048, 2048, 2048, item_bytes=1), gpu_machine("sm_80"))[0].tile
    loop = code.loop()
    kinds = loop.kinds()
    assert code.count("LDL") == code.count("STL") == 0
    assert kinds["IMMA"] == best.warp_rows // 16 * best.warp_columns // 8 * best.depth // 32
    assert loop.text.count("IMMA.16832.U8.S8") == kinds["IMMA"]
    assert loop.count("LDGSTS") == loop.count("LDGSTS.E.BYPASS.LTC128B.128") > 0
    assert kinds["LDSM"] == (best.warp_rows + best.warp_columns) // 16 * best.depth // 32
    assert kinds["BAR"] == 1
    others = sum(kinds[name] for name in ("IMAD", "IADD3", "LOP3", "LEA", "ISETP", "SEL", "MOV", "SHF"))
    assert others < kinds["IMMA"]


def test_rows_and_elements(tmp_path: Path) -> None:
    """All that lies along rows passes by 16 bytes, in registers."""
    x, half, row = np.empty((64, 768), np.float32), np.empty((64, 768), np.float16), np.empty(768, np.float32)
    cases = {
        "add": operator("Add", x, row, expected=[x]),
        "erf": operator("Erf", x, expected=[x]),
        "half": operator("Tanh", half, expected=[half]),
        "moved": operator("Transpose", np.empty((12, 64, 64), np.float32), perm=[1, 0, 2], expected=[x.reshape(64, 12, 64)]),
        "chosen": operator("Gather", np.empty((90, 768), np.float32), np.zeros(64, np.int64), axis=0, expected=[x]),
        "softmax": operator("Softmax", x, expected=[x]),
        "normal": operator("LayerNormalization", x, row, row, expected=[x]),
        "sums": operator("ReduceSum", x, np.array([1]), keepdims=0, expected=[np.empty(64, np.float32)]),
    }
    singles = {"chosen": (1, 0), "sums": (0, 1)}  # the index of a row, and its sum
    for name, code in codes({name: case.group for name, case in cases.items()}, tmp_path).items():
        loads, stores = singles.get(name, (0, 0))
        assert code.count("LDL") == code.count("STL") == 0, name
        assert code.count("LDG.E.128") == code.count("LDG") - loads > 0, name
        assert code.count("STG.E.128") == code.count("STG") - stores, name
        assert code.count("STG") > 0, name


_INTEGERS = (
    *("IMAD", "IADD3", "IADD", "VIADD", "LOP3", "LEA", "ISETP", "SEL", "SHF", "PRMT", "IMNMX", "VIMNMX", "UIMAD", "UIADD3"),
    *("ULOP3", "USHF", "ULEA", "UISETP", "USEL", "UPRMT"),
)


def test_convolutions(tmp_path: Path) -> None:
    """The main loop has copies with a predicate for the padding, and few instructions of integers: no division, no test of
    bounds."""
    found = codes(
        {"window": convolution((64, 128, 28, 28), 256, 3, 1, 1, narrow="xwry").group}, tmp_path, Target("cuda", "sm_90")
    )
    loop, whole = found["window"].loop(), found["window"]
    kinds = loop.kinds()
    assert whole.count("LDL") == whole.count("STL") == 0
    assert kinds["HMMA"] == 128
    assert loop.count("LDGSTS") == loop.count("LDGSTS.E.BYPASS.LTC128B.128") == 8 + 4
    assert kinds["BAR"] == 1
    integers = sum(kinds[name] for name in _INTEGERS) - loop.count("IMAD.MOV")
    assert integers < 0.25 * len(loop.instructions)


def test_attention(tmp_path: Path) -> None:
    """Scores and results stay in registers, of float32 as the sums of three terms, too."""
    cases = {"half": attend((8, 12, 512, 512, 64, 64), "bfloat16"), "exact": attend((8, 12, 512, 512, 64, 64))}
    found = codes({name: case.group for name, case in cases.items()}, tmp_path)
    assert {name: code.loop().kinds()["HMMA"] for name, code in found.items()} == {"half": 64, "exact": 192}
    for code in found.values():
        assert code.count("LDL") == code.count("STL") == 0
        assert code.loop().kinds()["BAR"] == 1
    assert found["half"].loop().count("LDGSTS.E.BYPASS.LTC128B.128") == 8
    assert found["exact"].loop().count("LDG.E.128") == 8


def test_attention_of_one_query(tmp_path: Path) -> None:
    """Keys and values 16 bytes a load, as many under way as a lane has, and nothing of them in memory of its own."""
    cases = {"half": attend((1, 12, 1, 1024, 64, 64), "bfloat16"), "exact": attend((1, 8, 1, 1024, 128, 128))}
    for code in codes({name: case.group for name, case in cases.items()}, tmp_path).values():
        assert code.count("LDL") == code.count("STL") == 0
        assert code.count("LDG") == code.count("LDG.E.128") >= 1 + 4 + 4
        assert code.count("HMMA") == 0
