"""Results of a call that show bytes which another result or an input has: kernels that copy what only a call knows the size of.

A `Copy` of the Plan is of a known number of bytes. So where sizes are symbolic, such a result is computed: as a Cast to the type
that it has already, which no pass sees.
"""

from __future__ import annotations

import onnx_ir as ir

from ..ir.aliases import is_view, view_root
from ..ir.cloning import copy_value
from ..ir.facts import has_static_type, tensor_type
from ..ir.names import fresh_name
from ..ir.symbolic.symbols import domain_of_model


def copy_shown_results(model: ir.Model) -> None:
    """Give each result of symbolic size memory of its own, where it is a view of a value that is none."""
    if domain_of_model(model) is None:
        return
    outputs = [value for value in model.graph.outputs if has_static_type(value) and tensor_type(value).is_symbolic]
    taken: set[ir.Value] = {value for value in model.graph.outputs if not _is_shown(value)}
    for value in outputs:
        root = view_root(value)
        if _is_shown(value) and (root in taken or root.producer() is None):
            _copy_before(model, value)
        taken.add(view_root(value))


def _is_shown(value: ir.Value) -> bool:
    producer = value.producer()
    return producer is not None and is_view(producer)


def _copy_before(model: ir.Model, value: ir.Value) -> None:
    """Let a view show a copy of what it shows."""
    view = value.producer()
    assert view is not None
    source = view.inputs[0]
    assert source is not None
    copied = copy_value(source)
    copied.name = fresh_name(model, f"{value.name}.copied")
    assert copied.dtype is not None
    model.graph.insert_before(view, ir.node("Cast", [source], {"to": copied.dtype}, outputs=[copied], name=copied.name))
    view.replace_input_with(0, copied)
