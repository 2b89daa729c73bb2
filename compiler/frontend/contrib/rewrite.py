"""The walk that rewrites every node of com.microsoft in a model."""

from __future__ import annotations

import onnx_ir as ir

from ....runtime.errors import CompileError, InvalidModelError
from ...ir.facts import infer_node, schema_of, set_constant_facts, source_of
from ...ir.scopes import subgraphs_of
from .call import Call, RefusedNodeError
from .table import OPERATORS, REFUSED, REFUSED_DOMAINS

DOMAIN = "com.microsoft"

_REFUSAL = "prefuse.refusal"  # key of a node's `meta`: why it stays
# ONNX Runtime keeps these in ONNX's own domain, where its optimizer found no operator of the model's opset.
_MISPLACED = ("LayerNormalization", "SimplifiedLayerNormalization")


def needed_opset(model: ir.Model) -> int | None:
    """The opset of ONNX in which all of a model's operators of com.microsoft can be rewritten; None where it has none.

    Those that ONNX Runtime misplaces move there.
    """
    needed: list[int] = []
    for node in model.graph.all_nodes():
        if node.domain == "" and node.op_type in _MISPLACED and schema_of(node, model.graph.opset_imports) is None:
            node.domain = DOMAIN
        if node.domain == DOMAIN:
            needed.append(OPERATORS[node.op_type].opset if node.op_type in OPERATORS else 0)
    return max(needed, default=None)


def rewrite_contrib(model: ir.Model) -> None:
    """Put ONNX's operators in the place of com.microsoft's, in the graph and its subgraphs; the opset must be the needed one.

    Results keep their names, and the new nodes the metadata of the old. What cannot be rewritten stays; `refusal_of` says why.
    The facts of all values are known afterwards.

    Raises:
        InvalidModelError: a node breaks the definition of its operator.
    """
    _rewrite_graph(model, model.graph)
    if not any(node.domain == DOMAIN for node in model.graph.all_nodes()):
        model.graph.opset_imports.pop(DOMAIN, None)


def refusal_of(node: ir.Node) -> str | None:
    """Why a node of one of ONNX Runtime's domains could not be rewritten; None for others."""
    found = node.meta.get(_REFUSAL)
    return found if isinstance(found, str) else REFUSED_DOMAINS.get(node.domain)


def _rewrite_graph(model: ir.Model, graph: ir.Graph) -> None:
    for value in graph.initializers.values():
        set_constant_facts(value)
    for node in tuple(graph):
        for subgraph in subgraphs_of(node):
            _rewrite_graph(model, subgraph)
        if node.domain == DOMAIN:
            _rewrite_node(model, node)
        else:
            infer_node(node, model)


def _rewrite_node(model: ir.Model, node: ir.Node) -> None:
    operator = OPERATORS.get(node.op_type)
    if operator is None:
        node.meta[_REFUSAL] = REFUSED.get(node.op_type, "an operator of com.microsoft without a rewrite")
        return
    call = Call(model, node)
    try:
        call.finish(operator.rewrite(call))
    except RefusedNodeError as refusal:
        node.meta[_REFUSAL] = str(refusal)
    except Exception as error:  # of onnx_ir and ONNX's inference: a type or attribute that the operator does not have
        reason = error.what if isinstance(error, CompileError) else error
        what = f"com.microsoft.{node.op_type} is not what ONNX Runtime defines: {reason}"
        raise InvalidModelError(source_of(node), what, "correct the model") from error
