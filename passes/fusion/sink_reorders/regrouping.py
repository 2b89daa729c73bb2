"""Shapes of one tensor's bytes: which dimensions of the one are which of the other."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod


def regrouped(shape: tuple[int, ...], shown: tuple[int, ...], source: tuple[int, ...]) -> tuple[int, ...] | None:
    """What an operand that spans `shown` by broadcasting must look like to span another shape, `source`, alike.

    So [4, 8] within [2, 12, 4, 8] is [32] within [24, 32]. None where it spans only some of the dimensions that become others
    together: [8] repeats along [4, 8], which no broadcast does along [32]. No dimension may be 0.
    """
    padded = (1,) * (len(shown) - len(shape)) + shape
    if len(padded) > len(shown):
        return None
    found: list[int] = []
    for here, there in _blocks(shown, source):
        if padded[here] == shown[here]:
            found += source[there]
        elif all(dim == 1 for dim in padded[here]):
            found += (1,) * (there.stop - there.start)
        else:
            return None
    if prod(found) == prod(source):
        return source
    spanned = _without_ones(tuple(found))
    return shape if _without_ones(shape) == spanned and len(shape) <= len(source) else spanned


def widened(shape: tuple[int, ...], shown: tuple[int, ...], source: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that an operand must be repeated to, within `shown`, so that `regrouped` has an answer for it."""
    padded = (1,) * (len(shown) - len(shape)) + shape
    found: list[int] = []
    for here, _ in _blocks(shown, source):
        found += padded[here] if all(dim == 1 for dim in padded[here]) else shown[here]
    return tuple(found)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape from its first dimension on that is not 1."""
    first = next((axis for axis, dim in enumerate(shape) if dim != 1), len(shape))
    return shape[first:]


def _blocks(first: tuple[int, ...], second: tuple[int, ...]) -> Iterator[tuple[slice, slice]]:
    """The shortest runs of dimensions of two shapes that have as many elements, in order."""
    ends, begins, sizes = [0, 0], (0, 0), [1, 1]
    while ends[0] < len(first) or ends[1] < len(second):
        side = 0 if (sizes[0] <= sizes[1] and ends[0] < len(first)) or ends[1] == len(second) else 1
        sizes[side] *= (first, second)[side][ends[side]]
        ends[side] += 1
        if sizes[0] == sizes[1]:
            yield slice(begins[0], ends[0]), slice(begins[1], ends[1])
            begins, sizes = (ends[0], ends[1]), [1, 1]
