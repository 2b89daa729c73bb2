"""Det: determinants of small matrices, by Gaussian elimination with partial pivoting."""

from __future__ import annotations

from math import prod

from tvm import tirx

from ...runtime.target import Target
from ..codegen.builder import Buffer, Expr, KernelBuilder
from ..groups.group import Group
from ..template.contract import BuiltKernel
from ..template.kernel import finish, new_builder
from ..template.loops import accumulator_type

OPERATORS = frozenset(["Det"])


def obstacle(group: Group, target: Target) -> str:
    """Why the kernel cannot be written for a group; empty if it can."""
    if len(group.ops) != 1 or group.ops[0].op_type not in OPERATORS:
        return "has no determinant"
    dtype = group.types[group.ops[0].inputs[0]].dtype
    return "" if "float" in dtype else f"no determinant of {dtype}"


def build(group: Group, target: Target) -> BuiltKernel:
    """Takes Det alone."""
    (op,) = group.ops
    kind, result = group.types[op.inputs[0]], group.types[op.outputs[0]]
    dtype, n = accumulator_type(kind.dtype), kind.shape[-1]
    count = prod(kind.shape[:-2])
    builder = new_builder(target)
    source = builder.parameter(op.inputs[0], kind.elements, kind.dtype)
    out = builder.parameter(op.outputs[0], result.elements, result.dtype)
    work = count * (n**3 // 3 + n)
    if count:
        matrices = builder.workspace(max(kind.elements, 1), dtype)
        with builder.chunks(count, work) as number:
            base = builder.bind(number * (n * n))

            def copy(i: Expr) -> None:
                builder.store(matrices, base + i, tirx.Cast(dtype, source[base + i]))

            builder.vector_loop(n * n, builder.lanes(dtype), copy)
            product = builder.local(1, dtype, "product")
            builder.store(product, 0, tirx.const(1, dtype))
            if n:
                with builder.loop(n, name="step") as step:
                    _eliminate(builder, matrices, product, base, n, step)
            builder.store(out, number, tirx.Cast(result.dtype, product[0]))
    return finish("determinant", builder, group, flops=2 * work)


def _eliminate(builder: KernelBuilder, matrices: Buffer, product: Buffer, base: Expr, n: int, step: Expr) -> None:
    """One step: swap the row with the column's largest absolute value up, multiply `product` by the pivot, clear the column.

    A NaN counts as the largest, that it reaches the result.
    """
    zero = tirx.const(0, "int32")
    pivot = builder.local(1, "int32", "pivot")
    builder.store(pivot, 0, step)
    with builder.loop(n - step, name="row") as i:
        row = builder.bind(step + i)
        greatest, candidate = tirx.abs(matrices[base + pivot[zero] * n + step]), matrices[base + row * n + step]
        with builder.when(tirx.Or(tirx.abs(candidate) > greatest, tirx.isnan(candidate))):
            builder.store(pivot, 0, row)
    chosen = builder.bind(pivot[zero])
    with builder.when(tirx.NE(chosen, step)):
        builder.store(product, 0, -product[zero])
        with builder.loop(n - step, name="column") as j:
            column = builder.bind(step + j)
            upper, lower = builder.local(1, str(matrices.dtype)), builder.local(1, str(matrices.dtype))
            builder.store(upper, 0, matrices[base + step * n + column])
            builder.store(lower, 0, matrices[base + chosen * n + column])
            builder.store(matrices, base + step * n + column, lower[zero])
            builder.store(matrices, base + chosen * n + column, upper[zero])
    builder.store(product, 0, product[zero] * matrices[base + step * n + step])
    with builder.loop(n - step - 1, name="row") as i:
        row = builder.bind((step + 1 + i) * n + base)
        factor = builder.local(1, str(matrices.dtype))
        builder.store(factor, 0, matrices[row + step] / matrices[base + step * n + step])
        with (
            builder.when(tirx.NE(matrices[base + step * n + step], tirx.const(0, str(matrices.dtype)))),
            builder.loop(n - step, name="column") as j,
        ):
            column = builder.bind(step + j)
            rest = matrices[row + column] - factor[zero] * matrices[base + step * n + column]
            builder.store(matrices, row + column, rest)
