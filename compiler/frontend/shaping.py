"""Inputs whose very values decide shapes: the target of a Reshape, the ends of a Slice, the axes of a reduction.

A program has static shapes, so a model is compiled for the values of such inputs as it is for the shapes of the others. Data of
which each call has others are no such inputs: a model that decides by them runs in stages.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from ..ir.bounds import is_data_sized
from ..ir.constants import constant_tensor
from ..ir.scopes import subgraphs_of
from ..ir.symbolic.symbols import constant_sizes

_LARGEST_ELEMENTS = 1024  # an input with more is data, whatever reads it

# Operands, by position, that must be known while compiling.
_SHAPING: dict[str, tuple[int, ...]] = {
    "AffineGrid": (1,),
    "BlackmanWindow": (0,),
    "CenterCropPad": (1,),
    "Col2Im": (1, 2),
    "ConstantOfShape": (0,),
    "CumProd": (1,),
    "CumSum": (1,),
    "DFT": (1, 2),
    "Dropout": (1, 2),
    "Expand": (1,),
    "HammingWindow": (0,),
    "HannWindow": (0,),
    "If": (0,),
    "MaxUnpool": (2,),
    "MelWeightMatrix": (0, 1, 2, 3, 4),
    "OneHot": (1,),
    "Pad": (1, 3),
    "Range": (0, 1, 2),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "STFT": (1, 3),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "SplitToSequence": (1,),
    "Squeeze": (1,),
    "Tile": (1,),
    "TopK": (1,),
    "Trilu": (1,),
    "Unsqueeze": (1,),
    "Upsample": (1,),
    **{f"Reduce{name}": (1,) for name in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")},
}


def shaping_inputs(model: ir.Model) -> tuple[str, ...]:
    """Names of the small inputs that shaping operands are computed from, in the graph's order.

    Floats are among them where the operand is of floats, too, and what chooses a branch is where it is one integer or truth.
    """
    operands = _operands_in(model.graph)
    chosen = {value for value, is_branch in operands if is_branch}
    shaping = {value for value, is_branch in operands if not is_branch}
    of_floats = _sources({value for value in shaping if _is_float(value)})
    of_shapes, of_branches = _sources(shaping), _sources(chosen)

    def is_shaping(value: ir.Value) -> bool:
        if not _is_small(value):
            return False
        return value in of_floats if _is_float(value) else value in of_shapes or (value in of_branches and _is_one(value))

    return tuple(str(value.name) for value in model.graph.inputs if is_shaping(value))


def _sources(values: set[ir.Value]) -> set[ir.Value]:
    """These values, and all that they are computed from."""
    found: set[ir.Value] = set()
    pending = list(values)
    while pending:
        value = pending.pop()
        if value in found:
            continue
        found.add(value)
        producer = value.producer()
        if producer is not None and producer.op_type not in ("Shape", "Size"):  # those read the type alone
            pending += [operand for operand in producer.inputs if operand is not None]
    return found


def bind_values(model: ir.Model, values: Mapping[str, np.ndarray]) -> ir.Model:
    """A copy of the model (weights shared) in which these inputs are constants."""
    bound = model.clone()
    for value in [value for value in bound.graph.inputs if value.name in values]:
        bound.graph.inputs.remove(value)
        array = np.array(values[str(value.name)])
        value.const_value = ir.tensor(array, dtype=value.dtype, name=value.name)
        value.shape = ir.Shape(array.shape)
        bound.graph.register_initializer(value)
    return bound


def shaping_operands(node: ir.Node) -> list[ir.Value]:
    """The operands of a node whose values decide shapes, or must be known while compiling for another reason."""
    positions = _SHAPING.get(node.op_type, ()) if node.domain == "" else ()
    return [value for p in positions if p < len(node.inputs) and (value := node.inputs[p]) is not None]


def forget_decided_shapes(model: ir.Model) -> None:
    """Forget what a file says of the shapes that operands decide which are not constant, or the data itself.

    Where inference finds none, nothing else says how large these results are, and kernels believe it.
    """
    for node in model.graph:
        if is_data_sized(node) or not all(map(_is_known, shaping_operands(node))):
            for value in node.outputs:
                if isinstance(value.type, ir.TensorType | None):
                    value.shape = None


def _is_known(value: ir.Value) -> bool:
    return constant_tensor(value) is not None or constant_sizes(value) is not None


def _operands_in(graph: ir.Graph) -> list[tuple[ir.Value, bool]]:
    """The shaping operands of a graph's nodes, and whether they choose a branch."""
    found = []
    for node in graph:
        found += [(value, node.op_type == "If") for value in shaping_operands(node)]
        for subgraph in subgraphs_of(node):
            found += _operands_in(subgraph)
    return found


def _is_small(value: ir.Value) -> bool:
    if not isinstance(value.type, ir.TensorType) or value.dtype == ir.DataType.STRING or value.shape is None:
        return False
    return not value.shape.is_static() or int(np.prod(value.shape.numpy())) <= _LARGEST_ELEMENTS


def _is_float(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_floating_point()


def _is_one(value: ir.Value) -> bool:
    return value.shape is not None and value.shape.is_static() and int(np.prod(value.shape.numpy())) == 1
