"""GELU, SiLU and hard-swish: products of a value and a sigmoid-shaped function of it.

The argument of the function and the result are compared as polynomials, so that neither the order of factors nor where a half
is multiplied in makes a difference. D. Hendrycks and K. Gimpel, Gaussian Error Linear Units, 2016, for GELU and both of its
approximations, by tanh and by a sigmoid.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import pi, sqrt

import onnx_ir as ir

from ....compiler.ir.constants import scalar_constant
from ....compiler.ir.matching import has_same_shape
from ....compiler.ir.rewriter import Rejection
from ..polynomial import Exponents, Polynomial, leaves_below, polynomial_of
from .spelling import Attributes, Spelling

_STEPS = 6  # nodes between the function and the result, at most
_TANH = sqrt(2 / pi)
_CUBE = 0.044715


@dataclass(frozen=True, slots=True)
class _Formula:
    """result = outer(x, function(inner(x))); an inner polynomial of None is any multiple of x, which becomes alpha."""

    op_type: str
    attributes: Attributes
    since: int
    inner: dict[Exponents, float] | None
    outer: dict[Exponents, float] = field(default_factory=lambda: {(1, 1): 1.0})


_HALVES: dict[Exponents, float] = {(1, 0): 0.5, (1, 1): 0.5}
_GELU_TANH = {"approximate": "tanh"}
_FORMULAS: dict[str, tuple[_Formula, ...]] = {
    "Erf": (_Formula("Gelu", {"approximate": "none"}, 20, {(1,): sqrt(0.5)}, _HALVES),),
    "Tanh": (_Formula("Gelu", _GELU_TANH, 20, {(1,): _TANH, (3,): _TANH * _CUBE}, _HALVES),),
    "Sigmoid": (
        _Formula("Gelu", _GELU_TANH, 20, {(1,): 2 * _TANH, (3,): 2 * _TANH * _CUBE}),  # 1 + tanh(u) = 2 sigmoid(2u)
        _Formula("Swish", {}, 24, None),
    ),
    "HardSigmoid": (_Formula("HardSwish", {}, 14, {(1,): 1.0}),),
    "Clip": (
        _Formula("HardSwish", {}, 14, {(0,): 3.0, (1,): 1.0}, {(1, 1): 1 / 6}),
        _Formula("HardSwish", {}, 14, {(0,): 0.5, (1,): 1 / 6}),
    ),
}  # fmt: skip


def activation(function: ir.Node) -> Spelling | Rejection | None:
    """The activation that is made from `function`, an Erf, Tanh, Sigmoid, HardSigmoid or Clip."""
    if function.domain != "" or function.op_type not in _FORMULAS:
        return None
    argument, value = function.inputs[0], function.outputs[0]
    if argument is None:
        return None
    for x in leaves_below(argument):
        inner = polynomial_of(argument, (x,))
        if inner is None:
            continue
        for formula in _FORMULAS[function.op_type]:
            attributes = _attributes(formula, function, inner, x)
            if attributes is None:
                continue
            for last, outer in _results(x, value, formula):
                core, nodes = frozenset([function, last]), inner.nodes | outer.nodes
                found = Spelling(formula.op_type, (x,), attributes, formula.since, last, core, nodes)
                return found.obstacle() or found
    return None


def _attributes(formula: _Formula, function: ir.Node, inner: Polynomial, x: ir.Value) -> Attributes | None:
    """Those of the operator, if the function and its argument are the formula's."""
    if formula.inner is None:
        return {"alpha": inner.terms[1,]} if inner.terms.keys() == {(1,)} else None
    if not inner.equals(formula.inner, x.dtype) or not _is_standard(function, formula):
        return None
    return formula.attributes


def _is_standard(function: ir.Node, formula: _Formula) -> bool:
    """Whether a HardSigmoid or Clip has the parameters of hard-swish."""
    if function.op_type == "HardSigmoid":
        alpha, beta = (function.attributes.get_float(key, default) for key, default in (("alpha", 0.2), ("beta", 0.5)))
        return abs(alpha - 1 / 6) < 1e-6 and abs(beta - 0.5) < 1e-6
    if function.op_type == "Clip":
        top = 1.0 if formula.outer[1, 1] == 1.0 else 6.0
        return len(function.inputs) == 3 and [scalar_constant(value) for value in function.inputs[1:]] == [0.0, top]
    return True


def _results(x: ir.Value, value: ir.Value, formula: _Formula) -> Iterator[tuple[ir.Node, Polynomial]]:
    """The nodes after the function that compute the formula's result, nearest first."""
    pending = [(reader, 1) for reader in value.consumers()]
    seen: set[ir.Node] = set()
    while pending and len(seen) < 2 * _STEPS:
        node, steps = pending.pop(0)
        if node in seen or node.graph is not value.graph:
            continue
        seen.add(node)
        found = polynomial_of(node.outputs[0], (x, value))
        if found is None:
            continue
        if found.equals(formula.outer, x.dtype) and has_same_shape(node.outputs[0], x):
            yield node, found
        elif steps < _STEPS:
            pending.extend((reader, steps + 1) for reader in node.outputs[0].consumers())
