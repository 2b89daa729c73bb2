"""Windows of an image as an operand of the matrix unit: implicit GEMM, no matrix of windows in memory.

Row m of A is an output position of an image, and k a tap of the window with a run of neighbouring channels. Where rows begin is
computed once a block, with a bit for each tap that says whether it lies in the image; a part of k then adds one number to all
rows of a thread and tests one bit, as the iterators of CUTLASS's convolutions do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, prod

import numpy as np
from tvm import tirx

from ...runtime.plan import TensorType
from ..codegen.builder import Buffer, Expr, row_major, unravel
from ..codegen.division import divided
from .gpu_matrix_unit import MatrixUnit
from .gpu_operand_tiles import Chunks, store_terms
from .gpu_part_layout import CHUNK, PartLayout

MOST_TAPS = 24  # whose bits a mask has, with those of the chunks beyond k
_LANES = 4  # of float32 in 16 bytes


@dataclass(frozen=True)
class ImageWindows:
    """The windows of images that lie channels-last, `pitch` elements a pixel, those of a matrix (group) from `group_step` on.

    A tap has `run` numbers of k, a multiple of a chunk's, of which the first `valid` are in memory, from its pixel on. `inputs`
    and `outputs` are extents of the image in memory and of the result. Where windows overhang (`is_padded`) there are at most
    `MOST_TAPS` taps.
    """

    images: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begins: tuple[int, ...]
    pitch: int
    run: int
    valid: int
    group_step: int = 0
    chunk: int = CHUNK

    def __post_init__(self) -> None:
        assert self.run % self.chunk == 0, "chunks of 16 bytes belong to one tap"
        assert not self.is_padded or self.taps <= MOST_TAPS, "a mask has no bits for so many taps"

    @property
    def rows(self) -> int:
        return self.images * prod(self.outputs)

    @property
    def taps(self) -> int:
        return prod(self.kernel)

    @property
    def k(self) -> int:
        return self.taps * self.run

    @property
    def elements(self) -> int:
        return self.images * prod(self.inputs) * self.pitch

    def overhangs(self, axis: int) -> bool:
        """Whether some window reads beyond the image in a dimension."""
        reach = 0, (self.kernel[axis] - 1) * self.dilations[axis]  # which goes backwards where the dilation is negative
        last = (self.outputs[axis] - 1) * self.strides[axis] + max(reach) - self.begins[axis]
        return min(reach) < self.begins[axis] or last >= self.inputs[axis]

    @property
    def is_padded(self) -> bool:
        return any(map(self.overhangs, range(len(self.kernel))))


@dataclass(frozen=True)
class _TapPlace:
    """Where a chunk of k lies: its distance from a row's first element, the bit of its tap in masks, or whether it belongs to a
    tap at all (None: all do), and how many of its numbers there are (None: all)."""

    distance: Expr
    bit: Expr | None
    is_tap: Expr | None
    count: Expr | None


@dataclass
class _Windows:
    """What brings parts of windows."""

    unit: MatrixUnit
    layout: PartLayout
    threads: int
    buffer: Buffer
    windows: ImageWindows

    def prepare(self, matrix: Expr, begin: Expr, thread: Expr) -> None:
        """The first element and the taps of each row that the thread brings chunks of: the same chunk of all its rows."""
        builder, windows, layout = self.unit.builder, self.windows, self.layout
        assert layout.along_k
        assert self.threads % layout.row_chunks == 0
        assert layout.chunk == windows.chunk
        self._thread = thread
        self._chunk = builder.bind(tirx.floormod(thread, layout.row_chunks))
        turns = ceil(layout.term_chunks / self.threads)
        self._origins = builder.local(turns, "int32", "origins")
        self._masks = builder.local(turns, "uint32", "masks")
        first = builder.bind(tirx.floordiv(thread, layout.row_chunks))
        for turn in range(turns):
            row = begin + first + turn * (self.threads // layout.row_chunks)
            row = builder.bind(tirx.min(row, windows.rows - 1))  # what lies beyond is multiplied and not stored
            image, *place = unravel(row, (windows.images, *windows.outputs))
            corner = [builder.bind(o * s - b) for o, s, b in zip(place, windows.strides, windows.begins, strict=True)]
            pixel = row_major((image, *corner), (windows.images, *windows.inputs))
            inside = self._chunk * layout.chunk if self._is_uniform else 0
            builder.store(self._origins, turn, pixel * windows.pitch + matrix * windows.group_step + inside)
            if windows.is_padded:
                builder.store(self._masks, turn, self._mask(corner))

    def _mask(self, corner: Sequence[Expr]) -> Expr:
        """A bit for each tap: whether it lies in the image."""
        windows, builder = self.windows, self.unit.builder
        mask = _u32(1)
        for axis in reversed(range(len(corner))):
            inner = prod(windows.kernel[axis + 1 :])
            if not windows.overhangs(axis):
                taps = [mask << _u32(tap * inner) for tap in range(windows.kernel[axis])]
            else:
                taps = []
                for tap in range(windows.kernel[axis]):
                    at = builder.bind(corner[axis] + tap * windows.dilations[axis])
                    is_inside = tirx.And(at >= 0, at < windows.inputs[axis])
                    taps.append(tirx.Select(is_inside, mask << _u32(tap * inner), _u32(0)))
            mask = builder.name(_any(taps))
        return mask

    @property
    def _is_uniform(self) -> bool:
        """Whether all of a part lies in one tap."""
        return self.windows.run % self.layout.depth == 0

    def _place(self, part: Expr) -> _TapPlace:
        """Of the thread's chunk in a part."""
        builder, windows, layout = self.unit.builder, self.windows, self.layout
        parts = ceil(windows.k / layout.depth)
        if self._is_uniform:
            a_tap = windows.run // layout.depth
            tap = builder.bind(divided(part, a_tap, parts))
            inside = builder.bind((part - tap * a_tap) * layout.depth)
        else:
            k = builder.bind(part * layout.depth + self._chunk * layout.chunk)
            tap = builder.bind(divided(k, windows.run, parts * layout.depth))
            inside = builder.bind(k - tap * windows.run)
        distance, rest, taps = inside, tap, windows.taps + ceil(layout.depth / windows.run)
        for axis in reversed(range(len(windows.kernel))):
            step = windows.dilations[axis] * prod(windows.inputs[axis + 1 :]) * windows.pitch
            outer = builder.bind(divided(rest, windows.kernel[axis], taps)) if axis else 0
            distance = distance + (rest - outer * windows.kernel[axis]) * step
            rest, taps = outer, ceil(taps / windows.kernel[axis])
        count: Expr | None = None
        if windows.valid < windows.run:
            first = inside + self._chunk * layout.chunk if self._is_uniform else inside
            count = builder.bind(tirx.max(tirx.min(windows.valid - first, layout.chunk), 0))
        bit = builder.bind(_u32(1) << tirx.Cast("uint32", tap)) if windows.is_padded else None
        ends_early = windows.k % layout.depth > 0 and bit is None  # else the bit of no tap is set
        return _TapPlace(builder.bind(distance), bit, builder.bind(tap < windows.taps) if ends_early else None, count)

    def _is_inside(self, place: _TapPlace, turn: int) -> Expr | None:
        """Whether the tap of one of the thread's rows lies in the image, and its chunk in k; None: all do."""
        return place.is_tap if place.bit is None else (self._masks[_i32(turn)] & place.bit) != _u32(0)

    def _each(self, body: Callable[[int, Expr], None]) -> None:
        Chunks(self.unit.builder, self.layout, self.threads).each(self._thread, body, self.layout.term_chunks)


