"""One step of a recurrence: an update whose products have roles, those of the input and those of the old state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from ....compiler.ir.constants import constant_array, constant_tensor
from ....compiler.ir.rewriter import Rejection
from .columns import MOVEMENT, Columns, columns_of, pieces_of
from .terms import Activation, Gate, Matrix, Product, Scaled, Shift, Term, terms_of
from .updates import Update, updates_of

_TYPES = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16)
_MAX_BODY = 128  # nodes of one step
_MOVING = MOVEMENT | {"Transpose"}


@dataclass(frozen=True, slots=True)
class GateWeights:
    """What a gate multiplies and adds. `inputs` has the matrices of each input source; those of one source are added up.

    `recurrent_shifts` belong to the product with the state, `shifts` to the sum; all of it counts times `sign`.
    """

    inputs: tuple[tuple[Matrix, ...], ...]
    recurrent: tuple[Matrix, ...]
    shifts: tuple[Shift, ...]
    recurrent_shifts: tuple[Shift, ...] = ()
    sign: int = 1


@dataclass(frozen=True, slots=True)
class Kernel:
    """What the steps of one recurrence have in common: operator, variant, gates in ONNX's order, and the activations f, g, h."""

    op_type: str
    gates: tuple[GateWeights, ...]
    activations: tuple[Activation, ...]
    linear_before_reset: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One step: the states that the nodes `body` compute from `inputs` and the old states, of which those that are None are 0."""

    kernel: Kernel
    inputs: tuple[Columns, ...]
    hidden: Columns | None
    cell: Columns | None
    hidden_out: ir.Value
    cell_out: ir.Value | None
    body: tuple[ir.Node, ...]

    @property
    def outputs(self) -> tuple[ir.Value, ...]:
        return (self.hidden_out,) if self.cell_out is None else (self.hidden_out, self.cell_out)


@dataclass(slots=True)
class Surroundings:
    """What is known of the graph when a step is looked for: the steps found so far, and what multiplies which value.

    `multipliers` are constant matrices, each with its first row that takes the value: a state's next step has them. `states`
    are the values that may be states: those that a constant matrix multiplies, and the cell states of steps.
    """

    multipliers: Mapping[ir.Value, Set[tuple[ir.Value, int]]]
    steps: dict[ir.Value, Step] = field(default_factory=dict)
    states: set[ir.Value] = field(init=False)

    def __post_init__(self) -> None:
        self.states = set(self.multipliers)

    def add(self, step: Step) -> None:
        """Remember a step that was found."""
        self.steps[step.hidden_out] = step
        self.states.update(step.outputs)


def find_step(node: ir.Node, known: Surroundings) -> Step | Rejection | None:
    """The step whose hidden state a node computes; a Rejection where it is nearly one; None where it is nothing like it."""
    output = node.outputs[0]
    root = columns_of(output) if output.dtype in _TYPES else None
    if root is None or root.value is not output:
        return None
    refused: Rejection | None = None
    for update in updates_of(root, known.states):
        found = update if isinstance(update, Rejection) else _with_roles(update, output, known)
        if isinstance(found, Step):
            return _whole(found)
        refused = refused or found
    return refused


def find_first_step(later: Step, known: Surroundings) -> Step | Rejection | None:
    """The step before `later`, where its old state is zero and the products with it are therefore not there."""
    if later.hidden is None or not later.hidden.is_whole or later.hidden.value in known.steps:
        return None
    output = later.hidden.value
    root = Columns(output, 0, later.hidden.end)
    for update in updates_of(root, known.states):
        if isinstance(update, Rejection) or update.op_type != later.kernel.op_type:
            continue
        if update.hidden is not None and not _is_zero(update.hidden):
            continue
        found = _step(update, None, output)
        if isinstance(found, Step) and _has_same_weights(found.kernel, later.kernel):
            return _whole(replace(found, kernel=later.kernel))
    return None


def _with_roles(update: Update, output: ir.Value, known: Surroundings) -> Step | Rejection | None:
    """The step of an update, with the state that its successor or its predecessor shows, else any that fits."""
    candidates = _candidates(update, output)
    found: list[tuple[int, Step]] = []
    refused = candidates if isinstance(candidates, Rejection) else None
    for hidden in candidates if isinstance(candidates, list) else []:
        step = _step(update, hidden, output)
        if isinstance(step, Step):
            found.append((_evidence(step, known), step))
        else:
            refused = refused or step
    if not found:
        return refused if update.op_type != "RNN" else None
    evidence, best = max(found, key=lambda pair: pair[0])
    if update.op_type == "RNN" and evidence == 0:
        return Rejection("a single step of an RNN is two products and a sum already", _producers(*update.gates))
    return best


def _candidates(update: Update, output: ir.Value) -> list[Columns] | Rejection:
    """What may be the old state: for LSTM and RNN all that the first gate multiplies and that has the size of the new one."""
    if update.hidden is not None:
        return [update.hidden]
    terms = terms_of(update.gates[0].argument)
    if isinstance(terms, Rejection):
        return terms
    products = [term for term in terms if isinstance(term, Product)]
    sources = dict.fromkeys(piece for one in products for piece in (one.source, *pieces_of(one.source)))
    width = columns_of(output)
    return [one for one in sources if width is not None and one.is_whole and one.width == width.width]


def _evidence(step: Step, known: Surroundings) -> int:
    """How sure it is that the step's old state is one: 2 if a step found before made it, 1 if one that is not found yet shows it.

    That is the next step, which multiplies its state by the same weights, or a first step without products of the state.
    """
    before = None if step.hidden is None else known.steps.get(step.hidden.value)
    if before is not None and before.kernel == step.kernel:
        return 2
    after = known.multipliers.get(step.hidden_out, frozenset())
    if any((matrix.value, matrix.rows) in after for gate in step.kernel.gates for matrix in gate.recurrent):
        return 1
    return int(isinstance(find_first_step(step, known), Step))


def _step(update: Update, hidden: Columns | None, output: ir.Value) -> Step | Rejection:
    """The step of an update whose old state is `hidden`; None for one that is zero and has no products."""
    activations = _activations(update)
    if isinstance(activations, Rejection):
        return activations
    order: tuple[Columns, ...] = ()
    gates = []
    for number, (gate, sign) in enumerate(zip(update.gates, update.signs, strict=True)):
        terms = terms_of(gate.argument)
        roles = terms if isinstance(terms, Rejection) else _roles(terms, hidden, update.reset if number == 2 else None)
        if isinstance(roles, Rejection):
            return roles
        order = order or tuple(roles.inputs)
        if not order or roles.inputs.keys() != set(order):
            return Rejection("the gates do not read the same inputs", _producers(gate))
        if hidden is not None and not roles.recurrent:
            return Rejection(f"a gate does not read the state %{hidden.value.name}", _producers(gate))
        gates.append(roles.weights(order, sign))
    kernel = Kernel(update.op_type, tuple(gates), activations, isinstance(update.reset, Scaled))
    old_hidden, old_cell = (None if one is None or _is_zero(one) else one for one in (hidden, update.cell))
    return Step(kernel, order, old_hidden, old_cell, output, update.cell_out, ())


@dataclass(slots=True)
class _Roles:
    """The terms of one gate by what they are for."""

    inputs: dict[Columns, list[Matrix]] = field(default_factory=dict)
    recurrent: list[Matrix] = field(default_factory=list)
    shifts: list[Shift] = field(default_factory=list)
    recurrent_shifts: list[Shift] = field(default_factory=list)

    def weights(self, order: tuple[Columns, ...], sign: int) -> GateWeights:
        inputs = tuple(tuple(self.inputs[source]) for source in order)
        return GateWeights(inputs, tuple(self.recurrent), tuple(self.shifts), tuple(self.recurrent_shifts), sign)


def _roles(terms: Iterable[Term], hidden: Columns | None, reset: Columns | Scaled | None) -> _Roles | Rejection:
    """Roles of a gate's terms; `reset` is the share of the state in the new gate of a GRU."""
    state = hidden if reset is None else reset
    roles = _Roles()
    for term in _split(terms, state):
        if isinstance(term, Shift):
            roles.shifts.append(term)
        elif isinstance(term, Product) and term.source == state:
            roles.recurrent.append(term.matrix)
        elif isinstance(term, Product) and term.source != hidden:
            roles.inputs.setdefault(term.source, []).append(term.matrix)
        elif term != reset or not isinstance(term, Scaled) or roles.recurrent:
            return Rejection(f"%{_name_of(term)} is no part of a gate's argument that the operator has")
        elif (refused := _add_scaled(roles, term.inner, hidden)) is not None:
            return refused
    return roles


