"""Estimated clocks of matrix products by warpgroups (wgmma, sm_90a), and the tiles that they are cut into.

A block lives as long as the grid: it multiplies tile after tile, while one of its threads copies what comes next, so that a tile
begins with full stages. What limits a part of 64 of k is the slowest of the matrix unit, shared memory (each part is written
once; each product of 64 rows reads its rows and all columns), L2, and the latency of memory divided by the parts on their way.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from ...runtime.hardware.gpu import GpuMachine
from .gpu_product import EPILOGUE_ITEMS_A_CLOCK, FIRST_CLOCKS, SECOND_GRID, ProductSize, piece_counts

DEPTH = 64  # of k in a part: 128 bytes
GROUP_ROWS = 64  # of a warpgroup's tile
GROUP_THREADS = 128
_ITEM_BYTES = 2
_RESERVED_BYTES = 2048  # of shared memory: mbarriers, and what the first stage is moved to begin at a multiple of 1024
_LEAST_STAGES, _MOST_STAGES = 2, 8
_TILES = ((128, 256), (128, 192), (128, 128), (128, 64), (64, 256), (64, 128), (64, 64), (64, 32), (64, 16))


@dataclass(frozen=True, slots=True)
class WarpgroupTile:
    """The tile of C of a block: `rows` are 64 for each warpgroup that multiplies; `stages` of shared memory hold parts of k."""

    rows: int
    columns: int
    stages: int

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply; one more copies."""
        return self.rows // GROUP_ROWS

    @property
    def threads(self) -> int:
        return GROUP_THREADS * (1 + self.consumers)

    @property
    def stage_bytes(self) -> int:
        return (self.rows + self.columns) * DEPTH * _ITEM_BYTES

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}x{DEPTH}*{self.stages}"


@dataclass(frozen=True, slots=True)
class WarpgroupWay:
    """How a product is computed: k is cut into `splits`, each summed for itself and then added in order."""

    tile: WarpgroupTile
    splits: int
    clocks: float

    def __str__(self) -> str:
        return str(self.tile) + f" in {self.splits}" * (self.splits > 1)


def warpgroup_ways(size: ProductSize, machine: GpuMachine, least_columns: int = 1) -> list[WarpgroupWay]:
    """The ways to compute a product by tiles of at least so many columns, the fastest first."""
    ways = []
    for rows, columns in (shape for shape in _TILES if shape[1] >= least_columns):
        stage = WarpgroupTile(rows, columns, 1).stage_bytes
        tile = WarpgroupTile(rows, columns, min((machine.block_bytes - _RESERVED_BYTES) // stage, _MOST_STAGES))
        if tile.stages < _LEAST_STAGES:
            continue
        ways += [_cut(size, tile, splits, machine) for splits in piece_counts(_tiles(size, tile), size.k, DEPTH, machine)]
    return sorted(ways, key=lambda way: way.clocks * (SECOND_GRID if way.splits > 1 else 1.0))


def part_clocks(tile: WarpgroupTile, machine: GpuMachine) -> dict[str, float]:
    """Clocks of one part of a block, by the unit that takes them."""
    read = tile.consumers * (GROUP_ROWS + tile.columns) * DEPTH * _ITEM_BYTES
    return {
        "matrix unit": 2 * tile.rows * tile.columns * DEPTH / machine.warpgroup_flops,
        "shared memory": (read + tile.stage_bytes) / machine.shared_bytes_a_clock,
        "L2": tile.stage_bytes / machine.l2_bytes,
        "latency": machine.memory_latency / (tile.stages - 1),
    }


def _tiles(size: ProductSize, tile: WarpgroupTile) -> int:
    return max(size.batch * ceil(size.m / tile.rows) * ceil(size.n / tile.columns), 1)


def _cut(size: ProductSize, tile: WarpgroupTile, splits: int, machine: GpuMachine) -> WarpgroupWay:
    parts = ceil(ceil(size.k / DEPTH) / splits)
    turns = ceil(_tiles(size, tile) * splits / machine.multiprocessors)
    epilogue = tile.rows * tile.columns / EPILOGUE_ITEMS_A_CLOCK
    inside = turns * (parts * max(part_clocks(tile, machine).values()) + epilogue) + FIRST_CLOCKS
    results = size.batch * size.m * size.n
    moved = _ITEM_BYTES * size.batch * (size.m + size.n) * size.k + 4 * results
    clocks = max(inside, moved / machine.memory_bytes) + machine.launch_cycles
    if splits > 1:
        clocks += 2 * 4 * splits * results / machine.memory_bytes + machine.launch_cycles
    return WarpgroupWay(tile, splits, clocks)
