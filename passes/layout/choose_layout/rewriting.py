"""Writing a node channels-last: transposes around what must keep ONNX's order, other axes for what need not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import onnx_ir as ir

from ....compiler.ir.constants import add_constant, add_sizes, constant_array, constant_tensor
from ....compiler.ir.facts import infer_node, tensor_type
from ....compiler.ir.functions import fuse_into_function, inline_function, is_fused
from ....compiler.ir.kinds import Kind, kind_of
from ....compiler.ir.matching import static_shape
from ....compiler.ir.names import fresh_name, release_name
from ....compiler.ir.rewriter import copy_source, graph_of, literal_shape, remove_nodes, replace_node
from .edges import products_of
from .forms import Flexible, is_laid, to_first, to_last
from .movers import MEANS
from .turning import turn_axes

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
    reordered: dict[tuple[ir.Value, int, tuple[int, int]], ir.Value] = field(default_factory=dict)

    def reads_directly(self, flexible: Flexible) -> bool:
        """Whether a node, made channels-last now, would read an operand that lies channels-first."""
        return any(flexible.node.inputs[position] not in self.last for position in flexible.direct)

    def write(self, flexible: Flexible) -> None:
        """Make a node compute channels-last."""
        match flexible.form:
            case "mean":
                self._write_group_of_mean(flexible.node)
            case "flat":
                self._write_flat(flexible.node)
            case "tokens":
                self._write_tokens(flexible.node)
            case "to-last":
                self._write_to_last(flexible)
            case "from-last":
                self._see_through(flexible.node, _first_input(flexible.node))
            case "from-tokens":
                self._write_from_tokens(flexible.node)
            case _:
                self._write_images(flexible)

    def _write_images(self, flexible: Flexible) -> None:
        """A node or group that reads and makes images."""
        operands = {value: value in self.last for i in flexible.operands if (value := flexible.node.inputs[i]) is not None}
        kept = {value for i in flexible.direct if (value := flexible.node.inputs[i]) is not None and not operands[value]}
        name = _group_name(flexible.node)
        nodes = [flexible.node]
        if is_fused(flexible.node):
            nodes = _without_turns(inline_function(self.model, flexible.node))
        wanted = [value for value in operands if value not in kept]
        if flexible.form == "window":
            self._write_window(nodes, wanted, f"{name}_channels_last")
        else:
            self._write_other_axes(nodes, wanted, re.sub("^transpose_", "", name) if len(nodes) > 1 else "")

    def finish(self) -> None:
        """Remove conversions and constants without readers, the latest first. Functions may be left without a call."""
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

    # The forms --------------------------------------------------------------------------------------------------------

    def _write_window(self, nodes: list[ir.Node], operands: Sequence[ir.Value], name: str) -> None:
        """Transposes around the nodes, in one function with them."""
        heads = []
        for value in operands:
            head = self._node("Transpose", [self._last(value, nodes[0])], value, perm=to_first(len(tensor_type(value).shape)))
            graph_of(nodes[0]).insert_before(nodes[0], [head])
            heads.append(head)
            _replace_inputs(nodes, {value: head.outputs[0]})
        results = _results_of(nodes)
        tails = [self._node("Transpose", [result], result, perm=to_last(len(tensor_type(result).shape))) for result in results]
        graph_of(nodes[-1]).insert_after(nodes[-1], tails)
        pairs = [(result, tail.outputs[0]) for result, tail in zip(results, tails, strict=True)]
        backs = self._convert_back(pairs, [*nodes, *tails])
        call = fuse_into_function(self.model, [*heads, *nodes, *tails], name, adjacent=True)
        self.last |= dict(zip(backs, call.outputs, strict=True))

    def _write_other_axes(self, nodes: list[ir.Node], operands: Sequence[ir.Value], name: str) -> None:
        """The same nodes on operands that lie channels-last; several are one function again."""
        values = {value: self._last(value, nodes[0]) for value in operands}
        inner = {output for node in nodes for output in node.outputs}
        rank = len(tensor_type(nodes[-1].outputs[0]).shape)
        for node in nodes:
            if kind_of(node) > Kind.OPERAND:
                self.spare += turn_axes(self.model, node)
            else:
                others = [value for value in node.inputs if value is not None and value not in inner and value not in values]
                values |= {value: self._constant(value, rank) for value in others}
        _replace_inputs(nodes, values)
        for node in nodes:
            for output in node.outputs:
                output.shape = None
            infer_node(node, self.model)
        results = _results_of(nodes)
        backs = self._convert_back([(result, result) for result in results], nodes)
        if name:
            results = list(fuse_into_function(self.model, nodes, name, adjacent=True).outputs)
        self.last |= dict(zip(backs, results, strict=True))

    def _write_group_of_mean(self, node: ir.Node) -> None:
        """A mean, and in a function of their own again what followed it in a group; apart where that makes several shapes."""
        if not is_fused(node):
            self._write_mean(node)
            return
        name, members = _group_name(node), inline_function(self.model, node)
        mean = next(one for one in members if one.op_type in MEANS)
        rest = [one for one in members if one is not mean]
        self._write_mean(mean)
        if len(rest) > 1 and len({static_shape(result) for result in _results_of(rest)}) == 1:
            fuse_into_function(self.model, rest, re.sub(f"^{mean.op_type.lower()}_", "", name), adjacent=True)

    def _write_mean(self, node: ir.Node) -> None:
        value, (result,) = node.inputs[0], node.outputs
        assert value is not None
        keeps = bool(node.attributes.get_int("keepdims", 1))
        operands, attributes = [self._last(value, node)], {"keepdims": int(keeps)}
        axes = np.arange(1, len(tensor_type(value).shape) - 1)
        if self.model.graph.opset_imports[""] >= _AXES_OPSET:
            operands.append(add_constant(self.model, axes, f"{result.name}.axes"))
            mean = ir.node(MEANS[node.op_type], operands, attributes, version=node.version)
        else:
            mean = ir.node(MEANS[node.op_type], operands, {**attributes, "axes": axes.tolist()}, version=node.version)
        new = [mean]
        if keeps:
            new.append(self._reshape(mean.outputs[0], tensor_type(result).shape, result))
        replace_node(self.model, node, new, [new[-1].outputs[0]])

    def _write_flat(self, node: ir.Node) -> None:
        """The rows of products in another order, and so their constants."""
        image, (flat,) = _first_input(node), node.outputs
        _, channels, *places = tensor_type(image).shape
        for product in products_of(self.model, flat) or ():
            weight = product.node.inputs[product.position]
            assert weight is not None
            product.node.replace_input_with(product.position, self._reordered(weight, product.axis, (channels, prod(places))))
            self.spare.append(weight)
        new = self._reshape(self._last(image, node), tensor_type(flat).shape, flat)
        self.spare += _constants_of(node)
        replace_node(self.model, node, [new], [new.outputs[0]])

    def _reordered(self, weight: ir.Value, axis: int, extents: tuple[int, int]) -> ir.Value:
        """A constant matrix whose `axis` is of channels and positions, with positions and channels; read when it is stored."""
        key = (weight, axis, extents)
        if key not in self.reordered:
            tensor = constant_tensor(weight)
            assert tensor is not None
            lazy = ir.LazyTensor(
                lambda: _exchanged(tensor, axis, extents), dtype=tensor.dtype, shape=ir.Shape(tensor_type(weight).shape)
            )
            self.reordered[key] = add_constant(self.model, lazy, str(weight.name))
        return self.reordered[key]

    def _write_tokens(self, node: ir.Node) -> None:
        """Positions with their channels are what lies channels-last already."""
        image, (merged,) = _first_input(node), node.outputs
        images, channels, positions = tensor_type(merged).shape
        new = self._reshape(self._last(image, node), (images, positions, channels), merged)
        made = [new]
        for user in tuple(merged.consumers()):
            replace_node(self.model, user, made, [new.outputs[0]])
            made = []
        self.spare += [*_constants_of(node), merged]

    def _write_to_last(self, flexible: Flexible) -> None:
        """A Transpose, alone or before pointwise nodes of a group: what it makes is the image channels-last."""
        node, image = flexible.node, flexible.node.inputs[flexible.operands[0]]
        assert image is not None
        last = self._last(image, node)
        if not is_fused(node):
            replace_node(self.model, node, [], [last])
            return
        name, members = _group_name(node), inline_function(self.model, node)
        turn = next(one for one in members if one.op_type == "Transpose")
        rest = [one for one in members if one is not turn]
        _replace_inputs(rest, {turn.outputs[0]: last})
        remove_nodes([turn])
        if len(rest) > 1:
            fuse_into_function(self.model, rest, re.sub("^transpose_", "", name), adjacent=True)

    def _write_from_tokens(self, node: ir.Node) -> None:
        """The same the other way round."""
        merged, image = _first_input(node), node.outputs[0]
        swap = merged.producer()
        assert swap is not None
        images, channels, *places = tensor_type(image).shape
        shape = images, *places, channels
        new = self._node("Reshape", [_first_input(swap), self._shape_constant(shape, image)], image, **literal_shape(shape))
        graph_of(node).insert_before(node, [new])
        self.spare += [*_constants_of(node), merged]
        self._see_through(node, new.outputs[0])

    def _see_through(self, node: ir.Node, last: ir.Value) -> None:
        """Readers that want the result of a node channels-last find it in `last`; others keep the node."""
        self.last[node.outputs[0]] = last
        self.spare.append(node.outputs[0])

    # Values -----------------------------------------------------------------------------------------------------------

    def _last(self, value: ir.Value, before: ir.Node) -> ir.Value:
        """The value channels-last: what it was converted from, or a conversion of it, which then stands before a node."""
        if value not in self.last:
            node = self._conversion(value, value, is_last=True)
            graph_of(before).insert_before(before, [node])
            self.last[value] = node.outputs[0]
        return self.last[value]

    def _convert_back(self, results: Sequence[tuple[ir.Value, ir.Value]], nodes: Sequence[ir.Node]) -> list[ir.Value]:
        """Give all readers of results but `nodes`, and the graph, conversions of the same channels-last, which then follow.

        A result comes with itself channels-last.
        """
        members, backs = set(nodes), []
        after = nodes[-1]
        for result, last in results:
            readers = [(user, index) for user, index in result.uses() if user not in members]
            node = self._conversion(last, result, is_last=False)
            graph = graph_of(after)
            graph.insert_after(after, [node])
            after, back = node, node.outputs[0]
            for user, index in readers:
                user.replace_input_with(index, back)
            if result.is_graph_output():
                back.name, result.name = result.name, back.name
                for index, output in enumerate(graph.outputs):
                    if output is result:
                        graph.outputs[index] = back
            self.spare.append(back)
            backs.append(back)
        return backs

    def _conversion(self, value: ir.Value, origin: ir.Value, *, is_last: bool) -> ir.Node:
        """A node that moves the channels of a value last or first: a view where its bytes stay as they are."""
        shape = tensor_type(value).shape
        order = to_last(len(shape)) if is_last else to_first(len(shape))
        turned = tuple(shape[axis] for axis in order)
        is_moved = is_laid(origin) if is_last else turned[1] > 1 and prod(turned[2:]) > 1
        if is_moved:
            return self._node("Transpose", [value], origin, perm=order)
        return self._node("Reshape", [value, self._shape_constant(turned, origin)], origin, **literal_shape(turned))

    def _node(self, op_type: str, inputs: list[ir.Value], origin: ir.Value, **attributes: int | Sequence[int]) -> ir.Node:
        """A node with a named output and facts, whose source is that of what it converts."""
        node = ir.node(op_type, inputs, attributes)
        node.outputs[0].name = fresh_name(self.model, str(origin.name))
        producer = origin.producer()
        if producer is not None:
            copy_source((producer,), node)
        infer_node(node, self.model)
        return node

    def _reshape(self, value: ir.Value, shape: Sequence[int], origin: ir.Value) -> ir.Node:
        return ir.node("Reshape", [value, self._shape_constant(shape, origin)], literal_shape(shape))

    def _shape_constant(self, shape: Sequence[int], origin: ir.Value) -> ir.Value:
        return add_sizes(self.model, shape, f"{origin.name}.shape")

    def _constant(self, value: ir.Value, rank: int) -> ir.Value:
        """A constant operand of pointwise nodes of a rank with its channels last, and no more dimensions than it needs."""
        array = constant_array(value)
        if array is None or array.size == 1:
            return value
        turned = array.reshape((1,) * (rank - array.ndim) + array.shape).transpose(to_last(rank))
        while turned.shape[0] == 1:
            turned = turned[0]
        self.spare.append(value)
        return add_constant(self.model, np.ascontiguousarray(turned), str(value.name))


def _results_of(nodes: Sequence[ir.Node]) -> list[ir.Value]:
    """The values that others read, or the last one where there are none."""
    members = set(nodes)
    values = [value for node in nodes for value in node.outputs]
    read = [value for value in values if value.is_graph_output() or any(user not in members for user in value.consumers())]
    return read or values[-1:]


def _without_turns(nodes: Sequence[ir.Node]) -> list[ir.Node]:
    """The nodes of a group but for those that turn images channels-first, whose readers then get them channels-last."""
    rest = []
    for node in nodes:
        if node.op_type == "Transpose":
            for user, index in tuple(node.outputs[0].uses()):
                user.replace_input_with(index, node.inputs[0])
            remove_nodes([node])
        else:
            rest.append(node)
    return rest


def _first_input(node: ir.Node) -> ir.Value:
    value = node.inputs[0]
    assert value is not None
    return value


def _constants_of(node: ir.Node) -> list[ir.Value]:
    """Constants that may be left without a reader when the node goes."""
    return [value for value in node.inputs[1:] if value is not None and constant_tensor(value) is not None]


def _exchanged(tensor: ir.TensorProtocol, axis: int, extents: tuple[int, int]) -> ir.TensorProtocol:
    """A matrix with the two factors `extents` of an axis in the other order."""
    array = tensor.numpy()
    parts = array.reshape(*array.shape[:axis], *extents, *array.shape[axis + 1 :])
    return ir.tensor(np.ascontiguousarray(parts.swapaxes(axis, axis + 1)).reshape(array.shape), dtype=tensor.dtype)


def _replace_inputs(nodes: Sequence[ir.Node], values: dict[ir.Value, ir.Value]) -> None:
    for node in nodes:
        for index, value in enumerate(node.inputs):
            if value is not None and value in values:
                node.replace_input_with(index, values[value])


def _group_name(node: ir.Node) -> str:
    return re.sub(r"_\d+$", "", node.op_type) if is_fused(node) else node.op_type.lower()
