"""Matching attention in a group: the two products, the softmax, and how indices map through the operators between them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import tvm_ffi
from tvm import tirx

from ...runtime.symbolic.shapes import is_one
from ..codegen.builder import Expr, Index
from ..expressions.pointwise import POINTWISE
from ..groups.group import Group, Op
from ..template.contract import Refusal
from ..template.loops import accumulator_type
from ..template.values import anchors_of
from ..template.views import view_of

_TYPES = ("float32", "float64", "float16", "bfloat16")


@dataclass(frozen=True)
class Attention:
    """softmax(f(Q K)) V: `scores` is the product Q K, `product` that with V. All others are pointwise operators or views."""

    group: Group
    scores: Op
    softmax: Op
    product: Op

    @property
    def batch(self) -> tuple[int, ...]:
        """Batch dimensions of the scores: all but queries and keys."""
        return self.group.types[self.scores.outputs[0]].shape[:-2]

    @property
    def queries(self) -> int:
        return self.group.types[self.scores.outputs[0]].shape[-2]

    @property
    def keys(self) -> int:
        return self.group.types[self.scores.outputs[0]].shape[-1]

    @property
    def depth(self) -> int:
        """Elements of a query or key."""
        return self.group.types[self.scores.inputs[0]].shape[-1]

    @property
    def width(self) -> int:
        """Elements of a value."""
        return self.group.types[self.product.inputs[1]].shape[-1]

    @property
    def dtype(self) -> str:
        """The type of all arithmetic."""
        return accumulator_type(self.group.types[self.softmax.inputs[0]].dtype)

    @property
    def score_count(self) -> int:
        return self.group.types[self.scores.outputs[0]].elements

    @property
    def weighs_probabilities(self) -> bool:
        """Whether operators compute something from each probability before the product with V."""
        return bool(self._weighing)

    @property
    def guard(self) -> float | None:
        """The value v of Where(IsNaN(p), v, p) for probabilities p of fully masked rows; None where there is no such operator.

        A row's exponentials are at most 1 and their sum at least 1, so either all of its probabilities are NaN or none.
        """
        if [op.op_type for op in self._weighing] != ["IsNaN", "Where"]:
            return None
        test, choice = self._weighing
        value = self.group.literal(choice.inputs[1])
        if value is None or value.size != 1 or choice.inputs[0] != test.outputs[0]:
            return None
        if choice.inputs[2] not in values_after(self.group, self.softmax.outputs[0]):
            return None
        return float(value.item())

    @cached_property
    def _weighing(self) -> tuple[Op, ...]:
        """The operators between the softmax and the product with V that do more than round."""
        reached, types = values_after(self.group, self.softmax.outputs[0]), self.group.types

        def is_rounding(op: Op) -> bool:
            return op.op_type == "Cast" and all(types[name].dtype in _TYPES for name in (op.inputs[0], op.outputs[0]))

        between = [op for op in self.group.ops if op is not self.softmax and not reached.isdisjoint(op.outputs)]
        return tuple(op for op in between if not is_rounding(op) and view_of(self.group, op) is None)

    def softmax_place(self, index: Index) -> Index:
        """The index in the softmax's operand of the score at an index."""
        return self._place(self.scores.outputs[0], index, self.softmax.inputs[0])

    def weight_place(self, index: Index) -> Index:
        """The index in the second product's operand of the softmax's result at an index."""
        return self._place(self.softmax.outputs[0], index, self.product.inputs[0])

    def result_place(self, index: Index) -> Index:
        """The index in the group's output of the second product's element at an index."""
        return self._place(self.product.outputs[0], index, self.group.outputs[0])

    def _place(self, name: str, index: Index, result: str) -> Index:
        places = carry_index(self.group, name, index)
        assert not isinstance(places, Refusal), places.reason
        return places[result]


def attention_of(group: Group) -> Attention | Refusal:
    """The attention in a group; a Refusal where it has another form."""
    anchors = anchors_of(group)
    products = [op for op in anchors if op.op_type == "MatMul"]
    softmaxes = [op for op in anchors if op.op_type == "Softmax"]
    if len(products) != 2 or len(softmaxes) != 1 or len(anchors) != 3:
        return Refusal("is not two products with a softmax between them")
    if len(group.outputs) != 1:
        return Refusal("more than the product leaves the group")
    (softmax,), (first, second) = softmaxes, products
    scores, product = (first, second) if second.inputs[0] in values_after(group, softmax.outputs[0]) else (second, first)
    form = Attention(group, scores, softmax, product)
    if reason := _shape_obstacle(form) or _path_obstacle(form):
        return Refusal(reason)
    return form


def never_stored(group: Group) -> set[str]:
    """What attention computes from each score, the scores themselves too: no memory holds it. None of it where views lie between,
    which count places in all scores."""
    form = attention_of(group)
    if isinstance(form, Refusal):
        return set()
    found = values_after(group, form.scores.outputs[0]) | values_after(group, form.softmax.outputs[0])
    makers = [op for op in group.ops if not found.isdisjoint(op.outputs)]
    return set() if any(view_of(group, op) is not None for op in makers) else found


