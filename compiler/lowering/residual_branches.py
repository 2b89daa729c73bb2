"""Which convolutions lie on a branch whose result is added to what was there before it.

An error of such a branch is a part of the sum only, which as many branches make as the model has blocks; where each convolution
follows the one before, all that follow take its error on. So branches may round more.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import onnx_ir as ir

from ..ir.functions import body_of, is_fused

_SAME = frozenset(["Cast", "Identity", "Reshape", "Transpose"])


def convolutions_on_branches(model: ir.Model) -> frozenset[ir.Node]:
    """The nodes with a convolution before which, in the graph's order, a value is made that an Add behind it reads.

    Linear in the nodes of the graph and of its groups.
    """
    places: dict[ir.Node, int] = {}  # of convolutions, among all nodes
    added: dict[Hashable, int] = {}  # where a value is added last
    same: dict[Hashable, Hashable] = {}  # the value that another is in other words
    made: list[list[Hashable]] = [list(model.graph.inputs)]
    for call in model.graph:
        name = _namer(model, call)
        for node in body_of(model, call) if is_fused(call) else (call,):
            if node.op_type == "Conv":
                places.setdefault(call, len(made))
            read = [same.get(key, key) for key in (name(value) for value in node.inputs if value is not None)]
            if node.op_type == "Add":
                added |= dict.fromkeys(read, len(made))
            results = [name(value) for value in node.outputs]
            same |= dict.fromkeys(results, read[0]) if node.op_type in _SAME else {}
            made.append(results)
    furthest, before = -1, []
    for values in made:
        before.append(furthest)
        furthest = max(furthest, *(added.get(value, -1) for value in values), -1)
    return frozenset(call for call, place in places.items() if before[place] > place)


def _namer(model: ir.Model, call: ir.Node) -> Callable[[ir.Value], Hashable]:
    """Tells values of the whole graph apart in the body of a call, which others may share."""
    if not is_fused(call):
        return lambda value: value
    body = body_of(model, call)
    outer = dict(zip((*body.inputs, *body.outputs), (*call.inputs, *call.outputs), strict=False))
    return lambda value: outer.get(value, (call, value))
