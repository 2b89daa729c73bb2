"""RDNA 3's matrix unit (v_wmma), simulated by its documented layout: what it multiplies, faults that are found, its code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from prefuse.compiler.lowering.gpu import rocm_compiler
from prefuse.compiler.lowering.gpu.rocm_compiler import compile_rocm
from prefuse.kernels.codegen import amdgcn
from prefuse.kernels.cost import gpu_product
from prefuse.kernels.cost.gpu_product import ProductSize, tiled_products
from prefuse.kernels.groups.configuration import TEMPLATE
from prefuse.kernels.microkernels.gpu_wmma import ExchangedSums, WmmaUnit
from prefuse.kernels.registry import build_kernel, candidates
from prefuse.kernels.template.contract import BuiltKernel
from prefuse.runtime.hardware.gpu import gpu_machine

from ...kernels.attention.attention_cases import attend
from ...kernels.harness import Case
from ...passes.layout.test_choose_layout import NETWORK, lowered
from ...sample import dealt, every
from .. import test_attention, test_byte_products, test_mma_convolutions, test_mma_products
from ..simulator import RDNA, SimulatedFaultError, check
from ..test_mma_products import numbers, product
from .gcn import read_assembly
from .test_mfma_products import lost_wait, no_barrier, rows_not_swizzled

SHAPES = ((16, 64, 16, 16), (64, 64, 32, 32))  # tiles whose warps have one block of sums, and four
PRODUCTS = (test_mma_products.of_any_size, test_mma_products.transposed, test_mma_products.batched)
ATTENTION = (test_attention.of_tiles, test_attention.of_halves, test_attention.with_scales, test_attention.with_hidden_keys)


def taken(case: Case) -> bool:
    """Whether the matrix unit multiplies what the case does: no float32 that must stay exact."""
    found, _ = candidates(case.group, RDNA)
    return bool(found) and found[0][0].startswith("gpu_mma")


def by_unit(cases: list[Case]) -> list[Case]:
    made = []
    for one in cases:
        configuration = {**one.group.configuration, TEMPLATE: one.template}
        made.append(replace(one, group=replace(one.group, configuration=configuration)))
    return [one for one in made if taken(one)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("cases", [*PRODUCTS, test_mma_convolutions.narrow])
def test_products_and_convolutions(
    cases: Callable[[], list[Case]], shape: tuple[int, int, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each case by one of the shapes today, by the other one tomorrow."""
    monkeypatch.setattr(gpu_product, "_SHAPES", (shape,))
    made = by_unit([replace(one, template="gpu_mma_matmul") if cases in PRODUCTS else one for one in cases()])
    assert made
    check(dealt(made, [one.label for one in made], shape, SHAPES), tmp_path, RDNA)


@pytest.mark.parametrize("cases", ATTENTION)
def test_attention_exchanges_sums(cases: Callable[[], list[Case]], tmp_path: Path) -> None:
    """The weights of a query lie in both halves of a wavefront before they are multiplied by values."""
    made = by_unit([replace(one, template="gpu_mma_attention") for one in cases()])
    if cases is test_attention.of_halves:
        assert made
    if made:
        check(dealt(made, [one.label for one in made], True, (True, False)), tmp_path, RDNA)


@pytest.mark.parametrize(("dtype", "zero"), test_byte_products.KINDS)
def test_bytes_of_either_sign(dtype: str, zero: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unsigned ones are multiplied as they are, so that their zero points are the model's own."""
    monkeypatch.setattr(gpu_product, "_SHAPES", SHAPES[:1])
    cases = [*test_byte_products.of_kind(dtype, zero), *test_byte_products.convolutions(dtype, zero)]
    check(dealt(cases, [case.label for case in cases], dtype, ("uint8", "int8")), tmp_path, RDNA)


def wrong_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WmmaUnit, "instruction", property(lambda self: amdgcn.Wmma(self.kind)))


