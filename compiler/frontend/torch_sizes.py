"""For which sizes of its inputs a graph that torch has exported holds."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...runtime.errors import OptionError

if TYPE_CHECKING:
    import torch

_LARGEST = 2**31 - 1  # elements along one axis
_ONES = 2  # the least size that torch says where it has not looked at smaller ones; programs are called with these all the same
_TRIED = (0, 1, 2, 3, 5, 8, 13, 64, 97)  # above the least size of a range
_SYMBOL = re.compile(r"\b[a-z]+[0-9]+\b")
_SIZE = re.compile(r"L\['tensors'\]\[(\d+)\]\.size\(\)\[(\d+)\]")
_COMPARED = 32  # points at which NumPy's answers are compared with sympy's
_MOST_SUBSTITUTED = 1 << 13  # points of a condition that sympy evaluates, in some seconds
_OF_ARRAYS = {  # what torch calls functions of whole numbers
    "FloorDiv": np.floor_divide,
    "CleanDiv": np.floor_divide,
    "CeilDiv": lambda a, b: -(-a // b),
    "PythonMod": np.mod,
    "ModularIndexing": lambda a, b, modulus: a // b % modulus,
    "PowByNatural": np.power,
    "Identity": np.asarray,
}
_FUNCTIONS = {one.__name__: one for one in (abs, bool, float, int, max, min, round)} | {"math": math}  # that guards call


@dataclass(frozen=True, slots=True)
class SizeRules:
    """What torch has found out about the sizes of a graph's inputs, which it exported for any sizes of some axes.

    `inputs` are their names, and of each the sizes: a number, or a symbol. `ranges` are the least and the greatest of what a
    symbol may be; `guards` are conditions in Python on a list of tensors L['tensors'], None where this torch does not tell them.
    """

    inputs: tuple[tuple[str, tuple[int | str, ...]], ...]
    ranges: Mapping[str, tuple[int, int]]
    guards: tuple[str, ...] | None

    def refusal(self, shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> str:
        """Why the graph does not hold for tensors of these shapes; empty if it does."""
        if self.guards is None:
            return "this version of torch does not tell what an exported program assumes of sizes"
        for (name, dims), shape in zip(self.inputs, shapes, strict=True):
            for axis, (dim, size) in enumerate(zip(dims, shape, strict=True)):
                least, most = (dim, dim) if isinstance(dim, int) else self.ranges.get(dim, (0, _LARGEST))
                if least == most != size:
                    return f"torch made dimension {axis} of {name} the constant {least}"
                if not least <= size <= most:
                    return f"torch exports dimension {axis} of {name} for {least} to {most}, not for {size}"
        return self._broken_guard(shapes, dtypes)

    def _broken_guard(self, shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> str:
        import torch

        tensors = [
            torch.empty(tuple(shape), dtype=getattr(torch, dtype), device="meta")
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        for guard in self.guards or ():
            try:
                holds = bool(eval(guard, {"__builtins__": _FUNCTIONS, "torch": torch}, {"L": {"tensors": tensors}}))
            except Exception:  # whatever torch writes that is not about sizes
                holds = False
            if not holds:
                return f"torch has traced what holds only where {self._readable(guard)}"
        return ""

    def _readable(self, guard: str) -> str:
        return _SIZE.sub(lambda found: f"{self.inputs[int(found[1])][0]}.shape[{found[2]}]", guard)

    def free(self) -> str:
        """The axes that may have several sizes, for people."""
        axes = [
            f"{name}.shape[{axis}]"
            for name, dims in self.inputs
            for axis, dim in enumerate(dims)
            if not isinstance(dim, int) and len(set(self.ranges.get(dim, (0, 1)))) > 1
        ]
        return ", ".join(axes)


def size_rules(program: torch.export.ExportedProgram, names: Sequence[str]) -> SizeRules:
    """What a program assumes of the sizes of its inputs, which are called `names`."""
    given = set(program.graph_signature.user_inputs)
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder" and node.name in given]
    inputs = tuple(
        (name, tuple(int(text) if (text := str(size)).isdigit() else text for size in value.shape))
        for name, value in zip(names, values, strict=True)
    )
    ranges = {str(symbol): (_bound(found.lower), _bound(found.upper)) for symbol, found in program.range_constraints.items()}
    return SizeRules(inputs, ranges, guards_of(program))


def guards_of(program: torch.export.ExportedProgram) -> tuple[str, ...] | None:
    """What torch has assumed of a program's sizes until now, as `SizeRules.guards`: while it takes operators apart, too."""
    from torch.export import exported_program

    convert = getattr(exported_program, "_convert_guards_to_code", None)  # private to torch
    return None if convert is None else tuple(map(str, convert(program.graph_module)))


