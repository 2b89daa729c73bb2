"""bound-shapes: results whose size depends on data are computed at their largest size, and cut after the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from math import prod
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from ...compiler.ir.bounds import is_data_sized
from ...compiler.ir.carried import carried_axis
from ...compiler.ir.constants import add_constant, constant_array, scalar_constant
from ...compiler.ir.facts import SOURCE_KEY, has_static_type, infer_node, source_of, tensor_type
from ...compiler.ir.functions import fuse_into_function
from ...compiler.ir.names import fresh_name
from ...compiler.ir.rewriter import Rejection, graph_of, replace_node
from ...compiler.pipeline import Context, Pass
from ...runtime.errors import InvalidModelError


@dataclass(frozen=True)
class BoundShapes(Pass):
    """Split operators whose results have a size that only a run knows into one of static size and a cut.

    Before:  y = NonZero(x);  z = Transpose(y)                          x: float[3,4], y: int64[2,?], z: int64[?,2]
    After:   count, y = prefuse.bounded_nonzero(x)                      y: int64[2,12], count: int64[1]
             z_max = Transpose(y);  z = prefuse.trim(z_max, count)      z_max: int64[12,2]

    Legal when the inputs have static shapes and all that reads the results carries the axis of unknown size to its own results,
    down to the outputs, where the cuts are: it then works on what nobody looks at, too. Where the size follows from constants,
    the operator becomes a Gather or a constant, or the cut is left out.
    """

    name: ClassVar[str] = "bound-shapes"

    def run(self, model: ir.Model, context: Context) -> bool:
        order = {node: index for index, node in enumerate(model.graph)}
        _complete_ranks(model)
        changed = False
        for node in tuple(model.graph):
            if not is_data_sized(node):
                if changed and not all(has_static_type(value) for value in node.outputs if value.name):
                    infer_node(node, model)  # what it reads may have got a static shape
                continue
            found = _match(node, order)
            if isinstance(found, Rejection):
                context.reject(self.name, found)
            else:
                found.rewrite(model)
                changed = True
        return changed


def _complete_ranks(model: ir.Model) -> None:
    """Infer what has no rank yet: ONNX says nothing of some operators' results before decompose has spelled them out."""
    for node in model.graph:
        if any(value.name and value.shape is None for value in node.outputs):
            infer_node(node, model)


@dataclass(frozen=True, slots=True)
class _Result:
    """An output of a data-sized operator: its largest shape, and the axis whose size a run finds; None: it has this shape."""

    shape: tuple[int, ...]
    axis: int | None


@dataclass(frozen=True, slots=True)
class _Selection:
    """A Compress whose condition is constant: a Gather of `places` along `axis`; None: of the flattened input."""

    node: ir.Node
    places: np.ndarray
    axis: int | None

    def rewrite(self, model: ir.Model) -> None:
        node, made = self.node, []
        data = node.inputs[0]
        name = str(node.outputs[0].name)
        if self.axis is None:
            made.append(ir.node("Reshape", [data, add_constant(model, np.array([-1]), f"{name}_flat")]))
            data = made[0].outputs[0]
        places = add_constant(model, self.places, f"{name}_places")
        made.append(ir.node("Gather", [data, places], {"axis": self.axis or 0}))
        node.outputs[0].shape = None
        replace_node(model, node, made, made[-1].outputs)


@dataclass(frozen=True, slots=True)
class _Emptiness:
    """An operator that finds nothing whatever its inputs hold."""

    node: ir.Node
    results: tuple[_Result, ...]

    def rewrite(self, model: ir.Model) -> None:
        empty: list[ir.Value | None] = []
        for value, result in zip(self.node.outputs, self.results, strict=False):
            assert value.dtype is not None, f"%{value.name} has no type"
            value.shape = ir.Shape(result.shape)
            array = np.zeros(result.shape, value.dtype.numpy())
            empty.append(add_constant(model, array, f"{value.name}_empty") if value.name else None)
        replace_node(model, self.node, (), empty)


