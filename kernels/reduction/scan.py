"""CumSum and CumProd: scans along one dimension. bfloat16 and float16 are accumulated in float32."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from tvm import tirx

from ...runtime.target import Target
from ..codegen.builder import Expr
from ..expressions import math
from ..groups.group import Group, literal_ints
from ..template.contract import BuiltKernel, Refusal
from ..template.kernel import finish, new_builder
from ..template.loops import accumulator_type
from .reduction_loops import block_slots

_SCANS: dict[str, tuple[int, Callable[[Expr, Expr], Expr]]] = {
    "CumProd": (1, lambda a, b: a * b),
    "CumSum": (0, lambda a, b: a + b),
}
OPERATORS = frozenset(_SCANS)


def build(group: Group, target: Target) -> BuiltKernel | Refusal:
    """Takes one scan alone, along an axis known while compiling. Neighbouring columns are accumulated together, in registers."""
    (op,) = group.ops
    axes = literal_ints(group, op.inputs[1])
    if axes is None:
        return Refusal("the axis is known only to a run")
    kind = group.types[op.inputs[0]]
    builder = new_builder(target)
    source = builder.parameter(op.inputs[0], kind.elements, kind.dtype)
    out = builder.parameter(op.outputs[0], kind.elements, kind.dtype)
    if not kind.elements:
        return finish("scan", builder, group, flops=0)
    shape = kind.shape or (1,)
    axis = axes[0] % len(shape)
    length, inner = shape[axis], prod(shape[axis + 1 :])
    initial, combine = _SCANS[op.op_type]
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
