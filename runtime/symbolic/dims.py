"""Named dimensions, and what may take their sizes for numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

ESTIMATING: ContextVar[bool] = ContextVar("estimating", default=False)
P = ParamSpec("P")
R = TypeVar("R")


class SymbolicSizeError(Exception):
    """A number was needed where only a call knows the size."""


@dataclass(frozen=True, slots=True)
class Dim:
    """A named dimension: every multiple of `multiple` from `least` to `greatest`."""

    name: str
    least: int
    greatest: int
    multiple: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.least <= self.greatest, f"no sizes in {self}"
        assert self.multiple >= 1, f"no steps in {self}"

    @property
    def sizes(self) -> range:
        """All that it can be."""
        return range(-(-self.least // self.multiple) * self.multiple, self.greatest + 1, self.multiple)

    def __str__(self) -> str:
        step = f" by {self.multiple}" if self.multiple > 1 else ""
        return f"{self.name}={self.least}..{self.greatest}{step}"


@dataclass(frozen=True, slots=True)
class Ratio:
    """A quotient that is rounded next: `ceil(m / 16)`."""

    above: Any
    below: Any

    def __ceil__(self) -> Any:
        return -(-self.above // self.below)

    def __floor__(self) -> Any:
        return self.above // self.below

    def __float__(self) -> float:
        raise SymbolicSizeError(f"{self.above} / {self.below} is no number before a call")


@contextmanager
def estimate() -> Iterator[None]:
    """Inside, every size is its hint: for what may be wrong without harm, costs and what they rank."""
    token = ESTIMATING.set(True)
    try:
        yield
    finally:
        ESTIMATING.reset(token)


def estimating(function: Callable[P, R]) -> Callable[P, R]:
    """The function with every size its hint. Its result must be an estimate: right for no size, harmful for none."""

    @wraps(function)
    def estimated(*args: P.args, **kwargs: P.kwargs) -> R:
        with estimate():
            return function(*args, **kwargs)

    return estimated
