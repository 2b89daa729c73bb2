"""Conv and ConvTranspose of any rank, NCHW, by implicit GEMM over a padded copy of the input, with a pointwise epilogue.

A is the weights (a row an output channel), packed at compile time if they are constant; columns of B are output positions. The
input is copied once into zero-padded planes and, for a stride s, split into the s phases of its positions. Then the positions
that an output row reads are contiguous for each tap, and no im2col matrix exists. Without padding and stride the input itself is
read. A transposed convolution is one such product for each phase of its output positions (position mod stride).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product as nest
from math import prod

from tvm import tirx

from ...runtime.plan import TensorType
from ...runtime.symbolic.sizes import SizeLike, greatest_of, least_of, maximum_of
from ...runtime.target import Target
from ..codegen.builder import Buffer, Expr, Index, row_major, unravel
from ..cost.convolution import channels_first_cycles
from ..cost.estimate import Estimate, with_bytes, with_epilogue
from ..cost.memory import scattered_cycles
from ..formats.format import Format, format_for, is_plain
from ..groups.group import Group, Op
from ..microkernels.packing import PackPanels, pack_in_kernel
from ..microkernels.register_tile import Plane, TileProduct, emit, tile_options
from ..template.contract import BuiltKernel, Candidate, Operand, Refusal
from ..template.kernel import epilogue_operands, finish, machine_of, minimum, new_builder
from ..template.loops import store_epilogue
from ..template.prologue import is_computed
from ..template.values import GroupValues, anchor_of, followers_of
from .channels_last_form import convolution_of
from .window import Taps, Window, read_window, transposed_taps

_MAX_PHASES = 16  # of a transposed convolution's output: each has code of its own


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes one Conv or ConvTranspose with an epilogue of pointwise operators of its output's shape."""
    anchor = anchor_of(group)
    source = group.types[anchor.inputs[0]]
    number_format = format_for(group.storage(anchor.inputs[0]), group.storage(anchor.inputs[1]), target, is_plain)
    if number_format is None:
        return Refusal(f"no convolution of {source.dtype}")
    if len(source.shape) < 3:
        return Refusal("has no spatial dimension")
    window = read_window(group, anchor)
    if anchor.op_type == "ConvTranspose" and prod(window.strides) > _MAX_PHASES:
        return Refusal(f"{prod(window.strides)} phases of output positions, more than {_MAX_PHASES}")
    one = convolution_of(group, anchor, window)
    operations = 2 * one.images * one.groups * one.rows * one.columns * one.outputs * one.depth
    scattered = scattered_cycles(group.types[anchor.outputs[0]].elements) if one.phases > 1 else 0.0
    cycles = channels_first_cycles(one, number_format.machine(machine_of(target, number_format.sums))) + scattered
    alone = with_bytes(Estimate(cycles, operations), group)
    estimate = with_epilogue(alone, group, target.machine, anchor)
    return Candidate(estimate, lambda: _Convolution(group, anchor, window, target, number_format).build())


@dataclass(frozen=True)
class _Planes:
    """The padded copy of a channel: for each phase (input position mod stride) a plane of `extents`.

    Element u of phase f in a dimension is input position (u - lead) * stride + f, zero outside of the input. In a dimension
    where all taps read one phase, `only` is that phase, and the others are not copied.
    """

    strides: tuple[int, ...]
    only: tuple[int | None, ...]
    leads: tuple[int, ...]
    extents: tuple[int, ...]

    @property
    def phases(self) -> tuple[int, ...]:
        """Number of phases copied in each dimension."""
        return tuple(stride if only is None else 1 for stride, only in zip(self.strides, self.only, strict=True))

    @property
    def size(self) -> int:
        """Elements of all phases of one channel."""
        return prod(self.phases) * prod(self.extents)

    def phase(self, number: Expr) -> Index:
        """The phase in each dimension of the plane with this number."""
        parts = unravel(number, self.phases)
        return tuple(part if only is None else only for part, only in zip(parts, self.only, strict=True))

    def plane_of(self, at: list[Expr]) -> Expr:
        """Number of the plane that holds the input positions congruent to `at`."""
        parts = [
            tirx.floormod(x, stride) if only is None else 0 for x, stride, only in zip(at, self.strides, self.only, strict=True)
        ]
        return row_major(parts, self.phases)


