"""Kernels for sizes that a call decides, by the same templates: chosen where the sizes are their hints, and written for all."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from tvm.error import InternalError

from ..runtime.symbolic.sizes import Domain, Size, SymbolicSizeError, hint_of
from .codegen.dimensions import dimensions
from .groups.group import Group
from .template.contract import BuiltKernel, Refusal

_FOLDER = Path(__file__).parent.parent.name
# What Python raises where a size meets code that is for numbers alone; the last two are raised by TVM's constants.
_MISFITS = (SymbolicSizeError, AttributeError, TypeError, ValueError, NotImplementedError, InternalError)


class _RefusedError(Exception):
    """A template has refused: its cuts of the domain are undone."""


def domain_of(group: Group) -> Domain | None:
    """The domain of the sizes in a group's types and literals; None where all are numbers."""
    for kind in group.types.values():
        for dim in kind.shape:
            if isinstance(dim, Size):
                return dim.domain
    for literal in group.literals.values():
        for number in literal.flat if literal.dtype == object else ():
            if isinstance(number, Size):
                return number.domain
    return None


def at_hint(group: Group) -> Group:
    """The group where the sizes are their hints."""
    types = {name: kind.hinted for name, kind in group.types.items()}
    literals = {name: _hinted(literal) for name, literal in group.literals.items()}
    return replace(group, types=types, literals=literals)


def write_symbolic(write: Callable[[], BuiltKernel | Refusal], domain: Domain) -> BuiltKernel | Refusal:
    """What a template writes for all sizes of a domain, which is cut where the kernel is not for all; or why it writes none."""
    try:
        with domain.trial(), dimensions(domain):
            built = write()
            if isinstance(built, Refusal):
                raise _RefusedError(built.reason)
            return built
    except _RefusedError as refused:
        return Refusal(str(refused))
    except _MISFITS as fault:
        frames = [frame for frame in traceback.extract_tb(fault.__traceback__) if "kernels/" in frame.filename]
        place = frames[-1] if frames else None
        where = "" if place is None else f" at {place.filename.rsplit(f'{_FOLDER}/', 1)[-1]}:{place.lineno}"
        return Refusal(f"symbolic: {fault}{where}")


def _hinted(literal: np.ndarray) -> np.ndarray:
    if literal.dtype != object:
        return literal
    return np.array([hint_of(number) for number in literal.flat], np.int64).reshape(literal.shape)
