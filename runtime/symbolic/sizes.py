"""Sizes that a call decides: integer expressions over named dimensions, which the compiler computes with as it does with numbers.

A `Domain` is the set of all sizes that a program shall serve, point by point. What the compiler asks of a `Size` is answered for
every point of it at once: where all agree, that is the answer, and it is right for every call. Where they do not, the answer of
one point, the hint, counts, and the domain is cut to the points that give the same; those that are left out belong to another
program. Two sizes that are the same at some points only count as different: but for 1, which broadcasts, nothing that ONNX
defines or that a kernel does is right because two extents differ. Nothing turns a size into a number in silence: what needs one
(`int`, `range`, an index, NumPy) raises SymbolicSizeError. Estimates alone, which may be wrong, take the hint: `estimating`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from hashlib import blake2b
from itertools import product
from math import prod
from typing import Any, ClassVar, TypeAlias

import numpy as np

from .dims import ESTIMATING, Ratio
from .dims import Dim as Dim
from .dims import SymbolicSizeError as SymbolicSizeError
from .dims import estimate as estimate
from .dims import estimating as estimating
from .size_text import polynomial_text

MOST_POINTS = 1 << 17  # of a domain: every question is answered at each of them
_LEAST_SHARE = 1 / 16  # of a domain's points, that a cut must leave
_LARGEST = 1 << 62  # of the sum of a size's terms, by their magnitudes; a number beside them may be that of any Slice
_LONGEST, _MOST_TERMS = 1 << 14, 256  # of a quotient's text, and of a polynomial: each operation may double them


class Domain:
    """The points that a program serves. `alive` marks those that are left of all; `cuts` says what has cut the others off."""

    def __init__(self, dims: Sequence[Dim], hint: Mapping[str, int], alive: np.ndarray | None = None) -> None:
        self.dims = tuple(dims)
        every = np.array(list(product(*(dim.sizes for dim in dims))), np.int64).reshape(-1, len(dims))
        assert len(every) <= MOST_POINTS, f"{len(every)} points"
        self.points = {dim.name: every[:, place] for place, dim in enumerate(dims)}
        self.at = int(np.flatnonzero((every == [hint[dim.name] for dim in dims]).all(axis=1))[0])
        self.alive = np.ones(len(every), np.bool_) if alive is None else alive.copy()
        assert self.alive[self.at], f"the hint {dict(hint)} is outside of the domain"
        self._least = max(int(self.alive.sum() * _LEAST_SHARE), 1)
        self.cuts: list[str] = []
        self.atoms: dict[str, tuple[str, int | Size, int | Size]] = {}  # by their texts: what is no polynomial
        self.known: dict[str, Size] = {}  # by their texts
        self._first: dict[bytes, Size] = {}  # by digests of their values at all points
        self.handles: dict[str, Any] = {}  # of who lowers sizes, by the names of dimensions

    def size(self, name: str) -> SizeLike:
        """A dimension as a size."""
        assert name in self.points, f"no dimension {name}"
        return _settled(Size(self, {(name,): 1}))

    def canonical(self, size: Size) -> Size:
        """Of all sizes that are the same at every point, the one that was asked for first: one text for what is equal."""
        text = str(size)
        if text not in self.known:
            digest = blake2b(size.values.tobytes(), digest_size=16).digest()
            self.known[text] = self._first.setdefault(digest, size)
        return self.known[text]

    def decide(self, outcomes: np.ndarray, what: Callable[[], str]) -> bool:
        """The answer to a question with these `outcomes` at all points. Raises SymbolicSizeError for too deep a cut."""
        seen = outcomes[self.alive]
        if seen.all() or not seen.any():
            return bool(seen[0])
        answer = bool(outcomes[self.at])
        if ESTIMATING.get():
            return answer
        kept = self.alive & (outcomes == answer)
        if kept.sum() < self._least or not self._is_box(kept):
            raise SymbolicSizeError(f"whether {what()} differs from size to size")
        self.alive = kept
        self.cuts.append(what() if answer else f"not {what()}")
        return answer

    def _is_box(self, points: np.ndarray) -> bool:
        """Whether points are all those between the least and the greatest of each dimension."""
        between = np.ones(len(points), np.bool_)
        for values in self.points.values():
            between &= (values >= values[points].min()) & (values <= values[points].max())
        return bool((between <= points).all())

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Cuts inside are undone where what is inside fails."""
        alive, count = self.alive, len(self.cuts)
        try:
            yield
        except BaseException:
            self.alive = alive
            del self.cuts[count:]
            raise

    @property
    def box(self) -> tuple[Dim, ...]:
        """The dimensions with the ranges that are left."""
        left = {name: values[self.alive] for name, values in self.points.items()}
        return tuple(replace(dim, least=int(left[dim.name].min()), greatest=int(left[dim.name].max())) for dim in self.dims)

    def serves(self, sizes: Mapping[str, int]) -> bool:
        """Whether a point is in the domain."""
        found = reduce(np.logical_and, (values == sizes[name] for name, values in self.points.items()), self.alive)
        return bool(found.any())


