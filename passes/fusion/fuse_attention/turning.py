"""Attention of models that keep channels before positions: values @ probabilities^T becomes (probabilities @ values^T)^T."""

from __future__ import annotations

import onnx_ir as ir

from ....compiler.ir.constants import constant_tensor
from ....compiler.ir.kinds import is_pointwise
from ....compiler.ir.matching import rank_of
from ....compiler.ir.rewriter import Rejection, operation, remove_nodes, replace_node
from .core import scores_of

_MAX_CHAIN = 16  # pointwise nodes that are looked at between Softmax and the Transpose


def turn_product(model: ir.Model, softmax: ir.Node) -> bool:
    """Multiply the probabilities from the right where a Transpose of them, read once, is multiplied from the left.

    The Transposes of values and result that take the place of the one of the probabilities are of fewer elements, and are read
    and stored through once the product is in a group. Whether anything was changed.
    """
    probabilities = _last_probabilities(softmax)
    transpose = _only_reader(probabilities)
    product = _only_reader(transpose.outputs[0]) if transpose is not None and _swaps_matrix(transpose) else None
    if transpose is None or product is None or product.op_type != "MatMul" or product.graph is not softmax.graph:
        return False
    values, turned = product.inputs
    rank, result_rank = rank_of(values), rank_of(product.outputs[0])
    if turned is not transpose.outputs[0] or values is turned or rank is None or rank < 2 or result_rank is None:
        return False
    # Without attention, which it would be for, it only moves more.
    if values is None or constant_tensor(values) is not None or isinstance(scores_of(softmax), Rejection):
        return False
    columns = operation("Transpose", [values], perm=_swapped(rank))
    weighted = operation("MatMul", [probabilities, columns.outputs[0]])
    result = operation("Transpose", weighted.outputs, perm=_swapped(result_rank))
    replace_node(model, product, [columns, weighted, result], result.outputs)
    remove_nodes([transpose])
    return True


def _last_probabilities(softmax: ir.Node) -> ir.Value:
    """What a chain of pointwise nodes, each read once, makes of the probabilities."""
    value = softmax.outputs[0]
    for _ in range(_MAX_CHAIN):
        reader = _only_reader(value)
        if reader is None or not is_pointwise(reader):
            break
        value = reader.outputs[0]
    return value


def _only_reader(value: ir.Value) -> ir.Node | None:
    uses = value.uses()
    return next(iter(uses))[0] if len(uses) == 1 and not value.is_graph_output() else None


def _swaps_matrix(node: ir.Node) -> bool:
    rank = rank_of(node.outputs[0])
    if node.op_type != "Transpose" or node.domain != "" or rank is None or rank < 2:
        return False
    return list(node.attributes.get_ints("perm", tuple(range(rank))[::-1])) == _swapped(rank)


def _swapped(rank: int) -> list[int]:
    """The permutation that swaps the last two of `rank` dimensions."""
    return [*range(rank - 2), rank - 1, rank - 2]
