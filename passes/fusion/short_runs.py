"""Costly operators in the epilogue or prologue of a kernel that stores, or loads, few neighbouring elements at a time.

Vectors are then mostly empty. In a kernel of their own they use whole vectors, for another trip over the tensor and a launch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from math import ceil, prod

import onnx_ir as ir

from ...compiler.ir.assignments.kernel_choice import AS_IT_IS, Ask, KernelChoice
from ...compiler.ir.facts import has_static_type, tensor_type
from ...compiler.ir.symbolic.symbols import hinted_shape
from ...kernels.cost.memory import parallel_work
from ...kernels.cost.operations import COSTLY, operations_of
from ...runtime.target import Target
from .fusion_cost import Join, saved_cycles

Shape = tuple[int, ...]
Runs = tuple[int, ...]


def short_run_fault(first: ir.Node, followers: Sequence[ir.Node], target: Target, ask: Ask) -> str | None:
    """Why followers, with results of a group's shape, are not all to be computed where it stores; None if they may be.

    `followers` are operators, those that the group has already among them.
    """
    costly = [node for node in followers if node.op_type in COSTLY]
    if not costly:
        return None
    runs = _cut(stored_runs(first, ask), first.outputs[0], followers)
    wasted = _wasted(costly, runs, target.vector_lanes)
    if not wasted:
        return None
    kind = tensor_type(first.outputs[0]).hinted
    operations = kind.elements * sum(operations_of(node.op_type) for node in costly)
    wakes_threads = operations >= parallel_work(target.machine) and target.threads > 1
    join = Join(2 * kind.size_bytes, recomputed_operations=wasted, saved_regions=int(wakes_threads))
    if (saved := saved_cycles(join, target.vector_lanes, target.threads)) >= 0:
        return None
    return f"vectors over {min(runs)} neighbours of {first.op_type} would be mostly empty, for {-saved:.0f} cycles"


def wasted_operations(group: ir.Node, nodes: Iterable[ir.Node], lanes: int, ask: Ask) -> float:
    """Scalar operations in the empty lanes of costly nodes computed where a group stores its result, or reads its operand."""
    costly = [node for node in nodes if node.op_type in COSTLY and has_static_type(node.outputs[0])]
    return _wasted(costly, stored_runs(group, ask), lanes) if costly else 0.0


def _wasted(costly: Iterable[ir.Node], runs: Runs, lanes: int) -> float:
    """The same of costly nodes and runs that are known."""
    if not runs:
        return 0.0
    vectors = sum(_vectors(run, lanes) for run in runs) / sum(runs)
    return sum(operations_of(one.op_type) * _empty(tensor_type(one.outputs[0]).hinted.elements, vectors, lanes) for one in costly)


def _vectors(run: int, lanes: int) -> int:
    """That cover a run of elements: of a smaller power of two where it fills no whole one, the last one overlapping."""
    return ceil(run / min(lanes, 1 << (run.bit_length() - 1)))


def _empty(elements: int, vectors: float, lanes: int) -> float:
    """Lanes that `vectors` for an element have beyond those of a flat loop, which goes one by one over what fills no vector."""
    whole, rest = divmod(elements, lanes)
    return max(elements * vectors - (whole + rest), 0) * lanes


def stored_runs(node: ir.Node, ask: Ask) -> Runs:
    """Neighbouring elements of its result that the kernel of a node or group stores at a time, of each of its parts in turn.

    None are told of where that is nothing to worry about, or not known.
    """
    values = [value for value in (*node.inputs, *node.outputs) if value is not None and value.name]
    if not all(map(has_static_type, values)):
        return ()
    choice = ask(node, AS_IT_IS)
    return choice.stored_runs if isinstance(choice, KernelChoice) and all(choice.stored_runs) else ()


def _cut(runs: Runs, result: ir.Value, followers: Iterable[ir.Node]) -> Runs:
    """What is left of runs where the followers read operands that span only some of the result's dimensions."""
    if not runs or not prod(out := _shape(result)):
        return ()
    operands = dict.fromkeys(value for node in followers for value in node.inputs if value is not None)
    most = min((_together(shape, out) for value in operands if (shape := hinted_shape(value)) is not None), default=prod(out))
    return tuple(min(run, most) for run in runs)


def _together(source: Shape, out: Shape) -> int:
    """Neighbouring elements of a result for which an operand has as many elements, or one."""
    padded = (1,) * (len(out) - len(source)) + source
    spans = [(extent, own != 1) for extent, own in zip(out, padded, strict=True) if extent != 1]
    last = spans[-1][1] if spans else False
    return prod(extent for extent, _ in takewhile(lambda one: one[1] == last, reversed(spans)))


def _shape(value: ir.Value) -> Shape:
    shape = hinted_shape(value)
    assert shape is not None
    return shape