class Size:
    """A polynomial over dimensions and over what is none: quotients, remainders, minima and maxima. Immutable.

    Made by arithmetic on those of `Domain.size`. Operations whose result is the same at every point give a plain int.
    """

    __slots__ = ("_text", "_values", "domain", "terms")
    lower: ClassVar[Callable[[Size], Any] | None] = None  # to an expression of the code generator, which sets it

    def __init__(self, domain: Domain, terms: Mapping[tuple[str, ...], int]) -> None:
        self.domain, self.terms = domain, terms
        self._values: np.ndarray | None = None
        self._text = ""

    # What it is -------------------------------------------------------------------------------------------------------

    @property
    def values(self) -> np.ndarray:
        """Its value at every point of the domain, int64. Raises SymbolicSizeError where it may be too large for that."""
        if self._values is None:
            total, most, number = np.zeros(len(self.domain.alive), np.int64), 0, self.terms.get((), 0)
            for atoms, factor in self.terms.items():
                parts = [self._atom(atom) for atom in atoms]
                most += abs(factor) * prod(int(np.abs(part).max()) for part in parts) if atoms else 0
                if most > _LARGEST:
                    raise SymbolicSizeError(f"{self} may be more than {_LARGEST}")
                total += factor * reduce(np.multiply, parts) if atoms else 0
            if not -(2**63) <= int(total.min()) + number <= int(total.max()) + number < 2**63:
                raise SymbolicSizeError(f"{self} may be more than {_LARGEST}")
            self._values = total + number
        return self._values

    def _atom(self, text: str) -> np.ndarray:
        if text in self.domain.points:
            return self.domain.points[text]
        operator, a, b = self.domain.atoms[text]
        with np.errstate(divide="ignore"):  # by 0 at points that have been cut off
            return _ATOMS[operator](values_of(a), values_of(b))

    @property
    def hint(self) -> int:
        """Its value where the hint is: for estimates."""
        return int(self.values[self.domain.at])

    @property
    def choices(self) -> tuple[int, ...]:
        """All its values, in order."""
        return tuple(np.unique(self.values[self.domain.alive]).tolist())

    @property
    def least(self) -> int:
        """Its smallest value."""
        return int(self.values[self.domain.alive].min())

    @property
    def greatest(self) -> int:
        """Its largest value."""
        return int(self.values[self.domain.alive].max())

    def __str__(self) -> str:
        self._text = self._text or polynomial_text(self.terms)
        return self._text

    __repr__ = __str__

    def __hash__(self) -> int:
        return hash(str(self))

    # Arithmetic -------------------------------------------------------------------------------------------------------

    def __add__(self, other: Any) -> Any:
        terms = _terms(other)
        if terms is None:
            return self._with(other, lambda a, b: a + b)
        total = dict(self.terms)
        for atoms, factor in terms.items():
            total[atoms] = total.get(atoms, 0) + factor
        return _made(self.domain, total)

    def __mul__(self, other: Any) -> Any:
        terms = _terms(other)
        if terms is None:
            return self._with(other, lambda a, b: a * b)
        total: dict[tuple[str, ...], int] = {}
        for (a, x), (b, y) in product(self.terms.items(), terms.items()):
            key = tuple(sorted((*a, *b)))
            total[key] = total.get(key, 0) + x * y
        return _made(self.domain, total)

    def __floordiv__(self, other: Any) -> Any:
        if _terms(other) is None:
            return self._with(other, lambda a, b: a // b)
        return _quotient(self, other)

    def __mod__(self, other: Any) -> Any:
        if _terms(other) is None:
            return self._with(other, lambda a, b: a % b)
        if isinstance(other, int) and all(factor % other == 0 for factor in self.terms.values()):
            return 0
        return _atom("%", self, other)

    def __truediv__(self, other: Any) -> Any:
        if _terms(other) is None or ESTIMATING.get():
            return self._with(hint_of(other), lambda a, b: a / b)
        return Ratio(self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return _quotient(other, self) if isinstance(other, int) else self._with(other, lambda a, b: b // a)

    def __rmod__(self, other: Any) -> Any:
        return _atom("%", other, self) if isinstance(other, int) else self._with(other, lambda a, b: b % a)

    def __rtruediv__(self, other: Any) -> Any:
        return self._with(other, lambda a, b: b / a)

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        return self // other, self % other

    def __neg__(self) -> Any:
        return self * -1

    def __sub__(self, other: Any) -> Any:
        return self + -other

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    __radd__ = __add__
    __rmul__ = __mul__

    def _with(self, other: Any, operation: Callable[[Any, Any], Any]) -> Any:
        """An operation with what is no size: a number of an estimate, or an expression of the code generator."""
        if isinstance(other, float) or (isinstance(other, int) and ESTIMATING.get()):
            return operation(self.__int__(), other)
        if isinstance(other, int) or Size.lower is None:
            raise SymbolicSizeError(f"{self} with {other!r}")
        return operation(Size.lower(self), other)

    # Questions --------------------------------------------------------------------------------------------------------

    def __eq__(self, other: object) -> Any:
        if isinstance(other, (int, np.integer, Size)):
            return self._equals(other)
        return False if other is None or isinstance(other, (str, tuple)) else self._with(other, lambda a, b: a == b)

    def __ne__(self, other: object) -> Any:
        if isinstance(other, (int, np.integer, Size)):
            return not self._equals(other)
        return True if other is None or isinstance(other, (str, tuple)) else self._with(other, lambda a, b: a != b)

    def __lt__(self, other: Any) -> Any:
        return self._ask(other, "<", np.less)

    def __le__(self, other: Any) -> Any:
        return self._ask(other, "<=", np.less_equal)

    def __gt__(self, other: Any) -> Any:
        return self._ask(other, ">", np.greater)

    def __ge__(self, other: Any) -> Any:
        return self._ask(other, ">=", np.greater_equal)

    def __bool__(self) -> bool:
        return bool(self != 0)

    def _equals(self, other: int | np.integer | Size) -> bool:
        """Whether it is the same at every point; at every other one, of 1, which alone is like no other size: it broadcasts."""
        outcomes = self.values == values_of(other)
        if not (isinstance(other, int) and other == 1) and not ESTIMATING.get():
            return bool(outcomes[self.domain.alive].all())
        return self.domain.decide(outcomes, lambda: f"{self} == {other}")

    def _ask(self, other: Any, sign: str, compare: Callable[..., np.ndarray]) -> Any:
        if isinstance(other, float):
            return compare(float(self), other)
        if not isinstance(other, (int, np.integer, Size)):
            return self._with(other, _COMPARED[sign])
        return self.domain.decide(compare(self.values, values_of(other)), lambda: f"{self} {sign} {other}")

    # Numbers ----------------------------------------------------------------------------------------------------------

    def __int__(self) -> int:
        if not ESTIMATING.get():
            raise SymbolicSizeError(f"{self} is no number before a call")
        return self.hint

    __index__ = __int__

    def __float__(self) -> float:
        return float(self.__int__())

    def __round__(self, digits: int = 0) -> int:
        return self.__int__()

    def bit_length(self) -> int:
        return self.__int__().bit_length()

    def bit_count(self) -> int:
        return self.__int__().bit_count()

    def __tvm_ffi_object__(self) -> Any:
        """As an operand of an expression of the code generator."""
        if Size.lower is None:
            raise SymbolicSizeError(f"{self} outside of a kernel")
        return Size.lower(self)


SizeLike: TypeAlias = Any  # int or Size: what computes with numbers computes with sizes, and no checker tells them apart


def minimum_of(a: SizeLike, b: SizeLike) -> Any:
    """The smaller one, without asking which that is."""
    return _either("min", a, b)


def maximum_of(a: SizeLike, b: SizeLike) -> Any:
    """The larger one, without asking which that is."""
    return _either("max", a, b)


def hint_of(size: SizeLike) -> int:
    """A number for estimates."""
    return size.hint if isinstance(size, Size) else size


def greatest_of(size: SizeLike) -> int:
    """The most that it can be: for memory."""
    return size.greatest if isinstance(size, Size) else size


def least_of(size: SizeLike) -> int:
    """The least that it can be."""
    return size.least if isinstance(size, Size) else size


_ATOMS: dict[str, Callable[[Any, Any], np.ndarray]] = {
    "//": np.floor_divide,
    "%": np.mod,
    "min": np.minimum,
    "max": np.maximum,
}
_COMPARED = {"==": operator.eq, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


def values_of(size: Any) -> Any:
    return size.values if isinstance(size, Size) else size


def _terms(value: object) -> Mapping[tuple[str, ...], int] | None:
    """A size or whole number as a polynomial; None of all else."""
    if isinstance(value, Size):
        return value.terms
    return {(): int(value)} if isinstance(value, (int, np.integer)) and not isinstance(value, bool) else None


def _made(domain: Domain, terms: Mapping[tuple[str, ...], int]) -> SizeLike:
    """The size of a polynomial, or the number that it is. Raises SymbolicSizeError for one of very many terms."""
    found = {atoms: factor for atoms, factor in terms.items() if factor}
    if len(found) > _MOST_TERMS:
        raise SymbolicSizeError(f"a size of {len(found)} terms")
    if not found.keys() - {()}:
        return found.get((), 0)
    return Size(domain, found)


def _settled(size: SizeLike) -> SizeLike:
    """A size, or the number that it is at every point."""
    return size.least if isinstance(size, Size) and size.least == size.greatest else size


def _quotient(a: SizeLike, b: SizeLike) -> SizeLike:
    if isinstance(a, Size) and isinstance(b, int) and b > 0 and (whole := {k: f // b for k, f in a.terms.items() if f % b == 0}):
        rest = _made(a.domain, {atoms: factor for atoms, factor in a.terms.items() if factor % b})
        return _made(a.domain, whole) + rest // b
    if isinstance(a, Size) and isinstance(b, int) and b > 0 and (inner := _quotient_inside(a)) is not None:
        (above, below), more = inner, a.terms.get((), 0)
        return (above + more * below) // (below * b)
    if isinstance(a, Size) and isinstance(b, int) and b > 0 and all(factor < 0 for factor in a.terms.values()):
        return -((b - 1 - a) // b)  # -(-a // b), which is how one rounds up, has no negative numbers then
    if isinstance(a, Size) and isinstance(b, Size) and len(b.terms) == 1 and (exact := _exact(a, b)) is not None:
        return exact
    return _atom("//", a, b)


def _quotient_inside(a: Size) -> tuple[SizeLike, int] | None:
    """What is divided by which number in a size that is one quotient, or that and a number; None of others."""
    found = [atoms for atoms in a.terms if atoms]
    if len(found) != 1 or len(found[0]) != 1 or a.terms[found[0]] != 1:
        return None
    operator, above, below = a.domain.atoms.get(found[0][0], ("", 0, 0))
    return (above, below) if operator == "//" and isinstance(below, int) and below > 0 else None


def _exact(a: Size, b: Size) -> SizeLike | None:
    """The quotient by one product of dimensions that is in every term; None where it is not. No dimension is 0 there."""
    ((below, divisor),) = b.terms.items()
    terms: dict[tuple[str, ...], int] = {}
    if b.least <= 0:
        return None
    for atoms, factor in a.terms.items():
        left = list(atoms)
        for atom in below:
            if atom not in left:
                return None
            left.remove(atom)
        if factor % divisor:
            return None
        terms[tuple(left)] = factor // divisor
    return _made(a.domain, terms)


def _either(kind: str, a: SizeLike, b: SizeLike) -> SizeLike:
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b) if kind == "min" else max(a, b)
    domain = _domain_of(a, b)
    lower = values_of(a) <= values_of(b) if kind == "min" else values_of(a) >= values_of(b)
    for chosen, outcomes in ((a, lower), (b, ~lower)):
        if np.broadcast_to(outcomes, domain.alive.shape)[domain.alive].all():
            return chosen
    return _atom(kind, a, b)


def _domain_of(a: SizeLike, b: SizeLike) -> Domain:
    (domain, *_) = (one.domain for one in (a, b) if isinstance(one, Size))
    return domain


def _atom(operator: str, a: SizeLike, b: SizeLike) -> SizeLike:
    """What is no polynomial of its operands. Raises SymbolicSizeError for a divisor that may be 0, and very long texts."""
    domain = _domain_of(a, b)
    if operator in ("//", "%") and not np.broadcast_to(values_of(b), domain.alive.shape)[domain.alive].all():
        raise SymbolicSizeError(f"{a} {operator} {b}, which may be 0")
    text = f"(({a}) {operator} ({b}))" if operator in ("//", "%") else f"{operator}({a}, {b})"
    if len(text) > _LONGEST:
        raise SymbolicSizeError(f"a size of {len(text)} characters, {text[:40]}...")
    domain.atoms.setdefault(text, (operator, a, b))
    return _settled(Size(domain, {(text,): 1}))