class _Convolution:
    """The kernel being built."""

    def __init__(self, group: Group, anchor: Op, window: Window, target: Target, number_format: Format) -> None:
        self.anchor, self.window, self.target = anchor, window, target
        self.transposed = anchor.op_type == "ConvTranspose"
        self.rank = len(window.kernel)
        self.group = group
        self.builder = new_builder(target, group.configuration)
        self.images, self.channels = group.types[anchor.inputs[0]].shape[:2]
        self.groups = anchor.attribute("group", 1)
        self.out_channels = group.types[anchor.outputs[0]].shape[1]
        self.source = group.types[anchor.inputs[0]]
        self.format, self.accumulator = number_format, number_format.sums
        self.inplace = epilogue_operands(self.builder, group, anchor)
        self.packed: dict[str, Operand] = {}

    def build(self) -> BuiltKernel:
        phases = list(nest(*(range(s) for s in self.window.strides))) if self.transposed else [(0,) * self.rank]
        taps = [tuple(self._taps(axis, phase[axis]) for axis in range(self.rank)) for phase in phases]
        outputs = [tuple(self._positions(axis, phase[axis]) for axis in range(self.rank)) for phase in phases]
        planes = self._planes(taps, outputs)
        computed = is_computed(self.group, self.anchor.inputs[0])
        direct = not computed and self._is_input(planes)
        direct = direct and all(least_of(_columns(out, self.window.inputs)) >= self._lanes for out in outputs)
        if direct:
            planes = replace(planes, extents=self.window.inputs)
            buffer = self.builder.parameter(self.anchor.inputs[0], self.source.elements, self.source.dtype)
        else:
            buffer = self._stage(planes)
        flops = 0
        for number, phase in enumerate(phases):
            if greatest_of(prod(outputs[number])):
                product = self._product(number, phase, taps[number], outputs[number], planes, buffer, direct)
                weights = self.group.types[self.anchor.inputs[1]].size_bytes
                emit(self.builder, product, a_bytes=weights, b_bytes=self.source.size_bytes // max(self.images, 1))
                flops += product.flops
        return finish("convolution", self.builder, self.group, flops=flops, packed=self.packed, inplace=self.inplace)

    # Geometry ---------------------------------------------------------------------------------------------------------

    @property
    def _lanes(self) -> int:
        return self.builder.lanes(self.accumulator)

    def _taps(self, axis: int, phase: int) -> Taps:
        window = self.window
        if not self.transposed:
            return Taps(0, 1, window.kernel[axis], -window.begins[axis], window.dilations[axis])
        return transposed_taps(window, axis, phase)

    def _positions(self, axis: int, phase: int) -> int:
        """Output positions of one phase."""
        extent = self.window.outputs[axis]
        return -(-maximum_of(extent - phase, 0) // self.window.strides[axis]) if self.transposed else extent

    def _planes(self, taps: list[tuple[Taps, ...]], outputs: list[tuple[int, ...]]) -> _Planes:
        strides = (1,) * self.rank if self.transposed else self.window.strides
        only, leads, extents = [], [], []
        for axis, stride in enumerate(strides):
            ats = [one[axis].at(i) for one in taps for i in range(one[axis].count)] or [0]
            phases = {at % stride for at in ats}
            only.append(phases.pop() if len(phases) == 1 else None)
            leads.append(max(0, -min(at // stride for at in ats)))
            longest = reduce(maximum_of, [out[axis] for out in outputs])
            extents.append(longest + max(0, *(at // stride for at in ats)) + leads[-1])
        return _Planes(strides, tuple(only), tuple(leads), tuple(extents))

    def _is_input(self, planes: _Planes) -> bool:
        """Whether the input can be read in place."""
        fits = all(extent <= whole for extent, whole in zip(planes.extents, self.window.inputs, strict=True))
        return prod(planes.strides) == 1 and not any(planes.leads) and fits

    # Code -------------------------------------------------------------------------------------------------------------

    def _stage(self, planes: _Planes) -> Buffer:
        """Copy the input into planes of the workspace: [image, channel, phase, position]."""
        builder, rows = self.builder, self.images * self.channels
        slack = 8 * self._lanes  # the last tile may read beyond the last plane
        buffer = builder.workspace(rows * planes.size + slack, self.accumulator)
        lines = prod(planes.extents[:-1])
        with (
            builder.chunks(rows, rows * planes.size) as row,
            builder.loop(prod(planes.phases), name="phase") as number,
            builder.loop(lines, name="line") as line,
        ):
            base = builder.bind(((row * prod(planes.phases) + number) * lines + line) * planes.extents[-1])
            self._stage_line(buffer, planes, planes.phase(number), row, line, base)
        return buffer

    def _stage_line(self, buffer: Buffer, planes: _Planes, phase: Index, row: Expr, line: Expr, base: Expr) -> None:
        """Copy the positions of one phase in a row of the input, zero-padded on both sides."""
        builder, inputs, stride, extent = self.builder, self.window.inputs, planes.strides[-1], planes.extents[-1]
        outer = zip(unravel(line, planes.extents[:-1]), planes.leads, planes.strides, phase, strict=False)
        at = [builder.bind((u - lead) * s + f) for u, lead, s, f in outer]
        image, channel = builder.bind(tirx.floordiv(row, self.channels)), builder.bind(tirx.floormod(row, self.channels))
        begin = min(planes.leads[-1], extent)
        end = builder.bind(minimum(begin + (inputs[-1] - phase[-1] + stride - 1) // stride, extent))

        def zeros(first: Expr, last: Expr) -> None:
            zero = tirx.const(0, self.accumulator)
            builder.dynamic_vector_loop(first, last, self._lanes, lambda i: builder.store(buffer, base + i, zero))

        def copy() -> None:
            first = builder.bind(phase[-1] - begin * stride)

            def element(i: Expr) -> None:
                index = (image, channel, *at, first + i * stride)
                value = GroupValues(self.group, builder).read(self.anchor.inputs[0], index)
                builder.store(buffer, base + i, self._number(value))

            zeros(0, begin)
            builder.dynamic_vector_loop(begin, end, self._lanes, element)
            zeros(end, extent)

        if not at:
            copy()
            return
        inside = builder.bind(tirx.all(*(tirx.And(x >= 0, x < n) for x, n in zip(at, inputs, strict=False))))
        with builder.when(inside):
            copy()
        with builder.when(tirx.Not(inside)):
            zeros(0, extent)

    def _number(self, element: Expr) -> Expr:
        """An element of the input in the type of the sums, less its zero point."""
        number, zero = tirx.Cast(self.accumulator, element), self.group.zero_points.get(self.anchor.inputs[0])
        if zero is None:
            return number
        return number - tirx.Cast(self.accumulator, GroupValues(self.group, self.builder).read(zero, ()))

    def _product(
        self,
        number: int,
        phase: Index,
        taps: tuple[Taps, ...],
        outputs: tuple[int, ...],
        planes: _Planes,
        buffer: Buffer,
        direct: bool,
    ) -> TileProduct:
        depth = (self.channels // self.groups, *(dimension.count for dimension in taps))
        rows = self.out_channels // self.groups
        columns = _columns(outputs, planes.extents)
        tiles = tile_options(
            rows, columns, prod(depth), machine_of(self.target, self.accumulator), shifted_loads=True, b_padded=not direct
        )
        if direct:  # no more columns than there are
            tiles = {name: tile for name, tile in tiles.items() if tile.columns <= least_of(columns)}
        tile = self.builder.choose("tile", tiles)
        weights = self._weights(number, taps, tile.rows)
        panels = -(-rows // tile.rows)

        def a(batch: Expr, panel: Expr, start: Expr, row: int, ks: Index) -> Expr:
            group = tirx.floormod(batch, self.groups) if self.groups > 1 else 0
            value = weights[((group * panels + panel) * prod(depth) + row_major(ks, depth)) * tile.rows + row]
            return tirx.Cast(self.accumulator, value)

        def b(batch: Expr, panel: Expr, start: Expr, column: Expr, ks: Index) -> Expr:
            channel = batch * depth[0] + ks[0]  # (image * groups + group) * channels of a group
            ats = [dimension.at(i) for dimension, i in zip(taps, ks[1:], strict=True)]
            places = [tirx.floordiv(at, s) + lead for at, s, lead in zip(ats, planes.strides, planes.leads, strict=True)]
            plane = channel * prod(planes.phases) + planes.plane_of(ats)
            value = buffer[plane * prod(planes.extents) + row_major(places, planes.extents) + start + column]
            return self._number(value) if direct else value

        flat = outputs == planes.extents and not self.transposed and _spatially_uniform(self.group, self.rank)
        plane = Plane(columns, columns, columns) if flat else self._plane(outputs, planes, columns)
        return TileProduct(
            self.images * self.groups,
            rows,
            plane,
            depth,
            tile,
            self.format,
            a,
            b,
            self._store(phase, planes, flat),
            a_padded=True,
            b_padded=not direct,
            overlaps=not self.transposed and not self.inplace,  # which store with strides, or what they have read
        )

    def _plane(self, outputs: tuple[int, ...], planes: _Planes, columns: int) -> Plane:
        def is_row(r: Expr) -> Expr:
            position = unravel(r, planes.extents[:-1])
            return tirx.all(*(u < out for u, out in zip(position[1:], outputs[1:-1], strict=True)))

        return Plane(columns, planes.extents[-1], outputs[-1], is_row if self.rank > 2 else None)

    def _weights(self, number: int, taps: tuple[Taps, ...], tile: int) -> Buffer:
        """The packed weights of one product, a parameter of their own, since each phase has other taps; weights that are not
        constant are packed by the kernel into the workspace."""
        name, kernel = self.anchor.inputs[1], self.window.kernel
        steps = tuple((dimension.first, dimension.step) for dimension in taps)
        spatial = tuple(range(3, 3 + self.rank))
        if self.transposed:
            shape = (self.groups, self.channels // self.groups, self.out_channels // self.groups, *kernel)
            order = (0, 2, 1, *spatial)
        else:
            shape = (self.groups, self.out_channels // self.groups, self.channels // self.groups, *kernel)
            order = (0, 1, 2, *spatial)
        pack = PackPanels(shape, order, 1, 1, tile, ((0, 1),) * 3 + steps)
        if name not in self.group.constants:
            kind = self.group.types[name]
            return pack_in_kernel(self.builder, self.builder.parameter(name, kind.elements, kind.dtype), pack)
        key = f"{name}/{number}"
        self.packed[key] = Operand(name, pack)
        kind = pack.packed_type(self.group.types[name])
        return self.builder.parameter(key, kind.elements, kind.dtype)

    def _store(self, phase: Index, planes: _Planes, flat: bool) -> Callable[[Expr, Expr, Expr, Expr, Expr], None]:
        builder, window = self.builder, self.window
        group = _with_flat_space(self.group, self.rank) if flat else self.group
        rows = self.out_channels // self.groups
        bias = self.anchor.inputs[2] if len(self.anchor.inputs) > 2 else ""

        def store(batch: Expr, m: Expr, r: Expr, c: Expr, value: Expr) -> None:
            image = tirx.floordiv(batch, self.groups) if self.groups > 1 else batch
            channel = tirx.floormod(batch, self.groups) * rows + m if self.groups > 1 else m
            position = (c,) if flat else (*unravel(r, planes.extents[:-1]), c)
            if self.transposed:
                position = tuple(u * s + f for u, s, f in zip(position, window.strides, phase, strict=True))
            index = (image, channel, *position)
            added = GroupValues(self.group, builder).read(bias, (channel,)) if bias else None
            total = value if added is None else value + tirx.Cast(self.accumulator, added)
            store_epilogue(group, builder, self.anchor, index, tirx.Cast(group.types[self.anchor.outputs[0]].dtype, total))

        return store


def _columns(outputs: tuple[int, ...], extents: tuple[int, ...]) -> SizeLike:
    """Columns of a plane up to the last output position."""
    last: SizeLike = row_major([maximum_of(out - 1, 0) for out in outputs], extents)
    return last + 1


def _spatially_uniform(group: Group, rank: int) -> bool:
    """Whether each operand of the epilogue spans all spatial dimensions or none, so that these can be merged into one."""
    anchor, followers = anchor_of(group), followers_of(group)
    whole = group.types[anchor.outputs[0]].shape[2:]
    names = {name for op in followers for name in (*op.inputs, *op.outputs) if name} | {anchor.outputs[0]}
    tails = (((1,) * rank + group.types[name].shape)[-rank:] for name in names)
    return all(tail == whole or prod(tail) == 1 for tail in tails)


def _with_flat_space(group: Group, rank: int) -> Group:
    """The group with the spatial dimensions of all its values merged into one; what the anchor alone reads stays as it is."""
    beside = {name for op in followers_of(group) for name in op.inputs}  # its input may be among them, as in x + conv(x)
    kept = set(anchor_of(group).inputs) - beside
    out_rank = rank + 2
    types = {
        name: kind
        if name in kept
        else TensorType((*((1,) * out_rank + kind.shape)[-out_rank:-rank], prod(((1,) * rank + kind.shape)[-rank:])), kind.dtype)
        for name, kind in group.types.items()
    }
    return replace(group, types=types)
