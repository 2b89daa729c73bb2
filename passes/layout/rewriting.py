"""Writing a node channels-last: transposes around what must keep ONNX's order, other axes for what need not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ...compiler.ir.constants import add_constant, constant_array
from ...compiler.ir.facts import infer_node, tensor_type
from ...compiler.ir.functions import fuse_into_function, inline_function, is_fused
from ...compiler.ir.names import fresh_name, release_name
from ...compiler.ir.rewriter import copy_source, graph_of, remove_nodes, replace_node
from .nodes import MEANS, Flexible, axes_of, is_laid

_TO_FIRST = (0, 3, 1, 2)
_TO_LAST = (0, 2, 3, 1)
_AXIS_LAST = (0, 3, 1, 2)  # where each of ONNX's axes of an image lies channels-last
_AXES_OPSET = 18  # from which reductions take their axes as an input


@dataclass(slots=True)
class LayoutWriter:
    """Rewrites nodes one after the other, in the order of the graph, which stays executable and verified.

    A node made channels-last is followed by the conversion of its result back, which later readers that want it channels-last see
    through. `finish` removes what nobody reads in the end. `last` gives, for values that lie channels-first, the same one
    channels-last.
    """

    model: ir.Model
    last: dict[ir.Value, ir.Value] = field(default_factory=dict)
    spare: list[ir.Value] = field(default_factory=list)  # what may be left without a reader: conversions, constants
    inlined: set[ir.OperatorIdentifier] = field(default_factory=set)  # functions that may be left without a call

    def write(self, flexible: Flexible) -> None:
        """Make a node compute channels-last."""
        if flexible.form == "mean":
            self._write_mean(flexible.node)
            return
        operands = {value: value in self.last for i in flexible.operands if (value := flexible.node.inputs[i]) is not None}
        kept = {value for i in flexible.direct if (value := flexible.node.inputs[i]) is not None and not operands[value]}
        name = _group_name(flexible.node)
        nodes = [flexible.node]
        if is_fused(flexible.node):
            self.inlined.add(flexible.node.op_identifier())
            nodes = list(inline_function(self.model, flexible.node))
        wanted = [value for value in operands if value not in kept]
        if flexible.form == "window":
            self._write_window(nodes, wanted, f"{name}_channels_last")
        else:
            self._write_other_axes(nodes, wanted, name if len(nodes) > 1 else "")

    def finish(self) -> None:
        """Remove conversions and constants without readers, the latest first, and functions without a call."""
        for value in reversed(self.spare):
            producer = value.producer()
            if value.uses() or value.is_graph_output():
                continue
            if producer is not None and producer.graph is not None:
                remove_nodes([producer])
                release_name(self.model, str(value.name))
            elif value.is_initializer() and not value.is_graph_input():
                self.model.graph.initializers.pop(str(value.name))
                release_name(self.model, str(value.name))

        for identifier in self.inlined - {node.op_identifier() for node in self.model.graph}:
            del self.model.functions[identifier]

    # The forms --------------------------------------------------------------------------------------------------------

    def _write_window(self, nodes: list[ir.Node], operands: Sequence[ir.Value], name: str) -> None:
        """Transposes around the nodes, in one function with them."""
        heads = []
        for value in operands:
            head = self._node("Transpose", [self._last(value, nodes[0])], value, perm=_TO_FIRST)
            graph_of(nodes[0]).insert_before(nodes[0], [head])
            heads.append(head)
            _replace_inputs(nodes, {value: head.outputs[0]})
        result = _result_of(nodes)
        tail = self._node("Transpose", [result], result, perm=_TO_LAST)
        graph_of(nodes[-1]).insert_after(nodes[-1], [tail])
        back = self._convert_back(result, tail.outputs[0], tail)
        call = fuse_into_function(self.model, [*heads, *nodes, tail], name)
        self.last[back] = call.outputs[0]

    def _write_other_axes(self, nodes: list[ir.Node], operands: Sequence[ir.Value], name: str) -> None:
        """The same nodes on operands that lie channels-last; several are one function again."""
        values = {value: self._last(value, nodes[0]) for value in operands}
        inner = {output for node in nodes for output in node.outputs}
        for node in nodes:
            if node.op_type == "Concat":
                node.attributes["axis"] = ir.AttrInt64("axis", 3)
            elif node.op_type == "Slice":
                self._turn_axes(node)
            else:
                others = [value for value in node.inputs if value is not None and value not in inner and value not in values]
                values |= {value: self._constant(value) for value in others}
        _replace_inputs(nodes, values)
        for node in nodes:
            node.outputs[0].shape = None
            infer_node(node, self.model)
        result = _result_of(nodes)
        back = self._convert_back(result, result, nodes[-1])
        if name:
            result = fuse_into_function(self.model, nodes, name).outputs[0]
        self.last[back] = result

    def _write_mean(self, node: ir.Node) -> None:
        value, (result,) = node.inputs[0], node.outputs
        assert value is not None
        keeps = bool(node.attributes.get_int("keepdims", 1))
        operands, attributes = [self._last(value, node)], {"keepdims": int(keeps)}
        axes = np.array([1, 2])
        if self.model.graph.opset_imports[""] >= _AXES_OPSET:
            operands.append(add_constant(self.model, axes, f"{result.name}.axes"))
            mean = ir.node(MEANS[node.op_type], operands, attributes, version=node.version)
        else:
            mean = ir.node(MEANS[node.op_type], operands, {**attributes, "axes": [1, 2]}, version=node.version)
        new = [mean]
        if keeps:
            new.append(ir.node("Reshape", [mean.outputs[0], self._shape_constant(tensor_type(result).shape, result)]))
        replace_node(self.model, node, new, [new[-1].outputs[0]])

    def _turn_axes(self, node: ir.Node) -> None:
        axes = axes_of(node)
        assert axes is not None
        turned = [_AXIS_LAST[axis] for axis in axes]
        if "axes" in node.attributes:
            node.attributes["axes"] = ir.AttrInt64s("axes", turned)
        else:
            old = node.inputs[3]
            assert old is not None
            assert old.dtype is not None
            node.replace_input_with(3, add_constant(self.model, np.array(turned, old.dtype.numpy()), str(old.name)))
            self.spare.append(old)

    # Values -----------------------------------------------------------------------------------------------------------

    def _last(self, value: ir.Value, before: ir.Node) -> ir.Value:
        """The value channels-last: what it was converted from, or a conversion of it, which then stands before a node."""
        if value not in self.last:
            node = self._conversion(value, value, _TO_LAST)
            graph_of(before).insert_before(before, [node])
            self.last[value] = node.outputs[0]
        return self.last[value]

    def _convert_back(self, result: ir.Value, last: ir.Value, after: ir.Node) -> ir.Value:
        """Give all readers of `result`, and the graph, the conversion of `last` instead, which then stands after a node."""
        readers = [(user, index) for user, index in result.uses() if user is not last.producer()]
        node = self._conversion(last, result, _TO_FIRST)
        back = node.outputs[0]
        graph = graph_of(after)
        graph.insert_after(after, [node])
        for user, index in readers:
            user.replace_input_with(index, back)
        if result.is_graph_output():
            back.name, result.name = result.name, back.name
            for index, output in enumerate(graph.outputs):
                if output is result:
                    graph.outputs[index] = back
        self.spare.append(back)
        return back

    def _conversion(self, value: ir.Value, origin: ir.Value, order: tuple[int, ...]) -> ir.Node:
        """A node that gives a value its dimensions in another order: a view where its bytes stay as they are."""
        shape = tensor_type(value).shape
        turned = tuple(shape[axis] for axis in order)
        is_moved = is_laid(origin) if order == _TO_LAST else turned[1] > 1 and turned[2] * turned[3] > 1
        if is_moved:
            return self._node("Transpose", [value], origin, perm=order)
        return self._node("Reshape", [value, self._shape_constant(turned, origin)], origin)

    def _node(self, op_type: str, inputs: list[ir.Value], origin: ir.Value, **attributes: Sequence[int]) -> ir.Node:
        """A node with a named output and facts, whose source is that of what it converts."""
        node = ir.node(op_type, inputs, attributes)
        node.outputs[0].name = fresh_name(self.model, str(origin.name))
        producer = origin.producer()
        if producer is not None:
            copy_source((producer,), node)
        infer_node(node, self.model)
        return node

    def _shape_constant(self, shape: Sequence[int], origin: ir.Value) -> ir.Value:
        return add_constant(self.model, np.array(shape, np.int64), f"{origin.name}.shape")

    def _constant(self, value: ir.Value) -> ir.Value:
        """A constant operand of pointwise nodes with its channels last, and no more dimensions than it needs."""
        array = constant_array(value)
        if array is None or array.size == 1:
            return value
        turned = array.reshape((1,) * (4 - array.ndim) + array.shape).transpose(_TO_LAST)
        while turned.shape[0] == 1:
            turned = turned[0]
        self.spare.append(value)
        return add_constant(self.model, np.ascontiguousarray(turned), str(value.name))


def _result_of(nodes: Sequence[ir.Node]) -> ir.Value:
    """The one value that others read."""
    members = set(nodes)
    for output in nodes[-1].outputs:
        if output.name:
            assert all(user not in members for user in output.consumers())
            return output
    raise AssertionError(f"{nodes[-1].op_type} has no output")


def _replace_inputs(nodes: Sequence[ir.Node], values: dict[ir.Value, ir.Value]) -> None:
    for node in nodes:
        for index, value in enumerate(node.inputs):
            if value is not None and value in values:
                node.replace_input_with(index, values[value])


def _group_name(node: ir.Node) -> str:
    return re.sub(r"_\d+$", "", node.op_type) if is_fused(node) else node.op_type.lower()
