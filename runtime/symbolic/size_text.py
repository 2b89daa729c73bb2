"""The texts of sizes in Plans, as functions of the dimensions that a call gives."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import prod

from .dims import Dim

_MOST_POINTS = 4096  # at which all values are computed
_FUNCTIONS = {"min": min, "max": max}
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.USub, ast.Load)


def evaluator(text: str) -> Callable[[Mapping[str, int]], int]:
    """The function of the dimensions' values that the text of a size is: sums, products, quotients, minima and maxima.

    Raises:
        ValueError, SyntaxError: it is any other text.
    """
    tree = ast.parse(text, mode="eval")
    if not all(map(_is_legal, ast.walk(tree))):
        raise ValueError(f"{text!r} is no size")
    code = compile(tree, "<size>", "eval")
    names = {"__builtins__": {}, **_FUNCTIONS}
    return lambda sizes: int(eval(code, names, dict(sizes)))


def values_at(text: str, dims: Sequence[Dim]) -> list[int]:
    """The size at each point, or of many points at the ends of each dimension. Raises as `evaluator`, or as Python computes."""
    names, ranges = [dim.name for dim in dims], [list(dim.sizes) for dim in dims]
    if prod(map(len, ranges)) > _MOST_POINTS:
        ranges = [[sizes[0], sizes[-1]] for sizes in ranges]
    size_at = evaluator(text)
    return [size_at(dict(zip(names, point, strict=True))) for point in product(*ranges)]


def _is_legal(node: ast.AST) -> bool:
    match node:
        case ast.Call():
            return isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords
        case ast.Constant():
            return type(node.value) is int
        case _:
            return isinstance(node, (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Name, *_OPERATORS))
