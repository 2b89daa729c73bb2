"""Graphs compiled for ranges of sizes: few programs, each for a box of sizes, cover all that the user asks for.

A program serves the sizes for which it would have been written the same way (runtime/sizes.py); what is left out gets a program
of its own. Where a graph cannot be compiled for a range, one dimension after the other is specialised, as without ranges.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import isqrt
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from ...runtime.errors import CompileError, OptionError
from ...runtime.executor import CompiledModel
from ...runtime.program_set.padding import Padding
from ...runtime.symbolic.sizes import Dim, Domain, SymbolicSizeError
from ..frontend.dimensions import bind_domain, dimension_bindings
from ..frontend.pytree import LEAF
from ..ir.randomness import check_repeatable
from ..ir.states import state_inputs
from .builder import Builder, BuildStages
from .dims_option import Box, require_in_range
from .padded import find_padding
from .served import Served, bucket_range
from .sources import GraphSource
from .specialize import Call, Source, Specialization, SpecializedModel, TensorKey

_MOST_PROGRAMS = 12  # that are compiled ahead; sizes beyond them wait for a call
# The largest sizes of programs of their own: 1 broadcasts, and is a vector; few rows fill one panel of a product.
# Where less than twice the sizes would be on one side, that is not worth a program.
_BANDS = (1, 32, 1024)


class RangesSource(Source, Protocol):
    """What programs for ranges of sizes are made from."""

    @property
    def served(self) -> tuple[Served, ...]:
        """The programs so far."""

    def notes(self) -> Iterator[str]:
        """What sizes each program serves, and why some have none."""

    def require_one_graph(self) -> None:
        """Check that sizes alone decide which program a call needs. Raises OptionError."""


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
        self._paddings: dict[tuple[Box, tuple[str, ...]], Padding | str] = {}
        self._building = threading.Lock()

    def bind(self, inputs: tuple[object, ...], named: dict[str, object]) -> Call:
        call = super().bind(inputs, named)
        sizes = dimension_bindings(self._model, self._shapes(call.types))
        for dim in self._dims:
            require_in_range(dim, sizes[dim.name])
        if not all(sizes[dim.name] for dim in self._dims):
            return call  # of nothing there is nothing to compute
        number, found = self._find(sizes)
        if found.model is not None:
            return replace(call, structure=LEAF, types=(((number,), "sizes"),))
        if found.padding is None:
            return call
        return replace(call, types=(((number,), "padded"), *self._types(found.sizes_of_program(sizes), call.types)))

    def compile(self, call: Call) -> Specialization:
        (number, *_), how = call.types[0] if call.types and call.types[0][0] else ((0,), "")
        if how == "sizes":
            found = self._served[number]
            whole = found.whole()
            assert whole is not None
            return whole
        if how == "padded":
            own = replace(call, types=call.types[1:])
            sizes = dimension_bindings(self._model, self._shapes(own.types))
            return self._served[number].specialization(super().compile(own).model, sizes)
        return super().compile(call)

    def _types(self, sizes: Mapping[str, Any], types: Sequence[TensorKey]) -> Iterator[TensorKey]:
        """The types of a call of other sizes."""
        declared = {value.name: value.shape for value in self._model.graph.inputs}
        for name, (_, dtype) in zip(self._names, types, strict=True):
            dims = declared[name] or ()
            yield tuple(dim if isinstance(dim, int) else sizes[str(dim.value)] for dim in dims), dtype

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
        told: set[str] = set()
        for served in self._served:
            yield str(replace(served, reason="above") if served.reason in told else served)
            told |= {served.reason} - {""}

    def require_one_graph(self) -> None:
        """It is one. Raises OptionError where torch has exported it for some of the sizes only: who loads it cannot ask torch."""
        if self._rules is None:
            return
        points = np.array([point for point in product(*(dim.sizes for dim in self._dims)) if all(point)], np.int64)
        points = points.reshape(-1, len(self._dims))
        for place in self._rules.suspects(self._shapes_at(points.T), len(points)):
            if refusal := self._rules.refusal(self._shapes_at(points[place].tolist())):
                raise OptionError("save", refusal, "compile it for ranges, or steps, for which it holds")

    def _shapes_at(self, sizes: Iterable[Any]) -> dict[str, tuple[Any, ...]]:
        """The shapes of inputs for sizes of all dimensions: numbers, or arrays of them."""
        named = {dim.name: size for dim, size in zip(self._dims, sizes, strict=True)}
        types = self._types(named, [((), self._dtypes.get(name, "")) for name in self._names])
        return {name: shape for name, (shape, _) in zip(self._names, types, strict=True)}

    def _find(self, sizes: Mapping[str, int]) -> tuple[int, Served]:
        if (found := self._known(sizes)) is not None:  # which waits for no other call's compilation
            return found
        with self._building:
            if (found := self._known(sizes)) is not None:
                return found
            self._served.append(self._made(sizes))
            return len(self._served) - 1, self._served[-1]

    def _known(self, sizes: Mapping[str, int]) -> tuple[int, Served] | None:
        """What serves these sizes, and its place; None where nothing does yet."""
        return next(((number, served) for number, served in enumerate(self._served) if served.serves(sizes)), None)

    def _made(self, sizes: Mapping[str, int]) -> Served:
        """A program for as many sizes around these as it can be for: any along all dimensions, or along all but one, or none.

        Where there is none along a dimension, the program is for one size, to which others are padded if that is harmless.
        """
        box = self._around(sizes)
        free = tuple(dim.name for dim in box if len(dim.sizes) > 1)
        reason, refusals = "", list[str]()
        for fixed in dict.fromkeys(((), *((name,) for name in free), free)):
            padding = self._padding(box, fixed) if fixed else None
            if isinstance(padding, str):
                refusals.append(padding)
                padding = None
            if padding is None and fixed == free != ():
                continue  # a program for one call alone, which that waits for
            ends = {d.name: bucket_range(d, sizes[d.name]) if padding else Dim(d.name, *[sizes[d.name]] * 2) for d in box}
            chosen = {name: ends[name].sizes[-1] for name in fixed}
            narrowed = tuple(Dim(d.name, *[chosen[d.name]] * 2) if d.name in chosen else d for d in box)
            try:
                model = self._program(narrowed)
            except (SymbolicSizeError, CompileError) as error:
                reason = reason or str(error)
                continue
            ranges = {dim.name: dim for dim in model.plan.dims} | {name: ends[name] for name in fixed}
            served = tuple(ranges.get(dim.name, dim) for dim in narrowed)
            return Served(served, model, reason, padding, fixed if padding else ())
        for fixed in (free, *((name,) for name in free)):
            if fixed and isinstance(padding := self._padding(box, fixed), Padding):
                return Served(box, None, reason, padding, fixed)
        return Served(box, None, reason, refusal=" and ".join(dict.fromkeys(refusals)))

    def _padding(self, box: Box, names: tuple[str, ...]) -> Padding | str:
        """How inputs may be padded along these dimensions; or why not."""
        if (box, names) not in self._paddings:
            try:
                self._paddings[box, names] = find_padding(self._bound_to(box), names, self._builder.options)
            except (SymbolicSizeError, CompileError) as error:
                self._paddings[box, names] = str(error)
        return self._paddings[box, names]

    def _program(self, box: Box) -> CompiledModel:
        """Raises SymbolicSizeError or CompileError where there is none."""
        self._builder.check_target()
        with self._looking() as digest:
            key = self._builder.key("sizes", digest, repr(box), repr([_hint(dim) for dim in box]))
            return self._builder.recall(key) or self._builder.build_program(key, lambda: self._bound_to(box))

    def _bound_to(self, box: Box) -> ir.Model:
        """The graph for all sizes of a box."""
        free = [dim for dim in box if len(dim.sizes) > 1]
        domain = Domain(free, {dim.name: _hint(dim) for dim in free}) if free else None
        return bind_domain(self._to_compile(), domain, {dim.name: dim.sizes[0] for dim in box if len(dim.sizes) == 1})

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

    @property
    def unserved(self) -> tuple[str, ...]:
        """The sizes for which a call waits for a compiler, each with the reason."""
        return tuple(str(served) for served in self._ranges.served if served.model is None)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What the passes said while compiling the programs, each line once."""
        ahead = [served.model for served in self._ranges.served if served.model is not None]
        return tuple(dict.fromkeys(remark for model in (*ahead, *self.programs) for remark in model.remarks))

    def _to_save(self) -> list[Specialization]:
        self._ranges.require_one_graph()
        ahead = [served.whole() for served in self._ranges.served]
        found = {id(one.model): one for one in (*filter(None, ahead), *self._ready())}
        if ahead and not found:
            fix = "call it with the sizes that are needed, or compile for these with --shape or example inputs"
            raise OptionError("save", f"no range of sizes has a program: {'; '.join(self.notes)}", fix)
        return list(found.values())

    def report(self) -> str:
        """What sizes each program serves, and the report of every program."""
        ahead = [served.model.report() for served in self._ranges.served if served.model is not None]
        return "\n\n".join(filter(None, ["\n".join(self.notes), *(ahead or [super().report()])]))


def _band(dim: Dim, size: int) -> Dim:
    """The sizes near one, which the same choices suit."""
    ends = [end for end in _BANDS if end == 1 or (2 * dim.least <= end and 2 * end <= dim.greatest)]
    least = max((end + 1 for end in ends if end < size), default=1)
    greatest = min((end for end in ends if end >= size), default=dim.greatest)
    return replace(dim, least=max(dim.least, least), greatest=min(dim.greatest, greatest))


def _corners(dims: Box) -> Iterator[dict[str, int]]:
    """The largest sizes first: most calls have some of theirs."""
    yield {dim.name: dim.sizes[-1] for dim in dims}


def _hint(dim: Dim) -> int:
    """The size at which choices are made that are right for any: in the middle, by ratio."""
    middle = isqrt(dim.least * dim.greatest)
    return min(dim.sizes, key=lambda size: abs(size - middle))
