"""Putting one recurrent operator in the place of a run of steps."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import onnx_ir as ir

from ....compiler.ir.rewriter import copy_source, remove_nodes, replace_node
from .building import Builder, Constants
from .columns import MOVEMENT, Columns, Place, columns_of, place_of, rows_of, static_shape, stripped
from .runs import Run
from .steps import Kernel

_PASSED_BY = MOVEMENT | {"Gather", "Transpose"}  # what a step reads its operands through
_DEFAULT_ACTIVATIONS = {"GRU": ("Sigmoid", "Tanh"), "LSTM": ("Sigmoid", "Tanh", "Tanh"), "RNN": ("Tanh",)}


@dataclass(slots=True)
class Rewriter:
    """Rewrites runs of one model, those first that make the states which others read as inputs.

    `current` has what stands for states of steps, and for stacks of them, that are gone.
    """

    model: ir.Model
    constants: Constants
    current: dict[ir.Value, ir.Value] = field(default_factory=dict)
    _freed: set[ir.Value] = field(default_factory=set)

    def place(self, columns: Columns) -> Place | None:
        """Where columns that a step reads lie in a sequence, by now."""
        return place_of(stripped(self._now(columns)))

    def rewrite(self, run: Run) -> None:
        """Put one node in the place of the run's steps. What reads their states reads its outputs; what nobody reads is gone."""
        first = run.steps[0]
        inputs = [self._now(one) for one in first.inputs]
        states = [None if one is None else self._now(one) for one in (first.hidden, first.cell)]
        body = [node for step in run.steps for node in step.body]
        stacks = _stacks(run)
        kept = {one.value for one in (*([] if run.places else inputs), *states) if one is not None}
        self._freed |= _detach([*body, *stacks], kept | {place.sequence for place in run.places})
        made = Builder(self.constants)
        rows = rows_of(first.hidden_out)
        sequence = made.sequence(run, rows) if run.places else made.rows(inputs, rows)
        recurrent = _operator(
            run, [sequence, *self.constants.weights_of(first), None, *(made.state(one, rows) for one in states)]
        )
        copy_source([node for step in run.steps if (node := step.hidden_out.producer())], recurrent)
        made.nodes.append(recurrent)
        new = _outputs(made, run, recurrent, stacks)
        roots = [node for step in run.steps for value in step.outputs[::-1] if (node := value.producer())]
        for root in [*roots, *stacks]:
            replace_node(self.model, root, made.nodes, [new.get(root.outputs[0])])
            made.nodes = []
        self.current.update(new)
        remove_nodes(node for node in body if node.graph is not None)

    def finish(self) -> None:
        """Drop the weights that only steps have read."""
        for value in self._freed:
            if not _is_read(value) and value.is_initializer() and not value.is_graph_input():
                del self.model.graph.initializers[str(value.name)]

    def _now(self, columns: Columns) -> Columns:
        return Columns(self.current.get(columns.value, columns.value), columns.begin, columns.end)


def _operator(run: Run, inputs: list[ir.Value | None]) -> ir.Node:
    """The node, with all its outputs."""
    step, kernel = run.steps[0], run.steps[0].kernel
    while inputs[-1] is None:
        inputs.pop()
    attributes: dict[str, int | str | list[str] | list[float]] = {"hidden_size": static_shape(step.hidden_out)[-1]}
    if run.direction == -1:
        attributes["direction"] = "reverse"
    if kernel.linear_before_reset:
        attributes["linear_before_reset"] = 1
    attributes.update(_activations(kernel))
    return ir.node(kernel.op_type, inputs, attributes, num_outputs=3 if step.cell_out is not None else 2)


def _activations(kernel: Kernel) -> dict[str, list[str] | list[float]]:
    """The attributes that say which activations are not ONNX's own."""
    names = [one.name for one in kernel.activations]
    if tuple(names) == _DEFAULT_ACTIVATIONS[kernel.op_type]:
        return {}
    found: dict[str, list[str] | list[float]] = {"activations": names}
    for position, name in enumerate(("activation_alpha", "activation_beta")):
        values = [one.parameters[position] for one in kernel.activations if len(one.parameters) > position]
        if values:
            found[name] = values
    return found


