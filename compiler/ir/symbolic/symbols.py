"""Sizes that a call decides, in a graph: as dimensions of shapes, and as the numbers of constants such as a Reshape's target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import onnx_ir as ir

from ....runtime.symbolic.sizes import Domain, Size, SizeLike, SymbolicSizeError, hint_of

MOST_SIZES = 64  # elements of a constant of sizes: shapes, places and lengths are short
_SAMPLES = 16  # of a domain's points


class SizeDim(ir.SymbolicDim):
    """A dimension that is a `Size`; its text is the size's. Passes that look for numbers see none."""

    __slots__ = ("size",)

    def __init__(self, size: Size) -> None:
        super().__init__(str(size))
        self.size = size


class SizeTensor(ir.LazyTensor):
    """A small constant of int64, some of whose numbers are sizes: nothing can read it as an array."""

    __slots__ = ("sizes",)

    def __init__(self, sizes: np.ndarray, name: str | None = None) -> None:
        def refuse() -> NoReturn:
            raise SymbolicSizeError(f"constant {self.name} is {sizes.tolist()}")

        super().__init__(refuse, ir.DataType.INT64, ir.Shape(sizes.shape), name=name)
        self.sizes = sizes  # of objects: int or Size


def shape_of_sizes(sizes: Sequence[SizeLike | None]) -> ir.Shape:
    """The shape of these dimensions; None is unknown."""
    return ir.Shape([SizeDim(one.domain.canonical(one)) if isinstance(one, Size) else one for one in sizes])


def size_of(dim: int | ir.SymbolicDim) -> SizeLike | None:
    """A dimension as a size; None where it is no number, nor one that a call decides."""
    return dim if isinstance(dim, int) else dim.size if isinstance(dim, SizeDim) else None


def sizes_of(value: ir.Value | None) -> tuple[int, ...] | None:
    """The dimensions of a value as sizes; None where one is unknown."""
    if value is None or value.shape is None:
        return None
    sizes: tuple[Any, ...] = tuple(map(size_of, value.shape))
    return None if any(size is None for size in sizes) else sizes


def constant_sizes(value: ir.Value | None) -> np.ndarray | None:
    """The numbers of a constant of sizes, as objects; None of any other value."""
    tensor = None if value is None or not value.is_initializer() else value.const_value
    return tensor.sizes if isinstance(tensor, SizeTensor) else None


def as_sizes(numbers: np.ndarray) -> np.ndarray | None:
    """Numbers as an array of objects, if there are few enough."""
    return numbers.astype(object) if numbers.size <= MOST_SIZES else None


def domain_of_model(model: ir.Model) -> Domain | None:
    """The domain of the sizes in a model's inputs; None where all are numbers."""
    for value in model.graph.inputs:
        for dim in value.shape or ():
            if isinstance(dim, SizeDim):
                return dim.size.domain
    return None


def some_points(domain: Domain) -> list[int]:
    """Places of points that are left of a domain: the hint, ends of the dimensions, and a few between."""
    left = np.flatnonzero(domain.alive)
    is_end = np.ones(len(left), np.bool_)
    for values in domain.points.values():
        own = values[left]
        is_end &= (own == own.min()) | (own == own.max())
    between = left[:: max(len(left) // _SAMPLES, 1)]
    return sorted({domain.at, *left[is_end][: 2 * _SAMPLES].tolist(), *between.tolist()})


def hinted_shape(value: ir.Value) -> tuple[int, ...] | None:
    """The dimensions of a value where sizes are their hints: for estimates. None where one is unknown."""
    sizes = sizes_of(value)
    return None if sizes is None else tuple(map(hint_of, sizes))