@dataclass(frozen=True, slots=True)
class ProgramRules:
    """What torch has found out about the sizes of a user's exported program.

    `inputs` are its tensors by their names, and of each the sizes: numbers, or expressions of symbols. `ranges` are the least and
    the greatest of what a symbol may be; `guards` are expressions that hold. All are sympy's.
    """

    inputs: Mapping[str, tuple[Any, ...]]
    ranges: Mapping[Any, tuple[int, int]]
    guards: tuple[Any, ...]

    def refusal(self, shapes: Mapping[str, Sequence[int]]) -> str:
        """Why the program does not hold for inputs of these shapes, by their names; empty if it does."""
        axes = [
            (f"{name}.shape[{axis}]", dim, size)
            for name, shape in shapes.items()
            for axis, (dim, size) in enumerate(zip(self.inputs.get(name, ()), shape, strict=False))
        ]
        sizes = {dim: size for _, dim, size in reversed(axes) if getattr(dim, "is_symbol", False)}
        names = {str(dim): name for name, dim, _ in reversed(axes) if dim in sizes}
        for name, dim, size in axes:
            least, most = self.ranges.get(dim, (0, _LARGEST))
            if not (least <= size or least <= _ONES) or size > most:
                return f"torch has exported {name} for {least} to {most}, not for {size}"
            if not isinstance(dim, int) and dim.subs(sizes).is_number and dim.subs(sizes) != size:
                return f"{name} is {size}, where torch has found {_renamed(dim, names)}"
        broken = next((guard for guard in self.guards if guard.subs(sizes) == False), None)  # noqa: E712  # of sympy, as below
        return "" if broken is None else f"torch has traced what holds only where {_renamed(broken, names)}"

    def suspects(self, shapes: Mapping[str, Sequence[int | np.ndarray]], count: int) -> np.ndarray:
        """The numbers of those of `count` points for which `refusal` has a reason: arrays are the sizes at all of them.

        Raises:
            OptionError: there are too many points to evaluate what torch assumes of them.
        """
        from sympy import Dummy, Eq  # type: ignore[import-untyped]

        axes = [
            (dim, np.broadcast_to(np.asarray(size, np.int64), (count,)))
            for name, shape in shapes.items()
            for dim, size in zip(self.inputs.get(name, ()), shape, strict=False)
        ]
        sizes = {dim: size for dim, size in reversed(axes) if getattr(dim, "is_symbol", False)}
        found = np.zeros(count, np.bool_)
        for dim, size in axes:
            least, most = self.ranges.get(dim, (0, _LARGEST))
            found |= (size > most) | ((size < least) & (least > _ONES))
            if not isinstance(dim, int):
                own = Dummy(integer=True)
                found |= _broken_at(Eq(dim, own), {**sizes, own: size})
        for guard in self.guards:
            found |= _broken_at(guard, sizes)
        return np.flatnonzero(found)


