"""The texts of sizes in Plans, as functions of the dimensions that a call gives."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import TypeAlias

from .dims import Dim

Interval: TypeAlias = tuple[int, int]  # the least number and the greatest

_MOST_POINTS = 1 << 17  # at which all values are computed: a compiler's program serves no more
_FUNCTIONS = {"min": min, "max": max}
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.USub, ast.Load)


def polynomial_text(terms: Mapping[tuple[str, ...], int]) -> str:
    """A sum of products of named factors with a number each: canonical, and a Python expression."""
    ordered = sorted(terms.items(), reverse=True)
    return " + ".join("*".join([*([str(factor)] if factor != 1 or not atoms else []), *atoms]) for atoms, factor in ordered)


@lru_cache(1024)
def evaluator(text: str) -> Callable[[Mapping[str, int]], int]:
    """The function of the dimensions' values that the text of a size is: sums, products, quotients, minima and maxima.

    Raises:
        ValueError, SyntaxError: it is any other text.
    """
    try:
        tree = ast.parse(text, mode="eval")
        if not all(map(_is_legal, ast.walk(tree))):
            raise ValueError(f"{text!r} is no size")
        code = compile(tree, "<size>", "eval")
    except (MemoryError, RecursionError) as error:  # of Python's parser, where it is nested too deeply
        raise ValueError(f"{text[:40]!r}... is no size") from error
    names = {"__builtins__": {}, **_FUNCTIONS}
    return lambda sizes: int(eval(code, names, dict(sizes)))


def size_faults(sizes: Iterable[tuple[int, str]], room: Sequence[int], dims: Sequence[Dim]) -> Iterator[str]:
    """What is wrong with the sizes of some axes, where there is so much room: none may be negative, nor need more.

    Interval arithmetic bounds a size at all points of its dimensions. Where these bounds are too wide to tell, it is computed at
    each point; where there are too many points for that, it counts as wrong.
    """
    for axis, text in sizes:
        if not 0 <= axis < len(room):
            yield f"its size {text} is of axis {axis}, it has {len(room)}"
            continue
        try:
            least, most = _bounds(text, [dim for dim in dims if dim.name in _names(text)], room[axis])
        except (NameError, TypeError, ValueError, ArithmeticError, SyntaxError, RecursionError) as error:
            yield f"its size {text} cannot be computed: {error}"
            continue
        if least < 0 or most > room[axis]:
            yield f"its size {text} is from {least} to {most}, there is room for {room[axis]}"


def _bounds(text: str, dims: Sequence[Dim], room: int) -> Interval:
    """The least and the greatest value of a size; or bounds of these, if they are within the room or too many points decide.

    Raises what `evaluator` and its function do.
    """
    size_at = evaluator(text)
    ends = {dim.name: (dim.sizes[0], dim.sizes[-1]) for dim in dims}
    wide: Interval | None
    try:
        wide = interval_of(text, ends)
    except ZeroDivisionError:  # of bounds, perhaps of no point
        wide = None
    if wide is not None and wide[0] >= 0 and wide[1] <= room:
        return wide
    counts = [(dim.sizes.stop - dim.sizes.start + dim.multiple - 1) // dim.multiple for dim in dims]  # len() fails above 2**63
    if prod(counts) > _MOST_POINTS:
        if wide is None:
            raise ZeroDivisionError(f"a divisor may be 0 at one of {prod(counts)} points")
        return wide
    found = [size_at(dict(zip(ends, point, strict=True))) for point in product(*(dim.sizes for dim in dims))]
    return min(found), max(found)


def interval_of(text: str, ends: Mapping[str, Interval]) -> Interval:
    """Bounds of what `evaluator` gives for a text at all points, given the least and greatest number of each name.

    Raises:
        ZeroDivisionError: a divisor may be 0, by its bounds.
        NameError, TypeError, ValueError: as `evaluator` and its function do.
    """

    def bounds(node: ast.AST) -> Interval:
        match node:
            case ast.Expression(body):
                return bounds(body)
            case ast.Constant(int(value)):
                return value, value
            case ast.Name(name):
                if name not in ends:
                    raise NameError(f"name {name!r} is not defined")
                return ends[name]
            case ast.UnaryOp(ast.USub(), operand):
                least, most = bounds(operand)
                return -most, -least
            case ast.BinOp(left, sign, right):
                return _INTERVALS[type(sign)](bounds(left), bounds(right))
            case ast.Call(ast.Name(name), arguments) if len(arguments) > 1:
                choose, found = _FUNCTIONS[name], [bounds(argument) for argument in arguments]
                return choose(least for least, _ in found), choose(most for _, most in found)
        raise TypeError(f"{text!r} is no size")

    return bounds(ast.parse(text, mode="eval"))


def _difference(a: Interval, b: Interval) -> Interval:
    return a[0] - b[1], a[1] - b[0]


def _corners(operation: Callable[[int, int], int]) -> Callable[[Interval, Interval], Interval]:
    """Of an operation that is monotone in each operand where the other one stays."""

    def bounds(a: Interval, b: Interval) -> Interval:
        found = [operation(x, y) for x in a for y in b]
        return min(found), max(found)

    return bounds


def _quotient(a: Interval, b: Interval) -> Interval:
    _require_divisor(b)
    return _corners(operator.floordiv)(a, b)


def _remainder(a: Interval, b: Interval) -> Interval:
    _require_divisor(b)
    if b[0] == b[1] and a[0] // b[0] == a[1] // b[0]:
        return _corners(operator.mod)(a, b)
    if b[0] > 0:
        return 0, min(b[1] - 1, a[1]) if a[0] >= 0 else b[1] - 1
    return b[0] + 1, 0


def _require_divisor(b: Interval) -> None:
    if b[0] <= 0 <= b[1]:
        raise ZeroDivisionError("a divisor may be 0")


_INTERVALS: Mapping[type[ast.operator], Callable[[Interval, Interval], Interval]] = {
    ast.Add: lambda a, b: (a[0] + b[0], a[1] + b[1]),
    ast.Sub: _difference,
    ast.Mult: _corners(operator.mul),
    ast.FloorDiv: _quotient,
    ast.Mod: _remainder,
}


def _names(text: str) -> set[str]:
    """The names in a text that `evaluator` takes."""
    return {node.id for node in ast.walk(ast.parse(text, mode="eval")) if isinstance(node, ast.Name)}


def _is_legal(node: ast.AST) -> bool:
    match node:
        case ast.Call():
            return isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords
        case ast.Constant():
            return type(node.value) is int
        case _:
            return isinstance(node, (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Name, *_OPERATORS))
