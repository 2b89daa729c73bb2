"""What a recurrence would take, by the units that multiply its inputs and its states."""

from __future__ import annotations

from math import ceil

from ...runtime.hardware.machine import Machine
from ...runtime.symbolic.sizes import estimating
from ...runtime.target import Target
from ..cost.amx import tile_step_cycles
from ..cost.estimate import UNHIDDEN, Estimate, with_bytes
from ..cost.pointwise import LoopBody, instructions_of
from ..cost.product import SEEN_ONCE, product_estimate
from ..groups.group import Group, Op
from ..template.kernel import machine_of
from .cells import Cell
from .products import row_format
from .products_amx import pays, terms_of
from .quantized_rows import byte_format

_BYTES_OF_WORD = 4
_ROUNDING_OPERATIONS = 8.0  # vector operations on a vector of a state that becomes bytes: its range, then its rounding


@estimating
def recurrence_estimate(group: Group, op: Op, cell: Cell, directions: int, target: Target) -> Estimate:
    """The estimate of the products of inputs and states by their weights, and of the gates."""
    first, second, inputs = group.types[op.inputs[0]].shape
    steps, rows = (second, first) if op.attribute("layout", 0) else (first, second)
    columns, hidden = group.types[op.inputs[2]].shape[1:]
    machine = machine_of(target, group.types[op.inputs[0]].dtype)
    units = _unit_body(cell).cycles(machine) * rows * ceil(hidden / machine.lanes)
    share = _product_cycles(group, op, op.inputs[1], (steps * rows, columns, inputs), target)
    gates = max(len(stage.gates) for stage in cell.stages)
    step = _product_cycles(group, op, op.inputs[2], (rows, columns, hidden), target, gates)
    weights = group.types[op.inputs[2]]
    projected = directions * steps * rows * columns * machine.item_bytes
    kept = 2 * machine.read_cycles(projected) if projected > machine.l1.size_bytes else 0.0  # written, and read step by step
    again = _weights_cycles(weights.size_bytes // max(directions, 1), machine)
    flops = 2 * directions * steps * rows * columns * (inputs + hidden)
    seen = SEEN_ONCE if steps * rows == 1 else UNHIDDEN
    return with_bytes(Estimate(directions * (share + steps * (step + units + again)) + kept, flops, constants_seen=seen), group)


def _unit_body(cell: Cell) -> LoopBody:
    """What a vector of hidden units takes beside the products: its gates are sums and the projection, its states are stored."""
    usual, *others = cell.activations
    calls = (*(usual,) * max(cell.gates - len(others) + (cell.gates > 3), 1), *others)
    arithmetic = sum(instructions_of(name) for name in calls) + 3.0 * cell.gates
    return LoopBody(arithmetic, loads=2.0 * cell.gates + len(cell.states), stores=2.0 * len(cell.states))


def _product_cycles(group: Group, op: Op, weights: str, size: tuple[int, int, int], target: Target, gates: int = 1) -> float:
    """Of one product of rows x depth by depth x columns, on tiles where these are faster."""
    rows, _, depth = size
    machine, x, is_bytes = machine_of(target, group.types[op.inputs[0]].dtype), op.inputs[0], weights in group.weights
    if not depth:
        return 0.0
    if is_bytes:
        rounded = _ROUNDING_OPERATIONS * rows * depth / machine.lanes / machine.multiply_adds
        if target.has_tiles and pays(*size, 1, machine, _BYTES_OF_WORD):
            return tile_step_cycles(*size, 1, machine, _BYTES_OF_WORD, gates=gates) + rounded
        words = byte_format(group, weights, target)
        return product_estimate(*size, words.machine(machine), k_pack=words.k_pack, unit=words.unit).cycles + rounded
    if pays(*size, terms := terms_of(group, x, weights, target), machine):
        return tile_step_cycles(*size, terms, machine, gates=gates)
    number_format = row_format(group, x, weights, rows, target)
    return product_estimate(*size, number_format.machine(machine), k_pack=number_format.k_pack, unit=number_format.unit).cycles


def _weights_cycles(size_bytes: int, machine: Machine) -> float:
    """Of weights that each step reads again, where L2 does not keep them: every second step reads them backwards, so that what
    L2 holds of them is still there."""
    return max(size_bytes - machine.l2.size_bytes, 0) / machine.l3.bytes_per_cycle