def _add_scaled(roles: _Roles, inner: Columns, hidden: Columns | None) -> Rejection | None:
    """Add what the reset gate scales: the whole product with the state, and its shift."""
    terms = terms_of(inner)
    if isinstance(terms, Rejection):
        return terms
    for term in _split(terms, hidden):
        if isinstance(term, Shift):
            roles.recurrent_shifts.append(term)
        elif isinstance(term, Product) and term.source == hidden:
            roles.recurrent.append(term.matrix)
        else:
            return Rejection(f"the reset gate scales %{_name_of(term)} too")
    return None


def _split(terms: Iterable[Term], state: Columns | Scaled | None) -> Iterator[Term]:
    """The terms, with a product of a Concat that has the state among its operands as one product for each operand."""
    for term in terms:
        pieces = pieces_of(term.source) if isinstance(term, Product) else []
        if not isinstance(term, Product) or state not in pieces:
            yield term
            continue
        begin = 0
        for piece in pieces:
            yield term.of_piece(piece, begin)
            begin += piece.width


def _activations(update: Update) -> tuple[Activation, ...] | Rejection:
    """f, g and h of the operator."""
    if update.op_type == "RNN":
        groups = [[update.gates[0]]]
    elif update.op_type == "GRU":
        groups = [list(update.gates[:2]), [update.gates[2]]]
    else:
        groups = [list(update.gates[:3]), [update.gates[3]], [update.output] if update.output else []]
    found = []
    for gates in groups:
        first = gates[0].activation
        if not all(gate.activation.is_known for gate in gates):
            name = next(gate.activation.name for gate in gates if not gate.activation.is_known)
            return Rejection(f"{update.op_type} has no activation {name}", _producers(*gates))
        if any(gate.activation != first for gate in gates):
            return Rejection(f"{update.op_type} has one activation for its gates", _producers(*gates))
        found.append(first)
    if any(sign == -1 and gate.activation.name != "Sigmoid" for gate, sign in zip(update.gates, update.signs, strict=True)):
        return Rejection(f"1 - {found[0].name} is no gate of {update.op_type}", _producers(*update.gates))
    return tuple(found)


