"""Graphs compiled for ranges of sizes: few programs, each for a box of sizes, cover all that the user asks for.

A program serves the sizes for which it would have been written the same way (runtime/sizes.py); what is left out gets a program
of its own. Where a graph cannot be compiled for a range, one dimension after the other is specialised, as without ranges.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import isqrt
from typing import Protocol

import onnx_ir as ir

from ...runtime.errors import CompileError, OptionError
from ...runtime.executor import CompiledModel
from ...runtime.symbolic.sizes import Dim, Domain, SymbolicSizeError
from ..frontend.dimensions import bind_domain, dimension_bindings
from ..frontend.pytree import LEAF
from ..ir.randomness import check_repeatable
from ..ir.states import state_inputs
from .builder import Builder, BuildStages
from .dims_option import Box, require_in_range
from .sources import GraphSource
from .specialize import Call, Source, Specialization, SpecializedModel

_MOST_PROGRAMS = 12  # that are compiled ahead; sizes beyond them wait for a call
# The largest sizes of programs of their own: 1 broadcasts, and is a vector; few rows fill one panel of a product.
_BANDS = (1, 32, 1024)


@dataclass(frozen=True, slots=True)
class Served:
    """A program and the sizes that it is for, or why there is none for these."""

    box: Box
    model: CompiledModel | None
    reason: str = ""

    def serves(self, sizes: Mapping[str, int]) -> bool:
        return all(sizes[dim.name] in dim.sizes for dim in self.box)


class RangesSource(Source, Protocol):
    """What programs for ranges of sizes are made from."""

    @property
    def served(self) -> tuple[Served, ...]:
        """The programs so far."""

    def notes(self) -> Iterator[str]:
        """What sizes each program serves, and why some have none."""


class SymbolicSource(GraphSource):
    """A graph whose dimensions all have names and ranges. Other sizes are compiled one by one, as `GraphSource` does."""

    def __init__(self, model: ir.Model, builder: Builder, build: BuildStages, dims: Box) -> None:
        """Raises OptionError or UnsupportedModelError for a graph that has no programs for ranges of sizes."""
        super().__init__(model, builder, build)
        if self._shaping:
            what = f"the contents of {', '.join(sorted(self._shaping))} decide shapes"
            raise OptionError("dims", what, "compute these shapes from the shapes of inputs, or leave out dims")
        if state_inputs(model):
            raise OptionError("dims", "there are no programs for ranges of sizes with states", "leave out dims, or those")
        if not builder.options.random:
            check_repeatable(model)
        self._dims = dims
        self._served: list[Served] = []
        self._building = threading.Lock()

    def bind(self, inputs: tuple[object, ...], named: dict[str, object]) -> Call:
        call = super().bind(inputs, named)
        sizes = dimension_bindings(self._model, self._shapes(call.types))
        for dim in self._dims:
            require_in_range(dim, sizes[dim.name])
        if not all(sizes[dim.name] for dim in self._dims):
            return call  # of nothing there is nothing to compute
        number, found = self._find(sizes)
        return call if found.model is None else replace(call, structure=LEAF, types=(((number,), "sizes"),))

    def compile(self, call: Call) -> Specialization:
        if call.types and call.types[0][1] == "sizes":
            model = self._served[call.types[0][0][0]].model
            assert model is not None
            return Specialization(model)
        return super().compile(call)

    def compile_ahead(self) -> None:
        """Compile the programs for all sizes, or for as many as a few programs serve. Raises CompileError where none can be."""
        for sizes in _corners(self._dims):
            if len(self._served) < _MOST_PROGRAMS:
                self._find(sizes)
        while len(self._served) < _MOST_PROGRAMS and (rest := self._unserved()) is not None:
            self._find(rest)

    @property
    def served(self) -> tuple[Served, ...]:
        """The programs so far."""
        return tuple(self._served)

    def notes(self) -> Iterator[str]:
        """What sizes each program serves, and why some have none."""
        for served in self._served:
            box = ", ".join(map(str, served.box))
            yield f"sizes {box}: {'one program' if served.model else f'specialised, as {served.reason}'}"

    def _find(self, sizes: Mapping[str, int]) -> tuple[int, Served]:
        with self._building:
            for number, served in enumerate(self._served):
                if served.serves(sizes):
                    return number, served
            self._served.append(self._made(sizes))
            return len(self._served) - 1, self._served[-1]

    def _made(self, sizes: Mapping[str, int]) -> Served:
        """A program for as many sizes around these as it can be for."""
        box = self._around(sizes)
        reasons: list[str] = []
        free = [dim.name for dim in box if len(dim.sizes) > 1]
        for fixed in ((), *((name,) for name in free if len(free) > 1)):
            narrowed = tuple(Dim(d.name, sizes[d.name], sizes[d.name]) if d.name in fixed else d for d in box)
            try:
                model = self._program(narrowed, sizes)
            except (SymbolicSizeError, CompileError) as error:
                reasons.append(str(error))
                continue
            ranges = {dim.name: dim for dim in model.plan.dims}
            return Served(tuple(ranges.get(dim.name, dim) for dim in narrowed), model)
        return Served(box, None, reasons[0])

    def _program(self, box: Box, sizes: Mapping[str, int]) -> CompiledModel:
        """Raises SymbolicSizeError or CompileError where there is none."""
        free = [dim for dim in box if len(dim.sizes) > 1]
        fixed = {dim.name: dim.sizes[0] for dim in box if len(dim.sizes) == 1}
        fixed |= {name: size for name, size in sizes.items() if name not in {dim.name for dim in box}}
        hint = {dim.name: _hint(dim) for dim in free}

        def bound() -> ir.Model:
            if self._prepared is None:
                self._prepared = self._builder.prepared(self._model)
            return bind_domain(self._prepared, Domain(free, hint) if free else None, fixed)

        key = self._builder.key("sizes", self._digest, repr(free), repr(fixed), repr(hint))
        self._builder.check_target()
        return self._builder.recall(key) or self._builder.build_program(key, bound)

    def _around(self, sizes: Mapping[str, int]) -> Box:
        """A box of sizes around a point that no program serves yet."""
        box = {dim.name: _band(dim, sizes[dim.name]) for dim in self._dims}
        for served in self._served:
            cuts = []
            for dim in served.box:
                ours, size = box[dim.name], sizes[dim.name]
                if size < dim.least:
                    cuts.append(replace(ours, greatest=min(ours.greatest, dim.least - 1)))
                elif size > dim.greatest:
                    cuts.append(replace(ours, least=max(ours.least, dim.greatest + 1)))
            best = max(cuts, key=lambda cut: len(cut.sizes) / len(box[cut.name].sizes))
            box[best.name] = best
        return tuple(box.values())

    def _unserved(self) -> dict[str, int] | None:
        """A point that no program serves yet; None where there is none."""
        names = [dim.name for dim in self._dims]
        for point in product(*(dim.sizes for dim in self._dims)):
            sizes = dict(zip(names, point, strict=True))
            if all(point) and not any(served.serves(sizes) for served in self._served):
                return sizes
        return None


class SymbolicModel(SpecializedModel):
    """A model compiled for ranges of sizes: no call waits for a compiler, unless the report says so."""

    def __init__(self, source: RangesSource) -> None:
        super().__init__(source)
        self._ranges = source

    @property
    def notes(self) -> tuple[str, ...]:
        """What sizes each program serves, and why some have none."""
        return tuple(self._ranges.notes())

    def report(self) -> str:
        """What sizes each program serves, and the report of every program."""
        ahead = [served.model.report() for served in self._ranges.served if served.model is not None]
        return "\n\n".join(filter(None, ["\n".join(self.notes), *(ahead or [super().report()])]))


def _band(dim: Dim, size: int) -> Dim:
    """The sizes near one, which the same choices suit."""
    least = max((end + 1 for end in _BANDS if end < size), default=1)
    greatest = min((end for end in _BANDS if end >= size), default=dim.greatest)
    return replace(dim, least=max(dim.least, least), greatest=min(dim.greatest, greatest))


def _corners(dims: Box) -> Iterator[dict[str, int]]:
    """The largest sizes first: most calls have some of theirs."""
    yield {dim.name: dim.sizes[-1] for dim in dims}


def _hint(dim: Dim) -> int:
    """The size at which choices are made that are right for any: in the middle, by ratio."""
    middle = isqrt(dim.least * dim.greatest)
    return min(dim.sizes, key=lambda size: abs(size - middle))
