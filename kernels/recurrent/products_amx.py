"""Products of a recurrence by AMX: rows of the input and of the states as bfloat16 terms or bytes, weights packed in AMX tiles.

The input projection is one product for all steps. A step multiplies the rows of the state, 32 at a time, by panels of 32 hidden
units of each gate, so that a panel's units are finished in the epilogue from sums in L1, as they are on vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, prod

import numpy as np
from tvm import tirx

from ...runtime.hardware.machine import Machine
from ...runtime.plan import TensorType
from ...runtime.symbolic.sizes import Size, SizeLike, estimating, greatest_of
from ...runtime.target import Target
from ..codegen.builder import Expr, KernelBuilder, unravel
from ..cost.amx import tile_step_cycles, vector_step_cycles
from ..groups.group import Group
from ..microkernels.amx_blocks import AmxMicroKernel, TileOperand, packed_operand, tile_chunks, work_of_dots
from ..microkernels.amx_packing import LINES, TERM_WORDS, PackTiles, PanelLayout
from ..microkernels.amx_unit import BF16_TILES, DEPTH, ROWS, U8_TILES, TileUnit, tile_unit
from ..microkernels.bf16_split import split
from ..microkernels.packed_gemm import Scratch
from ..microkernels.packing import PackPanels
from ..template.contract import Operand
from .operands import PackGates, RecurrentOperands
from .products import Element, pitch_of
from .quantized_rows import QuantizedRows

Store = Callable[[Expr, Expr, Expr, Expr], None]  # of (direction, row, column, value)


def terms_of(group: Group, x: str, weights: str, target: Target) -> int:
    """The number of bfloat16 terms by which AMX computes the products of a recurrence over `x`; 0 where it cannot."""
    kinds = group.types[x].dtype, group.types[weights].dtype
    if not target.has_tiles or weights not in group.constants or not set(kinds) <= {"float32", "bfloat16"}:
        return 0
    if kinds[1] == "float32":
        return max(group.tolerance.terms, 2)
    return 1 if group.tolerance.may_round or kinds[0] == "bfloat16" else 0


@estimating
def pays(rows: SizeLike, columns: int, depth: int, terms: int, machine: Machine, k_pack: int = 2) -> bool:
    """Whether AMX is faster than vectors for a step's product of rows x depth by depth x columns; `k_pack` 4: of bytes."""
    if terms == 0 or depth == 0:
        return False
    steps = ceil(depth / k_pack) if k_pack > 2 else depth  # on vectors
    on_tiles = tile_step_cycles(rows, columns, depth, terms, machine, k_pack)
    return on_tiles < vector_step_cycles(rows, columns, steps, machine)


@dataclass(frozen=True)
class GatePanels:
    """Pack as `PackGates` with a part a gate, each part a panel for AMX: [directions, panels * gates, depth, columns]."""

    gates: PackGates

    def packed_type(self, source: TensorType) -> TensorType:
        directions, panels, parts, depth, _, columns = self.gates.packed_type(source).shape
        return TensorType((directions, panels * parts, depth, columns), source.dtype)

    def __call__(self, array: np.ndarray) -> np.ndarray:
        return self.gates(array).reshape(self.packed_type(TensorType(array.shape, "")).shape)


