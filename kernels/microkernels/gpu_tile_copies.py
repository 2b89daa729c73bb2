"""Operands of warpgroups' products: how bulk copies bring their parts to shared memory, and how descriptors see them there.

Rows of 128 bytes of shared memory lie along k, or along lines where the operand does in memory; then 64 lines by 64 of k follow
each other. 16-byte chunks of eight rows are exchanged, as tensor maps and descriptors say ("128-byte swizzle"), and as constants
are packed at compile time (gpu_part_layout.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tvm import tirx

from ...runtime.gpu.tensor_maps import TensorMap
from ..codegen import ptx_hopper
from ..codegen.builder import Buffer, Expr
from ..codegen.gpu_builder import GpuBuilder
from ..codegen.ptx_hopper import STEP_DEPTH, SWIZZLE_BYTES, SWIZZLE_ROWS, u32
from ..cost.gpu_warpgroup_product import DEPTH

_ITEM_BYTES = 2
ROW_ITEMS = SWIZZLE_BYTES // _ITEM_BYTES  # numbers of a row of shared memory
_ATOM_BYTES = SWIZZLE_ROWS * SWIZZLE_BYTES
_BOX_BYTES = DEPTH * SWIZZLE_BYTES  # of 64 lines by 64 of k, where rows lie along lines
_UNUSED = 16  # a distance that the layout does not have


@dataclass(frozen=True)
class Tile:
    """A part of an operand in shared memory: `lines` by 64 of k."""

    lines: int
    along_k: bool

    @property
    def size_bytes(self) -> int:
        return self.lines * DEPTH * _ITEM_BYTES

    def described(self, address: Expr) -> Expr:
        """The descriptor of the first 16 of k of lines that begin at `address`."""
        leading = _UNUSED if self.along_k else _BOX_BYTES
        return ptx_hopper.descriptor(address, leading=leading, stride=_ATOM_BYTES)

    def offset(self, line: int) -> int:
        """Bytes before a line that is a multiple of 64."""
        assert line % ROW_ITEMS == 0
        return line * SWIZZLE_BYTES

    def step(self, number: int) -> Expr:
        """What is added to a descriptor for a later 16 of k: it counts 16 bytes."""
        distance = STEP_DEPTH * (_ITEM_BYTES if self.along_k else SWIZZLE_BYTES)
        return tirx.const(number * distance // 16, "uint64")


class TileCopies(Protocol):
    """What brings parts of an operand to shared memory; made outside of the block's code."""

    tile: Tile

    def prepare(self, matrix: Expr, begin: Expr) -> None:
        """The matrix and the first line of the parts to come."""

    def copy(self, part: Expr, to: Expr, mbarrier: Expr) -> None:
        """Begin to bring a part, all of whose bytes the mbarrier counts; lines and k beyond the operand's are zeros."""


@dataclass
class PackedTiles:
    """A constant in the form of `PackParts` with one term: each part is one run of bytes."""

    builder: GpuBuilder
    tile: Tile
    buffer: Buffer
    panels: int  # of a matrix
    parts: int

    def prepare(self, matrix: Expr, begin: Expr) -> None:
        panel = matrix * self.panels + tirx.floordiv(begin, self.tile.lines)
        self._origin = self.builder.bind(panel * (self.parts * self.tile.lines * DEPTH))

    def copy(self, part: Expr, to: Expr, mbarrier: Expr) -> None:
        source = self.buffer[self.builder.bind(self._origin + part * (self.tile.lines * DEPTH))]
        self.builder.do(ptx_hopper.copy_bulk(to, source, self.tile.size_bytes, mbarrier))


@dataclass
class MappedTiles:
    """Matrices of 16-bit numbers where they lie, by a tensor map; `address` is the map's."""

    builder: GpuBuilder
    tile: Tile
    address: Expr
    has_matrices: bool  # whether the map has a third dimension

    def prepare(self, matrix: Expr, begin: Expr) -> None:
        self._begin = begin
        self._matrix = (self.builder.bind(matrix),) if self.has_matrices else ()

    def copy(self, part: Expr, to: Expr, mbarrier: Expr) -> None:
        if self.tile.along_k:
            self._box(to, part * DEPTH, self._begin, mbarrier)
            return
        for line in range(0, self.tile.lines, ROW_ITEMS):
            self._box(to + u32(self.tile.offset(line)), self._begin + line, part * DEPTH, mbarrier)

    def _box(self, to: Expr, inner: Expr, outer: Expr, mbarrier: Expr) -> None:
        place = [self.builder.bind(inner), self.builder.bind(outer), *self._matrix]
        self.builder.do(ptx_hopper.copy_tensor(to, self.address, place, mbarrier))


def map_of_matrices(tile: Tile, matrices: int, lines: int, depth: int) -> TensorMap:
    """How copies of a tile's parts see matrices of `lines` by `depth`, rows along k or lines as the tile's."""
    inner, outer = (depth, lines) if tile.along_k else (lines, depth)
    rows = tile.lines if tile.along_k else DEPTH
    row_bytes = inner * _ITEM_BYTES
    more = [(matrices, row_bytes * outer, 1)] if matrices > 1 else []
    extents = (inner, outer, *(extent for extent, _, _ in more))
    strides = (row_bytes, *(stride for _, stride, _ in more))
    box = (ROW_ITEMS, rows, *(one for _, _, one in more))
    return TensorMap(0, _ITEM_BYTES, extents, strides, box, SWIZZLE_BYTES)
