"""Costly operators in the epilogue or prologue of a kernel that stores, or loads, few neighbouring elements at a time.

Vectors are then mostly empty. In a kernel of their own they use whole vectors, for another trip over the tensor and a launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from math import ceil, prod

import onnx_ir as ir

from ...compiler.ir.facts import has_static_type, tensor_type
from ...compiler.ir.matching import static_shape
from ...kernels.cost.memory import parallel_work
from ...kernels.cost.operations import COSTLY, operations_of
from ...runtime.target import Target
from .fusion_cost import Join, saved_cycles

_LEAST_SQUARE = 4  # elements of a side
Shape = tuple[int, ...]
Runs = tuple[int, ...]


def short_run_fault(anchor: ir.Node, followers: Sequence[ir.Node], target: Target) -> str | None:
    """Why followers, with results of the anchor's shape, are not all to be computed where it stores; None if they may be."""
    costly = [node for node in followers if node.op_type in COSTLY]
    if not costly:
        return None
    runs = _cut(stored_runs(anchor), anchor.outputs[0], followers)
    wasted = _wasted(costly, runs, target.vector_lanes)
    if not wasted:
        return None
    kind = tensor_type(anchor.outputs[0])
    operations = kind.elements * sum(operations_of(node.op_type) for node in costly)
    wakes_threads = operations >= parallel_work(target.machine) and target.threads > 1
    join = Join(2 * kind.size_bytes, recomputed_operations=wasted, saved_regions=int(wakes_threads))
    if (saved := saved_cycles(join, target.vector_lanes, target.threads)) >= 0:
        return None
    return f"vectors over {min(runs)} neighbours of {anchor.op_type} would be mostly empty, for {-saved:.0f} cycles"


def wasted_operations(anchor: ir.Node, nodes: Iterable[ir.Node], lanes: int) -> float:
    """Scalar operations in the empty lanes of costly nodes computed where an anchor stores its result, or reads its operand."""
    costly = [node for node in nodes if node.op_type in COSTLY and has_static_type(node.outputs[0])]
    return _wasted(costly, stored_runs(anchor), lanes) if costly else 0.0


def _wasted(costly: Iterable[ir.Node], runs: Runs, lanes: int) -> float:
    """The same of costly nodes and runs that are known."""
    if not runs:
        return 0.0
    vectors = sum(_vectors(run, lanes) for run in runs) / sum(runs)
    return sum(operations_of(one.op_type) * _empty(tensor_type(one.outputs[0]).elements, vectors, lanes) for one in costly)


def _vectors(run: int, lanes: int) -> int:
    """That cover a run of elements: of a smaller power of two where it fills no whole one, the last one overlapping."""
    return ceil(run / min(lanes, 1 << (run.bit_length() - 1)))


def _empty(elements: int, vectors: float, lanes: int) -> float:
    """Lanes that `vectors` for an element have beyond those of a flat loop, which goes one by one over what fills no vector."""
    whole, rest = divmod(elements, lanes)
    return max(elements * vectors - (whole + rest), 0) * lanes


def stored_runs(anchor: ir.Node) -> Runs:
    """Neighbouring elements of the result that the anchor's kernel stores at a time, of each of its parts in turn.

    None are told of where that is nothing to worry about, or not known.
    """
    find = _RUNS.get(anchor.op_type)
    values = [value for value in anchor.inputs if value is not None]
    if find is None or anchor.domain or any(static_shape(value) is None for value in (*values, *anchor.outputs)):
        return ()
    runs = find(anchor, [_shape(value) for value in values], _shape(anchor.outputs[0]))
    return runs if runs and all(runs) else ()


def _cut(runs: Runs, result: ir.Value, followers: Iterable[ir.Node]) -> Runs:
    """What is left of runs where the followers read operands that span only some of the result's dimensions."""
    if not runs or not prod(out := _shape(result)):
        return ()
    operands = dict.fromkeys(value for node in followers for value in node.inputs if value is not None)
    most = min((_together(shape, out) for value in operands if (shape := static_shape(value)) is not None), default=prod(out))
    return tuple(min(run, most) for run in runs)