def _broken_at(condition: Any, sizes: Mapping[Any, np.ndarray]) -> np.ndarray | bool:
    """At which points a condition of sympy's does not hold, given the sizes of symbols there; of others it may hold.

    Raises OptionError as `ProgramRules.suspects`.
    """
    symbols = [symbol for symbol in condition.free_symbols if symbol in sizes]
    if not symbols:
        return bool(condition == False)  # noqa: E712
    points, places = np.unique([sizes[symbol] for symbol in symbols], axis=1, return_inverse=True)
    count = points.shape[1]

    def is_broken(place: int) -> bool:
        return bool(condition.subs(dict(zip(symbols, points[:, place].tolist(), strict=True))) == False)  # noqa: E712

    found = _broken_arrays(condition, symbols, points) if len(symbols) == len(condition.free_symbols) else None
    if found is None or any(found[place] != is_broken(place) for place in range(0, count, max(count // _COMPARED, 1))):
        if count > _MOST_SUBSTITUTED:
            what = f"torch assumes {condition}, which is not evaluated at all {count} sizes"
            raise OptionError("save", what, "compile it for narrower ranges, or multiples")
        found = np.array([is_broken(place) for place in range(count)])
    return found[places.reshape(-1)]


def _broken_arrays(condition: Any, symbols: Sequence[Any], points: np.ndarray) -> np.ndarray | None:
    """The same by NumPy, which is a thousand times as fast; None where it does not know a function of torch's."""
    from sympy import lambdify

    try:
        holds = lambdify(symbols, condition, [_OF_ARRAYS, "numpy"])(*points.astype(object))  # whose numbers do not overflow
        return ~np.broadcast_to(np.asarray(holds, np.bool_), points.shape[1:])
    except Exception:  # of generated code
        return None


def program_rules(program: torch.export.ExportedProgram) -> ProgramRules | None:
    """What a program assumes of the sizes of its inputs, before it is translated; None where all of them are numbers."""
    given = set(program.graph_signature.user_inputs)
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder" and node.name in given}
    inputs = {name: tuple(map(_expression, value.shape)) for name, value in values.items() if hasattr(value, "shape")}
    environment = _environment_of(program)
    if environment is None or all(isinstance(dim, int) for dims in inputs.values() for dim in dims):
        return None
    ranges = {symbol: (_bound(found.lower), _bound(found.upper)) for symbol, found in program.range_constraints.items()}
    return ProgramRules(inputs, ranges, tuple(guard.expr for guard in environment.guards))


def _expression(size: Any) -> Any:
    """A size of torch's as a number, or as an expression of symbols."""
    return size.node.expr if hasattr(size, "node") else int(size)


def _renamed(expression: Any, names: Mapping[str, str]) -> str:
    """An expression with the axes that its symbols are, for people."""
    return _SYMBOL.sub(lambda found: names.get(found[0], found[0]), str(expression))


def _environment_of(program: torch.export.ExportedProgram) -> Any:
    """Where torch keeps the symbols of a program; None where all its sizes are numbers."""
    sizes = [size for node in program.graph.nodes for size in getattr(node.meta.get("val"), "shape", ())]
    return next((size.node.shape_env for size in sizes if hasattr(size, "node")), None)


class Assumptions:
    """What torch assumes of the sizes of a program while it is translated, beyond what it did in the trace."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        self._environment = _environment_of(program)
        self._known = self._count()
        self._ranges = program.range_constraints

    def broken(self) -> str:
        """One that does not hold for all sizes in the program's ranges, of which some are tried; empty if there is none."""
        if self._environment is None:
            return ""
        for guard in self._environment.guards[self._known :]:
            for step in _TRIED:
                sizes = {}
                for number, (symbol, found) in enumerate(self._ranges.items()):
                    least, most = _bound(found.lower), _bound(found.upper)
                    sizes[symbol] = min(least + step + number * (step % 3), most)
                if guard.expr.subs(sizes) == False:  # noqa: E712  # of sympy, whose constants are no bools
                    return str(guard.expr)
        return ""

    def _count(self) -> int:
        return 0 if self._environment is None else len(self._environment.guards)


def _bound(number: object) -> int:
    """A bound of a symbol as a number; infinity is what no size is."""
    try:
        return min(int(number), _LARGEST)  # type: ignore[call-overload, no-any-return]
    except (OverflowError, TypeError, ValueError, AttributeError):
        return _LARGEST
