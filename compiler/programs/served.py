"""Which sizes a program serves, and how it is called with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...runtime.executor import CompiledModel
from ...runtime.program_set.padding import Padding
from ...runtime.staged.staged_model import StagedModel
from ...runtime.symbolic.dims import Dim
from .dims_option import Box
from .padded import PaddedSpecialization
from .specialize import Specialization


@dataclass(frozen=True, slots=True)
class Served:
    """The sizes of `box` and their program; where there is none for all of them, why, `reason`, and why none is padded for.

    Of the dimensions `padded`, programs are for some sizes only, up to which inputs are made longer: that of `model` for the
    greatest of the box, others for powers of two.
    """

    box: Box
    model: CompiledModel | None
    reason: str = ""
    padding: Padding | None = None
    padded: tuple[str, ...] = ()
    refusal: str = ""

    def serves(self, sizes: Mapping[str, int]) -> bool:
        return all(sizes[dim.name] in dim.sizes for dim in self.box)

    def sizes_of_program(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """The sizes of the program that a call of these sizes runs, where no program is for all of the box."""
        ranges = {dim.name: dim for dim in self.box}
        return {name: bucket(ranges[name], size) if name in self.padded else size for name, size in sizes.items()}

    def whole(self) -> Specialization | None:
        """The program for all of the box and how it is called, if there is one."""
        return None if self.model is None else self.specialization(self.model, {dim.name: dim.sizes[-1] for dim in self.box})

    def specialization(self, model: CompiledModel | StagedModel, sizes: Mapping[str, int]) -> Specialization:
        """How a program for these sizes is called."""
        if self.padding is None:
            return Specialization(model)
        padded = [Dim(d.name, max(d.least, 1), sizes[d.name], d.multiple) for d in self.box if d.name in self.padded]
        return PaddedSpecialization(model, padding=self.padding, padded=tuple(padded))

    def __str__(self) -> str:
        padded = ", ".join(f"{dim.name}={dim.sizes[-1]}" for dim in self.box if dim.name in self.padded)
        if self.model is not None and not self.padded:
            what = "one program"
        elif self.model is not None:
            what = f"padded to {padded}, which no result shows: one program; none for a range, as {self.reason}"
        elif self.padded:
            what = f"padded along {', '.join(self.padded)} to powers of two, and specialised, as {self.reason}"
        else:
            what = f"specialised, as {self.reason}" + (f"; not padded, as {self.refusal}" if self.refusal else "")
        return f"sizes {', '.join(map(str, self.box))}: {what}"


def bucket(dim: Dim, size: int) -> int:
    """The size that one is padded to: the greatest one up to the next power of two. Itself is padded to none."""
    power = 1 << (size - 1).bit_length()
    return min(power // dim.multiple * dim.multiple, dim.sizes[-1])


def bucket_range(dim: Dim, size: int) -> Dim:
    """The sizes that are padded to the same one as `size`."""
    same = [one for one in dim.sizes if bucket(dim, one) == bucket(dim, size)]
    return Dim(dim.name, same[0], same[-1], dim.multiple)
