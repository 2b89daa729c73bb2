"""What the parameters of a subgraph stand for, where the model does not say their types."""

from __future__ import annotations

from copy import copy

import onnx_ir as ir

from .cloning import copy_facts
from .scopes import subgraphs_of


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
