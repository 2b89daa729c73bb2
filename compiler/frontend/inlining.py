"""Functions that a model brings along are put in the place of their calls, so that everything behind sees their operators."""

from __future__ import annotations

from collections.abc import Collection
from graphlib import CycleError, TopologicalSorter

import onnx_ir as ir

from ...runtime.errors import InvalidModelError, UnsupportedModelError
from ..ir.functions import DOMAIN, inline_function
from ..ir.scopes import subgraphs_of
from .function_calls import inlined_nodes

_LARGEST_NODES = 100_000  # after inlining: a short file may call itself into more than any memory holds
_GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def inline_functions(model: ir.Model, where: str, *, keeps_groups: bool = False) -> None:
    """Inline every call of a model's functions, whatever their domain: also in subgraphs, and in the functions that stay.

    Args:
        keeps_groups: leave the functions of our own domain that call no others. Only for who runs no kernels of them: lowering
            believes what the shapes of a group's results say.

    Raises:
        InvalidModelError: functions call each other in a circle, or a call does not fit its function.
        UnsupportedModelError: the model becomes too large.
    """
    if not model.functions:
        return
    _check_circles(model, where)
    if (nodes := inlined_nodes(model)) > _LARGEST_NODES:
        what = f"its functions call each other into {nodes} nodes"
        raise UnsupportedModelError(where, what, f"{_LARGEST_NODES} are the most that are taken")
    kept = {name for name in model.functions if keeps_groups and name[0] == DOMAIN and not _calls(model, name)}
    _inline_calls(model, model.graph, kept, where)
    for identifier in [name for name in model.functions if name not in kept]:
        del model.functions[identifier]


def _calls(model: ir.Model, name: ir.OperatorIdentifier) -> set[ir.OperatorIdentifier]:
    called = {node.op_identifier() for node in model.functions[name].all_nodes()}
    return called & model.functions.keys()


def _check_circles(model: ir.Model, where: str) -> None:
    try:
        TopologicalSorter({name: _calls(model, name) for name in model.functions}).prepare()
    except CycleError as error:
        names = " -> ".join(f"{domain}::{name}" for domain, name, _ in error.args[1])
        what = f"its functions cannot be inlined: they call each other in a circle, {names}"
        raise InvalidModelError(where, what, "correct the model") from error


def _inline_calls(model: ir.Model, graph: ir.Graph, kept: Collection[ir.OperatorIdentifier], where: str) -> None:
    pending = list(reversed(graph))
    while pending:
        node = pending.pop()
        name = node.op_identifier()
        if name in model.functions and name not in kept:
            _check_call(node, model.functions[name], where)
            pending.extend(reversed(inline_function(model, node, infers=False)))
        else:
            for subgraph in subgraphs_of(node):
                _inline_calls(model, subgraph, kept, where)


def _check_call(node: ir.Node, function: ir.Function, where: str) -> None:
    what = ""
    if len(node.inputs) > len(function.inputs) or len(node.outputs) > len(function.outputs):
        what = "a call has more inputs or outputs than it"
    elif any(one.type in _GRAPHS for one in (*node.attributes.values(), *function.attributes.values())):
        what = "it has graphs as attributes"
    if what:
        raise InvalidModelError(
            where, f"function {function.domain}.{function.name} cannot be inlined: {what}", "correct the model"
        )
