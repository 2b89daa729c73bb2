"""What an update of a state may be: the gates of a GRU, LSTM or RNN that would compute it, before their products have roles."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

import onnx_ir as ir

from ....compiler.ir.rewriter import Rejection
from .columns import Columns, pieces_of, stripped
from .polynomials import Polynomial, expanded
from .terms import Gate, Product, Scaled, gate_of, terms_of


@dataclass(frozen=True, slots=True)
class Update:
    """An operator that may compute a hidden state, with its gates in ONNX's order; those of sign -1 are 1 - s of a sigmoid s.

    `output` is that of the cell's activation, for LSTM. `hidden` is the old state where the update itself shows it (GRU); `reset`
    is what the new gate multiplies by: the columns of the reset gate times the state, or a product that it scales.
    """

    op_type: str
    gates: tuple[Gate, ...]
    signs: tuple[int, ...]
    hidden: Columns | None = None
    reset: Columns | Scaled | None = None
    cell: Columns | None = None
    cell_out: ir.Value | None = None
    output: Gate | None = None


def updates_of(root: Columns, states: Container[ir.Value]) -> Iterator[Update | Rejection]:
    """All readings of an update, the likely ones first, and why others are none. `states` are values that may be states."""
    node = root.producer
    if node is None:
        return
    if node.op_type == "Mul":
        yield from _lstm(root, states)
    elif node.op_type in ("Add", "Sub", "Where"):
        yield from _gru(root, states)
    elif (gate := gate_of(root)) is not None:
        yield Update("RNN", (gate,), (1,))


def _gru(root: Columns, states: Container[ir.Value]) -> Iterator[Update | Rejection]:
    """(1 - z) n + z h, where either of the two may be the state."""
    parts = _interpolation(expanded(root, states))
    if parts is None:
        return
    first, second, weight = parts
    update = gate_of(weight)
    for new, hidden, sign in ((first, second, 1), (second, first, -1)):
        gate = gate_of(new)
        if update is None or gate is None:
            continue
        reset = _reset_of(gate, hidden)
        if isinstance(reset, Rejection):
            yield reset
        elif reset is not None:
            yield Update("GRU", (update, reset[0], gate), (sign, 1, 1), hidden=hidden, reset=reset[1])


def _reset_of(new: Gate, hidden: Columns) -> tuple[Gate, Columns | Scaled] | Rejection | None:
    """The reset gate of a GRU's new gate, and where it stands; a Rejection where that is no sum that a gate may have."""
    terms = terms_of(new.argument)
    if isinstance(terms, Rejection):
        return terms
    for term in terms:
        if isinstance(term, Scaled) and (gate := gate_of(term.gate)) is not None:
            return gate, term
        for piece in pieces_of(term.source) if isinstance(term, Product) else ():
            node = piece.producer
            operands = [] if node is None or node.op_type != "Mul" else [piece.of(value) for value in node.inputs]
            factors = [stripped(one) for one in operands if one is not None]
            if len(factors) == 2 and hidden in factors:
                gate = gate_of(factors[1 - factors.index(hidden)])
                if gate is not None:
                    return gate, piece
    return None


def _lstm(root: Columns, states: Container[ir.Value]) -> Iterator[Update]:
    """o * tanh(c') with c' = f * c + i * g, or with one gate for both: f = 1 - i."""
    product = expanded(root, states)
    if product is None or len(product) != 1:
        return
    ((atoms, factor),) = product.items()
    if factor != 1 or len(atoms) != 2:
        return
    for first, second in _orders(atoms):
        out, output = gate_of(first), gate_of(second)
        if out is None or output is None:
            continue
        cell_out = output.argument
        if cell_out.producer is None or not cell_out.is_whole:
            continue
        found = []
        for (enter, keep, new), (enter_sign, keep_sign), cell in _cell_updates(expanded(cell_out, states)):
            gates, signs = (enter, out, keep, new), (enter_sign, 1, keep_sign, 1)
            found.append(Update("LSTM", gates, signs, cell=cell, cell_out=cell_out.value, output=output))
        yield from sorted(found, key=lambda one: sum(gate.activation != out.activation for gate in one.gates[:3]))


def _cell_updates(update: Polynomial | None) -> Iterator[tuple[tuple[Gate, Gate, Gate], tuple[int, int], Columns]]:
    """Gates (input, forget, new), the signs of input and forget gate, and the old cell."""
    if update is None:
        return
    parts = _interpolation(update)
    if parts is not None:
        first, second, weight = parts
        for new, cell, signs in ((second, first, (1, -1)), (first, second, (-1, 1))):
            both, gate = gate_of(weight), gate_of(new)
            if both is not None and gate is not None:
                yield (both, both, gate), signs, cell
        return
    if len(update) != 2 or any(factor != 1 or len(atoms) != 2 for atoms, factor in update.items()):
        return
    one, other = update
    for kept, entered in ((one, other), (other, one)):
        for keep, cell in _orders(kept):
            for enter, new in _orders(entered):
                gates = [gate for atom in (enter, keep, new) if (gate := gate_of(atom)) is not None]
                if len(gates) == 3:
                    yield (gates[0], gates[1], gates[2]), (1, 1), cell


def _interpolation(update: Polynomial | None) -> tuple[Columns, Columns, Columns] | None:
    """The a, b, w of a + w (b - a)."""
    if update is None or sorted((len(atoms), factor) for atoms, factor in update.items()) != [(1, 1.0), (2, -1.0), (2, 1.0)]:
        return None
    (start,) = next(atoms for atoms in update if len(atoms) == 1)
    falling = next(atoms for atoms, factor in update.items() if factor == -1)
    rising = next(atoms for atoms, factor in update.items() if factor == 1 and len(atoms) == 2)
    common, others = falling & rising, falling ^ rising
    if start not in falling or len(common) != 1 or start not in others:
        return None
    (weight,), (end,) = common, others - {start}
    return start, end, weight


def _orders(atoms: frozenset[Columns]) -> list[tuple[Columns, Columns]]:
    """Both orders of two atoms, the same in every run."""
    one, other = sorted(atoms, key=lambda columns: (str(columns.value.name), columns.begin))
    return [(one, other), (other, one)]
