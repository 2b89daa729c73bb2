"""Rows of GPUs, and which of them an architecture has."""

from __future__ import annotations

import pytest
from prefuse.kernels.cost.gpu_product import ProductSize, stage_bytes, tiled_products
from prefuse.runtime.hardware.gpu import gpu_machine

# KiB of shared memory of a block, of the CUDA programming guide's table of compute capabilities.
BLOCK_KIB = {
    "sm_70": 96, "sm_75": 64, "sm_80": 163, "sm_86": 99, "sm_87": 163, "sm_89": 99, "sm_90": 227, "sm_90a": 227, "sm_100": 227,
    "sm_103": 227, "sm_120": 99, "sm_121": 99,
}  # fmt: skip


@pytest.mark.parametrize("level", BLOCK_KIB)
def test_blocks_have_the_shared_memory_of_their_architecture(level: str) -> None:
    assert gpu_machine(level).block_bytes == BLOCK_KIB[level] << 10


@pytest.mark.parametrize("level", ["sm_80", "sm_86", "sm_89", "sm_120"])
def test_tiles_fit_in_the_shared_memory_of_a_block(level: str) -> None:
    size, machine = ProductSize(1, 4096, 4096, 4096), gpu_machine(level)
    used = [way.tile.stages * stage_bytes(way.tile, size) for way in tiled_products(size, machine)]
    assert max(used) <= machine.block_bytes
    assert max(used) > machine.block_bytes // 2
