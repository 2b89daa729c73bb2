"""The input projection: the product of the inputs of all steps by W, before the first step."""

from __future__ import annotations

from math import ceil

from tvm import tirx

from ...runtime.target import Target
from ..codegen.builder import Buffer, Expr, Index, KernelBuilder
from ..microkernels.register_tile import Plane, TileProduct, choose_tile, emit
from ..template.kernel import machine_of
from .cells import Cell
from .operands import PackGates, RecurrentOperands
from .products import Element, RowProduct, row_format
from .products_amx import Store, TiledBytes, TiledRows, pays, project_on_tiles, terms_of
from .quantized_rows import ByteProduct

_BYTES_OF_WORD = 4


def project(builder: KernelBuilder, operands: RecurrentOperands, cell: Cell, target: Target) -> Buffer:
    """A workspace [direction, row of X, gate, hidden] with x W^T and the biases that do not belong to a product with R."""
    depth, columns, rows = operands.inputs, operands.gates * operands.hidden, operands.steps * operands.batch
    projected = builder.workspace(operands.directions * rows * columns, operands.dtype)

    def store(direction: Expr, m: Expr, column: Expr, value: Expr) -> None:
        biased = value + bias_of_share(operands, cell, direction, column) if operands.bias else value
        builder.store(projected, (direction * rows + m) * columns + column, biased)

    terms = terms_of(operands.group, operands.x, operands.w, target)
    if operands.is_quantized(operands.w) and target.has_tiles and pays(rows, columns, depth, 1, target.machine, _BYTES_OF_WORD):
        project_on_tiles(operands, TiledBytes(operands, operands.w, 1, rows), target, store)
    elif pays(rows, columns, depth, terms, target.machine):
        project_on_tiles(operands, TiledRows(builder, 1, rows, depth, terms), target, store)
    else:
        _project_on_vectors(builder, operands, target, store)
    return projected


def _project_on_vectors(builder: KernelBuilder, operands: RecurrentOperands, target: Target, store: Store) -> None:
    depth, columns, rows = operands.inputs, operands.gates * operands.hidden, operands.steps * operands.batch
    product = _row_product(operands, rows, target)
    number_format = product.format
    tile = choose_tile(
        rows,
        columns,
        product.steps,
        number_format.machine(machine_of(target, operands.dtype)),
        shifted_loads=False,
        b_padded=True,
        cuts_last=True,
    )
    joins = operands.is_quantized(operands.w)
    pack = PackGates(1, (0,), tile.columns, number_format.k_pack, joins_neighbours=joins)
    weights = operands.weights(operands.w, pack)
    panels = ceil(columns / tile.columns)

    def element(row: Expr) -> Element:
        return lambda k: operands.load(operands.x, row * depth + k)

    def a(batch: Expr, panel: Expr, start: Expr, row: int, ks: Index) -> Expr | tuple[Expr, Expr]:
        return product.factor(start + row, ks[0], element(start + row))

    def b(batch: Expr, panel: Expr, start: Expr, column: Expr, ks: Index) -> Expr:
        place = ((batch * panels + panel) * product.steps + ks[0]) * tile.columns + column
        return product.weight(weights[place])

    if product.rounds:
        with builder.chunks(rows, rows * depth) as row:
            product.round_row(row, element(row))
    all_tiles = TileProduct(
        operands.directions,
        rows,
        Plane(columns, columns, columns),
        (product.steps,),
        tile,
        number_format,
        a,
        b,
        lambda batch, m, r, column, value: store(batch, m, column, product.finished(value, m, batch * columns + column)),
        a_padded=False,
        b_padded=True,
    )
    sizes = [operands.group.types[name].size_bytes for name in (operands.x, operands.w)]
    emit(builder, all_tiles, a_bytes=sizes[0], b_bytes=sizes[1])


def _row_product(operands: RecurrentOperands, rows: int, target: Target) -> RowProduct | ByteProduct:
    if operands.is_quantized(operands.w):
        return ByteProduct(operands, operands.w, rows, target)
    number_format = row_format(operands.group, operands.x, operands.w, rows, target)
    return RowProduct(operands.builder, number_format, rows, operands.inputs)


def bias_of_share(operands: RecurrentOperands, cell: Cell, direction: Expr, column: Expr) -> Expr:
    """The bias of a gate's unit: that of W, and that of R unless it belongs to the product with the state."""
    recurrent = operands.bias_of(direction, 1, column)
    for gate in cell.separate:
        belongs = tirx.And(column >= gate * operands.hidden, column < (gate + 1) * operands.hidden)
        recurrent = tirx.Select(belongs, operands.zero(), recurrent)
    return operands.bias_of(direction, 0, column) + recurrent