def _has_same_weights(first: Kernel, later: Kernel) -> bool:
    """Whether a first step, which has no products with the state, may have those of a later one."""
    if replace(first, gates=()) != replace(later, gates=()):
        return False
    return all(
        one.inputs == other.inputs
        and one.sign == other.sign
        and _is_close(one.shifts, other.shifts)
        and _is_close(one.recurrent_shifts, other.recurrent_shifts)
        and (not one.recurrent or one.recurrent == other.recurrent)
        for one, other in zip(first.gates, later.gates, strict=True)
    )


def _is_close(one: tuple[Shift, ...], other: tuple[Shift, ...]) -> bool:
    first, second = (sum((shift.array() for shift in shifts), np.zeros(1)) for shifts in (one, other))
    return bool(np.allclose(first, second, rtol=1e-6, atol=1e-9))


def _whole(step: Step) -> Step | Rejection:
    """The step with its nodes, if nothing else reads what they compute."""
    ends = {one.value for one in (*step.inputs, step.hidden, step.cell) if one is not None}
    body = _body(step.outputs, ends)
    if body is None:
        return Rejection(f"more than {_MAX_BODY} nodes compute %{step.hidden_out.name}")
    inside = set(body)
    for node in body:
        for value in node.outputs:
            outsiders = tuple(reader for reader in value.consumers() if reader not in inside)
            if value not in step.outputs and (outsiders or value.is_graph_output()):
                reader = outsiders[0].op_type if outsiders else "the caller"
                return Rejection(f"%{value.name} inside of a {step.kernel.op_type} is read by {reader} too", (node, *outsiders))
    return replace(step, body=tuple(body))


def _body(outputs: Iterable[ir.Value], ends: Set[ir.Value]) -> list[ir.Node] | None:
    """The nodes that compute `outputs` from `ends` and constants, each before its readers; without those that only move data."""
    moved = dict.fromkeys(ends, True)
    body: dict[ir.Node, None] = {}

    def visit(value: ir.Value) -> bool:
        """Whether a value is a constant or one of `ends`, perhaps moved."""
        node = value.producer()
        if value in moved or node is None or constant_tensor(value) is not None:
            return moved.get(value, True)
        if len(moved) > len(ends) + _MAX_BODY:
            return False
        inputs = [visit(one) for one in node.inputs if one is not None]
        moved.update(dict.fromkeys(node.outputs, all(inputs) and node.op_type in _MOVING))
        if not moved[value]:
            body[node] = None
        return moved[value]

    for value in outputs:
        visit(value)
    return list(body) if len(moved) <= len(ends) + _MAX_BODY else None


def _is_zero(columns: Columns) -> bool:
    array = constant_array(columns.value)
    return array is not None and not array.any()


def _producers(*gates: Gate) -> tuple[ir.Node, ...]:
    nodes = (gate.argument.producer for gate in gates)
    return tuple(node for node in nodes if node is not None)


def _name_of(term: Term) -> str:
    value = term.gate.value if isinstance(term, Scaled) else term.source.value if isinstance(term, Product) else term.value
    return str(value.name)
