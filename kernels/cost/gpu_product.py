"""Estimated clocks of matrix products on a GPU's matrix unit, and the tiles that they are cut into.

A block multiplies a tile of C, `depth` of k at a time, while asynchronous copies fetch what comes next. What limits a part is
the slowest of the matrix unit, shared memory (each part is written once; each warp reads its rows and columns), L2, and the
latency of memory divided by the parts that are on their way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from ...runtime.hardware.gpu import GpuMachine

_MOST_SPLITS = 32
SECOND_GRID = 1.05
FIRST_CLOCKS = 1500  # of a block: indices, the first stages' latency
EPILOGUE_ITEMS_A_CLOCK = 8  # of results that a block's epilogue stores


@dataclass(frozen=True, slots=True)
class MmaTile:
    """The tile of C of a block, `rows` x `columns`, that of each warp, and the `depth` of k in a stage of shared memory.

    All are powers of two; a warp, of `lanes` threads, has at least 16 x 16 of C, and `depth` is a multiple of 16.
    """

    rows: int
    columns: int
    warp_rows: int
    warp_columns: int
    depth: int
    stages: int
    lanes: int = 32

    @property
    def warps(self) -> int:
        return (self.rows // self.warp_rows) * (self.columns // self.warp_columns)

    @property
    def threads(self) -> int:
        return self.lanes * self.warps

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}x{self.depth}/{self.warp_rows}x{self.warp_columns}*{self.stages}"


@dataclass(frozen=True, slots=True)
class ProductSize:
    """`batch` products of m x k by k x n. Operands are sums of `terms` numbers each, of which `products` pairs are multiplied.

    `conversions`: scalar operations that a block spends on each element of an operand before it is in shared memory. `a_bytes`:
    those of A in memory, where they are not the elements of its matrix, as of an image, whose windows overlap. A number has
    `item_bytes`: 2, 4 where the matrix unit multiplies float32 itself, or 1.
    """

    batch: int
    m: int
    n: int
    k: int
    terms: tuple[int, int] = (1, 1)
    products: int = 1
    conversions: tuple[int, int] = (0, 0)
    a_bytes: int | None = None
    item_bytes: int = 2

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True, slots=True)
class TiledProduct:
    """How a product is computed: k is cut into `splits`, each summed by blocks of its own and then added in order."""

    tile: MmaTile
    splits: int
    clocks: float

    def __str__(self) -> str:
        return str(self.tile) + f" in {self.splits}" * (self.splits > 1)


_SHAPES = (
    (128, 256, 64, 64),
    (256, 128, 64, 64),
    (128, 128, 64, 32),
    (64, 128, 32, 32),
    (128, 64, 32, 32),
    (64, 64, 32, 32),
    (32, 64, 16, 32),
    (64, 32, 32, 16),
    (16, 128, 16, 32),
    (16, 64, 16, 16),
)
_WAVEFRONT_SHAPES = (
    (256, 128, 128, 64),
    (128, 256, 64, 128),
    (128, 128, 64, 64),
    (64, 128, 32, 64),
    (128, 64, 64, 32),
    (64, 64, 32, 32),
    (32, 64, 16, 32),
    (64, 32, 32, 16),
    (16, 128, 16, 32),
    (16, 64, 16, 16),
)
_SUMS_OF_TERMS = 64 * 32  # of a warp's tile, beyond which the fragments of several terms do not fit the registers


def tiled_products(size: ProductSize, machine: GpuMachine) -> list[TiledProduct]:
    """The ways to compute a product, the fastest first; there is always one.

    What takes a second grid has to be that much faster, as more than its time is saved without it.
    """
    shapes = _SHAPES if machine.lanes == 32 else _WAVEFRONT_SHAPES
    found = [_tile(shape, size, machine, most) for shape in shapes for most in machine.stages]
    tiles = dict.fromkeys(tile for tile in found if tile is not None)
    if machine.stages == (2,):
        tiles |= dict.fromkeys(deeper for tile in tiles if (deeper := _deeper(tile, size, machine)) is not None)
    counts = {tile: piece_counts(_blocks(size, tile), size.k, tile.depth, machine) for tile in tiles}
    ways = [_cut(size, tile, splits, machine) for tile in tiles for splits in counts[tile]]
    return sorted(ways, key=lambda way: way.clocks * (SECOND_GRID if way.splits > 1 else 1.0))


def copy_clocks(moved_bytes: int, machine: GpuMachine) -> float:
    """Clocks of a grid that reads and writes so many bytes, and waits for the one before it."""
    return moved_bytes / machine.memory_bytes + machine.launch_cycles


def stage_bytes(tile: MmaTile, size: ProductSize) -> int:
    """Shared memory of one stage: a part of A and one of B."""
    return (tile.rows * size.terms[0] + tile.columns * size.terms[1]) * tile.depth * size.item_bytes


def _tile(shape: tuple[int, int, int, int], size: ProductSize, machine: GpuMachine, most: int) -> MmaTile | None:
    """The tile with as much depth and as many stages, up to `most`, as shared memory has room for; None where registers or memory
    do not do."""
    if shape[2] * shape[3] > (_SUMS_OF_TERMS if sum(size.terms) > 2 else machine.warp_sums):
        return None
    deep, flat = 128 // size.item_bytes, 64 // size.item_bytes
    for depth in (deep, flat) if sum(size.terms) == 2 else (flat,):
        for stages in range(most, 1, -1):
            tile = MmaTile(*shape, depth, stages, machine.lanes)
            used = stages * stage_bytes(tile, size)
            if most == 2 and depth == deep:
                used *= 2  # two blocks at once hide each other's barriers
            if used <= machine.block_bytes and (stages > 2 or most == 2 or depth == flat):
                return tile
    return None


def _deeper(tile: MmaTile, size: ProductSize, machine: GpuMachine) -> MmaTile | None:
    """A small tile by parts of twice the depth, whose products hide twice as much of a load's latency where a block is alone;
    None where shared memory has no room for one."""
    deeper = replace(tile, depth=2 * tile.depth)
    is_small = tile.warp_rows * tile.warp_columns <= machine.deep_sums
    return deeper if is_small and deeper.stages * stage_bytes(deeper, size) <= machine.block_bytes else None


def piece_counts(blocks: int, k: int, depth: int, machine: GpuMachine) -> list[int]:
    """Into how many pieces k may be cut, of parts of `depth`: one, and what gives every multiprocessor one block or two."""
    parts = ceil(k / depth)
    most = min(_MOST_SPLITS, max(parts // 2, 1))
    wanted = {1, *(min(turns * machine.multiprocessors // blocks, most) for turns in (1, 2))}
    return sorted({ceil(parts / ceil(parts / n)) if parts else 1 for n in wanted if n})


def _blocks(size: ProductSize, tile: MmaTile) -> int:
    return max(size.batch * ceil(size.m / tile.rows) * ceil(size.n / tile.columns), 1)


def _cut(size: ProductSize, tile: MmaTile, splits: int, machine: GpuMachine) -> TiledProduct:
    blocks, parts = _blocks(size, tile), ceil(ceil(size.k / tile.depth) / splits)
    resident = max(min(machine.shared_bytes // (tile.stages * stage_bytes(tile, size)), 1024 // tile.threads), 1)
    turns = ceil(blocks * splits / machine.multiprocessors)
    at_once = min(resident, turns)
    limit = max(_part_clocks(tile, size, machine), machine.memory_latency / ((tile.stages - 1) * at_once))
    epilogue = tile.rows * tile.columns / EPILOGUE_ITEMS_A_CLOCK
    first = FIRST_CLOCKS * ceil(turns / resident)
    inside = turns * (parts * limit + epilogue) + first
    results = size.batch * size.m * size.n
    a_bytes = size.item_bytes * size.batch * size.m * size.terms[0] * size.k if size.a_bytes is None else size.a_bytes
    moved = a_bytes + size.item_bytes * size.batch * size.n * size.terms[1] * size.k + 4 * results
    clocks = max(inside, moved / machine.memory_bytes) + machine.launch_cycles
    if splits > 1:  # sums are written and read once more, and added by another grid
        clocks += 2 * 4 * splits * results / machine.memory_bytes + machine.launch_cycles
    return TiledProduct(tile, splits, clocks)


def _part_clocks(tile: MmaTile, size: ProductSize, machine: GpuMachine) -> float:
    """Clocks of one part of a block, by the unit that takes the longest."""
    rate = {1: machine.byte_factor * machine.half_flops, 2: machine.half_flops, 4: machine.float_flops}[size.item_bytes]
    matrix = 2 * tile.rows * tile.columns * tile.depth * size.products / rate
    read = tile.warps * (tile.warp_rows * size.terms[0] + tile.warp_columns * size.terms[1]) * tile.depth * size.item_bytes
    written = stage_bytes(tile, size)
    conversions = tile.rows * size.conversions[0] + tile.columns * size.conversions[1]
    converted = conversions * tile.depth / machine.lanes_a_clock
    return max(matrix, converted, (read + written) / machine.shared_bytes_a_clock, written / machine.l2_bytes)
