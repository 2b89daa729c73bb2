"""What the input adds to the gates of all steps: one product, before the first step."""

from __future__ import annotations

from math import ceil

from tvm import tirx

from ...runtime.target import Target
from ..builder import Buffer, Expr, Index, KernelBuilder
from .recurrent_cells import Cell
from .recurrent_operands import PackGates, RecurrentOperands
from .recurrent_products import Element, Form, RowProduct, form_of
from .tile_product import Plane, TileProduct, choose_tile, emit


def project(builder: KernelBuilder, operands: RecurrentOperands, cell: Cell, target: Target) -> Buffer:
    """The workspace [direction, row of X, gate, hidden] with x W^T and the biases that do not belong to a later product."""
    depth, columns, rows = operands.inputs, cell.gates * operands.hidden, operands.steps * operands.batch
    projected = builder.workspace(operands.directions * rows * columns, operands.dtype)
    form = form_of(operands.group, operands.x, operands.w, rows, target)
    product = RowProduct(builder, form, rows, depth, target)
    tile = choose_tile(
        rows,
        columns,
        product.steps,
        builder.lanes(operands.dtype),
        target.vector_registers,
        shifted_loads=False,
        b_padded=True,
    )
    weights = operands.weights(operands.w, PackGates(1, (0,), tile.columns, form is not Form.NUMBERS))
    panels = ceil(columns / tile.columns)

    def element(row: Expr) -> Element:
        return lambda k: operands.load(operands.x, row * depth + k)

    def a(batch: Expr, panel: Expr, start: Expr, row: int, ks: Index) -> Expr | tuple[Expr, Expr]:
        return product.factor(start + row, ks[0], element(start + row))

    def b(batch: Expr, panel: Expr, start: Expr, column: Expr, ks: Index) -> Expr:
        place = ((batch * panels + panel) * product.steps + ks[0]) * tile.columns + column
        return product.weight(weights[place], operands.dtype)

    def store(batch: Expr, m: Expr, r: Expr, column: Expr, value: Expr) -> None:
        biased = value + _bias(operands, cell, batch, column) if operands.bias else value
        builder.store(projected, (batch * rows + m) * columns + column, biased)

    if form is Form.WORDS:
        with builder.chunks(rows, rows * depth) as row:
            product.round_row(row, element(row))
    all_tiles = TileProduct(
        operands.directions,
        rows,
        Plane(columns, columns, columns),
        (product.steps,),
        tile,
        operands.dtype,
        a,
        b,
        store,
        a_padded=False,
        b_padded=True,
        multiply_add=product.multiply_add,
        terms=product.terms,
    )
    sizes = [operands.group.types[name].size_bytes for name in (operands.x, operands.w)]
    emit(builder, all_tiles, a_bytes=sizes[0], b_bytes=sizes[1])
    return projected


def _bias(operands: RecurrentOperands, cell: Cell, direction: Expr, column: Expr) -> Expr:
    """The bias of a line of W, and that of R unless it belongs to the product with the state."""
    recurrent = operands.bias_of(direction, 1, column)
    for gate in cell.separate:
        belongs = tirx.And(column >= gate * operands.hidden, column < (gate + 1) * operands.hidden)
        recurrent = tirx.Select(belongs, operands.zero(), recurrent)
    return operands.bias_of(direction, 0, column) + recurrent