def _outputs(made: Builder, run: Run, recurrent: ir.Node, stacks: dict[ir.Node, range]) -> dict[ir.Value, ir.Value]:
    """What stands for each state that is read, and for each stack of states. Outputs that are not needed become absent."""
    first, last = run.steps[0], run.steps[-1]
    outputs = dict(zip(("y", "y_h", "y_c"), recurrent.outputs, strict=False))
    new: dict[ir.Value, ir.Value] = {}
    if last.cell_out is not None and _is_read(last.cell_out):
        new[last.cell_out] = made.reshaped(outputs.pop("y_c"), static_shape(last.cell_out))
    shape, count = static_shape(first.hidden_out), len(run.steps)
    times = {step.hidden_out: number if run.direction == 1 else count - 1 - number for number, step in enumerate(run.steps)}
    read = [value for value in times if _is_read(value)]
    if stacks or read not in ([], [last.hidden_out]):
        y = outputs.pop("y")
        for stack, part in stacks.items():
            new[stack.outputs[0]] = _stacked(made, y, part, run, stack)
        states = made.reshaped(y, (count, *shape)) if read else y
        for value in read:
            index = made.constants.integers([times[value]], is_scalar=True)
            new[value] = made.operation("Gather", [states, index], axis=0)
    elif read:
        new[last.hidden_out] = made.reshaped(outputs.pop("y_h"), shape)
    for absent in outputs.values():
        absent.name = ""
    return new


def _stacked(made: Builder, y: ir.Value, part: range, run: Run, stack: ir.Node) -> ir.Value:
    """A Concat of the states of consecutive steps, from Y."""
    target = static_shape(stack.outputs[0])
    axis = stack.attributes.get_int("axis", 0) % len(target)
    if len(part) < len(run.steps):
        bounds = [made.constants.integers([number]) for number in (part.start, part.stop, 0)]
        y = made.operation("Slice", [y, *bounds])
    piece = list(target)
    piece[axis] //= len(part)
    return made.moved(y, (len(part), *piece), 0, axis, target)


def _stacks(run: Run) -> dict[ir.Node, range]:
    """The Concats of hidden states of consecutive steps, in the order of Y, and of which elements of it."""
    if len(run.steps) == 1:
        return {}
    count = len(run.steps)
    times = {step.hidden_out: number if run.direction == 1 else count - 1 - number for number, step in enumerate(run.steps)}
    graph = run.steps[0].body[0].graph
    found: dict[ir.Node, range] = {}
    readers = (reader for value in times for near in value.consumers() for reader in _through_views(near))
    for reader in dict.fromkeys(readers):
        if reader.op_type != "Concat" or reader.domain != "" or reader.graph is not graph:
            continue
        pieces = [columns_of(value) for value in reader.inputs]
        places = [times.get(one.value, -1) if one is not None and one.is_whole else -1 for one in pieces]
        shapes = {static_shape(value) for value in reader.inputs if value is not None}
        expected = range(places[0], places[0] + len(places))
        if len(places) > 1 and places[0] >= 0 and places == list(expected) and len(shapes) == 1:
            found[reader] = expected
    return found


def _through_views(node: ir.Node) -> Iterable[ir.Node]:
    """A reader, or the readers of the view that it is."""
    if node.op_type in MOVEMENT and node.op_type != "Concat" and len(node.outputs) == 1:
        return node.outputs[0].consumers()
    return (node,)


def _detach(nodes: Iterable[ir.Node], kept: Collection[ir.Value]) -> set[ir.Value]:
    """Let `nodes` read nothing, and remove what only moved data to them; what makes one of `kept` stays.

    Returns the initializers that lost a reader.
    """
    freed: list[ir.Value] = []
    initializers: set[ir.Value] = set()
    for node in nodes:
        freed.extend(value for value in node.inputs if value is not None)
        for position in range(len(node.inputs)):
            node.replace_input_with(position, None)
    while freed:
        value = freed.pop()
        producer = value.producer()
        if value.is_initializer():
            initializers.add(value)
        if producer is None or producer.graph is None or producer.op_type not in _PASSED_BY or producer.domain != "":
            continue
        if not any(_is_read(output) or output in kept for output in producer.outputs):
            freed.extend(value for value in producer.inputs if value is not None)
            remove_nodes([producer])
    return initializers


def _is_read(value: ir.Value) -> bool:
    return bool(value.uses()) or value.is_graph_output()
