"""Elements of attention's operands, scores and results, through the views and pointwise operators of its group."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
from tvm import tirx

from ...runtime.symbolic.shapes import is_symbolic
from ...runtime.symbolic.sizes import estimating
from ..codegen.builder import Expr, Index, KernelBuilder, broadcast_index, row_major
from ..groups.group import Op
from ..template.values import GroupValues, source_offset
from ..template.views import view_of
from .pattern import Attention

_COMPARED_HEADS = 1024  # heads, at most, whose offsets are compared at compile time


@dataclass(frozen=True)
class Elements:
    """Elements by `batch`, an index in the batch dimensions of the scores, and by numbers of `query` and `key` in that matrix."""

    form: Attention
    builder: KernelBuilder

    def query(self, batch: Index, query: Expr, k: Expr) -> Expr:
        return self._operand(self.form.scores, 0, batch, (query, k))

    def key(self, batch: Index, key: Expr, k: Expr) -> Expr:
        return self._operand(self.form.scores, 1, batch, (k, key))

    def value(self, batch: Index, key: Expr, column: Expr) -> Expr:
        return self._operand(self.form.product, 1, self._weight_batch(batch), (key, column))

    def score(self, batch: Index, query: Expr, key: Expr, product: Expr) -> Expr:
        """The softmax's operand (scale, mask) for the product of a query and a key."""
        form = self.form
        place = form.softmax_place((*batch, query, key))
        return self._followed(form.scores.outputs[0], product, form.softmax.inputs[0], place, form.dtype)

    def weight(self, batch: Index, query: Expr, key: Expr, probability: Expr) -> Expr:
        """The operand of the product with V for the probability of a query and a key."""
        form = self.form
        place = form.weight_place(form.softmax_place((*batch, query, key)))
        return self._followed(form.softmax.outputs[0], probability, form.product.inputs[0], place, form.dtype)

    def store_result(self, batch: Index, query: Expr, column: Expr, product: Expr) -> None:
        """The epilogue of an element of the product with V, stored through the views after it."""
        form, out = self.form, self.form.group.outputs[0]
        kind = form.group.types[out]
        place = form.result_place((*self._weight_batch(batch), query, column))
        element = self._followed(form.product.outputs[0], product, out, place, kind.dtype)
        self.builder.store(self.builder.parameter(out, kind.elements, kind.dtype), row_major(place, kind.shape), element)

    @estimating
    def is_transposed(self, product: Op) -> bool:
        """Whether a product's second operand is column-major in memory, as K is before the usual transpose."""
        group, name = self.form.group, product.inputs[1]
        shape = group.types[name].shape
        if 1 in shape[-2:]:
            return False
        outer = (0,) * (len(shape) - 2)
        origin, down, along = (source_offset(group, name, (*outer, *at)) for at in ((0, 0), (1, 0), (0, 1)))
        return abs(down - origin) < abs(along - origin)

    def shared_heads(self, most: int) -> int:
        """How many neighbouring heads, up to `most`, read the same K and V in memory, through views and casts."""
        form, batch = self.form, self.form.batch
        types, operands = form.group.types, ((form.scores, 1), (form.product, 1))
        if not batch or is_symbolic(batch) or prod(batch) > _COMPARED_HEADS or types[form.product.outputs[0]].shape[:-2] != batch:
            return 1
        if not all(self._lies_somewhere(product.inputs[position]) for product, position in operands):
            return 1

        def offsets(place: tuple[int, ...]) -> list[int]:
            """Offsets of the first and the last element of both operands."""
            found = []
            for product, position in operands:
                shape = types[product.inputs[position]].shape
                outer = broadcast_index(place, batch, shape[:-2])
                ends = ((0, 0), (shape[-2] - 1, shape[-1] - 1))
                found += [source_offset(form.group, product.inputs[position], (*outer, *end)) for end in ends]
            return found

        lies = {place: offsets(place) for place in np.ndindex(*batch)}

        def is_shared(count: int) -> bool:
            return all(lies[place] == lies[(*place[:-1], place[-1] // count * count)] for place in lies)

        return next((count for count in range(min(most, batch[-1]), 1, -1) if batch[-1] % count == 0 and is_shared(count)), 1)

    def _lies_somewhere(self, name: str) -> bool:
        """Whether a value is an input of the group, or made of one by views and casts."""
        while (op := self.form.group.producers.get(name)) is not None:
            if op.op_type != "Cast" and view_of(self.form.group, op) is None:
                return False
            name = op.inputs[0]
        return True

    def _weight_batch(self, batch: Index) -> Index:
        """The index in the batch dimensions of the product with V for one in those of the scores."""
        zero = tirx.const(0, "int32")
        return self.form.weight_place(self.form.softmax_place((*batch, zero, zero)))[:-2]

    def _followed(self, given: str, value: Expr, result: str, place: Index, dtype: str) -> Expr:
        """The element of `result` at a place, computed from an element of `given` that is `value`."""
        element = self.builder.name(tirx.Cast(self.form.group.types[given].dtype, value))
        values = GroupValues(self.form.group, self.builder, {given: lambda _: element})
        return tirx.Cast(dtype, values.read(result, place))

    def _operand(self, product: Op, position: int, batch: Index, place: tuple[Expr, Expr]) -> Expr:
        """An element of a product's operand, at `place` of the matrix that belongs to index `batch` of the product."""
        types, name = self.form.group.types, product.inputs[position]
        index = (*broadcast_index(batch, types[product.outputs[0]].shape[:-2], types[name].shape[:-2]), *place)
        return tirx.Cast(self.form.dtype, GroupValues(self.form.group, self.builder).read(name, index))
