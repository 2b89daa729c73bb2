"""The update of a state, multiplied out: so that all ways to write it are one."""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import partial

import onnx_ir as ir

from ....compiler.ir.constants import scalar_constant
from ..polynomial import added, multiplied, scaled
from .columns import Columns, stripped
from .terms import gate_of

Monomial = frozenset[Columns]
Polynomial = dict[Monomial, float]
_MAX_MONOMIALS, _MAX_DEPTH = 6, 8


def expanded(columns: Columns, states: Container[ir.Value]) -> Polynomial | None:
    """The columns as a sum of products of gates and states: each product with its factor; None where they are no such sum.

    Operands that are `states` are not looked into.
    """
    return _expand(stripped(columns), states, _MAX_DEPTH, is_factor=False)


def _expand(columns: Columns, states: Container[ir.Value], depth: int, *, is_factor: bool) -> Polynomial | None:
    node = columns.producer
    atom: Polynomial = {frozenset([columns]): 1.0}
    if node is None or node.op_type not in _OPERATORS or (is_factor and node.op_type != "Mul" and not _reads_gate(node, columns)):
        return atom
    if depth < _MAX_DEPTH and columns.value in states:
        return atom
    if depth == 0:
        return None
    values = node.inputs[1:] if node.op_type == "Where" else node.inputs
    operands = [_operand(value, columns, states, depth - 1, node.op_type == "Mul") for value in values]
    known = [one for one in operands if one is not None]
    if len(known) < len(operands):
        return None
    result = _OPERATORS[node.op_type](*known)
    return result if result is not None and len(result) <= _MAX_MONOMIALS else None


def _operand(
    value: ir.Value | None, columns: Columns, states: Container[ir.Value], depth: int, is_factor: bool
) -> Polynomial | None:
    number = scalar_constant(value)
    if number is not None:
        return {frozenset(): float(number)}
    same = columns.of(value)
    return None if same is None else _expand(stripped(same), states, depth, is_factor=is_factor)


def _reads_gate(node: ir.Node, columns: Columns) -> bool:
    """Whether a sum that is multiplied is one of gates and states, such as 1 - z or h - n, rather than a state itself."""
    operands = [columns.of(value) for value in node.inputs]
    return any(one is not None and gate_of(stripped(one)) is not None for one in operands)


def _difference(first: Polynomial, second: Polynomial) -> Polynomial:
    return added(first, scaled(second, -1.0))


def _joined(first: Monomial, second: Monomial) -> Monomial | None:
    """The product of two products; None where it would have a square: no recurrent operator has any."""
    return None if first & second else first | second


def _either(first: Polynomial, second: Polynomial) -> Polynomial | None:
    """Where, if both branches are the same: torch.lerp chooses the spelling that rounds better."""
    return first if first == second else None


_OPERATORS: dict[str, Callable[..., Polynomial | None]] = {
    "Add": added,
    "Mul": partial(multiplied, join=_joined),
    "Neg": partial(scaled, factor=-1.0),
    "Sub": _difference,
    "Where": _either,
}
