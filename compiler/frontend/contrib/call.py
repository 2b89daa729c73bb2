"""One node of com.microsoft while it is rewritten: what it says, and the ONNX nodes that are put in its place.

Whatever a node says must be used. An input or attribute that its rewrite has not read is refused at the end, so a rewrite need
name only what it understands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from ...ir.cloning import copy_facts
from ...ir.constants import add_constant, constant_array
from ...ir.facts import infer_node
from ...ir.names import fresh_name
from ...ir.rewriter import copy_source, graph_of, replace_node

Operand: TypeAlias = ir.Value | int | Sequence[int] | np.ndarray | None  # integers stand for int64 constants
AttributeValue: TypeAlias = int | float | str | Sequence[int] | Sequence[float]


class RefusedNodeError(Exception):
    """A node that cannot be rewritten; the message says why."""


class Call:
    """Reads a node and writes its replacement before it. `RefusedNodeError` is raised where it does not have what is asked for.

    The facts of all values that are written are known at once, as far as those of the inputs are.
    """

    def __init__(self, model: ir.Model, node: ir.Node) -> None:
        self._model = model
        self._graph = graph_of(node)
        self._node = node
        self._read_inputs: set[int] = set()
        self._read_attributes: set[str] = set()
        self._made: set[ir.Node] = set()

    @property
    def op_type(self) -> str:
        """The operator's name."""
        return self._node.op_type

    @property
    def input_count(self) -> int:
        """How many inputs there are, absent optional ones in between counted."""
        return len(self._node.inputs)

    def optional(self, position: int) -> ir.Value | None:
        """The input at a position; None where it is left out."""
        self._read_inputs.add(position)
        return self._node.inputs[position] if position < len(self._node.inputs) else None

    def input(self, position: int) -> ir.Value:
        """The input at a position, which the operator cannot do without."""
        value = self.optional(position)
        if value is None:
            raise RefusedNodeError(f"has no input {position}")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        """An integer attribute; required where there is no default."""
        attribute = self._attribute(name, default is None)
        return attribute.as_int() if attribute is not None else default or 0

    def number(self, name: str, default: float | None = None) -> float:
        """A float attribute; required where there is no default."""
        attribute = self._attribute(name, default is None)
        return attribute.as_float() if attribute is not None else default or 0.0

    def text(self, name: str, default: str) -> str:
        """A string attribute."""
        attribute = self._attribute(name)
        return default if attribute is None else attribute.as_string()

    def integers(self, name: str) -> tuple[int, ...] | None:
        """A list attribute; None where it is left out."""
        attribute = self._attribute(name)
        return None if attribute is None else tuple(attribute.as_ints())

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list attribute; empty where it is left out."""
        attribute = self._attribute(name)
        return () if attribute is None else tuple(attribute.as_floats())

    def forwarded(self, *names: str) -> dict[str, ir.Attr]:
        """Those of the attributes that the node has, to be given to the ONNX operator as they are."""
        return {name: found for name in names if (found := self._attribute(name)) is not None}

    def ignore(self, *names: str) -> None:
        """Attributes that change nothing of the result."""
        self._read_attributes.update(names)

    def is_asked(self, position: int) -> bool:
        """Whether the model uses the output at a position."""
        outputs = self._node.outputs
        return position < len(outputs) and bool(outputs[position].name) and _is_used(outputs[position])

    def op(self, op_type: str, *operands: Operand, **attributes: AttributeValue | ir.Attr) -> ir.Value:
        """Write an ONNX node with one output, and return that."""
        return self.ops(1, op_type, *operands, **attributes)[0]

    def ops(self, count: int, op_type: str, *operands: Operand, **attributes: AttributeValue | ir.Attr) -> tuple[ir.Value, ...]:
        """Write an ONNX node with `count` outputs."""
        inputs = [self._value(operand) for operand in operands]
        while inputs and inputs[-1] is None:
            inputs.pop()
        given = [
            one if isinstance(one, ir.Attr) else ir.convenience.convert_attribute(name, one) for name, one in attributes.items()
        ]
        hint = f"{self._node.outputs[0].name}_{op_type}"
        outputs = [ir.Value(name=fresh_name(self._model, hint)) for _ in range(count)]
        node = ir.Node("", op_type, inputs, given, outputs=outputs, name=outputs[0].name)
        copy_source((self._node,), node)
        self._graph.insert_before(self._node, node)
        self._made.add(node)
        infer_node(node, self._model)
        return tuple(outputs)

    def annotate(self, value: ir.Value, key: str, text: str) -> None:
        """Say something of a node that was written, by what it makes, in its metadata."""
        node = value.producer()
        assert node in self._made
        node.metadata_props[key] = text

    def like(self, value: ir.Value, number: float) -> ir.Value:
        """A scalar constant of the element type of `value`."""
        return self.constant(np.array(number, self.dtype(value).numpy()))

    def constant(self, array: np.ndarray) -> ir.Value:
        """An array as a value of the graph."""
        return add_constant(self._graph, array, fresh_name(self._model, f"{self._node.outputs[0].name}_constant"))

    def constant_int(self, number: int) -> ir.Value:
        """A scalar int64 constant."""
        return self.constant(np.array(number, np.int64))

    def retyped(self, tensor: ir.TensorProtocol) -> ir.Value:
        """A tensor as a value of the graph."""
        name = fresh_name(self._model, f"{self._node.outputs[0].name}_weight")
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()), const_value=tensor)
        self._graph.register_initializer(value)
        return value

    def known(self, value: ir.Value, what: str) -> np.ndarray:
        """The array of an input that must be constant."""
        array = constant_array(value)
        if array is None:
            raise RefusedNodeError(f"{what} is no constant")
        return array

    def dtype(self, value: ir.Value) -> ir.DataType:
        """The element type of a value."""
        if value.dtype is None:
            raise RefusedNodeError(f"the element type of {value.name} is unknown")
        return value.dtype

    def rank(self, value: ir.Value) -> int:
        """The number of dimensions of a value."""
        if value.shape is None:
            raise RefusedNodeError(f"the rank of {value.name} is unknown")
        return len(value.shape)

    def size(self, value: ir.Value, axis: int) -> int:
        """A dimension of a value that must be known."""
        size = self.dimension(value, axis)
        if size is None:
            raise RefusedNodeError(f"dimension {axis} of {value.name} is unknown")
        return size

    def dimension(self, value: ir.Value, axis: int) -> int | None:
        """A dimension of a value; None where it is not known."""
        size = None if value.shape is None or axis >= len(value.shape) else value.shape[axis]
        return size if isinstance(size, int) else None

    def is_filled(self, value: ir.Value | None) -> bool:
        """Whether a value is there with something in it: exporters pass empty tensors for states that are not there yet."""
        return value is not None and (value.shape is None or 0 not in value.shape)

    def finish(self, results: Sequence[ir.Value | None]) -> None:
        """Put values in the place of the node's outputs, in order; None, and outputs beyond the end, are not computed.

        Constants that nobody reads any more leave the graph: their bytes may lie under another type in it now.
        """
        self._check_all_read()
        outputs = self._node.outputs
        values = [*results[: len(outputs)], *[None] * (len(outputs) - len(results))]
        for position, value in enumerate(values):
            if value is None and self.is_asked(position):
                raise RefusedNodeError(f"output {position} is asked for")
        placed = [None if value is None else self._named(value, old) for value, old in zip(values, outputs, strict=True)]
        inputs = self._node.inputs
        replace_node(self._model, self._node, (), placed)
        for value in inputs:
            if value is not None and value.is_initializer() and not _is_used(value):
                self._graph.initializers.pop(str(value.name), None)

    def _named(self, value: ir.Value, old: ir.Value) -> ir.Value:
        """The value, made here and under the name of what it replaces."""
        producer = value.producer()
        if producer not in self._made or value.is_graph_output() or value.name in {one.name for one in self._node.outputs}:
            value = self.op("Identity", value)
        if old.name:
            value.name = old.name
        if value.type is None:
            copy_facts(old, value)
        return value

    def _check_all_read(self) -> None:
        unread = [name for name in self._node.attributes if name not in self._read_attributes]
        if unread:
            raise RefusedNodeError(f"attribute {unread[0]} is not taken")
        for position, value in enumerate(self._node.inputs):
            if value is not None and position not in self._read_inputs:
                raise RefusedNodeError(f"input {position} is not taken")

    def _attribute(self, name: str, is_required: bool = False) -> ir.Attr | None:
        self._read_attributes.add(name)
        attribute = self._node.attributes.get(name)
        if attribute is None and is_required:
            raise RefusedNodeError(f"has no attribute {name}")
        return attribute

    def _value(self, operand: Operand) -> ir.Value | None:
        if operand is None or isinstance(operand, ir.Value):
            return operand
        return self.constant(operand if isinstance(operand, np.ndarray) else np.array(operand, np.int64))


def _is_used(value: ir.Value) -> bool:
    return value.is_graph_output() or any(True for _ in value.uses())
