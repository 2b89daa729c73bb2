"""Transposes on GPUs: tiles through shared memory, so that both what is loaded and what is stored lies side by side.

A warp loads rows of a tile along the source, and stores columns along the result, 16 bytes a thread where extents allow. Rows of
the tile lie a word further apart than they are long, and a warp is so many rows by so many vectors that its 32 threads reach 32
banks (Ruetsch and Micikevicius, Optimizing Matrix Transpose in CUDA, 2009).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from tvm import tirx

from ..codegen.builder import Buffer, Expr, Index
from ..codegen.gpu_builder import GpuBuilder
from ..codegen.grids import BLOCK_THREADS
from ..template.loops import bound_unravel

LEAST_SIDE = 8  # of both extents: a sector of 32 bytes holds 8 words, which caches keep for so few neighbours
_WARP = 32
_WORD_BYTES = 4
SIDES = {1: 64, 2: 64}  # elements of a tile's side by their bytes; 32 of larger ones


def transpose_by_blocks(
    builder: GpuBuilder,
    extents: Sequence[int],
    across: int,
    source: Buffer,
    stored: Sequence[str],
    load: Callable[[Index], Expr],
    store: Callable[[Index, Expr], None],
) -> None:
    """Copy the elements of a loop nest, a block of threads for each tile of two of its loops.

    Args:
        extents: of the loops; results are contiguous along the last one, and the source along number `across`.
        stored: types of the results.
        load: the element of the source at an index, whose type is that of `source`.
        store: stores it.
    """
    item_bytes = source.dtype.bits // 8
    side = SIDES.get(item_bytes, 32)
    tile = _Tile(builder, builder.shared(side * pitch_of(side, item_bytes), str(source.dtype)), side, item_bytes)
    down, along = extents[across], extents[-1]
    outer = [extent for i, extent in enumerate(extents[:-1]) if i != across]
    counts = [*outer, -(-down // side), -(-along // side)]
    blocks = 1
    for count in counts:
        blocks *= count
    with builder.blocks(blocks, BLOCK_THREADS) as (block, thread):
        *others, i, j = bound_unravel(builder, block, counts)
        top, left = builder.bind(i * side), builder.bind(j * side)

        def place(a: Expr, b: Expr) -> Index:
            """The index of an element by its positions along the source and along the result."""
            return (*others[:across], a, *others[across:], b)

        count = _neighbours(builder, [str(source.dtype)], down)
        for row, first in tile.vectors(thread, count, side // count):
            b, a = left + row, builder.bind(top + first)
            with builder.when(tirx.And(b < along, a < down)), builder.neighbours(count) as e:
                builder.store(tile.buffer, row * tile.pitch + first + e, load(place(a + e, b)))
        builder.barrier()
        count = _neighbours(builder, [str(source.dtype), *stored], along)
        for row, first in tile.vectors(thread, count, stored_columns(side, count, item_bytes)):
            a, b = top + row, builder.bind(left + first)
            with builder.when(tirx.And(b < along, a < down)), builder.neighbours(count) as e:
                store(place(a, b + e), tile.buffer[(first + e) * tile.pitch + row])


def pitch_of(side: int, item_bytes: int) -> int:
    """Elements from one row of a tile to the next: a word more than the row."""
    return side + max(_WORD_BYTES // item_bytes, 1)


def _neighbours(builder: GpuBuilder, dtypes: Sequence[str], extent: int) -> int:
    """Elements that a thread takes at once: one of 8 bytes, as two for each thread would share banks."""
    widest = max(np.dtype(dtype).itemsize for dtype in dtypes)
    return builder.vector_count(dtypes, extent) if widest <= _WORD_BYTES else 1


@dataclass(frozen=True)
class _Tile:
    builder: GpuBuilder
    buffer: Buffer
    side: int
    item_bytes: int

    @property
    def pitch(self) -> int:
        return pitch_of(self.side, self.item_bytes)

    def vectors(self, thread: Expr, count: int, columns: int) -> Iterator[tuple[Expr, Expr]]:
        """The row, and the first of `count` elements in it, of each vector of a thread: a warp has `columns` vectors of each of
        its rows."""
        builder, wide = self.builder, self.side // count
        for turn in range(-(-self.side * wide // BLOCK_THREADS)):
            row, vector = vector_of(builder.bind(thread + turn * BLOCK_THREADS), wide, columns)
            yield builder.bind(row), builder.bind(vector * count)


def vector_of(number: Expr, wide: int, columns: int) -> tuple[Expr, Expr]:
    """The row and the place in it of a vector of a tile whose rows are `wide` vectors: a warp takes `columns` of each row."""
    columns = min(columns, _WARP)
    across = wide // columns  # warps beside each other
    warp, lane = number // _WARP, number % _WARP
    return lane // columns + (_WARP // columns) * (warp // across), lane % columns + columns * (warp % across)


def stored_columns(side: int, count: int, item_bytes: int) -> int:
    """Vectors of `count` elements that a warp stores of a row: fewer of narrow elements, two of which share a bank."""
    return side // count if item_bytes >= _WORD_BYTES else max(side // count // 2, 1)
