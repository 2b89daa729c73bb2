"""Where the operands of attention lie in memory: offsets through views, and what scales do to elements on their way."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product as nest

from ..codegen.builder import Expr, Index, KernelBuilder, broadcast_index, row_major
from ..expressions.pointwise import POINTWISE
from ..groups.group import Op
from ..template.contract import Refusal
from ..template.values import GroupValues
from ..template.views import view_of
from .pattern import Attention


@dataclass(frozen=True)
class Located:
    """An operand of `product` that is an input of the group, `source`, seen through views; `is_scaled`: and through operators
    with single numbers beside it, or Casts that round; `keeps_zero`: which make 0 of 0."""

    form: Attention
    product: Op
    position: int
    source: str
    is_scaled: bool
    keeps_zero: bool

    def offset(self, batch: Index, row: Expr, column: Expr) -> Expr:
        """In the source, of an element of the matrix that belongs to an index in the batch dimensions of the scores."""
        group, name = self.form.group, self.product.inputs[self.position]
        index = (
            *broadcast_index(batch, group.types[self.product.outputs[0]].shape[:-2], group.types[name].shape[:-2]),
            row,
            column,
        )
        while (op := group.producers.get(name)) is not None:
            if op.op_type in POINTWISE:
                name = _beside_numbers(self.form, op) or ""
            else:
                view = view_of(group, op)
                assert view is not None
                name, index = op.inputs[0], view.source(group, op, name, index)
        return row_major(index, group.types[name].shape)

    def scaled(self, builder: KernelBuilder, value: Expr) -> Expr:
        """What an element of the source becomes."""
        name = self.product.inputs[self.position]
        place = (0,) * len(self.form.group.types[name].shape)
        return GroupValues(self.form.group, builder, {self.source: lambda _: value}).read(name, place)

    def has_runs(self, length: int, *, along_rows: bool) -> bool:
        """Whether `length` elements along a row (or a column) are neighbours in memory that begin at multiples of `length`.

        Views take every digit of an index the same way, so that corners and a few places of the matrix tell whether elements
        are neighbours. Where they begin a step of each digit tells, whose place value divides its dimension: lines with even
        numbers may begin at multiples where those between do not.
        """
        shape = self.form.group.types[self.product.inputs[self.position]].shape
        batches = self.form.group.types[self.product.outputs[0]].shape[:-2]
        extent, across = (shape[-1], shape[-2]) if along_rows else (shape[-2], shape[-1])
        if extent % length:
            return False
        corners = nest(*({0, n // 2, n - 1} for n in batches))
        places = [(batch, line) for batch in corners for line in {0, across // 2, across - 1}]
        extents = (*batches, across)
        steps = [
            tuple(step if axis == moved else 0 for axis in range(len(extents)))
            for moved, n in enumerate(extents)
            for step in range(1, n)
            if n % step == 0
        ]

        def offset(batch: Index, line: int, at: int) -> int:
            return int(self.offset(batch, *((line, at) if along_rows else (at, line))))

        return all(offset(one[:-1], one[-1], 0) % length == 0 for one in steps) and all(
            offset(batch, line, first) % length == 0 and offset(batch, line, first + i) == offset(batch, line, first) + i
            for batch, line in places
            for first in range(0, extent, length)
            for i in range(length)
        )


def locate(form: Attention, product: Op, position: int) -> Located | Refusal:
    """Where an operand of one of the products lies; a Refusal where it is computed from more than one tensor."""
    name, is_scaled, group, casts = product.inputs[position], False, form.group, set[str]()
    keeps_zero = True
    while (op := group.producers.get(name)) is not None:
        if op.op_type in POINTWISE:
            source = _beside_numbers(form, op)
            if source is None:
                return Refusal(f"{op.op_type} computes an operand from several tensors")
            is_scaled = is_scaled or op.op_type != "Cast"
            keeps_zero = keeps_zero and _keeps_zero(op, source)
            if op.op_type == "Cast":
                casts.add(group.types[name].dtype)
            name = source
        elif view_of(group, op) is None:
            return Refusal(f"{op.op_type} makes an operand")
        else:
            name = op.inputs[0]
    is_scaled = is_scaled or not casts <= {"float32", group.types[name].dtype}  # to others, elements are rounded
    return Located(form, product, position, name, is_scaled, keeps_zero)


def result_offset(form: Attention, batch: Index, query: int, column: int) -> int:
    """Of an element of the result, for numbers; `batch` in the batch dimensions of the product with V."""
    out = form.group.outputs[0]
    return int(row_major(form.result_place((*batch, query, column)), form.group.types[out].shape))


def _keeps_zero(op: Op, source: str) -> bool:
    """Whether an operator makes 0 of an element that is 0, as what pads an operand is to stay."""
    return op.op_type in ("Cast", "Mul", "Neg") or (op.op_type == "Div" and op.inputs[0] == source)


def _beside_numbers(form: Attention, op: Op) -> str | None:
    """The one operand of a pointwise operator that is a tensor, of its result's shape; None where there are others."""
    types, tensors = form.group.types, [name for name in op.inputs if name and form.group.types[name].elements > 1]
    is_one = len(tensors) == 1 and types[tensors[0]].shape == types[op.outputs[0]].shape
    return tensors[0] if is_one else None
