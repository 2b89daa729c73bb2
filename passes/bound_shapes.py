"""bound-shapes: results whose size depends on data are computed at their largest size, and cut after the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from ..compiler.ir.bounds import is_data_sized
from ..compiler.ir.constants import add_constant, constant_array, scalar_constant
from ..compiler.ir.facts import SOURCE_KEY, has_static_type, infer_node, source_of
from ..compiler.ir.functions import fuse_into_function
from ..compiler.ir.names import fresh_name
from ..compiler.ir.rewriter import Rejection, replace_node
from ..compiler.pipeline import Context, Pass


@dataclass(frozen=True)
class BoundShapes(Pass):
    """Split operators whose results have a size that only a run knows into one of static size and a cut.

    Before:  y = NonZero(x)                                             x: float[3,4], y: int64[2,?]
    After:   count, y_max = prefuse.bounded_nonzero(x)                  y_max: int64[2,12], count: int64[1]
             y = prefuse.trim(y_max, count)

    Legal when the inputs have static shapes and what is cut is read by nobody but the caller: a reader would have a size that
    depends on data itself. Where the size follows from constants, the operator becomes a Gather or a constant, or the cut is
    left out.
    """

    name: ClassVar[str] = "bound-shapes"

    def run(self, model: ir.Model, context: Context) -> bool:
        changed = False
        for node in tuple(model.graph):
            if not is_data_sized(node):
                if changed and not all(has_static_type(value) for value in node.outputs if value.name):
                    infer_node(node, model)  # what it reads may have got a static shape
                continue
            found = _match(node)
            if isinstance(found, Rejection):
                context.reject(self.name, found)
            else:
                found.rewrite(model)
                changed = True
        return changed


@dataclass(frozen=True, slots=True)
class _Result:
    """An output of a data-sized operator: its largest shape, and the axis whose size a run finds; None: it has this shape."""

    shape: tuple[int, ...]
    axis: int | None

    @property
    def cut_shape(self) -> ir.Shape:
        return ir.Shape([None if axis == self.axis else dim for axis, dim in enumerate(self.shape)])


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
    """An operator whose results are to be computed at their largest size, and those of unknown size cut."""

    node: ir.Node
    results: tuple[_Result, ...]

    def rewrite(self, model: ir.Model) -> None:
        node = self.node
        operator = ir.Node("", node.op_type, node.inputs, node.attributes.values(), num_outputs=len(node.outputs), name=node.name)
        axis = self.results[0].axis or 0
        size = _make("Shape", operator.outputs[0], start=axis, end=axis + 1)
        count = size.outputs[0]
        count.name = fresh_name(model, f"{node.outputs[0].name or node.op_type.lower()}_count")
        body, trims = [operator, size], list[list[ir.Node]]()
        new_outputs: list[ir.Value | None] = []
        for old, value, result in zip(node.outputs, operator.outputs, self.results, strict=False):
            if not (old.uses() or old.is_graph_output()):
                new_outputs.append(None)
                continue
            body += _padded(value, count, result)
            new = body[-1].outputs[0]
            old.shape = result.cut_shape
            if result.axis is not None:
                new.name = fresh_name(model, f"{old.name}_max")
                trims.append(_trimmed(new, count, result.axis))
                new = trims[-1][-1].outputs[0]
            new_outputs.append(new)
        for made in (body[1:], *trims):
            for part in made:
                part.metadata_props[SOURCE_KEY] = source_of(node)
        replace_node(model, node, [*body, *(part for trim in trims for part in trim)], new_outputs)
        fuse_into_function(model, body, f"bounded_{node.op_type.lower()}").name = node.name
        for trim in trims:
            fuse_into_function(model, trim, "trim")


_Match = _Selection | _Emptiness | _Bound


def _match(node: ir.Node) -> _Match | Rejection:
    """How the size of a node's results is bounded."""
    for value in node.inputs:
        if value is not None and not has_static_type(value):
            return Rejection(f"{node.op_type} not bounded: the shape of its input %{value.name} is not known", (node,))
    results = _RESULTS[node.op_type](node)
    if any(result.shape[result.axis] == 0 for result in results if result.axis is not None):
        return _Emptiness(node, results)
    if node.op_type == "Compress" and (condition := constant_array(node.inputs[1])) is not None:
        axis = results[0].axis if "axis" in node.attributes else None
        return _Selection(node, np.flatnonzero(condition[: _compressed_size(node)]), axis)
    for value, result in zip(node.outputs, results, strict=False):
        if result.axis is not None and (readers := value.consumers()):
            why = f"%{value.name} is read by {readers[0].op_type}, whose size would depend on data"
            return Rejection(f"{node.op_type} not bounded: {why}", (node, *readers))
    return _Bound(node, results)


# ------------------------------------------------------------------------------------------------------- largest shapes


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
