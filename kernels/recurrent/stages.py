"""The stages of a recurrence's step: how each multiplies the state that it reads, on vectors or by AMX."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from ...runtime.target import Target
from ..codegen.builder import Buffer
from ..cost.amx import tile_step_cycles
from ..microkernels.amx_packing import LINES
from ..microkernels.amx_unit import TileUnit
from ..microkernels.register_tile import Tile
from ..template.kernel import machine_of
from .cells import Cell, Stage
from .operands import PackGates, RecurrentOperands
from .products import GateTile, RowProduct, choose_gate_tile, row_format
from .products_amx import GatePanels, TiledBytes, TiledRows, TiledWeights, pays, terms_of
from .quantized_rows import ByteProduct


@dataclass(frozen=True)
class StagePlan:
    """A stage, its rows of the state, register tiles, and weights packed in `panels` panels: `weights`, or `tiled` for AMX."""

    stage: Stage
    rows: RowProduct | ByteProduct | TiledRows | TiledBytes
    tiles: GateTile
    panels: int
    near_bytes: int  # of L2
    weights: Buffer = None
    tiled: TiledWeights | None = None

    @property
    def cycles(self) -> float:
        """Estimated cycles of the stage in a step of one direction on one core."""
        return self.panels * self.tiles.cycles

    @property
    def prefetches_weights(self) -> bool:
        """Whether weights are prefetched: those of a direction exceed L2, and a tile has rows enough to hide the prefetches."""
        if isinstance(self.rows, TiledRows | TiledBytes):
            return False
        tile = self.tiles.tile
        return tile.rows > 1 and self.panels * self.tiles.parts * self.rows.steps * tile.columns * 4 > self.near_bytes

    def prefetches_projection(self, share_bytes: int) -> bool:
        """Whether a tile's input projection is prefetched: `share_bytes`, all of it, exceed L2."""
        return self.tiled is None and self.tiles.tile.rows > 1 and share_bytes > self.near_bytes

    def place_of(self, gate: int) -> tuple[int, int]:
        """The part of a panel that has a gate's sums, and the column there of its first unit."""
        part, position = divmod(self.stage.gates.index(gate), len(self.stage.gates) // self.tiles.parts)
        return part, position * self.tiles.units


def plan_stage(operands: RecurrentOperands, cell: Cell, stage: Stage, unit: TileUnit | None, target: Target) -> StagePlan:
    """The plan of a stage on vectors, or by AMX where `unit` is given and faster."""
    gates, builder = stage.gates, operands.builder
    if operands.is_quantized(operands.r):
        size = operands.batch, len(gates) * operands.hidden, operands.hidden
        if unit is not None and pays(*size, 1, target.machine, unit.product.k_pack):
            rows_of_bytes = TiledBytes(operands, operands.r, operands.directions, operands.batch)
            return _plan_on_tiles(operands, cell, stage, rows_of_bytes, unit)
        return _plan_on_bytes(operands, cell, stage, target)
    terms = terms_of(operands.group, operands.x, operands.r, target)
    if unit is not None and pays(operands.batch, len(gates) * operands.hidden, operands.hidden, terms, target.machine):
        tiled = TiledRows(builder, operands.directions, operands.batch, operands.hidden, terms)
        return _plan_on_tiles(operands, cell, stage, tiled, unit)
    number_format = row_format(operands.group, operands.x, operands.r, operands.batch, target)
    rows = RowProduct(builder, number_format, operands.directions * operands.batch, operands.hidden)
    tiles = choose_gate_tile(
        operands.batch,
        len(gates),
        operands.hidden,
        rows.steps,
        machine_of(target, operands.dtype),
    )
    weights = operands.weights(operands.r, PackGates(cell.gates, gates, tiles.units, number_format.k_pack, tiles.parts))
    return StagePlan(stage, rows, tiles, ceil(operands.hidden / tiles.units), target.machine.l2.size_bytes, weights)


def _plan_on_bytes(operands: RecurrentOperands, cell: Cell, stage: Stage, target: Target) -> StagePlan:
    """The plan of a stage by weights of int8 on vectors."""
    rows = ByteProduct(operands, operands.r, operands.directions * operands.batch, target)
    machine = rows.format.machine(machine_of(target, operands.dtype))
    tiles = choose_gate_tile(operands.batch, len(stage.gates), operands.hidden, rows.steps, machine)
    pack = PackGates(cell.gates, stage.gates, tiles.units, rows.format.k_pack, tiles.parts, joins_neighbours=True)
    panels, near_bytes = ceil(operands.hidden / tiles.units), target.machine.l2.size_bytes
    return StagePlan(stage, rows, tiles, panels, near_bytes, operands.weights(operands.r, pack))


def _plan_on_tiles(
    operands: RecurrentOperands, cell: Cell, stage: Stage, rows: TiledRows | TiledBytes, unit: TileUnit
) -> StagePlan:
    """The plan of a stage by AMX: each gate is a part of a panel, two tiles wide."""
    gates, builder = stage.gates, operands.builder
    rows.clear_rest()
    lanes = builder.lanes(operands.dtype)
    panels = GatePanels(PackGates(cell.gates, gates, LINES, parts=len(gates)))
    size = operands.batch, len(gates) * LINES, operands.hidden
    cycles = tile_step_cycles(*size, rows.terms, builder.machine, rows.product.k_pack)
    tiles = GateTile(Tile(LINES, LINES // lanes, lanes), len(gates), LINES, cycles)
    weights = TiledWeights(operands, operands.r, panels, rows, unit)
    near_bytes = builder.machine.l2.size_bytes
    return StagePlan(stage, rows, tiles, ceil(operands.hidden / LINES), near_bytes, tiled=weights)
