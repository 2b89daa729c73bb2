"""What attention would take: both products, and the pointwise operators on scores between."""

from __future__ import annotations

from math import prod

from ...runtime.symbolic.sizes import estimating
from ...runtime.target import Target
from ..cost.estimate import Estimate, with_bytes
from ..cost.memory import WORK_PER_OPERATION
from ..cost.operations import operations_of
from ..cost.pointwise import pointwise_body
from ..cost.product import attention_cycles, attention_in_place_cycles, tiled_attention_cycles
from ..formats.format import Format
from ..template.kernel import machine_of, pointwise_cost
from .pattern import Attention


def attention_flops(form: Attention) -> int:
    """Of both products."""
    return 2 * prod(form.batch) * form.queries * form.keys * (form.depth + form.width)


def attention_work(form: Attention) -> int:
    """Scalar operations that threads share."""
    cost = pointwise_cost(form.group) + operations_of("Softmax")
    return attention_flops(form) // WORK_PER_OPERATION + prod(form.batch) * form.queries * form.keys * cost


@estimating
def attention_estimate(
    form: Attention,
    target: Target,
    number_format: Format,
    tile_cycles: float,
    seen: float,
    *,
    is_packed: bool,
    is_rough: bool,
    in_place: int = 0,
) -> Estimate:
    """Of all heads; by AMX in `tile_cycles` each, if these are not 0, or of `in_place` heads at once that share keys in memory.
    The others are those of `attention_cycles`."""
    machine, size = machine_of(target, form.dtype), (form.queries, form.keys, form.depth, form.width)
    heads, group = prod(form.batch), form.group
    scores = heads * form.queries * form.keys
    among = [op for op in group.ops if group.types[op.outputs[0]].elements == scores and op is not form.scores]
    if tile_cycles:
        operations = float(sum(operations_of(op.op_type) for op in among))
        cycles = tiled_attention_cycles(heads, size, machine, operations, tile_cycles)
        return with_bytes(Estimate(cycles, 2 * scores * (form.depth + form.width)), group)
    body = pointwise_body(group, [op for op in among if op is not form.softmax], machine)
    if in_place:
        cycles = attention_in_place_cycles(heads, in_place, size, machine, body)
    else:
        cycles = attention_cycles(
            heads,
            size,
            machine,
            body,
            k_pack=number_format.k_pack,
            unit=number_format.unit,
            is_packed=is_packed,
            is_rough=is_rough,
            seen=seen,
        )
    return with_bytes(Estimate(cycles, 2 * scores * (form.depth + form.width)), group)
