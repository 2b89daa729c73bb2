"""Polynomials, and values as polynomials of other values: what is computed, however its arithmetic is written."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from math import isclose
from typing import TypeVar

import onnx_ir as ir

from ...compiler.ir.constants import scalar_constant

_MAX_NODES = 16  # of one polynomial; GELU's longest spelling has ten
_MAX_DEGREE = 4
_TOLERANCE = {ir.DataType.DOUBLE: 1e-9, ir.DataType.FLOAT: 4e-6, ir.DataType.FLOAT16: 1e-3, ir.DataType.BFLOAT16: 8e-3}

Exponents = tuple[int, ...]
K = TypeVar("K", bound=Hashable)


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


def scaled(terms: dict[K, float], factor: float) -> dict[K, float]:
    """Coefficients, by monomial, of a polynomial times a number other than 0."""
    return {key: number * factor for key, number in terms.items()}


def added(first: dict[K, float], second: dict[K, float]) -> dict[K, float]:
    """The coefficients of a sum, none of them 0."""
    sums = {key: first.get(key, 0.0) + second.get(key, 0.0) for key in (first | second)}
    return {key: number for key, number in sums.items() if number}


def multiplied(first: dict[K, float], second: dict[K, float], join: Callable[[K, K], K | None]) -> dict[K, float] | None:
    """The coefficients of a product, none of them 0; None where `join` knows no product of two monomials."""
    products: dict[K, float] = {}
    for left, a in first.items():
        for right, b in second.items():
            key = join(left, right)
            if key is None:
                return None
            products[key] = products.get(key, 0.0) + a * b
    return {key: number for key, number in products.items() if number}


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
        return Polynomial(terms, frozenset([node]).union(*below))

    def _combined(self, node: ir.Node) -> dict[Exponents, float] | None:
        read = [self.read(value) for value in node.inputs]
        if any(one is None for one in read):
            return None
        first, *rest = [one.terms for one in read if one is not None]
        match node.op_type:
            case "Neg":
                return scaled(first, -1.0)
            case "Add":
                return added(first, rest[0])
            case "Sub":
                return added(first, scaled(rest[0], -1.0))
            case "Mul":
                return multiplied(first, rest[0], _joined)
        divisor = rest[0].get(self._ones, 0.0)
        return scaled(first, 1 / divisor) if divisor and len(rest[0]) == 1 else None

    def _power(self, node: ir.Node) -> dict[Exponents, float] | None:
        base, exponent = self.read(node.inputs[0]), scalar_constant(node.inputs[1])
        if base is None or exponent not in (1, 2, 3):
            return None
        result: dict[Exponents, float] | None = base.terms
        for _ in range(int(exponent) - 1):
            result = None if result is None else multiplied(result, base.terms, _joined)
        return result


_OPERATORS = frozenset(["Add", "Div", "Mul", "Neg", "Pow", "Sub"])


def _joined(first: Exponents, second: Exponents) -> Exponents:
    return tuple(i + j for i, j in zip(first, second, strict=True))
