"""What the iterations of a body become: copies of its nodes, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import onnx_ir as ir

from ....compiler.ir.cloning import ValueMap, clone_node
from ....compiler.ir.constants import share_constant
from ....compiler.ir.matching import is_read, static_shape
from ....compiler.ir.names import fresh_name
from ....compiler.ir.rewriter import operation
from ..canonicalize.scope import Scope
from ..canonicalize.sequences import stack


class Unroller:
    """Copies of one body into the graph around it. The nodes made are in no graph yet; constants are in the main graph."""

    def __init__(self, body: ir.Graph, scope: Scope) -> None:
        self.nodes: list[ir.Node] = []
        self._body = body
        self._scope = scope

    @cached_property
    def _constants(self) -> ValueMap:
        """The body's initializers as constants of the model, once for all iterations."""
        return {value: share_constant(self._scope.model, value) for value in self._body.initializers.values()}

    def run(self, arguments: Sequence[ir.Value | None]) -> list[ir.Value]:
        """Append one iteration, with these values for the body's parameters, and return its results."""
        values: ValueMap = {**self._constants, **dict(zip(self._body.inputs, arguments, strict=True))}
        for child in self._body:
            node = clone_node(child, values)
            node.metadata_props.update(child.metadata_props)
            for output in node.outputs:
                if output.name:
                    output.name = fresh_name(self._scope.model, output.name)
                    output.shape = None  # what is recorded in the body need not be true of every iteration
            self.nodes.append(node)
        return [found for value in self._body.outputs if (found := values.get(value, value)) is not None]

    def constant(self, parameter: ir.Value, array: np.ndarray) -> ir.Value | None:
        """A constant to give for a parameter; None where the body does not look at it."""
        return self._scope.constant(array, parameter.name) if is_read(parameter) else None

    def take(self, value: ir.Value | None, place: int, axis: int) -> ir.Value:
        """The elements of `value` at a place of an axis, without that dimension."""
        node = operation(
            "Gather", [value, self._scope.constant(np.array(place), None if value is None else value.name)], axis=axis
        )
        self.nodes.append(node)
        return node.outputs[0]

    def empty(self, value: ir.Value, axis: int, hint: str | None) -> ir.Value | None:
        """A stack of no tensors like `value`, a result of the body; None where its shape is not known."""
        dims = static_shape(value)
        if dims is None or value.dtype is None:
            return None
        place = axis % (len(dims) + 1)
        return self._scope.constant(np.empty((*dims[:place], 0, *dims[place:]), value.dtype.numpy()), hint)

    def stack(self, elements: Sequence[ir.Value], axis: int, hint: str | None) -> ir.Value:
        """The tensors along a new dimension."""
        nodes = stack(elements, axis, self._scope, hint)
        self.nodes += nodes
        return nodes[-1].outputs[0]
