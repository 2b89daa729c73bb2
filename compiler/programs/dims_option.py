"""The option `dims`: which sizes a call may have along which axes of its inputs."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from ...runtime.errors import InputError, OptionError
from ...runtime.interchange import is_integer
from ...runtime.symbolic.sizes import MOST_POINTS, Dim

if TYPE_CHECKING:
    import onnx_ir as ir

Box: TypeAlias = tuple[Dim, ...]
_MOST_SIZE = (1 << 31) - 1  # programs are given sizes in 32 bits
_RANGES = 'give {"T": (1, 512)}, or (1, 512, 8) for multiples of 8'
_AXES = 'give {"x": {0: (1, 8)}}, or names for sizes that are the same: {"x": {0: "B"}, "y": {0: "B"}, "B": (1, 8)}'


@dataclass(frozen=True, slots=True)
class AxisDims:
    """The named dimensions of a module, which has no names itself: of each input, the names of some axes; and their ranges.

    Axes may be negative. Each name has a range, and is that of an axis.
    """

    axes: Mapping[str, Mapping[int, str]]
    box: Box

    def names(self, inputs: Sequence[tuple[str, int]]) -> list[dict[int, str]]:
        """The names of axes, not negative, of these inputs, which are given with their ranks.

        Raises:
            OptionError: an input or an axis is not there.
        """
        for name in self.axes:
            if name not in dict(inputs):
                known = ", ".join(one for one, _ in inputs) or "none"
                raise OptionError("dims", f"no tensor of the call is {name!r}", f"its tensors are {known}")
        found: list[dict[int, str]] = []
        for name, rank in inputs:
            given = self.axes.get(name, {})
            for axis in given:
                if not -rank <= axis < rank:
                    raise OptionError("dims", f"{name} has no axis {axis}", f"it has {rank}")
            found.append({axis % rank: dim for axis, dim in given.items()})
        return found


def parse_dims(dims: object, model: ir.Model) -> tuple[ir.Model, Box]:
    """The ranges that a user gives for dimensions of a graph's inputs, and the graph (weights shared) with these as their names.

    Dimensions are called as they are in the graph, or by input and axis as those of a module. A name that is no word becomes one.

    Raises:
        OptionError: no mapping of names to (least, greatest) or (least, greatest, multiple) and of inputs to these by axis; or it
            names what no input has, or not all that they have.
    """
    import onnx_ir as ir

    from ..frontend.dimensions import is_number_tensor

    ranges, axes, used = _parsed(_mapping(dims, _RANGES), _RANGES)
    named = model.clone()
    named.meta.update(model.meta)  # of an exported program, what torch assumes of sizes
    inputs = list(filter(is_number_tensor, named.graph.inputs))
    by_axis = AxisDims(axes, ()).names([(str(value.name), len(value.shape or ())) for value in inputs])
    aliases = _aliases(inputs, by_axis)
    known = [dim.value for value in inputs for dim in value.shape or () if not isinstance(dim, int)]
    for name in ranges.keys() - used.keys() - set(known):
        listed = ", ".join(dict.fromkeys(filter(None, known))) or "numbers"
        raise OptionError("dims", f"no input has a dimension {name!r}", f"its dimensions are {listed}")
    found: dict[str, Dim] = {}
    for value, own in zip(inputs, by_axis, strict=True):
        names = [own.get(axis, aliases.get(dim, dim)) for axis, dim in enumerate(_dimensions_of(value))]
        if None in names:
            fix = f'give them by input and axis: {{"{value.name}": {{{names.index(None)}: (1, 8)}}}}'
            raise OptionError("dims", f"input {value.name} of shape {value.shape} has dimensions without a name", fix)
        for one in names:
            if isinstance(one, str) and one not in found:
                found[one] = _renamed(_range_of(one, {**ranges, **used}), found.values())
        value.shape = ir.Shape([found[one].name if isinstance(one, str) else one for one in names])
    return named, _checked(tuple(found.values()), _RANGES)


def parse_axis_dims(dims: object) -> AxisDims:
    """The ranges that a user gives for axes of a module's inputs: {input: {axis: range or name}}, and {name: range}.

    An input is called as the parameter of `forward()`, with the path inside it: `batch_words` is `batch["words"]`. A range is
    (least, greatest), (least, greatest, multiple), one size, or a `torch.export.Dim` with both ends.

    Raises:
        OptionError: it is anything else, or a name without a range or without an axis.
    """
    ranges, axes, used = _parsed(_mapping(dims, _AXES), _AXES)
    for name in ranges:
        if name not in used:
            raise OptionError("dims", f"{name!r} is the name of no axis: those of a module's inputs have none", _AXES)
    return AxisDims(axes, _checked(tuple(used.values()), _AXES))


def require_in_range(dim: Dim, size: int) -> None:
    """Raise InputError for a size that the user has not asked for; nothing, size 0, always has a result without elements."""
    if size not in dim.sizes and size != 0:
        what = f"{size} is outside of {dim}"
        raise InputError(f"dimension {dim.name}", what, "compile the model for more sizes, or without dims")


def _mapping(dims: object, fix: str) -> Mapping[str, object]:
    if not isinstance(dims, Mapping) or not dims or not all(isinstance(name, str) for name in dims):
        raise OptionError("dims", f"{dims!r} is no mapping of names to ranges", fix)
    return dims


def _parsed(given: Mapping[str, object], fix: str) -> tuple[dict[str, Dim], dict[str, dict[int, str]], dict[str, Dim]]:
    """Ranges by names, the names of axes by input, and the ranges of those by their names."""
    ranges = {name: _dim(name, found, fix) for name, found in given.items() if not isinstance(found, Mapping)}
    axes: dict[str, dict[int, str]] = {}
    used: dict[str, Dim] = {}
    for name, found in given.items():
        for axis, what in found.items() if isinstance(found, Mapping) else ():
            if not isinstance(axis, int) or isinstance(axis, bool):
                raise OptionError("dims", f"{axis!r} is no axis of {name}", _AXES)
            dim = _dim_of_axis(f"{name}_{axis}".replace("-", "m"), what, ranges)
            if used.setdefault(dim.name, dim) != dim:
                raise OptionError("dims", f"{dim.name} has two ranges: {used[dim.name]} and {dim}", "give it one")
            axes.setdefault(name, {})[axis] = dim.name
    return ranges, axes, used


def _dim_of_axis(own_name: str, given: object, ranges: Mapping[str, Dim]) -> Dim:
    if isinstance(given, str):
        if given not in ranges:
            raise OptionError("dims", f"{given!r} has no range", f"give it one: {given!r}: (1, 512)")
        return ranges[given]
    torchs = getattr(given, "__name__", None)
    if isinstance(torchs, str) and hasattr(given, "min"):  # a torch.export.Dim
        return _dim(torchs, (given.min, getattr(given, "max", None)), _AXES)
    return _dim(own_name, given, _AXES)


def _dim(name: str, found: object, fix: str) -> Dim:
    if is_integer(found):
        found = found, found
    given = tuple(found) if isinstance(found, Sequence) and not isinstance(found, str) else ()
    numbers = [int(one) for one in given if is_integer(one)]
    if len(numbers) not in (2, 3) or len(numbers) < len(given):
        _refuse(name, f"{found!r} is no range", fix)
    if not 0 <= numbers[0] <= numbers[1] or (len(numbers) > 2 and numbers[2] < 1):
        _refuse(name, f"{found!r} has no sizes", fix)
    if numbers[1] > _MOST_SIZE:
        _refuse(name, f"{found!r} has larger sizes than a program takes", f"give at most {_MOST_SIZE}")
    return Dim(name, *numbers)


def _refuse(name: str, what: str, fix: str) -> NoReturn:
    raise OptionError("dims", f"{name!r}: {what}", fix)


def _checked(box: Box, fix: str) -> Box:
    if not all(dim.name.isidentifier() and any(dim.sizes) for dim in box):  # of size 0 alone there is nothing to compile
        raise OptionError("dims", f"{', '.join(map(str, box))}: no sizes, or names that are no words", fix)
    if prod(len(dim.sizes) for dim in box) > MOST_POINTS:
        fix = f"give narrower ranges, or multiples: at most {MOST_POINTS} combinations"
        raise OptionError("dims", f"{', '.join(map(str, box))}: too many sizes to look at one by one", fix)
    return box


def _aliases(inputs: Sequence[ir.Value], by_axis: Sequence[Mapping[int, str]]) -> dict[int | str | None, str]:
    """What a user calls axes that have a name in the graph, by that name. Raises OptionError for an axis of one size."""
    found: dict[int | str | None, str] = {}
    for value, own in zip(inputs, by_axis, strict=True):
        for axis, name in own.items():
            dim = _dimensions_of(value)[axis]
            if isinstance(dim, int):
                raise OptionError("dims", f"axis {axis} of input {value.name} is {dim}", "leave it out")
            if dim is not None and found.setdefault(dim, name) != name:
                raise OptionError("dims", f"{dim!r} would be {found[dim]!r} and {name!r}", "give axes of one name one range")
    return found


def _dimensions_of(value: ir.Value) -> list[int | str | None]:
    """The dimensions of an input. Raises OptionError where not even their number is known."""
    if value.shape is None:
        raise OptionError(
            "dims", f"input {value.name} has a shape of any rank", "give it a shape in the model, or leave out dims"
        )
    return [dim if isinstance(dim, int) else dim.value for dim in value.shape]


def _range_of(name: str, ranges: Mapping[str, Dim]) -> Dim:
    if name not in ranges:
        raise OptionError("dims", f"dimension {name!r} has no range", f"give it one, if only of one size: {name!r}: 1")
    return ranges[name]


def _renamed(dim: Dim, others: Iterable[Dim]) -> Dim:
    """A dimension whose name is a word, as expressions of sizes have them, and no other's."""
    name = re.sub(r"\W", "_", dim.name, flags=re.ASCII)
    name = name if name.isidentifier() and not keyword.iskeyword(name) else f"_{name}"
    while any(other.name == name for other in others):
        name += "_"
    return replace(dim, name=name)