def carry_index(group: Group, name: str, index: Index) -> dict[str, Index] | Refusal:
    """For each value made of `name` by views and pointwise operators: the index of the element made of that at `index`."""
    places = {name: index}
    for op in group.ops:
        reached = [i for i, value in enumerate(op.inputs) if value in places]
        if not reached or any(value in places for value in op.outputs):
            continue
        if op.op_type in POINTWISE:
            out, (first, *rest) = op.outputs[0], [places[op.inputs[i]] for i in reached]
            if any(group.types[op.inputs[i]].shape != group.types[out].shape for i in reached):
                return Refusal(f"{op.op_type} broadcasts what the scores become")
            if not all(_same(first, other) for other in rest):
                return Refusal(f"{op.op_type} meets two places of what the scores become")
            places[out] = first
        elif (view := view_of(group, op)) is not None:
            if view.result is None or reached != [0]:
                return Refusal(f"{op.op_type} has not every element of what the scores become")
            places[op.outputs[0]] = view.result(group, op, places[op.inputs[0]])
    return places


def values_after(group: Group, name: str) -> set[str]:
    """A value and all that views and pointwise operators make of it."""
    reached, anchors = {name}, anchors_of(group)
    for op in group.ops:
        if not reached.isdisjoint(op.inputs) and all(op is not anchor for anchor in anchors):
            reached.update(op.outputs)
    return reached


def _values_before(group: Group, names: tuple[str, ...]) -> set[str]:
    """These values and all inside the group that they are computed from."""
    found, waiting = set[str](), list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += group.producers[name].inputs if name in group.producers else ()
    return found


def _shape_obstacle(form: Attention) -> str:
    types = form.group.types
    named = [*form.scores.inputs, *form.product.inputs, *form.scores.outputs, *form.softmax.outputs, *form.product.outputs]
    kinds = [types[name] for name in named]
    if odd := [kind for kind in kinds if kind.dtype not in _TYPES or accumulator_type(kind.dtype) != form.dtype]:
        return f"{odd[0].dtype} beside {form.dtype}"
    if any(len(kind.shape) < 2 for kind in kinds) or not all(kind.elements for kind in kinds):
        return "an operand is a vector or has no elements"
    rank = len(types[form.softmax.inputs[0]].shape)
    if form.softmax.attribute("axis", 1 if form.softmax.version < 13 else -1) % rank != rank - 1:
        return "the softmax is not along the last dimension"
    weights, result = types[form.product.inputs[0]].shape, types[form.product.outputs[0]].shape
    return "" if weights[:-2] == result[:-2] else "the product broadcasts the probabilities"


def _path_obstacle(form: Attention) -> str:
    """Why the two products and the softmax are not connected element by element; empty if they are."""
    group, score, probability = form.group, form.scores.outputs[0], form.softmax.outputs[0]
    if form.product.inputs[0] not in values_after(group, probability):
        return "no product has the probabilities as its first operand"
    extents = (*form.batch, form.queries, form.keys)
    index: Index = tuple(0 if is_one(extent) else tirx.Var("i", "int32") for extent in extents)
    row = index[-2:]
    for name, result in ((score, form.softmax.inputs[0]), (probability, form.product.inputs[0])):
        places = carry_index(group, name, index)
        if isinstance(places, Refusal):
            return places.reason
        if result not in places:
            return f"{name} does not become {result}"
        index = places[result]
        if not _same(index[-2:], row):
            return "rows of scores do not stay rows"
    columns = carry_index(group, form.product.outputs[0], index)
    if isinstance(columns, Refusal):
        return columns.reason
    if group.outputs[0] not in columns:
        return f"the product does not become {group.outputs[0]}"
    return _independence_obstacle(form)


def _independence_obstacle(form: Attention) -> str:
    """Why another operand (Q, K, V, a mask) depends on the scores; empty if none does."""
    group, made = form.group, {op.outputs[0] for op in (form.scores, form.softmax, form.product)}
    if _values_before(group, (*form.scores.inputs, form.product.inputs[1])) & made:
        return "an operand is made of the scores"
    stages = ((form.softmax.inputs[0], form.scores), (form.product.inputs[0], form.softmax), (group.outputs[0], form.product))
    for name, anchor in stages:
        made_of_it = values_after(group, anchor.outputs[0])
        followers = [op for op in group.ops if op is not anchor and not made_of_it.isdisjoint(op.outputs)]
        beside = tuple(value for op in followers for value in op.inputs if value and value not in made_of_it)
        if _values_before(group, beside) & made:
            return f"what {name} is computed with is made of the scores"
    return ""


def _same(a: Index, b: Index) -> bool:
    return all(_equal(x, y) for x, y in zip(a, b, strict=True))


def _equal(x: Expr, y: Expr) -> bool:
    if isinstance(x, int) or isinstance(y, int):
        return isinstance(x, int) and isinstance(y, int) and x == y
    return bool(tvm_ffi.structural_equal(x, y))
