"""Softmax and LogSoftmax: exponentials of what lies below the greatest element, and their sum."""

from __future__ import annotations

import onnx_ir as ir

from ....compiler.ir.matching import has_same_shape
from ....compiler.ir.rewriter import Rejection
from .moments import Reduced, reduced
from .spelling import Spelling, either_way, maker, operands


def softmax(node: ir.Node) -> Spelling | Rejection | None:
    """The Softmax that ends in `node`, a Div or Mul, or the LogSoftmax that ends in it, a Sub."""
    if node.domain != "" or node.op_type not in ("Div", "Mul", "Sub"):
        return None
    found = _logarithmic(node) if node.op_type == "Sub" else _quotient(node)
    return found.obstacle() or found if isinstance(found, Spelling) else found


def _quotient(node: ir.Node) -> Spelling | Rejection | None:
    """e / sum(e) with e = exp(x - max(x)), also as a product with the reciprocal."""
    for exponentials, other in either_way(node) if node.op_type == "Mul" else (operands(node),):
        nodes = [node]
        divisor: ir.Value | None = other
        if node.op_type == "Mul":
            inverse = maker(other, "Reciprocal")
            if inverse is None:
                continue
            divisor = inverse.inputs[0]
            nodes.append(inverse)
        exp, total = maker(exponentials, "Exp"), reduced(divisor, "ReduceSum")
        if exp is None or total is None or total.source is not exponentials:
            continue
        return _of("Softmax", node, exp.inputs[0], total, [*nodes, exp, *total.nodes])
    return None


def _logarithmic(node: ir.Node) -> Spelling | Rejection | None:
    """d - log(sum(exp(d))), also with ReduceLogSum or ReduceLogSumExp; the last needs no maximum to be subtracted."""
    shifted, logarithm = operands(node)
    if (whole := reduced(logarithm, "ReduceLogSumExp")) is not None and whole.source is shifted:
        below = _below_maximum(shifted, whole)
        if below is not None:
            return _spelled("LogSoftmax", node, below[0], whole, [node, *whole.nodes, *below[1]])
        return _spelled("LogSoftmax", node, shifted, whole, [node, *whole.nodes])
    log = maker(logarithm, "Log")
    total = reduced(logarithm, "ReduceLogSum") if log is None else reduced(log.inputs[0], "ReduceSum")
    exp = None if total is None else maker(total.source, "Exp")
    if total is None or exp is None or exp.inputs[0] is not shifted:
        return None
    return _of("LogSoftmax", node, shifted, total, [node, *([log] if log else []), *total.nodes, exp])


def _of(op_type: str, node: ir.Node, shifted: ir.Value | None, total: Reduced, nodes: list[ir.Node]) -> Spelling | Rejection:
    below = None if shifted is None else _below_maximum(shifted, total)
    if below is None:
        why = f"the maximum over dimensions {list(total.axes)} is not subtracted before the exponential, which may overflow"
        return Rejection(f"no {op_type}: {why}", (node,))
    return _spelled(op_type, node, below[0], total, [*nodes, *below[1]])


def _spelled(op_type: str, node: ir.Node, x: ir.Value, total: Reduced, nodes: list[ir.Node]) -> Spelling | Rejection:
    if len(total.axes) != 1:
        return Rejection(f"no {op_type}: it is over dimensions {list(total.axes)}, not one", (node,))
    if not has_same_shape(node.outputs[0], x):
        return Rejection(f"no {op_type}: the shape of %{x.name} is not that of the result", (node,))
    return Spelling(op_type, (x,), {"axis": total.axes[0]}, 13, node, frozenset(nodes))


def _below_maximum(shifted: ir.Value, total: Reduced) -> tuple[ir.Value, tuple[ir.Node, ...]] | None:
    """x of x - max(x) over the dimensions of `total`, and the nodes that compute it."""
    sub = maker(shifted, "Sub")
    if sub is None:
        return None
    x, greatest = operands(sub)
    found = reduced(greatest, "ReduceMax")
    return (x, (sub, *found.nodes)) if found is not None and found.source is x and found.axes == total.axes else None
