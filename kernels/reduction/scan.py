"""CumSum and CumProd: scans along one dimension. bfloat16 and float16 are accumulated in float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod

from tvm import tirx

from ...runtime.symbolic.sizes import estimating
from ...runtime.target import Target
from ..codegen.builder import Expr
from ..cost.estimate import Estimate, with_bytes
from ..cost.memory import parallel_work
from ..cost.pointwise import LoopBody
from ..cost.reduction import scan_cycles
from ..expressions import math
from ..groups.group import Group, literal_ints
from ..template.contract import BuiltKernel, Candidate, Refusal
from ..template.kernel import finish, machine_of, new_builder
from ..template.loops import accumulator_type
from .reduction_loops import block_slots

SCANS: dict[str, tuple[int, Callable[[Expr, Expr], Expr]]] = {
    "CumProd": (1, lambda a, b: a * b),
    "CumSum": (0, lambda a, b: a + b),
}
OPERATORS = frozenset(SCANS)


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes one scan alone, along an axis known while compiling. Neighbouring columns are accumulated together, in registers."""
    (op,) = group.ops
    axes = literal_ints(group, op.inputs[1])
    if axes is None:
        return Refusal("the axis is known only to a run")
    shape = group.types[op.inputs[0]].shape or (1,)
    axis = axes[0] % len(shape)
    return Candidate(_estimate(group, shape, axis, target), partial(_build, group, shape, axis, target))


@estimating
def _estimate(group: Group, shape: tuple[int, ...], axis: int, target: Target) -> Estimate:
    kind = group.types[group.ops[0].inputs[0]]
    machine = machine_of(target, accumulator_type(kind.dtype))
    _, columns = block_slots(machine.lanes, prod(shape[axis + 1 :]))
    cycles = scan_cycles(shape, axis, columns, LoopBody(1, loads=1, stores=1), machine)
    is_parallel = kind.elements >= parallel_work(target.machine)
    return with_bytes(Estimate(cycles, kind.elements, unit="vector", is_parallel=is_parallel), group)


def _build(group: Group, shape: tuple[int, ...], axis: int, target: Target) -> BuiltKernel:
    (op,) = group.ops
    kind = group.types[op.inputs[0]]
    builder = new_builder(target)
    source = builder.parameter(op.inputs[0], kind.elements, kind.dtype)
    out = builder.parameter(op.outputs[0], kind.elements, kind.dtype)
    if not kind.elements:
        return finish("scan", builder, group, flops=0)
    length, inner = shape[axis], prod(shape[axis + 1 :])
    initial, combine = SCANS[op.op_type]
    working = accumulator_type(kind.dtype)
    is_exclusive, is_backwards = bool(op.attribute("exclusive", 0)), bool(op.attribute("reverse", 0))
    lanes, columns = (1, 1) if builder.is_grid else block_slots(builder.lanes(working), inner)
    blocks = -(-inner // columns)
    with builder.chunks(prod(shape[:axis]) * blocks, kind.elements) as chunk:
        outer, block = builder.bind(tirx.floordiv(chunk, blocks)), tirx.floormod(chunk, blocks)
        first = builder.bind(outer * (length * inner) + tirx.min(block * columns, inner - columns))
        total = builder.local(columns, working, "total")
        builder.vector_loop(columns, lanes, lambda j: builder.store(total, j, tirx.const(initial, working)))
        with builder.loop(length, name="step") as step:
            place = builder.bind(first + (length - 1 - step if is_backwards else step) * inner)

            def accumulate(j: Expr) -> None:
                before = builder.name(total[j])
                after = builder.name(
                    math.wrapping(combine, before, tirx.Cast(working, source[place + j]), widest=builder.integer_bits)
                )
                builder.store(out, place + j, tirx.Cast(kind.dtype, before if is_exclusive else after))
                builder.store(total, j, after)

            builder.vector_loop(columns, lanes, accumulate)
    return finish("scan", builder, group, flops=kind.elements)
