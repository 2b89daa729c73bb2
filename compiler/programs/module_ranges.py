"""A module compiled for ranges of sizes: exported for any size of some axes, and again where torch makes a size a constant."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from math import lcm, prod
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np

from ...runtime.errors import CompileError, InputError, OptionError
from ...runtime.symbolic.dims import Dim
from ..frontend.pytree import Structure, Tensor
from .dims_option import AxisDims, Box, require_in_range
from .module_family import LEAST_SIZE
from .served import Served
from .sources import ModuleSource
from .specialize import DIFFERENT_CALLS, Call, Specialization, TensorKey
from .symbolic import SymbolicSource

if TYPE_CHECKING:
    import torch

    from ..frontend.torch_sizes import SizeRules
    from .builder import Builder, BuildStages

_STEPS = (2, 3, 4, 8, 16, 32, 64)  # of sizes that halve a few times, tried for who is told why ranges are refused
_MOST_VARIANTS = 8  # that are exported ahead
_MOST_CHANGES = 3  # along one axis, between sizes for which a graph holds and others
_MOST_CHECKED = 2048  # points at which torch's guards are evaluated ahead; those of a call always are
Sizes: TypeAlias = Mapping[str, int]  # by the names of dimensions


@dataclass(frozen=True, slots=True)
class _Assumed:
    """What torch assumes of the sizes of a graph: `axes` are the names of dimensions by the axes of each input, `shapes` and
    `dtypes` those of the example that it was exported with.
    """

    rules: SizeRules
    axes: Sequence[Mapping[int, str]]
    box: Box
    shapes: Sequence[tuple[int, ...]]
    dtypes: Sequence[str]

    def refusal(self, sizes: Sizes) -> str:
        """Why the graph does not hold for these sizes; empty if it does."""
        at = [
            tuple(sizes.get(dims.get(axis, ""), size) for axis, size in enumerate(shape))
            for shape, dims in zip(self.shapes, self.axes, strict=True)
        ]
        return self.rules.refusal(at, self.dtypes)

    def admits(self, sizes: Sizes) -> bool:
        """Whether the sizes are in the box."""
        return all(sizes[dim.name] in dim.sizes for dim in self.box)

    def check(self, points: Iterable[Sizes], of: Box | None = None) -> None:
        """Raise OptionError for sizes for which the graph does not hold: of its box, or `of` one that needs several graphs."""
        for sizes in points:
            if refusal := self.refusal(sizes):
                where = ", ".join(f"{name} = {size}" for name, size in sizes.items())
                fix = self._fix(of) or "give ranges for which it holds, or let the module not depend on it"
                raise OptionError("dims", f"{where}: {refusal}", fix)

    def _fix(self, of: Box | None) -> str:
        """Which of the sizes asked for may be given, as a user would write them; empty where none are known."""
        stepped, dims = self._in_steps(of or self.box), list(self.box)
        if stepped and (not of or _count(stepped) >= _count(dims)):
            changed = [_written(dim) for dim in stepped if dim not in (of or self.box)]
            return f"give sizes in steps, for which it holds: dims={{{', '.join(changed)}, ...}}"
        return f"give ranges for which it holds: dims={{{', '.join(map(_written, dims))}}}" if of else ""

    def _in_steps(self, box: Box) -> list[Dim]:
        """Ranges for which the graph holds because their sizes are multiples of a number; none where there are no others."""
        for step in _STEPS:
            stepped = [_multiples(dim, step) for dim in box]
            if None in stepped or not self._holds_for(dims := [dim for dim in stepped if dim is not None]):
                continue
            for place, dim in enumerate(box):  # those that need no steps
                others = [*dims[:place], dim, *dims[place + 1 :]]
                dims = others if self._holds_for(others) else dims
            if any(dim not in box for dim in dims):
                return dims
        return []

    def _holds_for(self, dims: Sequence[Dim]) -> bool:
        """Whether the graph holds for some sizes of each range, at its ends and in the middle."""
        some = [
            [(dim.name, dim.sizes[place]) for place in {0, min(1, len(dim.sizes) - 1), len(dim.sizes) // 2, -1}] for dim in dims
        ]
        return all(not self.refusal(dict(point)) for point in islice(product(*some), _MOST_CHECKED))


def _count(dims: Sequence[Dim]) -> int:
    return prod(len(dim.sizes) for dim in dims)


def _written(dim: Dim) -> str:
    """A range as a user writes it."""
    step = f", {dim.multiple}" if dim.multiple > 1 else ""
    return f'"{dim.name}": ({dim.least}, {dim.greatest}{step})'


def _multiples(dim: Dim, step: int) -> Dim | None:
    """The sizes of a range that are multiples of a number; None if there is none. A range of one size stays."""
    if len(dim.sizes) == 1:
        return dim
    found = replace(dim, multiple=lcm(step, dim.multiple))
    return found if found.sizes else None


@dataclass(frozen=True, slots=True)
class _Variant:
    """The graph of a module for calls of one structure and some sizes, the structure of its result, and what torch assumes."""

    source: SymbolicSource
    call: Structure
    result: Structure
    assumed: _Assumed


class ModuleRanges(ModuleSource):
    """An `nn.Module` some of whose inputs' axes have ranges. A program has the weights that there are when it is compiled.

    torch makes sizes of 0 and 1 constants: the graph for these is another, and so it may be for sizes of which something that is
    computed of them is 1. Which graph a call needs is decided by its structure, its element types, its sizes along axes without
    ranges, and by the ranges of the others for which a graph holds.
    """

    def __init__(self, module: torch.nn.Module, builder: Builder, build: BuildStages, dims: AxisDims) -> None:
        super().__init__(module, builder, build)
        self._dims = dims
        self._variants: dict[object, list[int]] = {}  # places in the list of those made, by kinds of calls
        self._made: list[_Variant] = []
        self._names: dict[Structure, Sequence[str]] = {}  # of the tensors in calls of one structure

    def bind(self, inputs: tuple[object, ...], named: dict[str, object]) -> Call:
        call = super().bind(inputs, named)
        names = self._names_of(call.structure)
        axes = self._dims.names([(name, len(shape)) for name, (shape, _) in zip(names, call.types, strict=True)])
        sizes = self._sizes(names, call.types, axes)
        place = self._place(call, axes, sizes)
        variant = self._made[place]
        if refusal := variant.assumed.rules.refusal([shape for shape, _ in call.types], [dtype for _, dtype in call.types]):
            raise InputError("dims", refusal, "give other sizes")
        bound = variant.source.bind(tuple(call.tensors), {})
        return replace(bound, structure=call.structure, types=(((place,), "graph"), *bound.types))

    def compile(self, call: Call) -> Specialization:
        variant = self._made[call.types[0][0][0]]
        found = variant.source.compile(replace(call, types=call.types[1:]))
        return replace(found, structure=variant.result)

    @property
    def served(self) -> tuple[Served, ...]:
        return tuple(served for variant in self._made for served in variant.source.served)

    def notes(self) -> Iterator[str]:
        for variant in self._made:
            yield from variant.source.notes()

    def require_one_graph(self) -> None:
        if len({variant.call for variant in self._made}) > 1:
            raise OptionError("save", DIFFERENT_CALLS, "compile the model for each kind of call, and save each")
        for variant in self._made:  # where a file is loaded, nobody can ask torch
            variant.assumed.check(_all_points(variant.assumed.box))

    def _names_of(self, structure: Structure) -> Sequence[str]:
        from ..frontend.torch_export import input_names

        if structure not in self._names:
            self._names[structure] = input_names(self._module, structure)
        return self._names[structure]

    def _sizes(self, names: Sequence[str], types: Sequence[TensorKey], axes: Sequence[Mapping[int, str]]) -> Sizes:
        """The sizes that a call gives to names. Raises InputError for one outside of its range, or two of one name."""
        sizes: dict[str, int] = {}
        ranges = {dim.name: dim for dim in self._dims.box}
        for name, (shape, _), dims in zip(names, types, axes, strict=True):
            for axis, dim in dims.items():
                if sizes.setdefault(dim, shape[axis]) != shape[axis]:
                    raise InputError(f"input {name}", f"shape {list(shape)}", f"dimension {axis} must be {dim} = {sizes[dim]}")
                require_in_range(ranges[dim], shape[axis])
        return {name: sizes[name] for name in ranges}

    def _place(self, call: Call, axes: Sequence[Mapping[int, str]], sizes: Sizes) -> int:
        """Where the variant for a call is; the first call of a kind has all made that the ranges need."""
        types = tuple(
            (tuple(-1 if axis in dims else size for axis, size in enumerate(shape)), dtype)
            for (shape, dtype), dims in zip(call.types, axes, strict=True)
        )
        places = self._variants.setdefault((call.structure, types), [])

        def made_for(wanted: Sizes) -> int | None:
            return next((place for place in places if self._made[place].assumed.admits(wanted)), None)

        if (place := made_for(sizes)) is not None:  # which waits for no other call's export
            return place
        with self._lock:
            if (place := made_for(sizes)) is None:
                with self._builder.reporting():
                    for wanted in (*self._ahead(sizes), sizes):
                        if made_for(wanted) is None:
                            for variant in self._cover(call, axes, wanted):
                                self._made.append(variant)
                                places.append(len(self._made) - 1)
                place = made_for(sizes)
            assert place is not None, f"no graph for {sizes}"
            return place

    def _cover(self, call: Call, axes: Sequence[Mapping[int, str]], wanted: Sizes) -> list[_Variant]:
        """The variants for all sizes that are 0 or 1 where the wanted ones are. Where torch's guards hold for some of them alone,
        the others are exported for themselves, as long as these are few ranges. Raises as `_variant`."""
        pins = _pins(self._dims.box, wanted)
        whole = tuple(
            Dim(dim.name, pins[dim.name], pins[dim.name]) if dim.name in pins else replace(dim, least=max(dim.least, LEAST_SIZE))
            for dim in self._dims.box
        )
        pending, made = [whole], list[_Variant]()
        while pending:
            box = pending.pop()
            sizes = _nearest(box, wanted)
            try:
                made.append(self._variant(call, axes, pins, sizes, box, len(made)))
            except (CompileError, OptionError):
                for other in made:  # which say why these sizes are apart
                    other.assumed.check([sizes], whole)
                raise
            pending.extend(_without(box, made[-1].assumed.box))
        return made

    def _ahead(self, sizes: Sizes) -> Iterator[Sizes]:
        """A point of each variant that the ranges need, near the sizes of a call, the one for most sizes first; few of them."""
        classes = []
        for dim in self._dims.box:
            free = [size for size in (sizes[dim.name], dim.sizes[-1]) if size >= LEAST_SIZE]
            classes.append([(dim.name, size) for size in (*free[:1], *(size for size in (1,) if size in dim.sizes))])
        for place, point in enumerate(product(*classes)):
            if place < _MOST_VARIANTS:
                yield dict(point)

    def _variant(
        self, call: Call, axes: Sequence[Mapping[int, str]], pins: Sizes, sizes: Sizes, box: Box, before: int
    ) -> _Variant:
        """Export for any sizes of a box but those of `pins`, and compile for the part around `sizes` for which the graph holds,
        after `before` others: sizes that the first of them leaves may be constants, the last one must hold for its whole box.
        Raises CompileError, OptionError where torch knows better."""
        from ..frontend.importer import prepare_graph
        from ..frontend.torch_export import export_module

        self._builder.report("export", 0.0)
        leaves = [self._example(_resized(one, dims, sizes)) for one, dims in zip(call.tensors, axes, strict=True)]
        free = [frozenset(axis for axis, dim in dims.items() if dim not in pins) for dims in axes]
        try:
            found = export_module(self._module, call.structure, leaves, free)
        except CompileError as error:
            where = ", ".join(f"{name} = {size}" for name, size in sizes.items())
            raise CompileError(error.where, f"{error.what} (exported for {where})", error.fix) from error
        assert found.sizes is not None
        shapes, dtypes = [tuple(leaf.shape) for leaf in leaves], [dtype for _, dtype in call.types]
        if before:
            pins = {**pins, **_constants(found.sizes, axes, sizes)}
            box = tuple(_part(dim, range(pins[dim.name], pins[dim.name] + 1)) if dim.name in pins else dim for dim in box)
        _check_names(found.sizes, axes, pins)
        assumed = _Assumed(found.sizes, axes, box, shapes, dtypes)
        if before < _MOST_VARIANTS - 1:
            assumed = replace(assumed, box=_held(assumed, sizes))
        assumed.check(_points(assumed.box))
        graph = prepare_graph(found.model, self._builder.name)
        for value, dims in zip(graph.graph.inputs, axes, strict=False):
            assert value.shape is not None
            value.shape = type(value.shape)([dims.get(axis, dim) for axis, dim in enumerate(value.shape)])
        source = SymbolicSource(graph, self._builder, self._build, assumed.box)
        if all(sizes.values()):  # of nothing there is nothing to compute
            source.compile_ahead()
        return _Variant(source, call.structure, found.result, assumed)


def _pins(box: Box, sizes: Sizes) -> dict[str, int]:
    """The sizes for which torch makes a graph of its own, or the only ones that there may be."""
    ranges = {dim.name: dim for dim in box}
    return {name: size for name, size in sizes.items() if size < LEAST_SIZE or len(ranges[name].sizes) == 1}


def _constants(rules: SizeRules, axes: Sequence[Mapping[int, str]], sizes: Sizes) -> dict[str, int]:
    """The dimensions that torch made constants, which are the sizes that it exported for."""
    named = [(dim, found[axis]) for (_, found), dims in zip(rules.inputs, axes, strict=True) for axis, dim in dims.items()]
    return {dim: sizes[dim] for dim, symbol in named if symbol == sizes[dim]}


def _held(assumed: _Assumed, sizes: Sizes) -> Box:
    """The part of a box around `sizes` in which no guard breaks along one axis; the whole box where such parts are many."""
    found = []
    for dim in assumed.box:
        holds = [not assumed.refusal({**sizes, dim.name: size}) for size in dim.sizes]
        changes = [place for place in range(1, len(holds)) if holds[place] != holds[place - 1]]
        own = dim.sizes.index(sizes[dim.name])
        if len(changes) > _MOST_CHANGES or not holds[own]:
            return assumed.box
        begin = max((place for place in changes if place <= own), default=0)
        end = min((place for place in changes if place > own), default=len(holds))
        found.append(_part(dim, dim.sizes[begin:end]))
    return tuple(found)


def _part(dim: Dim, sizes: range) -> Dim:
    return replace(dim, least=sizes[0], greatest=sizes[-1])


def _without(box: Box, inner: Box) -> list[Box]:
    """What is left of a box without one inside of it."""
    found: list[Box] = []
    for place, (dim, own) in enumerate(zip(box, inner, strict=True)):
        first, last = dim.sizes.index(own.sizes[0]), dim.sizes.index(own.sizes[-1])
        rests = dim.sizes[:first], dim.sizes[last + 1 :]
        found += [(*inner[:place], _part(dim, rest), *box[place + 1 :]) for rest in rests if rest]
    return found


def _nearest(box: Box, wanted: Sizes) -> Sizes:
    """The sizes of a box that are the nearest to others."""
    return {dim.name: min(dim.sizes, key=partial(_distance, wanted[dim.name])) for dim in box}


def _distance(a: int, b: int) -> int:
    return abs(a - b)


def _resized(tensor: Tensor, dims: Mapping[int, str], sizes: Sizes) -> Tensor:
    """An example of the sizes to export for: the contents do not matter."""
    shape = tuple(tensor.shape)
    wanted = tuple(sizes[dims[axis]] if axis in dims else size for axis, size in enumerate(shape))
    if wanted == shape:
        return tensor
    new = getattr(tensor, "new_zeros", None)
    return np.zeros(wanted, np.dtype(str(tensor.dtype))) if new is None else cast("Tensor", new(wanted))


def _check_names(rules: SizeRules, axes: Sequence[Mapping[int, str]], pins: Sizes) -> None:
    """Raise OptionError, which names the dimension, where torch found sizes to be others than their names say."""
    symbols: dict[str, str] = {}
    fix = "leave it out of dims, or let the module not depend on it"
    for (name, found), dims in zip(rules.inputs, axes, strict=True):
        for axis, dim in dims.items():
            symbol = found[axis]
            if dim in pins:
                continue
            if isinstance(symbol, int):
                raise OptionError("dims", f"{dim}: torch made dimension {axis} of {name} the constant {symbol}", fix)
            if not symbol.isidentifier():
                raise OptionError("dims", f"{dim}: torch found dimension {axis} of {name} to be {symbol}, of other sizes", fix)
            if (other := symbols.setdefault(symbol, dim)) != dim:
                raise OptionError("dims", f"torch found {other} and {dim} to be the same size", "give both axes one name")


def _all_points(box: Box) -> Iterator[Sizes]:
    names = [dim.name for dim in box]
    return (dict(zip(names, point, strict=True)) for point in product(*(dim.sizes for dim in box)))


def _points(box: Box) -> Iterator[Sizes]:
    """The ends of all ranges, and what lies between where these are few."""
    names = [dim.name for dim in box]
    ranges = [list(dim.sizes) for dim in box]
    if prod(map(len, ranges)) > _MOST_CHECKED:
        ranges = [[*every[:4], *every[:: max(len(every) // 8, 1)], *every[-4:]] for every in ranges]
    for place, point in enumerate(product(*ranges)):
        if place < _MOST_CHECKED:
            yield dict(zip(names, point, strict=True))
