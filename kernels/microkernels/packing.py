"""Packing an operand of a product into panels, at compile time, or by the kernel itself where the operand is not constant; and
panels as micro-kernels read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product as nest
from math import ceil, prod

import numpy as np
from tvm import tirx

from ...runtime.hardware.machine import LINE_BYTES
from ...runtime.plan import TensorType
from ..codegen.builder import Buffer, Expr, KernelBuilder, row_major, unravel
from ..codegen.work_stealing import share

SHARED_VECTORS = 2  # of float32, a panel of B that kernels for any number of rows read: two tiles of AMX
_AHEAD_BYTES = 16 * 1024  # prefetch distance in a panel: hardware prefetches no further than the page it reads


@dataclass(frozen=True)
class PackPanels:
    """Pack a constant operand into panels as the register tiles load it: [groups, panels, depth, tile], padded with zeros.

    The constant is reshaped to `shape`, sliced by `steps` (start, step of each dimension; empty: all of it), and transposed by
    `order`, whose first `group_axes` dimensions are groups, the next `line_axes` the rows of A or columns of B, the rest k.
    `k_pack` neighbours along the last of these lie side by side, as dot products load them (VNNI layout):
    [groups, panels, depth / k_pack, tile, k_pack], padded with zeros. `rounds` makes bfloat16 of float32.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    group_axes: int
    line_axes: int
    tile: int
    steps: tuple[tuple[int, int], ...] = ()
    k_pack: int = 1
    rounds: bool = False

    def packed_type(self, source: TensorType) -> TensorType:
        groups, panels, depth, tile = self._dimensions()
        shape = (groups, panels, depth // self.k_pack, tile, *((self.k_pack,) if self.k_pack > 1 else ()))
        return TensorType(shape, "bfloat16" if self.rounds else source.dtype)

    @property
    def sums(self) -> PackSums:
        """What lays out the sums over k of the same lines."""
        assert not self.steps
        return PackSums(self.shape, self.order, self.group_axes, self.line_axes, self.tile)

    def __call__(self, array: np.ndarray) -> np.ndarray:
        groups, panels, depth, tile = self._dimensions()
        cut = array.reshape(self.shape)[tuple(slice(start, None, step) for start, step in self.steps)].transpose(self.order)
        if cut.shape[-1] % self.k_pack:
            cut = np.pad(cut, (*((0, 0),) * (cut.ndim - 1), (0, -cut.shape[-1] % self.k_pack)))
        lines = cut.reshape(groups, prod(cut.shape) // max(groups * depth, 1), depth)
        packed = np.zeros((groups, panels, depth, tile), np.dtype("bfloat16") if self.rounds else array.dtype)
        for panel in range(panels):
            part = lines[:, panel * tile : (panel + 1) * tile]
            packed[:, panel, :, : part.shape[1]] = part.transpose(0, 2, 1)
        if self.k_pack == 1:
            return packed
        return np.ascontiguousarray(packed.reshape(groups, panels, -1, self.k_pack, tile).swapaxes(3, 4))

    def _dimensions(self) -> tuple[int, int, int, int]:
        steps = self.steps or ((0, 1),) * len(self.shape)
        cut = [len(range(start, extent, step)) for extent, (start, step) in zip(self.shape, steps, strict=True)]
        extents = [cut[axis] for axis in self.order]
        extents[-1] += -extents[-1] % self.k_pack
        lines = self.group_axes + self.line_axes
        groups, count = prod(extents[: self.group_axes]), prod(extents[self.group_axes : lines])
        return groups, ceil(count / self.tile), prod(extents[lines:]), self.tile

    def __str__(self) -> str:
        extra = f",{self.steps}" * bool(self.steps) + f",k_pack={self.k_pack}" * (self.k_pack > 1) + ",rounded" * self.rounds
        return f"panels({self.shape},{self.order},{self.tile}{extra})".replace(" ", "")


@dataclass(frozen=True)
class PackSums:
    """The sums over k of a constant operand of integers, as int32: [groups, lines], with zeros up to a multiple of `tile` lines.

    The constant is `shape`, transposed by `order`, whose first `group_axes` dimensions are groups, the next `line_axes` the rows
    of A or columns of B, the rest k.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    group_axes: int
    line_axes: int
    tile: int = 1

    def packed_type(self, source: TensorType) -> TensorType:
        extents = [self.shape[axis] for axis in self.order]
        head = self.group_axes + self.line_axes
        lines = prod(extents[self.group_axes : head])
        return TensorType((prod(extents[: self.group_axes]), lines + -lines % self.tile), "int32")

    def __call__(self, array: np.ndarray) -> np.ndarray:
        turned = array.reshape(self.shape).transpose(self.order)
        head = self.group_axes + self.line_axes
        sums = turned.sum(axis=tuple(range(head, turned.ndim)), dtype=np.int32)
        lines = sums.reshape(prod(turned.shape[: self.group_axes]), prod(turned.shape[self.group_axes : head]))
        return np.ascontiguousarray(np.pad(lines, ((0, 0), (0, -lines.shape[1] % self.tile))))

    def __str__(self) -> str:
        return f"sums({self.shape},{self.order},{self.group_axes},{self.line_axes},{self.tile})".replace(" ", "")


@dataclass(frozen=True)
class Panel:
    """A packed panel of B: contiguous rows of `columns` elements, from element `base` of a buffer on; or `streams` narrower ones
    with a share of the columns each, `apart` elements from one to the next."""

    buffer: Buffer
    base: Expr
    columns: int
    streams: int = 1
    apart: int = 0

    @property
    def item_bytes(self) -> int:
        """Of an element."""
        return np.dtype(str(self.buffer.dtype)).itemsize

    def prefetch(self, builder: KernelBuilder, row: Expr, ahead_bytes: int = _AHEAD_BYTES) -> None:
        """Prefetch the row so many bytes after `row`; beyond the panel's end, too, as prefetches never fault."""
        ahead, width = max(ahead_bytes // (self.columns * self.item_bytes), 1), self.columns // self.streams
        for stream, column in nest(range(self.streams), range(0, width, LINE_BYTES // self.item_bytes)):
            builder.prefetch(self.buffer[self.base + (row + ahead) * width + (stream * self.apart + column)])

    def prefetch_next(self, builder: KernelBuilder, rows: int, part: Expr, parts: int) -> Callable[[Expr], None]:
        """Prefetch the next panel into L2 while `parts` tiles, of which this is tile `part`, read this one of `rows` rows.

        By the statements that the result writes at each row, or, where that would be less than a number a row, a few lines now.
        """
        if parts <= self.columns:
            step = -(-self.columns // parts)
            at = builder.bind(self.base + rows * self.columns + part * (rows * step))

            def prefetch(row: Expr) -> None:
                for column in range(0, step, LINE_BYTES // self.item_bytes):
                    builder.prefetch(self.buffer[at + row * step + column], is_near=False)

            return prefetch
        lines = ceil(rows * self.columns * self.item_bytes / LINE_BYTES)
        begin, end = (builder.bind(tirx.Cast("int32", one)) for one in share(tirx.Cast("int64", part), parts, lines))
        with builder.loop(end - begin, name="line") as line:
            first = self.base + rows * self.columns
            builder.prefetch(self.buffer[first + (begin + line) * (LINE_BYTES // self.item_bytes)], is_near=False)
        return lambda row: None


def pack_in_kernel(builder: KernelBuilder, source: Buffer, pack: PackPanels) -> Buffer:
    """A workspace with the panels that `pack` would make at compile time, for a `k_pack` of 1 and without rounding.

    The statements that fill it are emitted here, before those that read it.
    """
    packed = pack.packed_type(TensorType(pack.shape, str(source.dtype)))
    groups, panels, depth, tile = packed.shape
    buffer = builder.workspace(packed.elements, packed.dtype)
    steps = pack.steps or ((0, 1),) * len(pack.shape)
    counts = [len(range(start, extent, step)) for extent, (start, step) in zip(pack.shape, steps, strict=True)]
    head = pack.group_axes + pack.line_axes
    group_axes, line_axes, depth_axes = pack.order[: pack.group_axes], pack.order[pack.group_axes : head], pack.order[head:]
    lines = prod(counts[axis] for axis in line_axes)
    if not packed.elements:
        return buffer

    def offset(group: Expr, line: Expr, k: Expr) -> Expr:
        place: list[Expr] = [0] * len(counts)
        for axes, at in ((group_axes, group), (line_axes, line), (depth_axes, k)):
            for axis, i in zip(axes, unravel(at, [counts[axis] for axis in axes]), strict=True):
                start, step = steps[axis]
                place[axis] = i * step + start
        return row_major(place, pack.shape)

    with builder.chunks(groups * panels, packed.elements) as chunk, builder.loop(depth, name="k") as k:
        group, panel = tirx.floordiv(chunk, panels), tirx.floormod(chunk, panels)
        with builder.loop(tile, name="line") as i:
            line = builder.bind(panel * tile + i)
            value = source[builder.bind(offset(group, tirx.min(line, lines - 1), k))]
            filled = builder.masked(line < lines, value, tirx.const(0, packed.dtype))
            builder.store(buffer, (chunk * depth + k) * tile + i, filled)
    return buffer
