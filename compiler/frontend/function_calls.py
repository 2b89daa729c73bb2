"""How large a model becomes when its functions are inlined, without inlining them."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir


def inlined_nodes(model: ir.Model) -> int:
    """Nodes of the main graph with every call of a model's function replaced by its body. A circle of calls counts once."""
    sizes: dict[ir.OperatorIdentifier, int] = {}
    pending = list(model.functions)
    entered: set[ir.OperatorIdentifier] = set()
    while pending:
        name = pending[-1]
        if name in sizes:
            pending.pop()
            continue
        body = model.functions[name]
        called = [node.op_identifier() for node in body.all_nodes() if node.op_identifier() in model.functions]
        missing = [one for one in called if one not in sizes and one not in entered]
        if name not in entered and missing:
            entered.add(name)
            pending += missing
            continue
        entered.add(name)
        sizes[name] = _size(body.all_nodes(), sizes)
        pending.pop()
    return _size(model.graph.all_nodes(), sizes)


def _size(nodes: Iterable[ir.Node], sizes: dict[ir.OperatorIdentifier, int]) -> int:
    return sum(sizes.get(node.op_identifier(), 1) for node in nodes)