@dataclass
class CopiedWindows(_Windows):
    """Of numbers that the unit multiplies, copied 16 bytes at a time, the padding as zeros."""

    def prepare(self, matrix: Expr, begin: Expr, thread: Expr) -> None:
        super().prepare(matrix, begin, thread)
        self._copies = self.unit.copies(ceil(self.layout.term_chunks / self.threads))

    def fetch(self, part: Expr, address: Expr) -> None:
        place = self._place(part)

        def copy(turn: int, number: Expr) -> None:
            index = self.unit.builder.bind(self._origins[_i32(turn)] + place.distance)
            self._copies.begin(turn, self._to(address, number), self.buffer, index, self._is_inside(place, turn), place.count)

        self._each(copy)

    def finish(self, address: Expr) -> None:
        if self.unit.copies_wait_in_registers:
            self._each(lambda turn, number: self._copies.end(turn, self._to(address, number)))

    def _to(self, address: Expr, number: Expr) -> Expr:
        row = tirx.floordiv(number, self.layout.row_chunks)
        return address + self.unit.offset(self.layout.place(row, self._chunk))


@dataclass
class ConvertedWindows(_Windows):
    """Of float32, loaded early and kept in registers while the block multiplies, then stored as bfloat16 terms."""

    def prepare(self, matrix: Expr, begin: Expr, thread: Expr) -> None:
        super().prepare(matrix, begin, thread)
        turns = ceil(self.layout.term_chunks / self.threads)
        self._waiting = self.unit.builder.local(turns * CHUNK, "float32", "waiting")

    def fetch(self, part: Expr, address: Expr) -> None:
        builder, at = self.unit.builder, self._place(part)

        def load(turn: int, number: Expr) -> None:
            origin, is_inside = builder.bind(self._origins[_i32(turn)] + at.distance), self._is_inside(at, turn)
            for first in range(0, CHUNK, _LANES):
                place = turn * CHUNK + first
                conditions = [] if is_inside is None else [is_inside]
                if at.count is not None:
                    conditions.append(at.count > first)
                if not conditions:
                    self._load(place, origin + first)
                    continue
                for i in range(_LANES):
                    builder.store(self._waiting, place + i, tirx.const(0, "float32"))
                with builder.when(tirx.all(*conditions)):
                    self._load(place, origin + first)

        self._each(load)

    def _load(self, place: int, origin: Expr) -> None:
        with self.unit.builder.vector(_LANES) as lane:
            self.unit.builder.store(self._waiting, place + lane, self.buffer[origin + lane])

    def finish(self, address: Expr) -> None:
        store_terms(self.unit, self.layout, self.threads, self._thread, self._waiting, address)


