"""Sizes in kernels: expressions over variables that a kernel loads from the table of dimensions, which a call fills."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import gcd
from typing import Any

import tvm_ffi
from tvm import tirx

from ...runtime.plan import DIMENSIONS
from ...runtime.symbolic.shapes import is_one
from ...runtime.symbolic.sizes import Domain, Size, SizeLike, SymbolicSizeError, greatest_of, least_of

_OPERATORS = {"//": tirx.floordiv, "%": tirx.floormod, "min": tirx.min, "max": tirx.max}
_LEAST, _GREATEST = -(2**31), 2**31 - 1  # of int32


@dataclass
class _Kernel:
    """The kernel being written: its domain, the variables of the dimensions that it has named so far, by name, and those of other
    sizes with what they are, by text and type, in an order in which they can be computed."""

    domain: Domain
    dims: dict[str, Any] = field(default_factory=dict)
    sizes: dict[tuple[str, str], tuple[Any, Any]] = field(default_factory=dict)


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
    """A size as an int32 expression: a variable times a number.

    TVM copies the expression of an integer variable to wherever that is read, and simplifies each copy. So what is more than a
    dimension is computed once, in front of the kernel.

    Raises:
        SymbolicSizeError: outside of a kernel for its domain, or of a size that may have more than 31 bits.
    """
    if not _is_short(size):
        raise SymbolicSizeError(f"{size}, from {size.least} to {size.greatest}, has more than 32 bits")
    return _lowered(size, "int32")


def lower_number(size: Size) -> Any:
    """A size that is data, which graphs have in 64 bits: an expression as of `lower_size`, of int64 where it may need that."""
    return _lowered(size, "int32" if _is_short(size) else "int64")


def _is_short(size: SizeLike) -> bool:
    """Whether a size fits into int32 at every point."""
    return bool(least_of(size) >= _LEAST and greatest_of(size) <= _GREATEST)


def _lowered(size: Size, dtype: str) -> Any:
    kernel = _CURRENT.get()
    if kernel is None or kernel.domain is not size.domain:
        raise SymbolicSizeError(f"{size} outside of a kernel")
    factor = gcd(*size.terms.values())
    terms = {atoms: number // factor for atoms, number in size.terms.items()}
    variable = _variable(kernel, Size(size.domain, terms), dtype)
    return variable if factor == 1 else variable * tirx.const(factor, dtype)


def _variable(kernel: _Kernel, size: Size, dtype: str) -> Any:
    text = str(size)
    if text in kernel.domain.points:
        return _dimension(kernel, text, dtype)
    if (text, dtype) not in kernel.sizes:
        wide = dtype if _has_short_parts(size) else "int64"
        value = _expression(kernel, size, wide)
        kernel.sizes[text, dtype] = tirx.Var("size", dtype), value if wide == dtype else tirx.Cast(dtype, value)
    return kernel.sizes[text, dtype][0]


def _has_short_parts(size: Size) -> bool:
    """Whether all that a size is computed of fits into int32."""
    operands = [one for atoms in size.terms for text in atoms for one in size.domain.atoms.get(text, ())[1:]]
    parts = [Size(size.domain, {atoms: factor}) for atoms, factor in size.terms.items()]
    return all(map(_is_short, (*operands, *parts)))


def _dimension(kernel: _Kernel, name: str, dtype: str) -> Any:
    variable = kernel.dims.setdefault(name, tirx.Var(name, "int32"))
    return variable if dtype == "int32" else tirx.Cast(dtype, variable)


def _expression(kernel: _Kernel, size: Size, dtype: str) -> Any:
    """A sum of products of dimensions and of what is none."""
    total: Any = None
    for atoms, factor in size.terms.items():
        part: Any = None if atoms and factor == 1 else tirx.const(factor, dtype)
        for text in atoms:
            atom = _atom(kernel, text, dtype)
            part = atom if part is None else part * atom
        total = part if total is None else total + part
    return total


def _atom(kernel: _Kernel, text: str, dtype: str) -> Any:
    if text not in kernel.domain.atoms:
        return _dimension(kernel, text, dtype)
    operator, a, b = kernel.domain.atoms[text]
    return _OPERATORS[operator](*(_lowered(one, dtype) if isinstance(one, Size) else tirx.const(one, dtype) for one in (a, b)))


def symbolic_offset(index: Sequence[Any], shape: Sequence[SizeLike]) -> Any:
    """The flat offset of an index where a call decides extents, simplified as TVM does it only where these are constants.

    Numbers come last, so that neighbours share the rest; quotient and remainder by an extent become again what was divided.
    """
    offset: Any = 0
    number = 0
    for i, extent in zip(index, shape, strict=True):
        if is_one(extent):
            continue
        whole = _divided_by(extent, offset, i) if isinstance(extent, Size) and not number else None
        if whole is not None:
            offset = whole
            continue
        if isinstance(extent, Size):
            offset, number = offset + number, 0
        rest, more = _apart(i)
        offset, number = offset * extent + rest, number * extent + more
    return offset + number


def _apart(sum_: Any) -> tuple[Any, int]:
    """A sum without its numbers, and these."""
    if isinstance(sum_, tirx.IntImm | int):
        return 0, int(sum_)
    if not isinstance(sum_, tirx.Add):
        return sum_, 0
    (a, x), (b, y) = _apart(sum_.a), _apart(sum_.b)
    return (a + b, x + y) if x + y else (sum_, 0)


def _divided_by(extent: Size, quotient: Any, remainder: Any) -> Any:
    """What has been divided by an extent where these are its quotient and remainder, which TVM finds for constants only."""
    if not (isinstance(quotient, tirx.Div) and isinstance(remainder, tirx.Mod)):
        return None
    parts = (quotient.a, remainder.a), (quotient.b, remainder.b), (quotient.b, lower_size(extent))
    return quotient.a if all(tvm_ffi.structural_equal(*pair) for pair in parts) else None


Size.lower = staticmethod(lower_size)
