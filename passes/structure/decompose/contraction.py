"""Einsum, as matrix products of two operands at a time."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from math import prod

import onnx_ir as ir

from ....compiler.ir.symbolic.symbols import sizes_of
from ....runtime.symbolic.sizes import Size, estimate
from .body import Body, ints

# What a matrix product computes with; other integers go through int32, whose last bits are theirs.
_PRODUCT_TYPES = frozenset(["float32", "float64", "float16", "bfloat16", "int32", "int64", "uint32", "uint64"])
_MOST_OPERANDS = 64  # the search for a pair looks at all of them for each pair that is left
Labels = tuple[str, ...]


@dataclass(frozen=True)
class _Term:
    """A tensor with a label for each dimension, no label twice."""

    value: ir.Value
    labels: Labels


def einsum(node: ir.Node) -> ir.Function | None:
    """Any equation. Operands are contracted in pairs, always the pair that leaves the smallest tensors."""
    x = node.inputs[0]
    shapes = [sizes_of(value) or () for value in node.inputs]
    parsed = parse_equation(node.attributes.get_string("equation"), [len(shape) for shape in shapes])
    if parsed is None or x is None or x.dtype is None or len(shapes) > _MOST_OPERANDS:
        return None
    terms, result = parsed
    if any(len({*labels}) < len(labels) and _has_sizes(shape) for labels, shape in zip(terms, shapes, strict=True)):
        return None  # a diagonal, whose step is a number
    sizes: dict[str, int] = {}
    for labels, shape in zip(terms, shapes, strict=True):
        for label, extent in zip(labels, shape, strict=True):
            sizes[label] = extent if sizes.get(label, 1) == 1 else sizes[label]
    dtype = x.dtype.numpy().name
    writer = _Contraction(Body(node), sizes, result, "int32" if dtype not in _PRODUCT_TYPES else dtype)
    return writer.write(terms, shapes, dtype)


def _has_sizes(shape: tuple[int, ...]) -> bool:
    """Whether a call decides one of the dimensions."""
    return any(isinstance(dim, Size) for dim in shape)


def parse_equation(equation: str, ranks: list[int]) -> tuple[list[Labels], Labels] | None:
    """The labels of each operand and of the result; None where the equation does not fit the operands.

    The dimensions of an ellipsis are labelled from the last on, so that operands of unequal rank broadcast as NumPy does. Without
    an arrow the result has the ellipsis and then, in the order of the alphabet, the labels that occur once.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    subscripts = left.split(",")
    if len(subscripts) != len(ranks):
        return None
    spare = [rank - len(term.replace("...", "")) for term, rank in zip(subscripts, ranks, strict=True)]
    if any(extra < 0 or (extra > 0 and "..." not in term) for term, extra in zip(subscripts, spare, strict=True)):
        return None
    widest = max((extra for term, extra in zip(subscripts, spare, strict=True) if "..." in term), default=0)
    ellipsis = tuple(f".{place}" for place in reversed(range(widest)))

    def labels(term: str, extra: int) -> Labels:
        before, dots, after = term.partition("...")
        return (*before, *(ellipsis[widest - extra :] if dots else ()), *after)

    terms = [labels(term, extra) for term, extra in zip(subscripts, spare, strict=True)]
    if not arrow:
        letters = left.replace("...", "").replace(",", "")
        right = ("..." if "..." in left else "") + "".join(sorted(one for one in set(letters) if letters.count(one) == 1))
    result = labels(right, widest)
    known = {label for term in terms for label in term}
    return (terms, result) if set(result) <= known and len(set(result)) == len(result) else None


