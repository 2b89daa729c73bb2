"""Whether the inputs of a graph may be made longer along a named dimension, without a change of what counts of its results.

A value carries a dimension where what counts of it, its first parts, depends on what counts of the inputs alone, and not on how
many parts there are: so what is behind the end of the inputs, whatever it is, is behind the end of the results. What mixes parts
(a sum over them, a product that contracts them, windows along them), and what computes with their number, is refused by name.
This is of ONNX's operators, not of sizes that a kernel likes; `rules.py` has what is known of each.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from ..ir.rewriter import Rejection
from ..ir.symbolic.symbols import SizeDim, domain_of_model
from .carry import Carries, Carry, MixedError, Question, unexplained
from .rules import carried


def carried_outputs(model: ir.Model, names: Collection[str]) -> tuple[Carries, ...] | Rejection:
    """Along which axes the dimensions `names` lie in each output of a graph; or why padding of its inputs would be seen.

    Shapes are known, as sizes of the dimensions; each of `names` has several sizes. Pure: nothing is changed.
    """
    domain = domain_of_model(model)
    assert domain is not None, "the sizes of a graph are symbolic"
    found: dict[ir.Value, Carries] = {}
    for value in model.graph.inputs:
        found[value] = _of_input(value, names)
        if fault := unexplained(value, found[value], names, domain):
            return Rejection(f"an input {fault}")
    for node in model.graph:
        try:
            results = carried(Question(node, found, names, domain))
        except MixedError as mixed:
            return Rejection(f"{node.op_type} {mixed}", (node,))
        for value, carries in zip(node.outputs, results, strict=True):
            if fault := unexplained(value, carries, names, domain):
                return Rejection(f"{node.op_type} {fault}", (node,))
            found[value] = carries
    return tuple(found.get(value, frozenset()) for value in model.graph.outputs)


def _of_input(value: ir.Value, names: Collection[str]) -> Carries:
    dims = [str(dim.size) if isinstance(dim, SizeDim) else "" for dim in value.shape or ()]
    return frozenset(Carry(name, axis) for axis, name in enumerate(dims) if name in names)