def _together(source: Shape, out: Shape) -> int:
    """Neighbouring elements of a result for which an operand has as many elements, or one."""
    padded = (1,) * (len(out) - len(source)) + source
    spans = [(extent, own != 1) for extent, own in zip(out, padded, strict=True) if extent != 1]
    last = spans[-1][1] if spans else False
    return prod(extent for extent, _ in takewhile(lambda one: one[1] == last, reversed(spans)))


def _shape(value: ir.Value) -> Shape:
    shape = static_shape(value)
    assert shape is not None
    return shape


def _box(box: Shape, whole: Shape) -> Runs:
    """Of a box in a tensor: dimensions that it fills join the one before."""
    run = 1
    for inner, outer in zip(reversed(box), reversed(whole), strict=True):
        run *= inner
        if inner != outer:
            break
    return (run,)


def _transpose(node: ir.Node, sources: list[Shape], out: Shape) -> Runs:
    """Neighbours in the operand that stay together; where none do, those along a side of the squares turned in registers."""
    order = [axis for axis in node.attributes.get_ints("perm", range(len(out))[::-1]) if sources[0][axis] != 1]
    shape = [extent for extent in out if extent != 1]
    run, axis = 1, len(shape) - 1
    while axis >= 0:
        run *= shape[axis]
        between = range(order[axis - 1] + 1, order[axis]) if axis else range(0)
        if not axis or order[axis - 1] > order[axis] or any(sources[0][one] != 1 for one in between):
            break
        axis -= 1
    last = max(order, default=0)
    is_turned = bool(order) and order[-1] != last and min(run, sources[0][last]) >= _LEAST_SQUARE
    return (min(run, sources[0][last]) if is_turned else run,)


def _concat(node: ir.Node, sources: list[Shape], out: Shape) -> Runs:
    axis = node.attributes.get_int("axis", 1) % len(out)
    return tuple(run for shape in sources if (run := prod(shape[axis:])))


def _gather(node: ir.Node, sources: list[Shape], out: Shape) -> Runs:
    """Single elements are gathered by whole vectors."""
    data, _ = sources
    inner = prod(data[node.attributes.get_int("axis", 0) % len(data) + 1 :])
    return (inner,) if inner != 1 else ()


def _gather_nd(node: ir.Node, sources: list[Shape], out: Shape) -> Runs:
    data, indices = sources
    inner = prod(data[node.attributes.get_int("batch_dims", 0) + indices[-1] :])
    return (inner,) if inner != 1 else ()


def _last(node: ir.Node, sources: list[Shape], out: Shape) -> Runs:
    return out[-1:]


def _product(node: ir.Node, sources: list[Shape], out: Shape) -> Runs:
    return out[-1:] if len(sources[1]) > 1 else ()


def _rows(node: ir.Node, sources: list[Shape], out: Shape) -> Runs:
    """Of a Softmax over another dimension than the last nothing is told."""
    axis = node.attributes.get_int("axis", -1) % len(out)
    is_row = node.op_type.endswith("Normalization") or axis == len(out) - 1
    return (prod(out[axis:]),) if is_row else ()


_RUNS: dict[str, Callable[[ir.Node, list[Shape], Shape], Runs]] = {
    "Concat": _concat,
    "DepthToSpace": lambda node, sources, out: (node.attributes.get_int("blocksize"),),
    "Gather": _gather,
    "GatherElements": _last,
    "GatherND": _gather_nd,
    "Gemm": _product,
    "LayerNormalization": _rows,
    "LogSoftmax": _rows,
    "MatMul": _product,
    "Pad": lambda node, sources, out: _box(tuple(map(min, sources[0], out)), out),
    "RMSNormalization": _rows,
    "Slice": lambda node, sources, out: _box(out, sources[0]),
    "Softmax": _rows,
    "SpaceToDepth": _last,
    "Transpose": _transpose,
}
