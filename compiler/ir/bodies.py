"""What the parameters of a subgraph stand for, where the model does not say their types."""

from __future__ import annotations

from copy import copy

import onnx_ir as ir

from .cloning import copy_facts
from .scopes import subgraphs_of


def body_fault(node: ir.Node) -> str | None:
    """What does not fit between a Loop or Scan and its body; None where all does, and of other operators."""
    if node.domain != "" or node.op_type not in ("Loop", "Scan") or "body" not in node.attributes:
        return None
    body, given = node.attributes["body"].as_graph(), len(node.inputs)
    if node.op_type == "Loop":
        carried, taken = max(given - 2, 0), max(given, 2)
        made = len(body.outputs) - 1
    else:
        count = node.attributes.get_int("num_scan_inputs", 0)
        if not 1 <= count <= given:
            return f"num_scan_inputs is {count}, of {given} inputs"
        carried, taken, made = given - count, given, len(body.outputs)
    if len(body.inputs) != taken:
        return f"the body takes {len(body.inputs)} values, and is given {taken}"
    if made < carried:
        what = "a condition and " if node.op_type == "Loop" else ""
        return f"the body gives {len(body.outputs)} values for {what}{carried} carried values"
    return _axes_fault(node, carried, made - carried) if node.op_type == "Scan" else None


def _axes_fault(node: ir.Node, carried: int, made: int) -> str | None:
    """What is wrong with the axes of a Scan: there is one for each value, and it is one of the value's."""
    scanned = node.inputs[carried:]
    for name, count in (("scan_input_axes", len(scanned)), ("scan_output_axes", made)):
        axes = node.attributes.get_ints(name)
        if axes and len(axes) != count:
            return f"{name} is {list(axes)} for {count} values"
    axes = node.attributes.get_ints("scan_input_axes") or (0,) * len(scanned)
    for value, axis in zip(scanned, axes, strict=True):
        if value is not None and value.shape is not None and not -len(value.shape) <= axis < len(value.shape):
            return f"{value.name} has {len(value.shape)} axes, and is scanned along axis {axis}"
    return None


def infer_parameters(node: ir.Node) -> None:
    """Give parameters without a type, in the body of a Loop, Scan or SequenceMap, the one that follows from the inputs.

    A carried value of a Loop may change its shape from iteration to iteration, so that only its element type is known.
    """
    if node.op_type not in ("Loop", "Scan", "SequenceMap"):
        return
    for body in subgraphs_of(node):
        for position, parameter in enumerate(body.inputs):
            if parameter.type is not None:
                continue
            if node.op_type == "Loop" and position < 2:
                parameter.type = ir.TensorType(ir.DataType.INT64 if position == 0 else ir.DataType.BOOL)
                parameter.shape = ir.Shape(())
                continue
            argument = node.inputs[position] if position < len(node.inputs) else None
            if argument is not None and argument.type is not None:
                _set_facts(node, position, parameter, argument)


def _set_facts(node: ir.Node, position: int, parameter: ir.Value, argument: ir.Value) -> None:
    if node.op_type == "SequenceMap" and isinstance(argument.type, ir.SequenceType):
        parameter.type = copy(argument.type.elem_type)
        return
    copy_facts(argument, parameter)
    if node.op_type == "Loop":
        parameter.shape = None
    elif node.op_type == "Scan" and argument.shape is not None:
        first = len(node.inputs) - node.attributes.get_int("num_scan_inputs", 0)
        if position >= first:
            axes = node.attributes.get_ints("scan_input_axes") or (0,) * len(node.inputs)
            axis = axes[position - first] % len(argument.shape)
            parameter.shape = ir.Shape([dim for place, dim in enumerate(argument.shape) if place != axis])