def _any(masks: Sequence[Expr]) -> Expr:
    total = masks[0]
    for one in masks[1:]:
        total = total | one
    return total


def _u32(value: int) -> Expr:
    return tirx.const(value, "uint32")


def _i32(value: int) -> Expr:
    return tirx.const(value, "int32")


@dataclass(frozen=True)
class PackTaps:
    """Pack a convolution's weights [outputs, channels, *kernel] as panels: [groups, panels, k, tile], k as `ImageWindows` has it.

    A tap's channels are padded with zeros to `pitch`; with `joins` the last dimension's taps are one, side by side. Each tap is
    then padded to `run`.
    """

    shape: tuple[int, ...]
    groups: int
    pitch: int
    run: int
    joins: bool
    tile: int

    def packed_type(self, source: TensorType) -> TensorType:
        outputs, _, *kernel = self.shape
        taps = prod(kernel[:-1] if self.joins else kernel)
        panels = ceil(outputs // self.groups / self.tile)
        return TensorType((self.groups, panels, taps * self.run, self.tile), source.dtype)

    def __call__(self, array: np.ndarray) -> np.ndarray:
        groups, panels, depth, tile = self.packed_type(TensorType(self.shape, str(array.dtype))).shape
        last = np.moveaxis(array.reshape(self.shape), 1, -1)
        outputs, *kernel, channels = last.shape
        padded = np.pad(last, [(0, 0)] * (last.ndim - 1) + [(0, self.pitch - channels)])
        taps = padded.reshape(outputs, -1, self.pitch * (kernel[-1] if self.joins else 1))
        lines = np.pad(taps, ((0, 0), (0, 0), (0, self.run - taps.shape[2]))).reshape(groups, outputs // groups, depth)
        filled = np.pad(lines, ((0, 0), (0, panels * tile - lines.shape[1]), (0, 0)))
        return np.ascontiguousarray(filled.reshape(groups, panels, tile, depth).swapaxes(2, 3))

    def __str__(self) -> str:
        how = f"{self.groups}*{self.pitch},{self.run}" + ",joined" * self.joins
        return f"taps({'x'.join(map(str, self.shape))},{how},{self.tile})"