@dataclass(frozen=True, slots=True)
class _Bound:
    """An operator whose results are to be computed at their largest size, as are those of its readers, in order of the graph."""

    node: ir.Node
    results: tuple[_Result, ...]
    readers: tuple[ir.Node, ...]
    axes: dict[ir.Value, int]  # of every value of unknown size among the results and those of the readers

    def rewrite(self, model: ir.Model) -> None:
        node = self.node
        name = node.op_type.lower()
        cut = [value for value in self.axes if value.is_graph_output()]
        places = [(model.graph.outputs.index(value), self.axes[value]) for value in cut]
        body, count, largest = self._body(model)
        for old, result in zip(node.outputs, self.results, strict=False):
            old.shape = ir.Shape(result.shape)
        replace_node(model, node, body, largest)
        for reader in self.readers:
            for value in reader.outputs:
                value.shape = None
            infer_node(reader, model)
        trims = [_trim(model, place, axis, count) for place, axis in places]
        fuse_into_function(model, body, f"bounded_{name}").name = node.name
        for trim in trims:
            fuse_into_function(model, trim, "trim")

    def _body(self, model: ir.Model) -> tuple[list[ir.Node], ir.Value, list[ir.Value | None]]:
        """The operator with what pads its results, the number of results, and the padded results that somebody reads."""
        node = self.node
        operator = ir.Node("", node.op_type, node.inputs, node.attributes.values(), num_outputs=len(node.outputs), name=node.name)
        axis = self.results[0].axis or 0
        size = _make("Shape", operator.outputs[0], start=axis, end=axis + 1)
        count = size.outputs[0]
        count.name = fresh_name(model, f"{node.outputs[0].name or node.op_type.lower()}_count")
        body, largest = [operator, size], list[ir.Value | None]()
        for old, value, result in zip(node.outputs, operator.outputs, self.results, strict=False):
            is_read = bool(old.uses()) or old.is_graph_output()
            if is_read:
                body += _padded(value, count, result)
            largest.append(body[-1].outputs[0] if is_read else None)
        for part in body[1:]:
            part.metadata_props[SOURCE_KEY] = source_of(node)
        return body, count, largest


_Match = _Selection | _Emptiness | _Bound


def _match(node: ir.Node, order: Mapping[ir.Node, int]) -> _Match | Rejection:
    """How the size of a node's results is bounded; `order` is that of the graph.

    Raises:
        InvalidModelError: the node's inputs do not fit its operator.
    """
    for value in node.inputs:
        if value is not None and not has_static_type(value):
            return Rejection(f"{node.op_type} not bounded: the shape of its input %{value.name} is not known", (node,))
        if value is not None and value.name and tensor_type(value).is_symbolic:
            return Rejection(f"{node.op_type} not bounded: a call decides the shape of its input %{value.name}", (node,))
    _check(node)
    results = _RESULTS[node.op_type](node)
    if any(result.shape[result.axis] == 0 for result in results if result.axis is not None):
        return _Emptiness(node, results)
    if node.op_type == "Compress" and (condition := constant_array(node.inputs[1])) is not None:
        axis = results[0].axis if "axis" in node.attributes else None
        return _Selection(node, np.flatnonzero(condition[: _compressed_size(node)]), axis)
    return _follow(node, results, order)


def _follow(node: ir.Node, results: tuple[_Result, ...], order: Mapping[ir.Node, int]) -> _Bound | Rejection:
    """The nodes to which the unknown size of a node's results spreads, in order of the graph."""
    pairs = zip(node.outputs, results, strict=False)
    axes = {value: result.axis for value, result in pairs if value.name and result.axis is not None}
    readers: list[ir.Node] = []
    pending: list[tuple[int, ir.Node]] = []
    queued: set[ir.Node] = set()
    fresh = list(axes)
    while True:
        for reader in (reader for value in fresh for reader in value.consumers() if reader not in queued):
            if reader not in order:
                return _rejection(node, reader, "a subgraph")
            queued.add(reader)
            heappush(pending, (order[reader], reader))
        if not pending:
            return _Bound(node, results, tuple(readers), axes)
        _, reader = heappop(pending)
        axis = carried_axis(reader, {value: axes[value] for value in reader.inputs if value is not None and value in axes})
        if axis is None:
            return _rejection(node, reader, reader.op_type)
        readers.append(reader)
        fresh = list(reader.outputs)
        axes.update(dict.fromkeys(fresh, axis))


def _rejection(node: ir.Node, reader: ir.Node, what: str) -> Rejection:
    why = f"{what}, whose result may have any size, reads what it finds"
    return Rejection(f"{node.op_type} not bounded: {why}", (node, reader))


def _trim(model: ir.Model, place: int, axis: int, count: ir.Value) -> list[ir.Node]:
    """Nodes that cut an output of the graph to its first `count` elements along an axis, under its name."""
    value = model.graph.outputs[place]
    producer = value.producer()
    assert producer is not None, f"%{value.name} is no result"
    nodes = _trimmed(value, count, axis)
    for part in nodes:
        part.metadata_props[SOURCE_KEY] = source_of(producer)
    name, value.name = value.name, fresh_name(model, f"{value.name}_max")
    nodes[-1].outputs[0].name = name
    for part in nodes[:-1]:
        part.outputs[0].name = fresh_name(model, f"{name}_bound")
    graph_of(producer).insert_after(producer, nodes)
    for part in nodes:
        infer_node(part, model)
    result = model.graph.outputs[place] = nodes[-1].outputs[0]
    assert value.shape is not None
    result.shape = ir.Shape([None if number == axis else dim for number, dim in enumerate(value.shape)])
    return nodes


# ------------------------------------------------------------------------------------------------------- largest shapes