def columns_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lane l has column l of B, as if sums of a half were neighbours."""
    monkeypatch.setattr(WmmaUnit, "line_of", lambda self, lane, *, is_a: lane % 16)


def other_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = amdgcn.Wmma.__call__
    monkeypatch.setattr(amdgcn.Wmma, "__call__", lambda self, first, second, sums: multiply(self, second, first, sums))


def lines_of_32_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The upper half of a wavefront has other lines than the lower one."""
    monkeypatch.setattr(WmmaUnit, "line_of", lambda self, lane, *, is_a: (lane + lane // 16) % 16)


def deep() -> Case:
    """Nine parts of k in one block, more than there are stages."""
    case = product(numbers(64, 64 * 9, dtype="bfloat16"), numbers(64, 64 * 9, dtype="bfloat16"), transB=1)
    return replace(case, group=replace(case.group, configuration={TEMPLATE: "gpu_mma_matmul", "tile": "64x64x64/32x32*2"}))


@pytest.mark.parametrize(
    ("mutate", "fault"),
    [
        (no_barrier, "with no barrier between|what nobody wrote"),
        (lost_wait, "a barrier that does not wait for accesses of LDS"),
        (rows_not_swizzled, "Not equal to tolerance"),
        (columns_in_order, "Not equal to tolerance"),
        (other_operands, "Not equal to tolerance"),
        (lines_of_32_lanes, "differ between the halves of a wavefront"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_faults_are_found(
    mutate: Callable[[pytest.MonkeyPatch], None], fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match=fault) as found:
        check([deep()], tmp_path, RDNA)
    assert isinstance(found.value, SimulatedFaultError) == ("tolerance" not in fault)


def test_lost_signs_and_exchanges_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        wrong_signs(patch)
        (folder := tmp_path / "signs").mkdir()
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            check([test_byte_products.deep()], folder, RDNA)
    monkeypatch.setattr(ExchangedSums, "_other", lambda self, own: own)
    (folder := tmp_path / "exchanges").mkdir()
    case = replace(attend((1, 1, 32, 130, 64, 32), "bfloat16"), template="gpu_mma_attention")
    with pytest.raises(AssertionError, match="differ between the halves of a wavefront"):
        check([case], folder, RDNA)


def test_float32_stays_with_threads() -> None:
    """There is no product of float32, and three or six of bfloat16 for each are no faster than multiply-adds."""
    group = replace(product(numbers(64, 64), numbers(64, 64)).group, configuration={})
    found, refused = candidates(group, RDNA)
    assert found[0][0] == "gpu_matmul"
    assert "multiplies no float32" in refused["gpu_mma_matmul"]
    rounded = replace(group, precision="bfloat16")
    assert candidates(rounded, RDNA)[0][0][0] == "gpu_mma_matmul"


def test_convolutions_of_float32_leave_the_layout() -> None:
    model, context = lowered(NETWORK, str(RDNA))
    assert not [node for node in model.graph if node.op_type == "Transpose"]
    assert any("multiplies no float32" in str(remark) for remark in context.remarks)


@pytest.mark.parametrize("along_k", [True, False])
def test_the_code_of_every_tile(along_k: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing spilled, and 16 bytes at a time from and to memory."""
    monkeypatch.setattr(rocm_compiler, "_link", bytes)
    m, n, k = 512, 512, 4096
    ways = tiled_products(ProductSize(1, m, n, k), gpu_machine(RDNA.level))
    tiles = [way.tile for way in ways if way.splits == 1]
    assert len(tiles) >= 9
    groups = {}
    for number, tile in enumerate(every(3, tiles)):
        b = (n, k) if along_k else (k, n)
        operands = np.zeros((m, k), np.float16), np.zeros(b, np.float16)
        case = product(*operands, transB=int(along_k)) if along_k else product(*operands)
        configuration = {TEMPLATE: "gpu_mma_matmul", "tile": str(tile)}
        groups[f"k{number}"] = replace(case.group, configuration=configuration)
    built = {name: build_kernel(group, RDNA) for name, group in groups.items()}
    functions = {name: one.function for name, one in built.items() if isinstance(one, BuiltKernel)}
    assert len(functions) == len(groups)
    codes = read_assembly(compile_rocm(functions, RDNA).assembly)
    for name in groups:
        code = codes[f"{name}_0"]
        for fact in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"):
            assert code.fact(fact) == 0, (groups[name].configuration, fact)
        assert code.fact("vgpr_count") <= 256
        assert code.count("v_wmma_f32_16x16x16_f16") > 0
        assert code.count("scratch_") == code.count("flat_") == 0
        assert code.count("global_load") == code.count("global_load_b128") > 0
