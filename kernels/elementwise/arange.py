"""Range, of a length that only a call knows: of any other, it is a constant."""

from __future__ import annotations

import numpy as np
from tvm import tirx

from ...runtime.symbolic.sizes import Size, hint_of
from ...runtime.target import Target
from ..codegen.builder import Expr, Index
from ..codegen.dimensions import lower_number
from ..groups.group import Group
from ..template.contract import BuiltKernel, Refusal
from ..template.kernel import finish, map_elements, new_builder
from ..template.loops import store_epilogue
from ..template.values import anchor_of

OPERATORS = frozenset(["Range"])


def obstacle(group: Group, target: Target) -> str:
    """Takes a Range of integers from a known number on, by known steps."""
    anchor = anchor_of(group)
    first, _, step = (group.literal(name) for name in anchor.inputs)
    if first is None or step is None:
        return "only a run knows where it begins"
    return "" if np.dtype(group.types[anchor.outputs[0]].dtype).kind in "iu" else "is of floats, whose last one may be rounded"


def build(group: Group, target: Target) -> BuiltKernel | Refusal:
    """Takes a Range with its epilogue."""
    if reason := obstacle(group, target):
        return Refusal(reason)
    anchor, builder = anchor_of(group), new_builder(target)
    kind = group.types[anchor.outputs[0]]
    first, step = (_number(group, anchor.inputs[place], kind.dtype) for place in (0, 2))

    def element(index: Index) -> None:
        store_epilogue(group, builder, anchor, index, first + tirx.Cast(kind.dtype, index[0]) * step)

    elements = hint_of(kind.elements)
    map_elements(builder, kind.shape, builder.lanes(kind.dtype), elements, element)
    return finish("range", builder, group, flops=elements)


def _number(group: Group, name: str, dtype: str) -> Expr:
    literal = group.literal(name)
    assert literal is not None
    value = literal.item()
    return tirx.Cast(dtype, lower_number(value)) if isinstance(value, Size) else tirx.const(int(value), dtype)
