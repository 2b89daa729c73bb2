"""Shapes some of whose dimensions a call decides. Nothing here asks a question that cuts a domain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .sizes import Size, SizeLike, hint_of, values_of


def is_symbolic(shape: Sequence[object]) -> bool:
    """Whether a call decides a dimension of a shape."""
    return any(isinstance(dim, Size) for dim in shape)


def is_one(size: SizeLike) -> bool:
    """Whether a size is 1 at every point. Nothing is cut: what holds for any size holds for one that may be 1."""
    return equal(size, 1)


def equal(a: SizeLike, b: SizeLike) -> bool:
    """Whether two sizes are the same at every point. Nothing is cut."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    if isinstance(a, Size) and isinstance(b, Size) and a.terms == b.terms:
        return True
    domain = a.domain if isinstance(a, Size) else b.domain
    return bool(np.broadcast_to(values_of(a) == values_of(b), len(domain.alive))[domain.alive].all())


def same_shape(a: Sequence[SizeLike], b: Sequence[SizeLike]) -> bool:
    """Whether two shapes are the same at every point. Nothing is cut."""
    return len(a) == len(b) and all(map(equal, a, b))


def broadcast_shape(*shapes: Sequence[SizeLike]) -> tuple[Any, ...]:
    """As of NumPy's `broadcast_shapes`: of sizes that may differ at any point, none. Raises ValueError."""
    found: list[SizeLike] = []
    for place in range(1, max(map(len, shapes), default=0) + 1):
        dims = [shape[-place] for shape in shapes if place <= len(shape) and not is_one(shape[-place])]
        if not all(equal(dim, dims[0]) for dim in dims):
            raise ValueError(f"{dims} in one dimension")
        found.append(dims[0] if dims else 1)
    return tuple(reversed(found))


def broadcasts_to(shape: Sequence[SizeLike], target: Sequence[SizeLike]) -> bool:
    """Whether broadcasting with a shape leaves `target` as it is, at every point. Nothing is cut."""
    try:
        return same_shape(broadcast_shape(shape, target), target)
    except ValueError:
        return False


def hinted(shape: Sequence[SizeLike]) -> tuple[int, ...]:
    """The shape where the hint is."""
    return tuple(map(hint_of, shape))
