"""Whether the tables of an ONNX decoder that are looked up by position have rows for as many tokens as a sequence may have.

A kernel keeps an index within its table, so that a text would go on with the wrong rows, where torch and ONNX Runtime end it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from ...runtime.errors import OptionError
from ...runtime.target import Target
from ..ir.matching import static_shape
from ..ir.scopes import subgraphs_of
from ..pipeline import Context, parse_pipeline, run_pipeline
from ..pipeline.pass_table import PASSES
from .onnx_step import Step

_COUNTED = ("counts", "length")
_OPERANDS = {"Gather": (0, 1), "RotaryEmbedding": (1, 3)}  # which operands are a table and its indices


def check_position_tables(step: Step, max_tokens: int, target: Target) -> None:
    """Look up what the last token that a sequence may have looks up; `step` takes one token a call.

    Raises:
        OptionError: a table whose indices follow from the token's place alone has no such row.
    """
    lookups = list(_lookups(step.model.graph))
    if not lookups:
        return
    names = [str(index.name) for _, index, _ in lookups]
    for (table, _, rows), places in zip(lookups, _places(step.model, names, max_tokens - 1, target), strict=True):
        excess = int(np.max(places, initial=0)) - (rows - 1)
        if excess > 0:
            what = f"{max_tokens} given, and {table.name} has {rows} rows, which are looked up by position"
            raise OptionError("max_tokens", what, f"give at most {max_tokens - excess}")


def _lookups(graph: ir.Graph) -> Iterator[tuple[ir.Value, ir.Value, int]]:
    """The table of each lookup by place alone, its indices, and how many rows it has."""
    for node in graph:
        if node.domain or node.op_type not in _OPERANDS:
            continue
        table, index = (node.inputs[place] if place < len(node.inputs) else None for place in _OPERANDS[node.op_type])
        if table is None or index is None or not (shape := static_shape(table)):
            continue
        if _follows_from_place(index, graph):
            axis = node.attributes.get_int("axis", 0) if node.op_type == "Gather" else 0
            yield table, index, shape[axis]


def _follows_from_place(value: ir.Value, graph: ir.Graph) -> bool:
    """Whether a value is computed of the inputs that count tokens, and of constants and no other input."""
    waiting, seen, is_counted = [value], set[ir.Value](), False
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        if (producer := one.producer()) is not None:
            waiting += [operand for operand in producer.inputs if operand is not None]
            if any(True for _ in subgraphs_of(producer)):
                return False
        elif one in graph.inputs:
            if one.name not in _COUNTED:
                return False
            is_counted = True
    return is_counted


def _places(model: ir.Model, names: list[str], length: int, target: Target) -> list[np.ndarray]:
    """Values of the model by their names, for a token behind `length` ones."""
    part = model.clone()
    values = {str(value.name): value for node in part.graph for value in node.outputs}
    part.graph.outputs[:] = [values[name] for name in dict.fromkeys(names)]
    run_pipeline(part, parse_pipeline("eliminate-dead", PASSES), Context(target))
    inputs = {str(value.name): value for value in part.graph.inputs if value.name in _COUNTED}
    part.graph.inputs[:] = inputs.values()
    given = {"counts": 1, "length": length}
    arrays = {name: np.full(static_shape(value) or (), given[name], np.int64) for name, value in inputs.items()}
    found = ReferenceEvaluator(ir.to_proto(part)).run(None, arrays)
    by_name = dict(zip(dict.fromkeys(names), found, strict=True))
    return [np.asarray(by_name[name]) for name in names]
