"""Results of a model in stages are the caller's, where values between steps are views of each other, constants and inputs."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence

import numpy as np
from numpy.lib.array_utils import byte_bounds

from .host_operators import Value


def owned(results: Sequence[Value], held: Iterable[np.ndarray]) -> list[Value]:
    """The results, of which writing to one array changes no other and none that is `held`: copies where it could."""
    held, arrays = list(held), list(arrays_of(results))
    copied = _met([*held, *arrays])
    numbers = iter(range(len(held), len(held) + len(arrays)))
    return [_owned(value, numbers, copied) for value in results]


def arrays_of(values: Iterable[Value]) -> Iterator[np.ndarray]:
    """All arrays of values and of sequences among them."""
    for value in values:
        if isinstance(value, np.ndarray):
            yield value
        elif value is not None:
            yield from arrays_of(value)


def _met(arrays: Sequence[np.ndarray]) -> set[int]:
    """The numbers of arrays whose memory meets, as far as its ends tell, that of one before them, perhaps by way of others."""
    spans = sorted((*byte_bounds(array), number) for number, array in enumerate(arrays) if array.size)
    clusters: list[list[int]] = []
    end = 0
    for first, last, number in spans:
        if first >= end:
            clusters.append([])
        clusters[-1].append(number)
        end = max(end, last)
    return {number for cluster in clusters for number in sorted(cluster)[1:]}


def _owned(value: Value, numbers: Iterator[int], copied: Container[int]) -> Value:
    if isinstance(value, list):
        return [_owned(item, numbers, copied) for item in value]
    if value is None:
        return None
    return value.copy() if next(numbers) in copied or not value.flags.writeable else value
