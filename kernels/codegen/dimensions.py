"""Sizes in kernels: expressions over variables that a kernel loads from the table of dimensions, which a call fills."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from tvm import tirx

from ...runtime.plan import DIMENSIONS
from ...runtime.symbolic.sizes import Domain, Size, SymbolicSizeError

# Of the kernel being written: its domain, and the variables of the dimensions that it has named so far.
_CURRENT: ContextVar[tuple[Domain, dict[str, Any]] | None] = ContextVar("dimensions", default=None)
_OPERATORS = {"//": tirx.floordiv, "%": tirx.floormod, "min": tirx.min, "max": tirx.max}


@contextmanager
def dimensions(domain: Domain | None) -> Iterator[None]:
    """Inside, one kernel for a domain is written, whose sizes are expressions of its own."""
    token = _CURRENT.set(None if domain is None else (domain, {}))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def table_of_kernel() -> tuple[str, int, list[tuple[int, Any]]] | None:
    """The name and the length of the table, and the place of each variable that is loaded from it; None where none is."""
    current = _CURRENT.get()
    if current is None or not current[1]:
        return None
    domain, variables = current
    places = {dim.name: place for place, dim in enumerate(domain.dims)}
    return DIMENSIONS, len(domain.dims), [(places[name], variable) for name, variable in variables.items()]


def lower_size(size: Size) -> Any:
    """A size as an int32 expression. Raises SymbolicSizeError outside of a kernel for its domain."""
    total: Any = None
    for atoms, factor in size.terms.items():
        part: Any = None
        for text in atoms:
            atom = _atom(size.domain, text)
            part = atom if part is None else part * atom
        number = tirx.const(factor, "int32")
        part = number if part is None else part if factor == 1 else part * number
        total = part if total is None else total + part
    return total


def _atom(domain: Domain, text: str) -> Any:
    current = _CURRENT.get()
    if current is None or current[0] is not domain:
        raise SymbolicSizeError(f"{text} outside of a kernel")
    if text in domain.atoms:
        operator, a, b = domain.atoms[text]
        return _OPERATORS[operator](*(lower_size(one) if isinstance(one, Size) else tirx.const(one, "int32") for one in (a, b)))
    return current[1].setdefault(text, tirx.Var(text, "int32"))


Size.lower = staticmethod(lower_size)
