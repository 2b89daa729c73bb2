"""One program of a set: which calls are its own, and how it is called with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from ..executor import CompiledModel
from ..interchange import copied_results
from ..symbolic.dims import Dim
from ..symbolic.size_text import evaluator
from .padding import Padding


@dataclass(frozen=True)
class Member:
    """A program and the sizes that it serves: those of its plan; of the dimensions `padded` all sizes of these ranges, whose
    greatest one is the program's, for which `padding` makes inputs longer.
    """

    model: CompiledModel
    padded: tuple[Dim, ...] = ()
    padding: Padding | None = None

    def __post_init__(self) -> None:
        assert bool(self.padded) is (self.padding is not None), "sizes are padded by a Padding"

    @cached_property
    def dims(self) -> tuple[Dim, ...]:
        """The dimensions whose sizes a call decides."""
        return (*self.model.plan.dims, *self.padded)

    @cached_property
    def axes(self) -> tuple[dict[int, str], ...]:
        """The names of such dimensions by the axes of each input."""
        names = {dim.name for dim in self.padded}
        found = []
        for position, port in enumerate(self.model.inputs):
            axes = {sized.axis: sized.text for sized in port.sizes}
            given = {} if self.padding is None else self.padding.inputs[position]
            found.append({**axes, **{axis: name for axis, name in given.items() if name in names}})
        return tuple(found)

    @property
    def reach(self) -> tuple[bool, int]:
        """How little it is made for a call: exact programs come first, then those for ranges of sizes, then longer inputs."""
        return bool(self.padded), prod(dim.greatest - dim.least + 1 for dim in self.dims)

    @cached_property
    def types(self) -> tuple[str, ...]:
        """The types of the inputs for people; a range stands for a padded size."""
        ranges = {dim.name: f"{dim.least}..{dim.greatest}" for dim in self.dims}
        found = []
        for port, axes in zip(self.model.inputs, self.axes, strict=True):
            shape = [ranges[axes[axis]] if axis in axes else str(size) for axis, size in enumerate(port.type.shape)]
            found.append(f"{port.name} {port.type.storage}[{','.join(shape)}]")
        return tuple(found)

    def serves(self, shapes: Sequence[Sequence[int]]) -> bool:
        """Whether calls with inputs of these shapes are its own."""
        sizes = self._sizes(shapes)
        return sizes is not None and all(sizes[dim.name] in dim.sizes for dim in self.dims)

    def nothing(self, shapes: Sequence[Sequence[int]]) -> list[np.ndarray] | None:
        """The results of a call in which a size of its plan is 0, if none has an element; None where some have, or it serves no
        such sizes otherwise."""
        sizes = self._sizes(shapes)
        ranges = {dim.name: dim.sizes for dim in self.dims}
        if sizes is None or 0 not in sizes.values() or any(size and size not in ranges[name] for name, size in sizes.items()):
            return None
        results = []
        for position, port in enumerate(self.model.outputs):
            shape = list(port.type.shape)
            try:
                for sized in port.sizes:
                    shape[sized.axis] = evaluator(sized.text)(sizes)
            except ArithmeticError:  # a quotient by a size that is 0
                return None
            for cut in () if self.padding is None else self.padding.outputs[position]:
                shape[cut.axis] = shape[cut.axis] // ranges[cut.name][-1] * sizes[cut.name]
            if 0 not in shape:
                return None
            results.append(np.empty([max(size, 0) for size in shape], port.type.dtype))
        return results

    def _sizes(self, shapes: Sequence[Sequence[int]]) -> dict[str, int] | None:
        """The sizes of its dimensions in a call, in range or not; None where the shapes are others in more than these."""
        sizes: dict[str, int] = {}
        for port, axes, shape in zip(self.model.inputs, self.axes, shapes, strict=True):
            if len(shape) != len(port.type.shape):
                return None
            for axis, (size, own) in enumerate(zip(shape, port.type.shape, strict=True)):
                if (size != own) if axis not in axes else (sizes.setdefault(axes[axis], size) != size):
                    return None
        return sizes

    def serves_exactly(self, shapes: Sequence[Sequence[int]]) -> bool:
        """Whether such calls, which it serves, run as they are."""
        sizes = {} if self.padding is None else self.padding.sizes(shapes)
        return all(sizes[dim.name] == dim.sizes[-1] for dim in self.padded)

    def run(self, callee: Callable[..., object], tensors: Sequence[object], out: object = None) -> object:
        """Call the model or a context of it with inputs that it serves: one array or tensor, or a tuple of them. Results are
        copied to `out` where the program's own are longer."""
        if self.padding is None:
            return callee(*tensors) if out is None else callee(*tensors, out=out)
        result = self.padding.run(callee, tensors, {dim.name: dim.sizes[-1] for dim in self.padded})
        return result if out is None else copied_results(result, out, self.model.output_names)


def differences(members: Sequence[Member]) -> str:
    """Why programs are no set: how their inputs or outputs differ, or that one keeps states; empty if they are one. Outputs of a
    module may have other names in each export: those are made up."""
    kinds = []
    for member in members:
        plan = member.model.plan
        if plan.states:
            return "a program keeps states"
        inputs = ", ".join(f"{port.name} {port.type.dtype}" for port in plan.inputs)
        kinds.append((f"takes {inputs}", f"gives {', '.join(port.type.dtype for port in plan.outputs)}"))
    for other in kinds[1:]:
        for ours, theirs in zip(kinds[0], other, strict=True):
            if ours != theirs:
                return f"one program {ours}, another {theirs}"
    return ""
