"""Values as polynomials of other values, so that an activation is recognised however its arithmetic is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isclose

import onnx_ir as ir

from ...compiler.ir.constants import scalar_constant

_MAX_NODES = 16  # of one polynomial; GELU's longest spelling has ten
_MAX_DEGREE = 4
_TOLERANCE = {ir.DataType.DOUBLE: 1e-9, ir.DataType.FLOAT: 4e-6, ir.DataType.FLOAT16: 1e-3, ir.DataType.BFLOAT16: 8e-3}

Exponents = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Polynomial:
    """Coefficients by the exponents of each variable, none of them 0, and the nodes that compute it from the variables."""

    terms: dict[Exponents, float]
    nodes: frozenset[ir.Node]

    def equals(self, wanted: dict[Exponents, float], dtype: ir.DataType | None) -> bool:
        """Whether the coefficients are those wanted, as exactly as exporters write constants of this type."""
        tolerance = _TOLERANCE.get(dtype or ir.DataType.UNDEFINED)
        return (
            tolerance is not None
            and self.terms.keys() == wanted.keys()
            and all(isclose(value, wanted[key], rel_tol=tolerance) for key, value in self.terms.items())
        )


def polynomial_of(value: ir.Value, variables: Sequence[ir.Value]) -> Polynomial | None:
    """`value` as a polynomial of `variables`; None where other operators or values are in it, or too much of them."""
    return _Reader(variables).read(value)


def leaves_below(value: ir.Value) -> Iterator[ir.Value]:
    """`value` itself and what polynomials are made from on the way to it, nearest first: what may be its variable."""
    pending, seen = [value], set[ir.Value]()
    while pending and len(seen) < _MAX_NODES:
        one = pending.pop(0)
        if one in seen or scalar_constant(one) is not None:
            continue
        seen.add(one)
        yield one
        node = one.producer()
        if node is not None and node.domain == "" and node.op_type in _OPERATORS:
            pending.extend(operand for operand in node.inputs if operand is not None)


class _Reader:
    """One reading: each value is read once, however many paths lead to it."""

    def __init__(self, variables: Sequence[ir.Value]) -> None:
        self._known: dict[ir.Value, Polynomial | None] = {}
        self._ones = len(variables) * (0,)
        for place, value in enumerate(variables):
            unit = tuple(int(place == other) for other in range(len(variables)))
            self._known[value] = Polynomial({unit: 1.0}, frozenset())

    def read(self, value: ir.Value | None) -> Polynomial | None:
        if value is None:
            return None
        if value not in self._known:
            if len(self._known) > 2 * _MAX_NODES:
                return None
            self._known[value] = None
            self._known[value] = self._read(value)
        return self._known[value]

    def _read(self, value: ir.Value) -> Polynomial | None:
        number = scalar_constant(value)
        if number is not None:
            return Polynomial({self._ones: float(number)} if number else {}, frozenset())
        node = value.producer()
        if node is None or node.domain != "" or node.op_type not in _OPERATORS:
            return None
        terms = self._power(node) if node.op_type == "Pow" else self._combined(node)
        if terms is None or any(sum(exponents) > _MAX_DEGREE for exponents in terms):
            return None
        below = [one.nodes for one in map(self.read, node.inputs) if one is not None]
        return Polynomial({key: number for key, number in terms.items() if number}, frozenset([node]).union(*below))

    def _combined(self, node: ir.Node) -> dict[Exponents, float] | None:
        read = [self.read(value) for value in node.inputs]
        if any(one is None for one in read):
            return None
        first, *rest = [one.terms for one in read if one is not None]
        match node.op_type:
            case "Neg":
                return _scaled(first, -1.0)
            case "Add":
                return _sum(first, rest[0])
            case "Sub":
                return _sum(first, _scaled(rest[0], -1.0))
            case "Mul":
                return _product(first, rest[0])
        divisor = rest[0].get(self._ones, 0.0)
        return _scaled(first, 1 / divisor) if divisor and len(rest[0]) == 1 else None

    def _power(self, node: ir.Node) -> dict[Exponents, float] | None:
        base, exponent = self.read(node.inputs[0]), scalar_constant(node.inputs[1])
        if base is None or exponent not in (1, 2, 3):
            return None
        result = base.terms
        for _ in range(int(exponent) - 1):
            result = _product(result, base.terms)
        return result


_OPERATORS = frozenset(["Add", "Div", "Mul", "Neg", "Pow", "Sub"])


def _scaled(terms: dict[Exponents, float], factor: float) -> dict[Exponents, float]:
    return {key: value * factor for key, value in terms.items()}


def _sum(first: dict[Exponents, float], second: dict[Exponents, float]) -> dict[Exponents, float]:
    return {key: first.get(key, 0.0) + second.get(key, 0.0) for key in first.keys() | second.keys()}


def _product(first: dict[Exponents, float], second: dict[Exponents, float]) -> dict[Exponents, float]:
    result: dict[Exponents, float] = {}
    for left, a in first.items():
        for right, b in second.items():
            key = tuple(i + j for i, j in zip(left, right, strict=True))
            result[key] = result.get(key, 0.0) + a * b
    return result
