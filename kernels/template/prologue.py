"""The prologue: operands that pointwise operators before the anchor compute where the template reads them.

A template that reads an operand by flat offsets reads it through `source_of`; one that has indices reads it through GroupValues.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...runtime.symbolic.shapes import equal, is_one
from ..codegen.builder import Buffer, Expr, KernelBuilder
from ..expressions import pointwise
from ..groups.group import Group
from .values import GroupValues, apart


@dataclass(frozen=True)
class Computed:
    """An operand with a prologue, indexed by flat offset as a buffer is.

    Every value of the prologue has as many elements as the operand, or one.
    """

    group: Group
    builder: KernelBuilder
    name: str

    @property
    def dtype(self) -> str:
        return self.group.types[self.name].dtype

    def __getitem__(self, offset: Expr) -> Expr:
        return self._read(self.name, offset, {})

    def _read(self, name: str, offset: Expr, known: dict[str, Expr]) -> Expr:
        """The element of a value; `known` are those that have been named at this offset."""
        if name in known:
            return known[name]
        op, kind = self.group.producers.get(name), self.group.types[name]
        if op is None:
            values = GroupValues(self.group, self.builder)
            if (literal := self.group.literal(name)) is not None and literal.size == 1:
                return values.read(name, ())
            return values.load(name, 0 if is_one(kind.elements) else offset)
        types = self.group.types
        operands = [self._read(one, offset, known) if one else None for one in op.inputs]
        dtypes = [types[one].dtype if one else "" for one in op.inputs]
        builder = self.builder
        flags = {
            "has_bfloat16": builder.has_bfloat16,
            "is_rough": self.group.tolerance.may_round,
            "is_grid": builder.is_grid,
        }
        made = pointwise.apply(op, operands, dtypes, kind.dtype, builder.name, builder.integer_bits, **flags)
        known[name] = builder.name(apart(self.group, builder, op, made))
        return known[name]


def source_of(group: Group, builder: KernelBuilder, name: str) -> Buffer:
    """An anchor's operand by flat offset: a buffer in memory, or `Computed` where it has a prologue."""
    if name in group.producers:
        return Computed(group, builder, name)
    kind = group.types[name]
    return builder.parameter(name, kind.elements, kind.dtype)


def is_computed(group: Group, name: str) -> bool:
    """Whether an operand has a prologue."""
    return name in group.producers


def flat_obstacle(group: Group, name: str) -> str:
    """Why a prologue cannot be computed from flat offsets; empty if it can, or if the operand is an input."""
    elements = group.types[name].elements
    waiting, seen = [name], set[str]()
    while waiting:
        value = waiting.pop()
        if value in seen or not value:
            continue
        seen.add(value)
        op = group.producers.get(value)
        count = group.types[value].elements
        if not is_one(count) and not equal(count, elements):
            return f"{value}, which an operand is computed from, spans only some of its dimensions"
        if op is not None:
            if op.op_type not in pointwise.POINTWISE:
                return f"{op.op_type} before the anchor is not pointwise"
            waiting += op.inputs
    return ""
