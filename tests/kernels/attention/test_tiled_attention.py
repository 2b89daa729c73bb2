"""Attention with both of its products on the tile unit; against float64."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
from prefuse.kernels.attention import attention
from prefuse.kernels.cost import amx as tile_costs
from prefuse.kernels.registry import build_kernel
from prefuse.kernels.template.contract import BuiltKernel
from prefuse.runtime.precision import Precision
from prefuse.runtime.target import AMX_EMULATED, Target
from prefuse.tests.sample import dealt

from ..harness import Case, check, run, target_of
from ..microkernels.amx_emulator import AMX, emulator
from .attention_cases import attend, check_instructions, guarded, masked

__all__ = ["emulator"]
UNITS: dict[Precision, float] = {"float32": 3e-6, "float32-fast": 2e-5, "bfloat16": 4e-2}


@pytest.fixture(autouse=True)
def tiles_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few keys, too, for which vectors are faster."""
    monkeypatch.setattr(attention, "tile_product_cycles", lambda *sizes, **how: -1e9)  # less than bytes take


def tiled(case: Case, precision: Precision = "float32-fast") -> Case:
    return replace(case, group=replace(case.group, precision=precision), rtol=0.0, atol=UNITS[precision], got=[])


def cases() -> list[Case]:
    """Sizes that divide tiles and such that do not; masks of infinities, rows without a key."""
    blind = np.zeros((70, 40))
    blind[::3] = -np.inf
    return [
        attend((1, 2, 64, 64, 32, 32)),
        attend((2, 1, 37, 70, 20, 45)),
        attend((1, 2, 17, 33, 64, 3)),
        attend((1, 1, 130, 9, 8, 64)),
        attend((1, 2, 70, 40, 16, 16), score_step=masked(np.where(np.tri(70, 40), 0.0, -np.inf))),
        attend((1, 1, 70, 40, 16, 16), score_step=masked(blind), weight_step=guarded),
    ]


@pytest.mark.parametrize("precision", UNITS)
def test_attention(precision: Precision) -> None:
    """Each case in one precision a day, in the next one tomorrow."""
    chosen = dealt(cases(), [case.label for case in cases()], precision, tuple(UNITS))
    check([tiled(case, precision) for case in chosen], target_of(AMX_EMULATED))


def test_tiles_are_used() -> None:
    case = attend((1, 2, 64, 64, 32, 32))
    precise, rounded = tiled(case, "float32"), tiled(case, "bfloat16")
    run([precise, rounded], target_of(AMX_EMULATED))
    assert np.abs(rounded.got[0] - case.expected[0]).max() > 100 * np.abs(precise.got[0] - case.expected[0]).max()


def test_keys_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_CACHE_SHARE", 1 / 128)
    check([tiled(attend((1, 2, 70, 200, 16, 24)))], target_of(AMX_EMULATED))


def test_the_instructions_give_the_bits_of_the_loops(emulator: ctypes.CDLL | None) -> None:
    check_instructions([tiled(case) for case in cases()], 3, emulator)


def test_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "tile_product_cycles", tile_costs.tile_product_cycles)

    def uses_tiles(queries: int, precision: Precision, target: Target = AMX) -> bool:
        built = build_kernel(tiled(attend((1, 2, queries, 256, 64, 64)), precision).group, target)
        assert isinstance(built, BuiltKernel)
        return "tdpbf16ps" in str(built.function) or "uint16" in str(built.function)

    assert uses_tiles(256, "float32-fast")
    assert uses_tiles(256, "bfloat16")
    assert not uses_tiles(2, "bfloat16")
    assert not uses_tiles(256, "bfloat16", Target("cpu", "avx512", 2))
