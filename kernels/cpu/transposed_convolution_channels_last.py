"""ConvTranspose of signals and images whose result lies channels-last, as tile products over positions of its input.

Output positions `u * stride + phase` of one phase are a convolution of stride 1 with some of the weights. Phases that read the
input alike are one product with as many times the columns: a kernel of 2 by 2 with stride 2 is four 1 by 1 products of the same
rows. As in `convolution_channels_last`, positions are rows, channels are columns, and where a phase reads beyond the input there
is a copy of it with zeros around.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product as nest
from math import ceil, prod

import numpy as np
from tvm import tirx

from ...runtime.plan import TensorType
from ...runtime.target import Target
from ..bfloat16 import multiply_add, words_multiply_add
from ..builder import Buffer, Expr, Index, row_major, unravel
from ..costs import channels_last_tiles
from ..group import Group
from ..template import BuiltKernel, Operand, Refusal
from ..values import GroupValues
from .anchored import accumulator_type
from .channels_last import ChannelsLast, channels_last_form
from .common import finish, new_builder
from .convolution_channels_last import deal, each_column, has_pairs
from .packing import PackPanels
from .padded_image import Image, padded_image
from .tile_product import Tile, sum_tile
from .window import Taps, Window, read_window, transposed_taps

_TYPES = ("float32", "float64", "float16", "bfloat16")
_WORK_PER_OPERATION = 16
_NEAR_BYTES = 256 * 1024  # of the input that stays in the second cache while all weights pass
_MAX_PRODUCTS = 16  # each is code of its own


def build(group: Group, target: Target) -> BuiltKernel | Refusal:
    """Takes one ConvTranspose of signals or images whose result is transposed to channels-last, with its followers."""
    form = channels_last_form(group, may_join=True)
    if isinstance(form, Refusal):
        return form
    if form.anchor.op_type != "ConvTranspose":
        return Refusal("has no transposed convolution")
    source = form.inner.types[form.anchor.inputs[0]]
    if source.dtype not in _TYPES:
        return Refusal(f"no convolution of {source.dtype}")
    if len(source.shape) > 4:
        return Refusal("is of volumes")
    window = _of_lines(read_window(form.inner, form.anchor))
    products = [_Product(down, across) for down, across in nest(phase_runs(window, 0), phase_runs(window, 1))]
    if len(products) > _MAX_PRODUCTS:
        return Refusal(f"{len(products)} different phases of output positions, more than {_MAX_PRODUCTS}")
    return _TransposedConvolution(form, target, window).build(products)


def _of_lines(window: Window) -> Window:
    """The window over an image; over one of a single line, where it is over a signal."""
    if len(window.kernel) > 1:
        return window
    ones, zeros = (1, *window.kernel), (0, *window.begins)
    strides, dilations = (1, *window.strides), (1, *window.dilations)
    return Window(ones, strides, dilations, zeros, (1, *window.inputs), (1, *window.outputs))


@dataclass(frozen=True)
class PhaseRun:
    """Neighbouring phases of one dimension that read the input alike: `taps` are those of the first, and weights of the next
    phases begin one further each. There are `positions` outputs of each phase.
    """

    first: int
    count: int
    taps: Taps
    positions: int


def phase_runs(window: Window, axis: int) -> list[PhaseRun]:
    """The phases of one dimension that have output positions."""
    runs: list[PhaseRun] = []
    for phase in range(min(window.strides[axis], window.outputs[axis])):
        taps = transposed_taps(window, axis, phase)
        if not taps.count:
            taps = Taps(0, 1, 0, 0, 0)  # such positions are the bias alone
        positions = len(range(phase, window.outputs[axis], window.strides[axis]))
        last = runs[-1] if runs else None
        following = last and (replace(last.taps, first=last.taps.first + last.count) if taps.count else last.taps)
        if last and taps == following and positions == last.positions:
            runs[-1] = replace(last, count=last.count + 1)
        else:
            runs.append(PhaseRun(phase, 1, taps, positions))
    return runs


@dataclass(frozen=True)
class _Product:
    """Phases that are one product."""

    down: PhaseRun
    across: PhaseRun

    @property
    def phases(self) -> tuple[int, int]:
        return self.down.count, self.across.count

    @property
    def positions(self) -> tuple[int, int]:
        return self.down.positions, self.across.positions

    @property
    def taps(self) -> tuple[Taps, Taps]:
        return self.down.taps, self.across.taps


@dataclass(frozen=True)
class PackPhases:
    """The weights of one product, [groups * phases, panels, depth, tile]: the last panel filled up with zeros.

    `shape` is (group, input, output, row, column); `down` and `across` are the rows and columns of the kernel that each phase
    uses, one after the other, so that they divide into equal parts.
    """

    shape: tuple[int, int, int, int, int]
    phases: tuple[int, int]
    down: tuple[int, ...]
    across: tuple[int, ...]
    tile: int
    pairs: bool = False  # of neighbouring inputs, as in PackPanels

    @property
    def panels(self) -> PackPanels:
        """How the weights of all phases, once taken, are laid out."""
        taps = len(self.down) // self.phases[0], len(self.across) // self.phases[1]
        shape = (*self.shape[:3], self.phases[0], taps[0], self.phases[1], taps[1])
        return PackPanels(shape, (0, 3, 5, 2, 4, 6, 1), 3, 1, self.tile, pairs=self.pairs)

    def packed_type(self, source: TensorType) -> TensorType:
        return self.panels.packed_type(source)

    def __call__(self, array: np.ndarray) -> np.ndarray:
        taken = array.reshape(self.shape)[..., list(self.down), :][..., list(self.across)]
        return self.panels(taken)

    def __str__(self) -> str:
        pairs = ",pairs" if self.pairs else ""
        return f"phases({self.shape},{self.phases},{self.down},{self.across},{self.tile}{pairs})".replace(" ", "")


class _TransposedConvolution:
    """One kernel being built."""

    def __init__(self, form: ChannelsLast, target: Target, window: Window) -> None:
        self.form, self.target, self.anchor, self.window = form, target, form.anchor, window
        self.builder = new_builder(target, form.outer.configuration)
        self.source = form.inner.types[form.anchor.inputs[0]]
        self.images, self.channels = self.source.shape[:2]
        self.groups = form.anchor.attribute("group", 1)
        self.out_channels = form.inner.types[form.anchor.outputs[0]].shape[1]
        self.accumulator = accumulator_type(self.source.dtype)
        self.is_last = form.anchor.inputs[0] in form.operands
        self.is_whole = True  # whether products read the input itself
        self.is_paired = has_pairs(form, target, self.channels // self.groups)
        if self.is_paired:  # a word of two channels is one element
            self.channels //= 2
        self.packed: dict[str, Operand] = {}

    def build(self, products: list[_Product]) -> BuiltKernel | Refusal:
        self.form.copy_pieces(self.builder)
        flops = 0
        if self.form.inner.types[self.anchor.outputs[0]].elements:
            leads, reaches = self._reaches(products)
            self.is_whole = not any(leads) and all(reach <= n for reach, n in zip(reaches, self.window.inputs, strict=True))
            rank = len(self.source.shape) - 2
            image = padded_image(self.builder, self.form, leads[-rank:], reaches[-rank:], words=self.is_paired)
            if isinstance(image, Refusal):
                return image
            for number, product in enumerate(products):
                flops += self._emit(number, product, image, leads)
        name = "transposed_convolution_channels_last"
        return finish(name, self.builder, self.form.outer, flops=flops, packed=self.packed)

    def _reaches(self, products: list[_Product]) -> tuple[list[int], list[int]]:
        """How far before the input products read, and up to where, counted from there."""
        leads, reaches = [], []
        for axis in range(2):
            ends = [(one.taps[axis].reach, one.positions[axis]) for one in products if one.taps[axis].count]
            lead = max([0, *(-first for (first, _), _ in ends)])
            leads.append(lead)
            reaches.append(max([0, *(lead + last + positions for (_, last), positions in ends)]))
        return leads, reaches

    # One product ------------------------------------------------------------------------------------------------------

    def _emit(self, number: int, product: _Product, image: Image, leads: list[int]) -> int:
        """Write the loops over tiles; returns the arithmetic operations of the product."""
        builder, (down, across) = self.builder, product.taps
        inputs, outputs = self.channels // self.groups, self.out_channels // self.groups
        depth = (down.count, across.count, inputs)
        images, lines, rows = self._positions(product)
        lanes = builder.lanes(self.accumulator)
        ranked = channels_last_tiles(rows, outputs, max(prod(depth), 1), inputs, lanes, self.target.vector_registers)
        tile = builder.choose("tile", {str(tile): tile for tile in (Tile(*shape, lanes) for shape in ranked)})
        panels, phases = ceil(outputs / tile.columns), prod(product.phases)
        weights = self._weights(number, product, tile.columns) if prod(depth) else None
        flops: int = (4 if self.is_paired else 2) * images * lines * rows * phases * self.out_channels * prod(depth)
        combine = words_multiply_add(self.target) if self.is_paired else multiply_add

        def emit_tile(place: dict[str, Expr]) -> None:
            group, phase, first = place["group"], place["phase"], builder.bind(place["n"] * tile.columns)
            line = builder.bind(tirx.min(place["block"] * size + place["line"], lines - 1)) if is_lines else 0
            stretch = place["m"] if is_lines else place["block"] * size + place["line"]
            start = builder.bind(tirx.min(stretch * tile.rows, rows - tile.rows))
            origin = (line + down.begin + leads[0], start + across.begin + leads[1])
            corner = builder.bind(image.offset(place["image"], group * inputs, *self._place(origin)))
            panel = builder.bind(((group * phases + phase) * panels + place["n"]) * (prod(depth) * tile.columns))

            def a(row: int, ks: Index) -> Expr:
                at = image.offset(0, ks[2], *self._place((ks[0] * down.pitch, row + ks[1] * across.pitch)))
                return self._factor(image.buffer[corner + at])

            def b(column: Expr, ks: Index) -> Expr:
                assert weights is not None
                return self._factor(weights[panel + row_major(ks, depth) * tile.columns + column])

            sums = sum_tile(builder, tile, self.accumulator, depth, a, b, combine)
            with builder.loop(tile.rows, name="row") as row:
                index = self._index(product, place["image"], line, builder.bind(start + row), phase)
                base = builder.bind(row * tile.columns)

                def store(c: Expr) -> None:
                    self._store(index, group * outputs + first + c, sums[base + c])

                each_column(builder, first, outputs, tile, store)

        # Blocks of lines, or of tiles where there is only one line: their rows stay near while all weights pass.
        is_lines = lines > 1
        tiles = ceil(rows / tile.rows)
        units, unit = (lines, rows) if is_lines else (tiles, tile.rows)
        near = max(1, _NEAR_BYTES // max(unit * inputs * self.groups * 4, 1))
        blocks = ceil(units / near)
        size = ceil(units / blocks)
        extents = {"image": images, "block": blocks, "group": self.groups, "phase": phases, "n": panels, "line": size}
        if is_lines:
            extents["m"] = tiles
        deal(builder, extents, flops // _WORK_PER_OPERATION, emit_tile)
        return int(flops)

    def _factor(self, element: Expr) -> Expr:
        return element if self.is_paired else tirx.Cast(self.accumulator, element)

    def _place(self, place: Sequence[Expr]) -> Index:
        """A line and a column as ONNX has them: signals have no lines."""
        return tuple(place)[-(len(self.source.shape) - 2) :]

    def _is_flat(self, product: _Product) -> bool:
        """Whether each position of the product reads the input's element of its own place, and the input is no copy."""
        is_same = all(one.count == 1 and one.begin == 0 for one in product.taps)
        return self.is_whole and is_same and product.positions == self.window.inputs

    def _positions(self, product: _Product) -> tuple[int, int, int]:
        """Images, lines of each and positions of a line; lines without anything between them are one, and so are images."""
        lines, rows = product.positions
        if self._is_flat(product):
            return (1, 1, self.images * lines * rows) if self.is_last else (self.images, 1, lines * rows)
        return self.images, lines, rows

    def _index(self, product: _Product, number: Expr, line: Expr, position: Expr, phase: Expr) -> Index:
        """Image, row and column of the output for a position of a line."""
        if self._is_flat(product):
            if self.is_last:
                number, line, position = unravel(position, (self.images, *product.positions))
            else:
                line, position = unravel(position, product.positions)
        parts = unravel(phase, product.phases)
        runs = (product.down, product.across)
        row, column = (
            u * stride + run.first + part
            for u, stride, run, part in zip((line, position), self.window.strides, runs, parts, strict=True)
        )
        return number, self.builder.bind(row), self.builder.bind(column)

    def _store(self, index: Index, channel: Expr, value: Expr) -> None:
        bias = self.anchor.inputs[2] if len(self.anchor.inputs) > 2 else ""
        if bias:
            value = value + tirx.Cast(self.accumulator, GroupValues(self.form.inner, self.builder).read(bias, (channel,)))
        number, *place = index
        dtype = self.form.inner.types[self.anchor.outputs[0]].dtype
        self.form.follow(self.builder, (number, channel, *self._place(place)), tirx.Cast(dtype, value))

    # Weights ----------------------------------------------------------------------------------------------------------

    def _weights(self, number: int, product: _Product, tile: int) -> Buffer:
        name = self.anchor.inputs[1]
        inputs = self.source.shape[1] // self.groups
        shape = (self.groups, inputs, self.out_channels // self.groups, *self.window.kernel)
        down, across = (tuple(_weight_places(run)) for run in (product.down, product.across))
        kind = self.form.inner.types[name]
        pack = PackPhases(shape, product.phases, down, across, tile, self.is_paired)
        if name not in self.form.inner.constants:
            return self._pack_here(pack, product, self.builder.parameter(name, kind.elements, kind.dtype))
        key = f"{name}/last{number}"
        self.packed[key] = Operand(name, pack)
        elements = pack.packed_type(kind).elements
        if self.is_paired:
            return self.builder.parameter(key, elements // 2, "int32")
        return self.builder.parameter(key, elements, kind.dtype)

    def _pack_here(self, pack: PackPhases, product: _Product, source: Buffer) -> Buffer:
        """The same layout, written by the kernel where weights are not constant."""
        builder, packed = self.builder, pack.packed_type(TensorType((), str(source.dtype)))
        groups, panels, depth, tile = packed.shape
        buffer = builder.workspace(packed.elements, packed.dtype)
        taps = product.taps
        with builder.chunks(groups * panels, packed.elements) as chunk, builder.loop(depth, name="k") as k:
            group, down, across, panel = unravel(chunk, (self.groups, *product.phases, panels))
            i, j, channel = unravel(k, (taps[0].count, taps[1].count, pack.shape[1]))
            row, column = taps[0].first + down + i * taps[0].step, taps[1].first + across + j * taps[1].step
            with builder.loop(tile, name="line") as line:
                output = builder.bind(panel * tile + line)
                place = (group, channel, tirx.min(output, pack.shape[2] - 1), row, column)
                value = source[builder.bind(row_major(place, pack.shape))]
                filled = builder.masked(output < pack.shape[2], value, tirx.const(0, packed.dtype))
                builder.store(buffer, (chunk * depth + k) * tile + line, filled)
        return buffer


def _weight_places(run: PhaseRun) -> Iterator[int]:
    """Rows or columns of the kernel that the phases of a run use, phase after phase."""
    for phase in range(run.count):
        yield from (run.taps.first + phase + i * run.taps.step for i in range(run.taps.count))
