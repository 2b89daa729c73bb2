"""Pointwise nodes and normalizations of rows, computed in the shape of what the view shows that they read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import onnx_ir as ir

from ....compiler.ir.aliases import is_view, remove_unread_views, view_root
from ....compiler.ir.constants import add_constant, add_sizes, constant_tensor, derived_tensor
from ....compiler.ir.kinds import Kind, is_pointwise, kind_of, takes_followers
from ....compiler.ir.matching import static_shape
from ....compiler.ir.rewriter import Rejection, drop_unused_constants, literal_shape, operation, replace_node
from ....compiler.ir.rows import ROW_OPERATORS, rows_of
from .regrouping import regrouped, widened

_MAX_PULLED = 8  # nodes that one node may take along into another shape
_MAX_REPEATED = 4096  # elements of a constant that is repeated to be shown in another shape
_Shape = tuple[int, ...]
_Plan = dict[ir.Node, list["_Form"]]  # what to compute in another shape, in order of the graph, and how its operands are shown


@dataclass(frozen=True, slots=True)
class _Form:
    """The shape in which an operand is shown; a constant is repeated to the shape `through` before."""

    through: _Shape
    shape: _Shape


def view_before(node: ir.Node) -> ir.Value | None:
    """The operand of a pointwise node, or of a normalization, that is a view of what the node could be in one group with."""
    if not is_pointwise(node) and not _is_of_rows(node):
        return None
    for value in node.inputs if is_pointwise(node) else node.inputs[:1]:
        if value is None or view_root(value) is value or not takes_followers(view_root(value).producer()):
            continue
        source, shown = static_shape(view_root(value)), static_shape(value)
        if source is not None and shown is not None and source != shown and 0 not in shown:
            return value
    return None


def _is_of_rows(node: ir.Node) -> bool:
    return node.op_type in ROW_OPERATORS and rows_of(node) is not None and not any(value.name for value in node.outputs[1:])


def _reading_fault(root: ir.Value) -> str:
    """Why what reads a value is not to join the group of what makes it; empty if it may be.

    A product's epilogue takes it whoever else reads the product.
    """
    producer = root.producer()
    waiting = [] if producer is not None and kind_of(producer) is Kind.OUTPUT_FUSABLE else [root]
    while waiting:
        value = waiting.pop()
        if value.is_graph_output():
            return f"%{value.name} is an output of the graph"
        for reader in value.consumers():
            if is_view(reader):
                waiting.append(reader.outputs[0])
            elif not is_pointwise(reader) and not _is_of_rows(reader):
                return f"%{value.name} is also read by {reader.op_type}"
    return ""


def _extend(
    plan: _Plan, node: ir.Node, shown: _Shape, source: _Shape, holds: Callable[[ir.Value], bool], waiting: int = 0
) -> str:
    """Put a node, after those that come along, into a plan that computes it in the shape of the source; else why not.

    Values that hold their readers are those whose makers these are better computed beside than beside the source. Beside those of
    the plan, `waiting` nodes come along, for whose operands this one is.
    """
    if static_shape(node.outputs[0]) != shown:
        return f"its shape is {node.outputs[0].shape} and that of the view {list(shown)}"
    if not is_pointwise(node):
        rows = rows_of(node)
        if rows is None or source[-rows.count :] != shown[-rows.count :]:
            return f"it would have other rows in {list(source)}"
        others = [_Form((), ()) if value is None else _form_of(value, shown, source) for value in node.inputs[1:]]
        if None in others:
            return "its scale spans only some of the dimensions that become others"
        plan[node] = [_Form(shown, source), *(form for form in others if form is not None)]
        return ""
    forms: list[_Form] = []
    for value in node.inputs:
        form = _Form((), ()) if value is None else _form_of(value, shown, source)
        if form is None:
            assert value is not None
            return f"%{value.name} spans only some of the dimensions that become others"
        if value is not None and form.shape == source:
            producer = _only_for(node, value)
            if holds(value) if producer is None else not is_pointwise(producer) or len(plan) + waiting >= _MAX_PULLED:
                return f"it can join what makes %{value.name}"
            if producer is not None and (fault := _extend(plan, producer, shown, source, holds, waiting + 1)):
                return fault
        forms.append(form)
    plan[node] = forms
    return ""


def _form_of(value: ir.Value, shown: _Shape, source: _Shape) -> _Form | None:
    """How an operand is shown to what is computed in the shape of the source; None where it cannot be."""
    shape = static_shape(value)
    if shape is None:
        return None
    target = regrouped(shape, shown, source)
    if target is not None:
        return _Form(shape, target)
    through = widened(shape, shown, source)
    target = regrouped(through, shown, source)
    is_small = constant_tensor(value) is not None and prod(through) <= _MAX_REPEATED
    return _Form(through, target) if is_small and target is not None else None


def _shape_of(value: ir.Value) -> _Shape:
    shape = static_shape(value)
    assert shape is not None
    return shape


def _only_for(node: ir.Node, value: ir.Value) -> ir.Node | None:
    """What makes a value that a node alone reads and that is no view."""
    producer = value.producer()
    if producer is None or is_view(producer) or constant_tensor(value) is not None or producer.graph is not node.graph:
        return None
    return None if value.is_graph_output() or value.consumers() != (node,) else producer


def _is_anchored(node: ir.Node, value: ir.Value) -> bool:
    """Whether a node, once it reads a value without views, stays in its shape: an anchor's that it alone reads.

    Pointwise nodes between the two come along, and are between them in any shape.
    """
    while (producer := value.producer()) is not None and is_view(producer):
        if value.is_graph_output() or value.consumers() != (node,) or producer.inputs[0] is None:
            return False
        node, value = producer, producer.inputs[0]
    shape, waiting, pulled = static_shape(value), [(node, value)], 0
    while waiting:
        reader, value = waiting.pop()
        maker = _only_for(reader, value)
        if maker is None:
            continue
        if not is_pointwise(maker) or pulled == _MAX_PULLED:
            return True
        pulled += 1
        waiting += [(maker, each) for each in maker.inputs if each is not None and static_shape(each) == shape]
    return False


@dataclass(slots=True)
class ViewSinking:
    """The rewriting of one graph, in its order. Views that nothing reads any more are out of it as soon as they are passed."""

    model: ir.Model
    has_passed: bool = False  # any view
    unread: list[ir.Value | None] = field(default_factory=list)  # operands of views that are gone
    shapes: dict[_Shape, ir.Value] = field(default_factory=dict)  # operands of the Reshapes made, by what they hold
    constants: dict[tuple[ir.Value, _Form], ir.Value] = field(default_factory=dict)  # in other shapes
    faults: dict[ir.Value, str] = field(default_factory=dict)  # of sources, why nothing joins their groups

    def pass_view(self, node: ir.Node, view: ir.Value) -> list[ir.Node] | Rejection:
        """Compute a node that reads a view in the shape of the view's source: what is computed so now, it last; or why not."""
        root, producer = view_root(view), view_root(view).producer()
        assert producer is not None
        plan: _Plan = {}
        is_free = not _is_anchored(node, view)
        fault = self._fault_of(root) or _extend(
            plan, node, _shape_of(view), _shape_of(root), lambda value: is_free and self._takes_readers(value)
        )
        if fault:
            return Rejection(f"{node.op_type} not computed before the view of {producer.op_type}: {fault}", (producer, node))
        return [self._sink(one, forms) for one, forms in plan.items()]

    def _fault_of(self, root: ir.Value) -> str:
        """Why what reads a value is not to join the group of what makes it."""
        if root not in self.faults:
            self.faults[root] = _reading_fault(root)
        return self.faults[root]

    def _takes_readers(self, value: ir.Value) -> bool:
        """Whether what reads a value that is no view could join its maker: such a reader would come back from any other shape."""
        producer = value.producer()
        return not (producer is None or is_view(producer)) and takes_followers(producer) and not self._fault_of(value)

    def _sink(self, node: ir.Node, forms: Sequence[_Form]) -> ir.Node:
        """Put a node that reads its operands in other shapes, and a view of its result, in the node's place."""
        made: list[ir.Node] = []
        operands = list(zip(node.inputs, forms, strict=True))
        inputs = [None if value is None else self._shown(value, form, made) for value, form in operands]
        attributes = dict(node.attributes)
        shape = _shape_of(node.outputs[0])
        if not is_pointwise(node):  # its rows are counted from the last dimension
            axis = node.attributes.get_int("axis", -1)
            attributes["axis"] = ir.AttrInt64("axis", axis % len(shape) - len(shape))
        computed = ir.Node(node.domain, node.op_type, inputs, attributes, name=node.name, version=node.version)
        view = operation("Reshape", [computed.outputs[0], self._dims(shape)], **literal_shape(shape))
        read = list(node.inputs)
        replace_node(self.model, node, [*made, computed, view], [view.outputs[0], *[None] * (len(node.outputs) - 1)])
        self._leave(read)
        return computed

    def read_sources(self, node: ir.Node) -> None:
        """Let a node read what it sees through views that give it back its shape."""
        for position, value in enumerate(node.inputs):
            root, shape = value if value is None else view_root(value), static_shape(value)
            if root is not value and shape is not None and static_shape(root) == shape:
                node.replace_input_with(position, root)
                self._leave([value])

    def _shown(self, value: ir.Value, form: _Form, made: list[ir.Node]) -> ir.Value:
        """An operand in its form: what it is a view of, a new constant, or a new view."""
        for known in (value, view_root(value)):
            if static_shape(known) == form.shape:
                return known
        if (tensor := constant_tensor(value)) is not None:
            if (value, form) not in self.constants:

                def show() -> np.ndarray:
                    return np.broadcast_to(tensor.numpy(), form.through).reshape(form.shape)

                lazy = derived_tensor(("view", form.through, form.shape), [tensor], show, tensor.dtype, form.shape)
                self.constants[value, form] = add_constant(self.model, lazy, str(value.name))
            return self.constants[value, form]
        made.append(operation("Reshape", [view_root(value), self._dims(form.shape)], **literal_shape(form.shape)))
        return made[-1].outputs[0]

    def _dims(self, shape: _Shape) -> ir.Value:
        """The second operand of a Reshape to a shape."""
        if shape not in self.shapes:
            self.shapes[shape] = add_sizes(self.model, shape, "shape")
        return self.shapes[shape]

    def _leave(self, values: Sequence[ir.Value | None]) -> None:
        """Take the views that make some values out of the graph, as far as nothing reads them now."""
        self.has_passed = True
        self.unread += [operand for value in values if value is not None for operand in remove_unread_views(value)]

    def clean_up(self) -> bool:
        """Take out the constants that nothing reads any more; return whether any view was passed."""
        drop_unused_constants(self.model, [*self.unread, *(value for value, _ in self.constants)])
        return self.has_passed
