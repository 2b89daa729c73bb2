"""The texts of sizes in Plans, as functions of the dimensions that a call gives."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from math import prod

from .dims import Dim

_MOST_POINTS = 4096  # at which all values are computed
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

    They are computed at each point of the dimensions that they depend on, or of many points at the ends of each dimension.
    """
    for axis, text in sizes:
        if not 0 <= axis < len(room):
            yield f"its size {text} is of axis {axis}, it has {len(room)}"
            continue
        try:
            size_at, names = evaluator(text), _names(text)
            ranges = _points([dim.sizes for dim in dims if dim.name in names])
            if prod(map(len, ranges)) > _MOST_POINTS:
                raise ValueError(f"it depends on {len(ranges)} dimensions")
            named = [dim.name for dim in dims if dim.name in names]
            found = [size_at(dict(zip(named, point, strict=True))) for point in product(*ranges)]
        except (NameError, TypeError, ValueError, ArithmeticError, SyntaxError) as error:
            yield f"its size {text} cannot be computed: {error}"
            continue
        if min(found) < 0 or max(found) > room[axis]:
            yield f"its size {text} is from {min(found)} to {max(found)}, there is room for {room[axis]}"


def _points(ranges: list[range]) -> list[range]:
    """The ranges of dimensions, or of too many points their ends."""
    if prod(-(-(every.stop - every.start) // every.step) for every in ranges) <= _MOST_POINTS:  # len() knows none above 2**63
        return ranges
    return [range(every[0], every[-1] + 1, max(1, every[-1] - every[0])) for every in ranges]


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
