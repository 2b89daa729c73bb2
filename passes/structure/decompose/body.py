"""A writer of bodies whose shape follows from the node: as many parts as it has operands, constants computed for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ....compiler.ir.facts import data_type
from ....compiler.ir.symbolic.symbols import SizeTensor
from ....runtime.symbolic.sizes import Size

Attribute = int | float | str | Sequence[int] | Sequence[float]


class Body:
    """The function that will stand for `node`, written operator by operator.

    `inputs` stand for the node's own, None where one is left out. The body belongs to the model's opset, 18 or newer.
    """

    def __init__(self, node: ir.Node) -> None:
        self._node = node
        self._nodes: list[ir.Node] = []
        self._parameters = [ir.Value(name=f"i{position}") for position in range(len(node.inputs))]
        self.inputs = tuple(None if v is None else p for v, p in zip(node.inputs, self._parameters, strict=True))

    def input(self, position: int) -> ir.Value:
        """The parameter at a position where the node has an input."""
        value = self.inputs[position]
        assert value is not None, f"{self._node.op_type} has no input {position}"
        return value

    def has_input(self, position: int) -> bool:
        return position < len(self.inputs) and self.inputs[position] is not None

    def op(self, op_type: str, *operands: ir.Value | np.ndarray | None, **attributes: Attribute) -> ir.Value:
        """The first output of an operator of ONNX; arrays become constants."""
        return self.ops(op_type, *operands, outputs=1, **attributes)[0]

    def ops(self, op_type: str, *operands: ir.Value | np.ndarray | None, outputs: int, **attributes: Attribute) -> list[ir.Value]:
        """All outputs of an operator."""
        values = [self.constant(one) if isinstance(one, np.ndarray) else one for one in operands]
        node = ir.node(op_type, values, attributes or None, num_outputs=outputs)
        return self._add(node)

    def constant(self, contents: np.ndarray | ir.TensorProtocol) -> ir.Value:
        """A constant with the contents and the type of an array; a tensor is read only when it is needed."""
        tensor = ir.tensor(contents) if isinstance(contents, np.ndarray) else contents
        return self._add(ir.node("Constant", [], {"value": tensor}))[0]

    def reshape(self, value: ir.Value, shape: Sequence[int]) -> ir.Value:
        """`value` under another shape, in which 0 is an empty dimension; sizes may be those that a call decides."""
        return self.op("Reshape", value, self.shape(shape), allowzero=1)

    def shape(self, dims: Sequence[int]) -> ir.Value:
        """A constant with these dimensions; sizes may be those that a call decides."""
        if any(isinstance(dim, Size) for dim in dims):
            return self.constant(SizeTensor(np.array([*dims], object)))
        return self.constant(ints(dims))

    def transpose(self, value: ir.Value, order: Sequence[int]) -> ir.Value:
        """`value` with its dimensions in another order; itself where that is no change."""
        return value if list(order) == list(range(len(order))) else self.op("Transpose", value, perm=order)

    def cast(self, value: ir.Value | np.ndarray, dtype: ir.DataType | str) -> ir.Value:
        """`value` in another element type, given as ONNX or NumPy names it."""
        return self.op("Cast", value, to=int(data_type(dtype) if isinstance(dtype, str) else dtype))

    def function(self, *outputs: ir.Value) -> ir.Function:
        """The finished body."""
        for number, one in enumerate(value for node in self._nodes for value in node.outputs):
            one.name = f"v{number}"
        graph = ir.Graph(self._parameters, outputs, nodes=self._nodes)
        return ir.Function("prefuse.expansions", self._node.op_type, graph=graph, attributes=())

    def _add(self, node: ir.Node) -> list[ir.Value]:
        self._nodes.append(node)
        return list(node.outputs)


def ints(numbers: Sequence[int]) -> np.ndarray:
    """A shape, axes or indices as an operand."""
    return np.array(numbers, np.int64)
