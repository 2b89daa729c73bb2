"""Sizes in kernels: expressions over variables that a kernel loads from the table of dimensions, which a call fills."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import gcd
from typing import Any

from tvm import tirx

from ...runtime.plan import DIMENSIONS
from ...runtime.symbolic.sizes import Domain, Size, SymbolicSizeError

_OPERATORS = {"//": tirx.floordiv, "%": tirx.floormod, "min": tirx.min, "max": tirx.max}


@dataclass
class _Kernel:
    """The kernel being written: its domain, the variables of the dimensions that it has named so far, by name, and those of other
    sizes with what they are, by text, in an order in which they can be computed."""

    domain: Domain
    dims: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, tuple[Any, Any]] = field(default_factory=dict)


_CURRENT: ContextVar[_Kernel | None] = ContextVar("dimensions", default=None)


@contextmanager
def dimensions(domain: Domain | None) -> Iterator[None]:
    """Inside, one kernel for a domain is written, whose sizes are expressions of its own."""
    token = _CURRENT.set(None if domain is None else _Kernel(domain))
    try:
        yield
    finally:
        _CURRENT.reset(token)


@dataclass(frozen=True)
class SizeTable:
    """What a kernel loads: from the table `name` of `count` dimensions, the `places` of some variables; and the `sizes` that it
    computes from these, once: variables and what they are."""

    name: str
    count: int
    places: tuple[tuple[int, Any], ...]
    sizes: tuple[tuple[Any, Any], ...]


def table_of_kernel() -> SizeTable | None:
    """The sizes that the kernel being written has named; None where there are none."""
    kernel = _CURRENT.get()
    if kernel is None or not kernel.dims:
        return None
    places = {dim.name: place for place, dim in enumerate(kernel.domain.dims)}
    named = tuple((places[name], variable) for name, variable in kernel.dims.items())
    return SizeTable(DIMENSIONS, len(places), named, tuple(kernel.sizes.values()))


def lower_size(size: Size) -> Any:
    """A size as an int32 expression: a variable times a number. Raises SymbolicSizeError outside of a kernel for its domain.

    TVM copies the expression of an integer variable to wherever that is read, and simplifies each copy. So what is more than a
    dimension is computed once, in front of the kernel.
    """
    kernel = _CURRENT.get()
    if kernel is None or kernel.domain is not size.domain:
        raise SymbolicSizeError(f"{size} outside of a kernel")
    factor = gcd(*size.terms.values())
    terms = {atoms: number // factor for atoms, number in size.terms.items()}
    variable = _variable(kernel, Size(size.domain, terms))
    return variable if factor == 1 else variable * tirx.const(factor, "int32")


def _variable(kernel: _Kernel, size: Size) -> Any:
    text = str(size)
    if text in kernel.domain.points:
        return kernel.dims.setdefault(text, tirx.Var(text, "int32"))
    if text not in kernel.sizes:
        value = _expression(kernel, size)
        kernel.sizes[text] = tirx.Var("size", "int32"), value
    return kernel.sizes[text][0]


def _expression(kernel: _Kernel, size: Size) -> Any:
    """A sum of products of dimensions and of what is none."""
    total: Any = None
    for atoms, factor in size.terms.items():
        part: Any = None if atoms and factor == 1 else tirx.const(factor, "int32")
        for text in atoms:
            atom = _atom(kernel, text)
            part = atom if part is None else part * atom
        total = part if total is None else total + part
    return total


def _atom(kernel: _Kernel, text: str) -> Any:
    if text not in kernel.domain.atoms:
        return kernel.dims.setdefault(text, tirx.Var(text, "int32"))
    operator, a, b = kernel.domain.atoms[text]
    return _OPERATORS[operator](*(lower_size(one) if isinstance(one, Size) else tirx.const(one, "int32") for one in (a, b)))


Size.lower = staticmethod(lower_size)
