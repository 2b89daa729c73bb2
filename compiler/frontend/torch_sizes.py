"""For which sizes of its inputs a graph that torch has exported holds."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_LARGEST = 2**31 - 1  # elements along one axis
_TRIED = (0, 1, 2, 3, 5, 8, 13, 64, 97)  # above the least size of a range
_SIZE = re.compile(r"L\['tensors'\]\[(\d+)\]\.size\(\)\[(\d+)\]")
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


class Assumptions:
    """What torch assumes of the sizes of a program while it is translated, beyond what it did in the trace."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        sizes = [size for node in program.graph.nodes for size in getattr(node.meta.get("val"), "shape", ())]
        self._environment = next((size.node.shape_env for size in sizes if hasattr(size, "node")), None)
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
