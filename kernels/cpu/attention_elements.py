"""Elements of attention's operands, scores and results, through the views and pointwise operators of its group."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from ..builder import Expr, Index, KernelBuilder, broadcast_index, row_major
from ..group import Op
from ..values import GroupValues, source_offset
from .attention_form import Attention


@dataclass(frozen=True)
class Elements:
    """`batch` is a place among the batch dimensions of the scores, `query` and `key` count among all of them."""

    form: Attention
    builder: KernelBuilder

    def query(self, batch: Index, query: Expr, k: Expr) -> Expr:
        return self._operand(self.form.scores, 0, batch, (query, k))

    def key(self, batch: Index, key: Expr, k: Expr) -> Expr:
        return self._operand(self.form.scores, 1, batch, (k, key))

    def value(self, batch: Index, key: Expr, column: Expr) -> Expr:
        return self._operand(self.form.product, 1, self._weight_batch(batch), (key, column))

    def score(self, batch: Index, query: Expr, key: Expr, product: Expr) -> Expr:
        """What becomes of the product of a query and a key before the softmax."""
        form = self.form
        place = form.softmax_place((*batch, query, key))
        return self._followed(form.scores.outputs[0], product, form.softmax.inputs[0], place, form.dtype)

    def weight(self, batch: Index, query: Expr, key: Expr, probability: Expr) -> Expr:
        """What becomes of the probability of a query and a key before the product."""
        form = self.form
        place = form.weight_place(form.softmax_place((*batch, query, key)))
        return self._followed(form.softmax.outputs[0], probability, form.product.inputs[0], place, form.dtype)

    def store_result(self, batch: Index, query: Expr, column: Expr, product: Expr) -> None:
        """Store an element of the product, and what is computed from it, where it comes to lie."""
        form, out = self.form, self.form.group.outputs[0]
        kind = form.group.types[out]
        place = form.result_place((*self._weight_batch(batch), query, column))
        element = self._followed(form.product.outputs[0], product, out, place, kind.dtype)
        self.builder.store(self.builder.parameter(out, kind.elements, kind.dtype), row_major(place, kind.shape), element)

    def is_transposed(self, product: Op) -> bool:
        """Whether a product's second operand lies column by column in memory, as keys do before the usual transpose."""
        group, name = self.form.group, product.inputs[1]
        shape = group.types[name].shape
        if 1 in shape[-2:]:
            return False
        outer = (0,) * (len(shape) - 2)
        origin, down, along = (source_offset(group, name, (*outer, *at)) for at in ((0, 0), (1, 0), (0, 1)))
        return abs(down - origin) < abs(along - origin)

    def _weight_batch(self, batch: Index) -> Index:
        """The place of a head among the batch dimensions of the product with the values."""
        zero = tirx.const(0, "int32")
        return self.form.weight_place(self.form.softmax_place((*batch, zero, zero)))[:-2]

    def _followed(self, given: str, value: Expr, result: str, place: Index, dtype: str) -> Expr:
        """The element of `result` at a place, where that of `given` which it is made of is `value`."""
        element = self.builder.name(tirx.Cast(self.form.group.types[given].dtype, value))
        values = GroupValues(self.form.group, self.builder, {given: lambda _: element})
        return tirx.Cast(dtype, values.read(result, place))

    def _operand(self, product: Op, position: int, batch: Index, place: tuple[Expr, Expr]) -> Expr:
        """An element of an operand of a product at a place of its matrix, for a place among the product's batch dimensions."""
        types, name = self.form.group.types, product.inputs[position]
        index = (*broadcast_index(batch, types[product.outputs[0]].shape[:-2], types[name].shape[:-2]), *place)
        return tirx.Cast(self.form.dtype, GroupValues(self.form.group, self.builder).read(name, index))