def _check(node: ir.Node) -> None:
    """Raise an InvalidModelError for what ONNX's inference lets pass."""
    fault = ""
    if node.op_type == "Compress" and len(_shape(node, 1)) != 1:
        fault = f"its condition has the shape {list(_shape(node, 1))}, not one dimension"
    if node.op_type == "NonMaxSuppression":
        boxes, scores, scalars = _shape(node, 0), _shape(node, 1), range(2, len(node.inputs))
        if len(boxes) != 3 or len(scores) != 3 or boxes != (scores[0], scores[2], 4):
            fault = f"boxes {list(boxes)} and scores {list(scores)} are not [batches, boxes, 4] and [batches, classes, boxes]"
        elif any(prod(_shape(node, place)) > 1 for place in scalars if node.inputs[place] is not None):
            fault = "its limits are not single numbers"
        elif node.attributes.get_int("center_point_box", 0) not in (0, 1):
            fault = f"center_point_box is {node.attributes.get_int('center_point_box')}, not 0 or 1"
    if fault:
        raise InvalidModelError(source_of(node), f"{node.op_type}: {fault}", "correct the model")


def _compress_results(node: ir.Node) -> tuple[_Result, ...]:
    shape, axis = _shape(node, 0), _axis(node)
    if axis is None:
        return (_Result((_compressed_size(node),), 0),)
    return (_Result((*shape[:axis], _compressed_size(node), *shape[axis + 1 :]), axis),)


def _compressed_size(node: ir.Node) -> int:
    """Positions of a Compress that may be selected: a condition may be shorter than what it selects from."""
    shape, axis = _shape(node, 0), _axis(node)
    return min(prod(shape) if axis is None else shape[axis], prod(_shape(node, 1)))


def _non_max_suppression_results(node: ir.Node) -> tuple[_Result, ...]:
    (batches, boxes, _), (_, classes, _) = _shape(node, 0), _shape(node, 1)
    limit = node.inputs[2] if len(node.inputs) > 2 else None
    known = 0 if limit is None else scalar_constant(limit)
    selected = boxes if known is None else max(min(boxes, int(known)), 0)
    return (_Result((batches * classes * selected, 3), 0),)


def _non_zero_results(node: ir.Node) -> tuple[_Result, ...]:
    shape = _shape(node, 0)
    return (_Result((len(shape), prod(shape)), 1),)


def _unique_results(node: ir.Node) -> tuple[_Result, ...]:
    """Y, indices, inverse_indices and counts. One element has nothing to be equal to."""
    shape, axis = _shape(node, 0), _axis(node)
    size = prod(shape) if axis is None else shape[axis]
    largest = (size,) if axis is None else shape
    cut = None if size == 1 else 0
    return (
        _Result(largest, None if size == 1 else axis or 0),
        _Result((size,), cut),
        _Result((size,), None),
        _Result((size,), cut),
    )


_RESULTS: dict[str, Callable[[ir.Node], tuple[_Result, ...]]] = {
    "Compress": _compress_results,
    "NonMaxSuppression": _non_max_suppression_results,
    "NonZero": _non_zero_results,
    "Unique": _unique_results,
}


def _shape(node: ir.Node, position: int) -> tuple[int, ...]:
    value = node.inputs[position]
    assert value is not None
    assert value.shape is not None
    return tuple(value.shape.numpy())


def _axis(node: ir.Node) -> int | None:
    """The axis along which a node selects, not negative; None: its input is flattened."""
    attribute = node.attributes.get("axis")
    return None if attribute is None else attribute.as_int() % len(_shape(node, 0))


# --------------------------------------------------------------------------------------------------------------- bodies


def _padded(value: ir.Value, size: ir.Value, result: _Result) -> list[ir.Node]:
    """Nodes that give `value`, which has `size` elements along an axis, its largest shape, with zeros behind it."""
    shape = _constant(*result.shape)
    if result.axis is None:
        return [shape, _make("Reshape", value, shape.outputs[0], allowzero=1)]
    zero, most, axis = _constant(0), _constant(result.shape[result.axis]), _constant(result.axis)
    missing = _make("Sub", most.outputs[0], size)
    pads = _make("Concat", zero.outputs[0], missing.outputs[0], axis=0)
    padded = _make("Pad", value, pads.outputs[0], None, axis.outputs[0])
    whole = _make("Reshape", padded.outputs[0], shape.outputs[0], allowzero=1)
    return [zero, most, axis, missing, pads, padded, shape, whole]


def _trimmed(value: ir.Value, size: ir.Value, axis: int) -> list[ir.Node]:
    """Nodes that cut `value` to its first `size` elements along an axis."""
    zero, along = _constant(0), _constant(axis)
    return [zero, along, _make("Slice", value, zero.outputs[0], size, along.outputs[0])]


def _constant(*numbers: int) -> ir.Node:
    return ir.node("Constant", [], {"value_ints": list(numbers)}, name="")


def _make(op_type: str, *inputs: ir.Value | None, **attributes: int) -> ir.Node:
    return ir.node(op_type, inputs, attributes, name="")