@dataclass(frozen=True)
class _Contraction:
    """Writes one Einsum. `sizes` are the extents of labels; `dtype` is what is computed with."""

    body: Body
    sizes: dict[str, int]
    result: Labels
    dtype: str

    def write(self, labels: list[Labels], shapes: list[tuple[int, ...]], dtype: str) -> ir.Function:
        terms = []
        for position, (names, shape) in enumerate(zip(labels, shapes, strict=True)):
            value = self.body.input(position)
            value = value if dtype == self.dtype else self.body.cast(value, self.dtype)
            terms.append(self._squeezed(self._diagonal(value, names, shape), shape, names))
        terms = [self._summed(term, terms[:at] + terms[at + 1 :]) for at, term in enumerate(terms)]
        while len(terms) > 1:
            i, j = self._cheapest_pair(terms)
            rest = [term for at, term in enumerate(terms) if at not in (i, j)]
            terms = [*rest, self._product(terms[i], terms[j], rest)]
        value = self._in_order(terms[0], [label for label in self.result if label in terms[0].labels])
        value = self.body.reshape(value, [self.sizes[label] for label in self.result])
        return self.body.function(value if dtype == self.dtype else self.body.cast(value, dtype))

    def _diagonal(self, value: ir.Value, labels: Labels, shape: tuple[int, ...]) -> _Term:
        """Dimensions of one label become their diagonal: a step over the two of them flattened."""
        extents = list(shape)
        while repeated := next((label for label in labels if labels.count(label) > 1), None):
            i = labels.index(repeated)
            j = labels.index(repeated, i + 1)
            others = [axis for axis in range(len(labels)) if axis not in (i, j)]
            n = extents[i]
            extents = [*(extents[axis] for axis in others), n]
            flat = self.body.reshape(self.body.transpose(value, [*others, i, j]), [*extents[:-1], n * n])
            value = self.body.op("Slice", flat, ints([0]), ints([n * n]), ints([len(others)]), ints([n + 1]))
            labels = (*(labels[axis] for axis in others), repeated)
        return _Term(value, labels)

    def _squeezed(self, term: _Term, shape: tuple[int, ...], names: Labels) -> _Term:
        """Without the dimensions of one element: they broadcast."""
        extents = dict(zip(names, shape, strict=True))
        kept = tuple(label for label in term.labels if extents[label] != 1)
        return term if kept == term.labels else _Term(self.body.reshape(term.value, [extents[label] for label in kept]), kept)

    def _summed(self, term: _Term, others: list[_Term]) -> _Term:
        """Without the labels that nothing else needs."""
        needed = {*self.result, *(label for other in others for label in other.labels)}
        axes = [axis for axis, label in enumerate(term.labels) if label not in needed]
        if not axes:
            return term
        value = self.body.op("ReduceSum", term.value, ints(axes), keepdims=0)
        return _Term(value, tuple(label for label in term.labels if label in needed))

    def _cheapest_pair(self, terms: list[_Term]) -> tuple[int, int]:
        """The pair whose product grows the sum of the sizes least; the fewest multiplications where several do."""

        def cost(pair: tuple[int, int]) -> tuple[int, int]:
            a, b = (terms[at].labels for at in pair)
            needed = {*self.result, *(label for at, term in enumerate(terms) if at not in pair for label in term.labels)}
            joined = {*a, *b}
            return self._size(joined & needed) - self._size(a) - self._size(b), self._size(joined)

        with estimate():
            return min(combinations(range(len(terms)), 2), key=cost)

    def _product(self, a: _Term, b: _Term, rest: list[_Term]) -> _Term:
        """The product of two terms, summed over what neither the result nor the others need."""
        needed = {*self.result, *(label for term in rest for label in term.labels)}
        place = {label: at for at, label in enumerate(self.result)}

        def ordered(labels: set[str]) -> list[str]:
            return sorted(labels, key=lambda label: (place.get(label, len(place)), label))

        shared = set(a.labels) & set(b.labels)
        batch = ordered(shared & needed)
        depth = [label for label in a.labels if label in shared - needed]
        rows, columns = (ordered(set(term.labels) - shared) for term in (a, b))
        if [place.get(label, len(place)) for label in rows] > [place.get(label, len(place)) for label in columns]:
            a, b, rows, columns = b, a, columns, rows
        labels = (*batch, *rows, *columns)
        if not depth:
            left = self._shaped(a, [*batch, *rows], [*batch, *rows, *(None for _ in columns)])
            right = self._shaped(b, [*batch, *columns], [*batch, *(None for _ in rows), *columns])
            return _Term(self.body.op("Mul", left, right), labels)
        b_count, m, k, n = (self._size(part) for part in (batch, rows, depth, columns))
        left = self.body.reshape(self._in_order(a, [*batch, *rows, *depth]), [b_count, m, k] if batch else [m, k])
        right = self.body.reshape(self._in_order(b, [*batch, *depth, *columns]), [b_count, k, n] if batch else [k, n])
        product = self.body.op("MatMul", left, right)
        return _Term(self.body.reshape(product, [self.sizes[label] for label in labels]), labels)

    def _shaped(self, term: _Term, order: list[str], labels: list[str | None]) -> ir.Value:
        """A term transposed to `order`, with dimensions of one element where `labels` have None."""
        return self.body.reshape(self._in_order(term, order), [1 if label is None else self.sizes[label] for label in labels])

    def _in_order(self, term: _Term, order: list[str]) -> ir.Value:
        return self.body.transpose(term.value, [term.labels.index(label) for label in order])

    def _size(self, labels: set[str] | Labels | list[str]) -> int:
        return prod(self.sizes[label] for label in labels)
