"""The option `dims`: which sizes a call may have along which axes of its inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from ...runtime.errors import InputError, OptionError
from ...runtime.symbolic.sizes import MOST_POINTS, Dim

if TYPE_CHECKING:
    import onnx_ir as ir

Box: TypeAlias = tuple[Dim, ...]
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


def parse_dims(dims: object, model: ir.Model) -> Box:
    """The ranges that a user gives for names of dimensions of a graph's inputs: one for each of them.

    Raises:
        OptionError: no mapping of names to (least, greatest) or (least, greatest, multiple), or of names that no input has, or
            of not all that they have.
    """
    given, known = _mapping(dims, _RANGES), _names(model)
    for name in given:
        if name not in known:
            raise OptionError("dims", f"no input has a dimension {name!r}", f"its dimensions are {', '.join(known) or 'numbers'}")
    found = {name: _dim(name, numbers, _RANGES) for name, numbers in given.items()}
    for name in known:
        if name not in found:
            raise OptionError("dims", f"dimension {name!r} has no range", f"give it one, if only of one size: {name!r}: (1, 1)")
    return _checked(tuple(found[name] for name in known), _RANGES)


def parse_axis_dims(dims: object) -> AxisDims:
    """The ranges that a user gives for axes of a module's inputs: {input: {axis: range or name}}, and {name: range}.

    An input is called as the parameter of `forward()`, with the path inside it: `batch_words` is `batch["words"]`. A range is
    (least, greatest), (least, greatest, multiple), or a `torch.export.Dim` with both ends.

    Raises:
        OptionError: it is anything else, or a name without a range or without an axis.
    """
    given = _mapping(dims, _AXES)
    ranges = {name: _dim(name, found, _AXES) for name, found in given.items() if not isinstance(found, Mapping)}
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
    numbers = tuple(found) if isinstance(found, Sequence) and not isinstance(found, str) else ()
    if len(numbers) not in (2, 3) or not all(isinstance(one, int) and not isinstance(one, bool) for one in numbers):
        _refuse(name, f"{found!r} is no range", fix)
    if not 0 <= numbers[0] <= numbers[1] or (len(numbers) > 2 and numbers[2] < 1):
        _refuse(name, f"{found!r} has no sizes", fix)
    return Dim(name, *numbers)


def _refuse(name: str, what: str, fix: str) -> NoReturn:
    raise OptionError("dims", f"{name!r}: {what}", fix)


def _checked(box: Box, fix: str) -> Box:
    if not all(dim.name.isidentifier() and len(dim.sizes) for dim in box):
        raise OptionError("dims", f"{', '.join(map(str, box))}: no sizes, or names that are no words", fix)
    if prod(len(dim.sizes) for dim in box) > MOST_POINTS:
        fix = f"give narrower ranges, or multiples: at most {MOST_POINTS} combinations"
        raise OptionError("dims", f"{', '.join(map(str, box))}: too many sizes to look at one by one", fix)
    return box


def _names(model: ir.Model) -> list[str]:
    """The names of dimensions of a model's inputs, in their order. Raises OptionError for a dimension without a name."""
    from ..frontend.dimensions import is_number_tensor

    names: dict[str, None] = {}
    for value in filter(is_number_tensor, model.graph.inputs):
        if value.shape is None or any(not isinstance(dim, int) and dim.value is None for dim in value.shape):
            what = f"input {value.name} of shape {value.shape or 'unknown'} has dimensions without a name"
            raise OptionError("dims", what, "give them names in the model, or leave out dims")
        names |= {str(dim.value): None for dim in value.shape if not isinstance(dim, int)}
    return list(names)
