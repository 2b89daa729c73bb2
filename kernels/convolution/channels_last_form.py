"""NHWC (channels-last) groups: the form in which choose-layout writes them, and how templates read it.

    Transpose(0,3,1,2) of an operand -> one anchor with its epilogue, in ONNX's own order of dimensions -> Transpose(0,2,3,1)

or Transpose(0,4,1,2,3) and Transpose(0,2,3,4,1) for volumes; for signals both are Transpose(0,2,1). Pointwise operators before
a transpose are the prologue, computed where the operand is read.

A template sees the group without its transposes and reads elements at ONNX's indices (image, channel, *spatial); loads and
stores are contiguous along channels. A result may be some channels of a Concat with other tensors, or with slices of them: it is
stored in its place there, and the other pieces are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod

from tvm import tirx

from ...runtime.target import Target
from ..codegen.builder import Expr, Index, KernelBuilder, row_major, unravel
from ..cost.convolution import Convolution, channels_last_cycles, direct_cycles, in_words
from ..cost.estimate import Estimate, with_bytes, with_epilogue
from ..expressions.pointwise import POINTWISE
from ..formats.format import Format
from ..groups.group import Group, Op
from ..microkernels.register_tile import Tile
from ..template.contract import Refusal
from ..template.kernel import machine_of, same_place_operands
from ..template.loops import sweep
from ..template.values import GroupValues, Reader, anchors_of
from ..template.views import slice_places
from .window import Window, read_window

_RANKS = (3, 4, 5)  # of signals, of images and of volumes
_LINE_BYTES = 64


@dataclass(frozen=True)
class Destination:
    """Where an output of the inner group is stored: to the channels of `parameter` from `first` on."""

    value: str
    parameter: str
    first: int = 0


@dataclass(frozen=True)
class Piece:
    """An input, or a slice of it, that is copied to the channels of `parameter` from `first` on.

    `places`: (start, step) of the slice in each dimension; `shape`: its extents.
    """

    source: str
    places: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]
    parameter: str
    first: int


@dataclass(frozen=True)
class ChannelsLast:
    """A group `outer` of transposes around `inner`: one anchor with its epilogue.

    `operands` maps the inputs of `inner` that are channels-last in memory to their names in `outer`. All outputs of `inner` have
    the anchor's shape.
    """

    outer: Group
    inner: Group
    anchor: Op
    operands: Mapping[str, str]
    destinations: tuple[Destination, ...]
    pieces: tuple[Piece, ...]

    def readers(self, builder: KernelBuilder) -> dict[str, Reader]:
        """How to read the operands that are channels-last in memory."""
        return {name: self._reader(builder, parameter) for name, parameter in self.operands.items()}

    def _reader(self, builder: KernelBuilder, parameter: str) -> Reader:
        """A reader with new GroupValues at every element, as those of a prologue are bound in the loop body around it."""
        return lambda index: GroupValues(self.outer, builder).read(parameter, _turned(index))

    @property
    def operand_bytes(self) -> dict[str, int]:
        """Bytes of the anchor's image and weights, by "image" and "weights"; those of the hint, where calls decide."""
        kinds = zip(("image", "weights"), self.anchor.inputs, strict=False)
        return {operand: self.inner.types[name].hinted.size_bytes for operand, name in kinds}

    def is_computed(self) -> bool:
        """Whether the anchor's first operand has a prologue."""
        name = self.anchor.inputs[0]
        return self.operands.get(name, name) in self.outer.producers

    def read_image(self, builder: KernelBuilder, index: Index) -> Expr:
        """The element of the anchor's first operand at (image, channel, *spatial)."""
        return GroupValues(self.inner, builder, self.readers(builder)).read(self.anchor.inputs[0], index)

    def words(self, builder: KernelBuilder, index: Index) -> Callable[[Expr], Expr]:
        """The anchor's first operand as int32 pairs of neighbouring channels, counted from (image, channel, *spatial) on.

        It has 16-bit elements, an even number of channels and no prologue; the channel at `index` is even.
        """
        name = self.operands[self.anchor.inputs[0]]
        kind = self.outer.types[name]
        memory = builder.parameter(name, kind.elements // 2, "int32")
        image, channel, *place = index
        first = builder.bind(_offset((image, tirx.div(channel, 2), *place), (*kind.shape[:-1], kind.shape[-1] // 2)))
        return lambda word: memory[first + word]

    def store_epilogue(self, builder: KernelBuilder, index: Index, value: Expr) -> None:
        """The epilogue at an index of the anchor's output, whose element is `value`: compute all results, then store them."""
        made = self.anchor.outputs[0]
        if self.inner.reader_counts.get(made, 0) > 1:
            value = builder.name(value)
        values = GroupValues(self.inner, builder, {**self.readers(builder), made: lambda _: value})
        elements = {output: values.read(output, index) for output in self.inner.outputs}
        if len(elements) > 1 and not builder.is_grid:  # all are known before the first is stored: in place of what another reads
            elements = {output: builder.name(element) for output, element in elements.items()}
        for one in self.destinations:
            kind = self.outer.types[one.parameter]
            image, channel, *position = index
            place = _offset((image, channel + one.first if one.first else channel, *position), kind.shape)
            builder.store(builder.parameter(one.parameter, kind.elements, kind.dtype), place, elements[one.value])

    def same_place_operands(self, builder: KernelBuilder) -> tuple[tuple[int, str], ...]:
        """Inputs that the epilogue alone reads, and only at the element that it then stores, so that a result, by its number, may
        alias them: in a kernel that calls `store_epilogue` once for each element. None on GPUs, whose grids follow each other,
        nor where pieces are copied or no state is read."""
        if builder.is_grid or self.pieces or not self.outer.updates_state:
            return ()
        after = self.operands.keys() - {*self.anchor.inputs, *self.inner.zero_points.values()}
        sizes = {one.parameter: self.inner.types[one.value].elements for one in self.destinations}
        whole = {name for name, elements in sizes.items() if elements == self.outer.types[name].elements}
        return tuple(
            (number, name)
            for number, name in same_place_operands(self.outer)
            if self.outer.outputs[number] in whole
            and all(after.issuperset(op.outputs) for op in self.outer.ops if name in op.inputs)
        )

    def epilogue_bytes(self) -> int:
        """Bytes of the results, and of the epilogue's operands of their shape."""
        return sum(self.outer.types[name].size_bytes for name in self._epilogue_tensors())

    def prefetch(self, builder: KernelBuilder, index: Index, channels: int) -> None:
        """Prefetch the cache lines that the epilogue reads and writes for `channels` elements from an index on."""
        for name in self._epilogue_tensors():
            kind = self.outer.types[name]
            memory, item_bytes = builder.parameter(name, kind.elements, kind.dtype), kind.bits // 8
            firsts = [one.first for one in self.destinations if one.parameter == name] or [0]
            image, channel, *position = index
            for first in firsts:
                place = _offset((image, channel + first, *position), kind.shape)
                for at in range(0, channels, _LINE_BYTES // item_bytes):
                    builder.prefetch(memory[place + at])

    def _epilogue_tensors(self) -> tuple[str, ...]:
        """The results, and the epilogue's operands of their shape."""
        shape = self.inner.types[self.anchor.outputs[0]].shape
        read = {name for op in self.inner.ops if op is not self.anchor for name in op.inputs}
        beside = (self.operands[name] for name in sorted(read & self.operands.keys()) if self.inner.types[name].shape == shape)
        return (*dict.fromkeys(name for name in beside if name in self.outer.inputs), *self.outer.outputs)

    def copy_pieces(self, builder: KernelBuilder) -> None:
        """Copy the other pieces of a Concat to the results."""
        for piece in self.pieces:
            if prod(piece.shape):
                self._copy_piece(builder, piece)

    def _copy_piece(self, builder: KernelBuilder, piece: Piece) -> None:
        *lines, width, channels = piece.shape
        source, target = (self.outer.types[name] for name in (piece.source, piece.parameter))
        read = builder.parameter(piece.source, source.elements, source.dtype)
        written = builder.parameter(piece.parameter, target.elements, target.dtype)
        first, step = piece.places[-1]
        if builder.is_grid:
            with builder.chunks(prod(piece.shape), prod(piece.shape)) as element:
                index = unravel(element, piece.shape)
                places = [i * step + start for i, (start, step) in zip(index, piece.places, strict=True)]
                place = row_major((*index[:-1], index[-1] + piece.first), target.shape)
                builder.store(written, place, read[row_major(places, source.shape)])
            return
        with builder.chunks(prod(lines), prod(piece.shape)) as line, builder.loop(width, name="column") as column:
            at = (*(builder.bind(i) for i in unravel(line, tuple(lines))), column)
            starts = [i * step + start for i, (start, step) in zip(at, piece.places, strict=False)]
            origin = builder.bind(row_major((*starts, first), source.shape))
            base = builder.bind(row_major((*at, piece.first), target.shape))
            lanes = builder.lanes(target.dtype)
            builder.vector_loop(channels, lanes, lambda i: builder.store(written, base + i, read[origin + i * step]))


def channels_last_form(group: Group, *, may_join: bool = False) -> ChannelsLast | Refusal:
    """The group as NHWC templates see it; a Refusal where it has another form.

    With `may_join` a result may be a part of a Concat: the template calls `copy_pieces`.
    """
    moves = [op for op in group.ops if op.op_type == "Transpose"]
    heads = [op for op in moves if _turns(op, _to_first) and _is_pointwise(_before(group, op.inputs))]
    before = _before(group, [op.inputs[0] for op in heads])
    operands = {op.outputs[0]: op.inputs[0] for op in heads}
    results = {op.outputs[0]: op.inputs[0] for op in moves if op not in heads and _turns(op, _to_last)}
    if not results or len(operands) + len(results) != len(moves):
        return Refusal("its values do not lie channels-last")
    joins = [op for op in group.ops if op.op_type == "Concat"] if may_join else []
    parts = [part for join in joins for part in _parts(group, join, results)]
    destinations = tuple(part for part in parts if isinstance(part, Destination))
    destinations += tuple(Destination(made, out) for out, made in results.items() if out in group.outputs)
    if {one.parameter for one in destinations} != set(group.outputs):
        return Refusal("its values do not lie channels-last")
    around = {*operands, *results, *(part.parameter for part in parts)}
    joined = {name for join in joins if join.outputs[0] in around for name in join.inputs}
    ops = tuple(op for op in group.ops if op not in before and op.outputs[0] not in around | joined)
    made = {output for op in ops for output in op.outputs}
    inside = {*made, *(name for name in group.literals if name not in group.inputs)}
    read = [name for op in ops for name in op.inputs if name and name not in inside]
    outputs = tuple(dict.fromkeys(one.value for one in destinations))
    inner = replace(group, ops=ops, inputs=tuple(dict.fromkeys(read)), outputs=outputs)
    anchors = anchors_of(inner)
    if len(anchors) != 1:
        return Refusal(f"has {len(anchors)} anchors")
    (anchor,) = anchors
    if not made.issuperset(outputs) or not {*operands, *group.inputs}.issuperset(read):
        return Refusal("its values do not lie channels-last")
    if any(group.types[name].shape != group.types[anchor.outputs[0]].shape for name in outputs):
        return Refusal("a result is not of its anchor's shape")
    pieces = tuple(part for part in parts if isinstance(part, Piece))
    return ChannelsLast(group, inner, anchor, operands, destinations, pieces)


def extents_of(form: ChannelsLast) -> Convolution:
    """The extents of the form's anchor, a Conv or ConvTranspose, for the cost model."""
    return convolution_of(form.inner, form.anchor, read_window(form.inner, form.anchor))


def convolution_of(group: Group, anchor: Op, window: Window) -> Convolution:
    """The extents of a Conv or ConvTranspose, for the cost model."""
    source, groups = group.types[anchor.inputs[0]], anchor.attribute("group", 1)
    images, channels, *_ = source.shape
    outputs = group.types[anchor.outputs[0]].shape[1] // groups
    numbers = (images, groups, channels // groups, outputs), window.inputs, window.outputs, window.kernel, window.strides
    has_pads, element_bytes = any(window.begins), source.size_bytes // max(source.elements, 1)
    if anchor.op_type == "Conv":
        return Convolution.of_dimensions(*numbers, window.dilations, has_pads=has_pads, element_bytes=element_bytes)
    return Convolution.of_phases(*numbers, has_pads=has_pads, element_bytes=element_bytes)


def vector_cycles(form: ChannelsLast, target: Target, number_format: Format) -> float:
    """Cycles in which vectors of output channels make the products of a form's anchor, in words where the format has them."""
    one, machine = extents_of(form), number_format.machine(machine_of(target, number_format.sums))
    cycles = channels_last_cycles(in_words(one, number_format.k_pack) if number_format.k_pack > 1 else one, machine)
    return cycles if form.anchor.inputs[0] in form.operands else cycles + direct_cycles(one, machine)


def convolution_estimate(form: ChannelsLast, cycles: float, target: Target, *, unit: str = "fma") -> Estimate:
    """The estimate of a form whose anchor takes so many cycles, with its epilogue and the bytes of the whole group."""
    return with_epilogue(estimate_with_bytes(form, cycles, unit=unit), form.inner, target.machine, form.anchor)


def estimate_with_bytes(form: ChannelsLast, cycles: float, *, unit: str) -> Estimate:
    """The estimate of a form that takes so many cycles, its epilogue included, with the bytes of the whole group."""
    one = extents_of(form)
    operations = 2 * one.images * one.groups * one.rows * one.columns * one.outputs * one.depth * one.k_pack
    return with_bytes(Estimate(cycles, operations, unit=unit), form.outer)


def each_column(builder: KernelBuilder, first: Expr, outputs: int, tile: Tile, body: Callable[[Expr], None]) -> None:
    """`body(column)` for each column of the register tile from channel `first` on that is one of `outputs` channels."""
    rest = outputs % tile.columns
    is_whole = first + tile.columns <= outputs
    if not rest:
        sweep(builder, tile.columns, tile.lanes, body)
    elif outputs < tile.columns:
        sweep(builder, rest, tile.lanes, body)
    else:
        with builder.when(is_whole):
            sweep(builder, tile.columns, tile.lanes, body)
        with builder.when(tirx.Not(is_whole)):
            sweep(builder, rest, tile.lanes, body)


def _parts(group: Group, join: Op, results: Mapping[str, str]) -> tuple[Destination | Piece, ...]:
    """The parts of a Concat of channels that is an output of the group; empty where one of them has another form."""
    if join.attribute("axis") != len(group.types[join.outputs[0]].shape) - 1 or join.outputs[0] not in group.outputs:
        return ()
    parts: list[Destination | Piece] = []
    first = 0
    for name in join.inputs:
        shape, maker = group.types[name].shape, group.producers.get(name)
        if name in results:
            parts.append(Destination(results[name], join.outputs[0], first))
        elif maker is None:
            parts.append(Piece(name, ((0, 1),) * len(shape), shape, join.outputs[0], first))
        elif maker.op_type == "Slice" and maker.inputs[0] in group.inputs and (places := slice_places(group, maker)):
            parts.append(Piece(maker.inputs[0], tuple(places), shape, join.outputs[0], first))
        else:
            return ()
        first += shape[-1]
    return tuple(parts)


def _before(group: Group, names: Iterable[str]) -> list[Op]:
    """The operators that compute some values."""
    before: list[Op] = []
    waiting = list(names)
    while waiting:
        op = group.producers.get(waiting.pop())
        if op is not None and op not in before:
            before.append(op)
            waiting += op.inputs
    return before


def _is_pointwise(ops: Iterable[Op]) -> bool:
    return all(op.op_type in POINTWISE for op in ops)


def _offset(index: Index, shape: tuple[int, ...]) -> Expr:
    """Flat offset of an index (image, channel, *spatial) in memory of this shape (image, *spatial, channel)."""
    return row_major(_turned(index), shape)


def _turned(index: Index) -> Index:
    """The index (image, *spatial, channel) of the element at (image, channel, *spatial)."""
    return tuple(index[axis] for axis in _to_last(len(index)))


def _to_first(rank: int) -> tuple[int, ...]:
    return (0, rank - 1, *range(1, rank - 1))


def _to_last(rank: int) -> tuple[int, ...]:
    return (0, *range(2, rank), 1)


def _turns(op: Op, order: Callable[[int], tuple[int, ...]]) -> bool:
    """Whether a Transpose of a signal, image or volume has the permutation `order(rank)`."""
    axes = op.attribute("perm") or ()
    return len(axes) in _RANKS and tuple(axes) == order(len(axes))
