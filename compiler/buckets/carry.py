"""How a named dimension lies in the axes of a value, and what a node says of it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from ...runtime.symbolic.shapes import equal
from ...runtime.symbolic.sizes import Domain, Size, SizeLike, SymbolicSizeError
from ..ir.constants import constant_array
from ..ir.symbolic.symbols import constant_sizes, sizes_of

_WORD = re.compile(r"[^\W\d]\w*")


@dataclass(frozen=True, slots=True)
class Carry:
    """A dimension `name` in an axis of a value: the axis is [outer, name, inner] row by row, of which `inner` is given."""

    name: str
    axis: int
    inner: SizeLike = 1


Carries: TypeAlias = frozenset[Carry]
NONE: Carries = frozenset()


class MixedError(Exception):
    """What counts of a result may depend on what does not count of an operand; the message says how, after the operator."""


@dataclass(frozen=True, slots=True)
class Question:
    """A node as the rules see it, and how the dimensions `names` lie in its operands."""

    node: ir.Node
    found: Mapping[ir.Value, Carries]
    names: Collection[str]
    domain: Domain

    def given(self, position: int) -> bool:
        """Whether an operand is there."""
        return position < len(self.node.inputs) and self.node.inputs[position] is not None

    def carries(self, position: int = 0) -> Carries:
        """Of an operand; none of one that is absent."""
        value = self.node.inputs[position] if self.given(position) else None
        return NONE if value is None else self.found.get(value, NONE)

    def shape(self, position: int = 0) -> tuple[Any, ...]:
        """Of an operand. Raises MixedError where it is not known."""
        return _shape(self.node.inputs[position])

    def result(self, position: int = 0) -> tuple[Any, ...]:
        """The shape of an output. Raises MixedError where it is not known."""
        return _shape(self.node.outputs[position])

    def numbers(self, position: int) -> np.ndarray | None:
        """The elements of a constant operand; None where it is absent. Raises MixedError where they are not known."""
        if not self.given(position):
            return None
        array = constant_array(self.node.inputs[position])
        if array is None:
            raise MixedError(f"reads numbers that are not known, {self._label(position)}")
        return array.reshape(-1)

    def axis(self, default: int) -> int:
        """The attribute, not negative, of the first operand."""
        return self.node.attributes.get_int("axis", default) % len(self.shape())

    def require_same_for_all(self, *positions: int) -> None:
        """Raise MixedError for operands, or for all but the first, that are not the same for all parts."""
        for position in positions or range(1, len(self.node.inputs)):
            if self.carries(position):
                raise MixedError(f"reads padding, {self._label(position)}")

    def require_apart(self, carries: Carries, axes: Collection[int], what: str) -> None:
        """Raise MixedError for a dimension in one of these axes."""
        for carry in sorted(carries, key=repr):
            if carry.axis in axes:
                raise MixedError(f"{what} along {carry.name}")

    def of_size(self, axis: int, size: SizeLike) -> Carries:
        """An axis with one part for each of a dimension; none where it has nothing to do with one. Raises MixedError."""
        if not mentioned(size, self.names):
            return NONE
        for name in self.names:
            if equal(size, self.domain.size(name)):
                return frozenset({Carry(name, axis)})
        raise MixedError(f"makes {size} elements")

    def _label(self, position: int) -> str:
        value = self.node.inputs[position]
        return f"%{value.name if value is not None else position}"

    def require_sizes_for_shapes(self, positions: Collection[int]) -> None:
        """Raise MixedError for a constant of sizes that the node computes with; at `positions` it tells a shape."""
        for position, value in enumerate(self.node.inputs):
            sizes = constant_sizes(value)
            if sizes is None or position in positions:
                continue
            for size in sizes.flat:
                if mentioned(size, self.names):
                    raise MixedError(f"computes with {size}")


def mentioned(size: SizeLike, names: Collection[str]) -> list[str]:
    """The dimensions of `names` on which a size depends."""
    words = set(_WORD.findall(str(size))) if isinstance(size, Size) else set()
    return [name for name in names if name in words]


def shown(carries: Carries, shape: tuple[Any, ...], result: tuple[Any, ...], domain: Domain) -> Carries:
    """Of the same bytes under another shape. Raises MixedError where an axis of it has a part of what a dimension is in."""
    found = set()
    for carry in carries:
        behind = prod(shape[carry.axis + 1 :]) * carry.inner  # elements from one part to the next
        place = next((axis for axis in reversed(range(len(result))) if _holds(axis, behind, carry, result, domain)), None)
        if place is None:
            raise MixedError(f"spreads {carry.name} over several axes of {[*map(str, result)]}")
        found.add(Carry(carry.name, place, behind // prod(result[place + 1 :])))
    return frozenset(found)


def _holds(axis: int, behind: SizeLike, carry: Carry, shape: tuple[Any, ...], domain: Domain) -> bool:
    """Whether an axis of a shape holds all of a dimension whose parts are `behind` elements apart."""
    try:
        inner = behind // prod(shape[axis + 1 :])
        whole = domain.size(carry.name) * inner
        return equal(inner * prod(shape[axis + 1 :]), behind) and equal(shape[axis] // whole * whole, shape[axis])
    except SymbolicSizeError:  # of a quotient by what may be 0
        return False


def unexplained(value: ir.Value, carries: Carries, names: Collection[str], domain: Domain) -> str:
    """How the shape of a value depends on dimensions other than by those that it carries; empty if it does not."""
    if not value.name:
        return ""
    shape = sizes_of(value)
    if shape is None:
        return f"has a result of unknown shape, %{value.name}"
    for axis, size in enumerate(shape):
        here = [carry for carry in carries if carry.axis == axis]
        if len(here) > 1 or [carry.name for carry in here] != mentioned(size, names):
            return f"has a result of {size} elements along axis {axis}, %{value.name}"
        for carry in here:
            part = domain.size(carry.name) * carry.inner
            if mentioned(size // part, names) or mentioned(carry.inner, names) or not equal(size // part * part, size):
                return f"has a result of {size} elements along axis {axis}, %{value.name}"
    return ""


def _shape(value: ir.Value | None) -> tuple[Any, ...]:
    if (shape := sizes_of(value)) is None:
        raise MixedError(f"has an operand or result of unknown shape, %{value.name if value is not None else ''}")
    return shape