class TiledRows:
    """Rows of `depth` float32 numbers in the workspace as bfloat16 terms, [group, row, term, k], equally many rows a group.

    Rows are padded with zeros to blocks of 32, k to whole tiles. A row takes an odd number of cache lines, so that a tile's rows
    do not conflict in L1.
    """

    rounds = True  # rows are rounded to terms before they are multiplied
    product = BF16_TILES

    def __init__(self, builder: KernelBuilder, groups: int, rows: SizeLike, depth: int, terms: int) -> None:
        self.builder, self.groups, self.rows, self.depth, self.terms = builder, groups, rows, depth, terms
        self.filled, self.blocks = ceil(depth / DEPTH) * DEPTH, ceil(rows / LINES)
        self._pitch = 2 * pitch_of(terms * self.filled // 2)
        self._group = self.blocks * LINES * self._pitch
        self._buffer = builder.workspace(groups * self._group, "uint16")

    @property
    def is_rough(self) -> bool:
        """Whether what rows are rounded to is no more exact than bfloat16."""
        return self.terms == 1

    def finished(self, total: Expr, row: Expr, line: Expr) -> Expr:
        """The product of a row by line `line`, over all directions, of the weights: the sum itself."""
        return total

    def clear_rest(self) -> None:
        """Store zeros to the padding rows."""
        rest = self.blocks * LINES - self.rows
        if isinstance(rest, Size) or rest:
            with self.builder.loop(self.groups, name="group") as group:
                self._clear(self.builder.bind(group * self._group + self.rows * self._pitch), rest * self._pitch)

    def round_row(self, row: Expr, element: Element) -> None:
        """Store the terms of a row; rows are numbered over all groups."""
        builder = self.builder
        group, line = (row, 0) if self.rows == 1 else (tirx.floordiv(row, self.rows), tirx.floormod(row, self.rows))
        begin = builder.bind(group * self._group + line * self._pitch)

        def store(k: Expr) -> None:
            for term, part in enumerate(split(builder, element(k), self.terms)):
                builder.store(self._buffer, begin + (term * self.filled) + k, part)

        builder.vector_loop(self.depth, builder.lanes("float32"), store)
        for term in range(self.terms):
            self._clear(builder.bind(begin + (term * self.filled + self.depth)), self.filled - self.depth)

    def lines(self, group: Expr, block: Expr) -> TileOperand:
        """The tiles of block `block` (32 rows) of a group."""
        base = self.builder.bind((group if self.groups > 1 else 0) * self._group + block * (LINES * self._pitch))

        def at(ks: tuple[Expr, ...], term: int, half: Expr) -> Expr:
            return base + half * (ROWS * self._pitch) + term * self.filled + ks[0] * DEPTH

        return TileOperand(self._buffer, self._pitch, at)

    def _clear(self, begin: Expr, count: SizeLike) -> None:
        zero = tirx.const(0, "uint16")
        self.builder.vector_loop(count, self.builder.lanes("uint16"), lambda i: self.builder.store(self._buffer, begin + i, zero))


class TiledBytes(QuantizedRows):
    """The same of rows of uint8 with a scale and a zero point each. What pads them is never written: weights are zero there."""

    product, terms = U8_TILES, 1

    def __init__(self, operands: RecurrentOperands, weights: str, groups: int, rows: int) -> None:
        depth = operands.group.types[weights].shape[2]
        self.groups, self.filled, self.blocks = groups, ceil(depth / self.product.depth) * self.product.depth, ceil(rows / LINES)
        super().__init__(operands, weights, groups, rows, self.blocks * LINES, self.filled)

    def clear_rest(self) -> None:
        """Nothing."""

    def lines(self, group: Expr, block: Expr) -> TileOperand:
        """The tiles of block `block` (32 rows) of a group."""
        first = (group if self.groups > 1 else 0) * self.group_rows + block * LINES
        base = self.builder.bind(first * self.pitch)

        def at(ks: tuple[Expr, ...], term: int, half: Expr) -> Expr:
            return base + half * (ROWS * self.pitch) + ks[0] * self.product.depth

        return TileOperand(self.bytes, self.pitch, at)


class TiledWeights:
    """Constant weights packed in panels of 32 columns, and the product of a block of rows with a panel."""

    def __init__(
        self, operands: RecurrentOperands, name: str, panels: PanelLayout, rows: TiledRows | TiledBytes, unit: TileUnit
    ) -> None:
        self.builder, self.rows, self.unit = operands.builder, rows, unit
        pack = PackTiles(panels, rows.terms, True, product=rows.product)
        key, kind = f"{name}:{pack}", pack.packed_type(operands.group.types[name])
        operands.packed[key] = Operand(name, pack)
        self._buffer = operands.builder.parameter(key, kind.elements // rows.product.k_pack, "uint32")
        self.panels, self._steps = kind.shape[1], rows.filled // rows.product.depth
        self._blocks = AmxMicroKernel(
            self.builder, unit, (self._steps,), rows.terms, (1 if greatest_of(rows.rows) <= ROWS else 2, 2)
        )

    def multiply(self, group: Expr, block: Expr, panel: Expr, sums: Scratch) -> None:
        """Store the product of a group's block of rows with its panel to `sums`, 32 rows of 32."""
        size = self._steps * self.rows.terms * TERM_WORDS
        base = self.builder.bind((group * self.panels + panel) * size)
        b = packed_operand(self._buffer, base, self.rows.terms, words=True, product=self.rows.product)
        is_known = not isinstance(self.rows.rows, Size)  # else all blocks have 32 rows, some of which are zeros
        has_short = is_known and self.rows.blocks > 1 and 0 < self.rows.rows % LINES <= ROWS
        is_short = tirx.EQ(block, self.rows.blocks - 1) if has_short else None
        self._blocks.multiply(self.rows.lines(group, block), b, sums, is_short=is_short)


def project_on_tiles(operands: RecurrentOperands, rows: TiledRows | TiledBytes, target: Target, store: Store) -> None:
    """The input projection x W^T of all steps and directions: each thread takes panels of weights, and all rows by each."""
    builder, (depth, directions) = operands.builder, (operands.inputs, operands.directions)
    with builder.chunks(rows.rows, rows.rows * depth) as row:
        rows.round_row(row, lambda k: operands.load(operands.x, row * depth + k))
    rows.clear_rest()
    columns, unit = operands.gates * operands.hidden, tile_unit(builder, target, rows.product)
    weights = TiledWeights(operands, operands.w, PackPanels((directions, columns, depth), (0, 1, 2), 1, 1, LINES), rows, unit)
    extents = directions, weights.panels, rows.blocks
    dots = prod(extents) * ceil(depth / rows.product.depth) * 4
    with tile_chunks(builder, unit, prod(extents), work_of_dots(dots, rows.terms)) as (chunk, sums):
        direction, panel, block = (builder.bind(part) for part in unravel(chunk, extents))
        weights.multiply(direction, block, panel, sums)
        _store_block(builder, (direction, panel, block), (rows, columns), sums, store)


def _store_block(
    builder: KernelBuilder, place: tuple[Expr, Expr, Expr], size: tuple[TiledRows | TiledBytes, int], sums: Scratch, store: Store
) -> None:
    """Call `store` for the sums of a block that are within the edges."""
    (direction, panel, block), (rows, columns), lanes = place, size, builder.lanes("float32")
    top, left = builder.bind(block * LINES), builder.bind(panel * LINES)
    width = LINES if columns % LINES == 0 else builder.bind(tirx.min(columns - left, LINES))
    with builder.loop(builder.bind(tirx.min(rows.rows - top, LINES)), name="row") as row:
        line, base = builder.bind(top + row), builder.bind(row * LINES)

        def element(c: Expr) -> None:
            value = rows.finished(sums[base + c], line, direction * columns + left + c)
            store(direction, line, left + c, value)

        builder.dynamic_vector_loop(0, width, lanes, element)
