"""Estimated cycles of convolutions on one core, from extents alone: for choose-layout and for a template's register tile.

Multiply-adds are counted by register tiles (`register_tile.py`), copies and layout conversions by their bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, inf, prod

from ...runtime.hardware.machine import LINE_BYTES, Machine
from ...runtime.symbolic.sizes import Size, SizeLike, estimating
from .memory import copy_cycles
from .register_tile import MAX_ROWS, Step, grid_cycles, tile_cycles

_L2_SHARE = 0.625  # of L2 that a panel of weights may take
_DEPTHWISE_STEP, _DEPTHWISE_START = 0.8, 4.0  # cycles of a vector of channels: a tap, and a position's overhead
_SHORT_DEPTH = 512  # multiply-adds of a sum below which set conflicts of the stored rows outweigh what tall tiles save
_ENOUGH_WAYS = (
    12  # of L1, from which on set conflicts of a tile's rows matter only where panels stay in L2: with Zen 3's 8, 0.25 the speed
)
_SHORT_ROWS, _SHORT_PAIR_ROWS = 7, 8  # tile rows where L1 sets conflict or sums are short; for several taps of bfloat16 pairs
_WORD_BYTES = 4  # of a float32 channel, or of a pair of bfloat16 ones
_MANY_PLANES, _APART = 128, 1.1  # NCHW with so many input channels: each is on a page of its own, TLB misses slow each step
_PLANE_STEP = 1.15  # by which steps of NCHW are slower than counted: 0.76 to 0.88 of the time of large planes, on Zen 3
_NEAR_PLANE_BYTES, _FAR_PLANES = 8192, 0.1  # NCHW inputs of larger planes: scalars loaded from many pages slow a sum by so much
_SEEN_SHARE = 0.5  # of the time of lines from L2 that products do not hide: 0.3 to 0.6 on Zen 3, more than 1 for planes of 7 x 7
_SEGMENT_CYCLES = 20.0  # overhead of the epilogue for each row of an image in a tile, where tiles span several rows
_FAR_VOLUMES = 0.25  # as _FAR_PLANES, where a kernel spans planes of a volume: 198 GFLOP/s NCHW, 250 NHWC
_FAR_IMAGE_BYTES = 6 * 1024 * 1024  # images beyond which NCHW is as slow: each panel of weights reads the image from L3 again
_FEW_CHANNELS = 8  # input channels below which LLVM keeps the scalars that neighbouring windows share in registers,
_FEW_ROWS = 5  # so that a tile has no more rows, and accumulators in half of the registers
_CLEARLY = 1.5  # times as long: by so much orders of loops must differ before the one that reads weights again is taken
_NEAR_BYTES = 512 * 1024  # of weights that stay near from one output row to the next
_SHORT_SUMS = 256  # multiply-adds of a sum of whose results stores are worth being contiguous
_PREFETCHED_BYTES = 256 * 1024  # of weights above which each tile prefetches its share of the next panel
_MOST_HEIGHTS, _WORTH_A_HEIGHT = 8, 0.99  # of tiles, each with code of its own; of the time, which another one must save
_MOST_COUNTS = 24  # of rows that heights are chosen for
_PANEL_SHARE, _LEAST_PANEL_BYTES = 0.375, 384 * 1024  # of L2: a panel that stays there while the next one is prefetched beside it


@dataclass(frozen=True, slots=True)
class Convolution:
    """The extents of one convolution; `inputs` and `outputs` are channels of one group.

    `height` x `width` is the input, `rows` x `columns` the output; in a volume, rows are those of all planes. A transposed
    convolution is described as one of stride 1 with as many times the output channels as it has phases.
    """

    images: int
    groups: int
    inputs: int
    outputs: int
    height: int
    width: int
    rows: int
    columns: int
    kernel: tuple[int, int]
    strides: tuple[int, int]
    is_padded: bool
    element_bytes: int = 4
    dilations: tuple[int, int] = (1, 1)
    depths: int = 1  # taps along a volume's planes
    gaps: int = 0  # rows between the planes of a padded NCHW volume, which are computed and not stored
    planes: int = 1  # of the result
    phases: int = 1  # of a transposed convolution, in `outputs`
    is_copied: bool = False  # the input is copied even without padding
    met: float = 1.0  # the part of the taps that reads more than padding; below 1 only for dilated kernels
    k_pack: int = 1  # neighbouring channels that one dot product multiplies: an element is a 32-bit pair if 2

    @classmethod
    def of_dimensions(
        cls,
        channels: tuple[int, int, int, int],
        sizes: Sequence[int],
        results: Sequence[int],
        kernel: Sequence[int],
        strides: Sequence[int],
        dilations: Sequence[int],
        *,
        has_pads: bool,
        element_bytes: int,
    ) -> Convolution:
        """Of signals, images or volumes. `channels`: images, groups, inputs and outputs of a group; `sizes` and `results`: the
        spatial dimensions of input and output."""
        many = [*zip(sizes, results, kernel, strides, dilations, strict=True)]
        pads = [(out - 1) * stride + (taps - 1) * dilation + 1 - size for size, out, taps, stride, dilation in many]
        return cls(
            *channels,
            *_as_plane(sizes),
            *_as_plane(results),
            kernel=_as_plane(kernel),
            strides=_as_plane(strides),
            is_padded=any(pad > 0 for pad in pads) or has_pads,
            element_bytes=element_bytes,
            dilations=_as_plane(dilations),
            met=prod(
                share_met(*axis, begin=max(pad, 0) // 2, run=_even_run(axis[1]) if number == len(kernel) else 1)
                for number, (axis, pad) in enumerate(zip(many, pads, strict=True), 1)
            )
            if max(dilations, default=1) > 1
            else 1.0,
            depths=prod(kernel[:-2]),
            gaps=prod(results[:-2]) * (kernel[-2] - 1) if len(kernel) > 2 else 0,
            planes=prod(results[:-2]),
        )

    @classmethod
    def of_phases(
        cls,
        channels: tuple[int, int, int, int],
        sizes: Sequence[int],
        results: Sequence[int],
        kernel: Sequence[int],
        strides: Sequence[int],
        *,
        has_pads: bool,
        element_bytes: int,
    ) -> Convolution:
        """Of a transposed convolution; arguments as of `of_dimensions`."""
        extents, taps = ([ceil(n / s) for n, s in zip(numbers, strides, strict=True)] for numbers in (results, kernel))
        images, groups, inputs, outputs = channels
        return cls(
            images,
            groups,
            inputs,
            outputs * prod(strides),
            *_as_plane(sizes),
            *_as_plane(extents),
            kernel=_as_plane(taps),
            strides=(1, 1),
            is_padded=prod(taps) > 1 or (*extents,) != (*sizes,) or has_pads,
            element_bytes=element_bytes,
            planes=prod(extents[:-2]),
            phases=prod(strides),
        )

    @property
    def is_pointwise(self) -> bool:
        """Whether each output position reads one input position, all of them in order."""
        return prod(self.kernel) == prod(self.strides) == 1 and not self.is_padded

    @property
    def is_depthwise(self) -> bool:
        return self.groups > 1 and self.inputs == self.outputs == 1

    @property
    def depth(self) -> int:
        """Multiply-adds of one output element."""
        return self.inputs * prod(self.kernel)

    @property
    def input_bytes(self) -> int:
        return self.images * self.groups * self.inputs * self.height * self.width * self.element_bytes


@estimating
def share_met(inputs: int, outputs: int, taps: int, stride: int, dilation: int, *, begin: int, run: int) -> float:
    """The part of the taps along a dimension that reads the input, not only padding, averaged over tiles of `run` positions.

    The first window begins `begin` positions before the input. 1 where there are no outputs.
    """
    met = 0
    starts = range(0, outputs, run)
    for start in starts:
        first = min(start, outputs - run) * stride - begin
        last = first + (run - 1) * stride
        lowest = min(max(-(last // dilation), 0), taps)
        met += max(min(-((first - inputs) // dilation), taps) - lowest, 0)
    return met / (len(starts) * taps) if starts else 1.0


def _even_run(positions: int) -> int:
    """Positions of a tile, where a row's positions are divided among tiles as evenly as possible."""
    return ceil(positions / max(ceil(positions / MAX_ROWS), 1)) or 1


def _as_plane(extents: Sequence[int]) -> tuple[int, int]:
    """(rows, columns): all dimensions but the last as one, as a row of a volume costs what a row of an image does."""
    return prod(extents[:-1]), extents[-1]


@estimating
def in_words(one: Convolution, k_pack: int) -> Convolution:
    """The convolution by dot products: its elements are 32-bit words of `k_pack` neighbouring input channels.

    Channels that fill no words are padded with zeros, in a copy of the image.
    """
    is_copied, size = one.is_copied or one.inputs % k_pack > 0, k_pack * one.element_bytes
    return replace(one, inputs=ceil(one.inputs / k_pack), element_bytes=size, is_copied=is_copied, k_pack=k_pack)


@estimating
def pays_to_fill_pairs(one: Convolution, machine: Machine) -> bool:
    """Whether an odd number of bfloat16 channels is faster by dot products of pairs, for which the image is copied and padded."""
    if one.groups > 1 or one.inputs % 2 == 0:
        return False
    return channels_last_cycles(in_words(one, 2), machine) < channels_last_cycles(one, machine)


@estimating
def in_words_of_taps(one: Convolution, k_pack: int) -> Convolution:
    """The convolution whose elements are words of `k_pack` neighbouring taps of a row, in a copy of the image."""
    height, width = one.kernel
    return replace(one, kernel=(height, ceil(width / k_pack)), is_copied=True, k_pack=k_pack)


@estimating
def spread_pitch(elements: int, item_bytes: int, machine: Machine) -> int:
    """Elements from position to position in a padded copy: a cache line more than `elements` where L1 sets would conflict."""
    return elements + LINE_BYTES // item_bytes if elements * item_bytes % machine.l1.set_stride_bytes == 0 else elements


def channels_last_tile(
    positions: int, channels: int, depth: int, inputs: int, machine: Machine, *, pitch: int = 0, k_pack: int = 1
) -> tuple[int, int]:
    """Rows (positions) and vectors (of output channels) of the NHWC register tile with the fewest cycles."""
    return channels_last_tiles(positions, channels, depth, inputs, machine, pitch=pitch, k_pack=k_pack)[0]


@estimating
def channels_last_tiles(
    positions: int, channels: int, depth: int, inputs: int, machine: Machine, *, pitch: int = 0, k_pack: int = 1
) -> list[tuple[int, int]]:
    """All NHWC register tiles for so many contiguous positions: those that the model covers, fewest cycles first, then others.

    Short sums of words (of `k_pack` numbers) are faster in wide tiles of few rows, and with many accumulators, as a dot product
    has a longer latency. Those of bytes need neither: what they store is a fourth, in rows that share no sets of L1. The
    positions that a tile reads are `pitch` float32 (or words) apart, `inputs` if that is 0.
    """
    lanes, registers, pairs, are_bytes = machine.lanes, machine.registers, k_pack > 1, k_pack == _WORD_BYTES
    are_few, is_near = inputs < _FEW_CHANNELS, depth * 2 * lanes * _WORD_BYTES <= _L2_SHARE * machine.l2.size_bytes  # panel in L2
    share_sets = (pitch or inputs) * _WORD_BYTES % machine.l1.set_stride_bytes == 0
    are_crowded = (depth < _SHORT_DEPTH and not are_bytes) or (share_sets and (is_near or machine.l1.ways < _ENOUGH_WAYS))
    short = _SHORT_PAIR_ROWS if pairs and depth > inputs else _SHORT_ROWS
    rows = min(positions, _FEW_ROWS if are_few else short if are_crowded else MAX_ROWS)
    vectors = 4 if are_few or (pairs and depth * 4 * lanes * _WORD_BYTES <= machine.l1.size_bytes) else 2
    every = product(range(1, max(min(positions, MAX_ROWS), 1) + 1), (1, 2, 3, 4))  # one row even without positions
    fitting = [(r, v) for r, v in every if r * v + v + 1 <= registers and (v == 1 or (v - 1) * lanes < channels)]

    def rank(tile: tuple[int, int]) -> tuple[bool, float, tuple[int, int]]:
        sums = registers // 2 if are_few or (tile[1] > 2 and not are_bytes) else registers
        is_counted = tile[0] <= rows and tile[1] <= vectors and tile[0] * tile[1] <= sums
        return not is_counted, _stretch_cycles(tile, positions, channels, depth, machine, pairs=pairs), tile

    return sorted(fitting, key=rank)


def channels_last_heights(
    positions: SizeLike,
    vectors: int,
    channels: int,
    depth: int,
    inputs: int,
    machine: Machine,
    *,
    pitch: int = 0,
    k_pack: int = 1,
) -> dict[int, int]:
    """A few heights of NHWC register tiles of so many vectors, and the cycles of a tile of each: of which some suit any number of
    positions that a call may have. One has no more rows than there are positions at least (or one row).

    Those that are best for some numbers are taken, the one that saves most of all first.
    """
    choices = positions.choices if isinstance(positions, Size) else (positions,)
    counts = _spread([count for count in choices if count] or [1])
    best: dict[int, float] = {}
    for count in counts:
        tiles = channels_last_tiles(count, channels, depth, inputs, machine, pitch=pitch, k_pack=k_pack)
        rows = next((rows for rows, width in tiles if width == vectors), 1)
        best[rows] = tile_cycles(machine, rows, vectors, depth, Step(depth * vectors * machine.vector_bytes, is_dot=k_pack > 1))
    return few_heights({rows: round(cycles) for rows, cycles in best.items()}, counts)


def few_heights(cycles: Mapping[int, int], counts: Sequence[int]) -> dict[int, int]:
    """The heights of tiles that together are nearly the best for so many rows, of those of which a tile takes so many cycles.
    One of them is no more than the least of `counts`, which rise."""

    def share(chosen: Collection[int], count: int) -> float:
        """How many times as long rows take by the best of the chosen heights as by the best of all."""
        return _cycles_of(chosen, count, cycles) / _cycles_of(cycles, count, cycles)

    found = [max(height for height in cycles if height <= counts[0])]
    while len(found) < _MOST_HEIGHTS and (rest := [height for height in cycles if height not in found]):
        now = sum(share(found, count) for count in counts)
        then = {height: sum(share((*found, height), count) for count in counts) for height in rest}
        height = min(rest, key=lambda one: then[one])
        if then[height] > now * _WORTH_A_HEIGHT:
            break
        found.append(height)
    return {height: cycles[height] for height in found}


def _cycles_of(heights: Collection[int], count: int, cycles: Mapping[int, int]) -> float:
    return min((ceil(count / height) * cycles[height] for height in heights if height <= count), default=inf)


def _spread(numbers: Sequence[int]) -> list[int]:
    """A few of many numbers in order, the first and the last among them."""
    places = {round(place * (len(numbers) - 1) / (_MOST_COUNTS - 1)) for place in range(_MOST_COUNTS)}
    return [numbers[place] for place in sorted(places)]


def _stretch_cycles(
    tile: tuple[int, int], positions: int, channels: int, depth: int, machine: Machine, *, pairs: bool = False
) -> float:
    step = Step(depth * tile[1] * machine.vector_bytes, is_dot=pairs)
    return grid_cycles(machine, *tile, (positions, channels, depth), step)


@estimating
def channels_last_cycles(one: Convolution, machine: Machine) -> float:
    """Cycles of a convolution whose result is NHWC."""
    if one.is_depthwise:
        vectors = one.images * one.rows * one.columns * ceil(one.groups / machine.lanes)
        return vectors * (_DEPTHWISE_STEP * one.depth + _DEPTHWISE_START)
    return _tiled_cycles(one, machine)


def _tiled_cycles(one: Convolution, machine: Machine) -> float:
    """Of tiles of positions by output channels."""
    copied = copy_cycles(one.input_bytes) if one.is_padded or one.is_copied else 0.0
    (stretches, positions), outputs = _stretches(one), one.outputs // one.phases  # of a phase: phases share no vectors
    depth, pairs = ceil(one.met * one.depth), one.k_pack > 1
    tile = _tile_of(one, machine)
    return copied + stretches * one.groups * one.phases * _stretch_cycles(tile, positions, outputs, depth, machine, pairs=pairs)


def _stretches(one: Convolution) -> tuple[int, int]:
    """How many runs of contiguous positions tiles are dealt to, and the positions of each."""
    return (1, one.rows * one.columns * one.images) if one.is_pointwise else (one.rows * one.images, one.columns)


def _tile_of(one: Convolution, machine: Machine) -> tuple[int, int]:
    is_copied = one.is_padded or one.is_copied
    pitch = spread_pitch(one.inputs * one.groups, _WORD_BYTES, machine) if is_copied else one.inputs * one.groups
    pitch *= 1 if one.is_pointwise else one.strides[1]
    (_, positions), outputs = _stretches(one), one.outputs // one.phases
    return channels_last_tile(positions, outputs, one.depth, one.inputs, machine, pitch=pitch, k_pack=one.k_pack)


@estimating
def loop_order(one: Convolution, columns: int, machine: Machine) -> str:
    """The best order of the loops around an NHWC register tile of `columns` output channels.

    "by panel": weights exceed L2, so all positions are multiplied by one panel before the next. "by image": the same for each
    image, where L3 holds one but not all. "by line": weights stay in L2, and a line's input near for all panels; or reading the
    image again for each panel takes clearly longer than all weights for each line. "by position": short sums with many outputs,
    so that stores are contiguous.
    """
    depth, outputs = one.depth, one.outputs // one.phases
    if depth <= _SHORT_SUMS and outputs > depth:
        return "by position"
    weight_bytes, (lines, _) = one.groups * one.outputs * depth * one.element_bytes, _stretches(one)
    if weight_bytes <= _NEAR_BYTES:
        return "by line"
    read, image_bytes = ceil(outputs / columns) * one.input_bytes, one.input_bytes // max(one.images, 1)
    cycles = {
        "by panel": machine.read_cycles(read, one.input_bytes) + machine.read_cycles(weight_bytes),
        "by image": machine.read_cycles(read, image_bytes) + machine.read_cycles(one.images * weight_bytes, weight_bytes),
        "by line": machine.read_cycles(lines * weight_bytes, weight_bytes),
    }
    best = min(cycles, key=lambda order: cycles[order])
    return best if _CLEARLY * cycles[best] < cycles["by panel"] else "by panel"


def prefetches_next(weight_bytes: int, panel_bytes: int, machine: Machine) -> bool:
    """Whether tiles that go by panel prefetch the next one into L2: where both have room there."""
    most = max(machine.l2.part_bytes(_PANEL_SHARE), _LEAST_PANEL_BYTES)
    return weight_bytes > _PREFETCHED_BYTES and panel_bytes <= most


@estimating
def weights_overlap(one: Convolution, machine: Machine) -> float:
    """The part of an NHWC convolution's tiles behind which weights arrive: those that meet each panel first, or all where each
    panel is prefetched while the one before it is multiplied."""
    if one.is_depthwise or not one.rows * one.columns * one.images:
        return 1.0
    (stretches, positions), (rows, vectors) = _stretches(one), _tile_of(one, machine)
    weight_bytes = one.groups * one.outputs * one.depth * one.element_bytes
    order, tiles = loop_order(one, vectors * machine.lanes, machine), ceil(positions / rows)
    if order == "by line" and stretches > 1:
        return 1 / stretches
    if order != "by position" and prefetches_next(weight_bytes, one.depth * vectors * machine.vector_bytes, machine):
        return 1.0
    return 1 / (stretches * tiles)


@estimating
def direct_cycles(one: Convolution, machine: Machine) -> float:
    """Additional cycles when an NHWC convolution reads an NCHW input in place."""
    if one.is_depthwise:  # whose neighbouring channels are then no vectors: a product for each
        return _tiled_cycles(one, machine) - channels_last_cycles(one, machine)
    is_large = one.inputs * one.depths >= _MANY_PLANES and one.height * one.width * one.element_bytes > _NEAR_PLANE_BYTES
    far = _FAR_PLANES if one.depths == 1 and one.input_bytes <= _FAR_IMAGE_BYTES * one.images else _FAR_VOLUMES
    return max(far * channels_last_cycles(one, machine) if is_large else 0.0, _line_cycles(one, machine))


def _line_cycles(one: Convolution, machine: Machine) -> float:
    """Of the cache lines of an NCHW input, one for each channel and row of a window, that each tile loads from L2 again.

    None where they stay in L1 beside a panel of weights.
    """
    (stretches, positions), (rows, vectors) = _stretches(one), _tile_of(one, machine)
    lines, columns = one.inputs * one.depths * one.kernel[0], vectors * machine.lanes
    if lines * LINE_BYTES + one.depth * vectors * machine.vector_bytes < machine.l1.size_bytes:
        return 0.0
    tiles = stretches * ceil(positions / rows) * one.groups * one.phases * ceil(one.outputs // one.phases / columns)
    return _SEEN_SHARE * tiles * lines * LINE_BYTES / machine.l2.bytes_per_cycle


@estimating
def channels_first_cycles(one: Convolution, machine: Machine) -> float:
    """Cycles of an NCHW convolution: output channels are the rows of register tiles, positions of a padded plane the columns."""
    pitch = one.columns + (one.kernel[1] - 1) // one.strides[1]
    positions = one.rows * one.columns if one.is_pointwise else (one.rows + one.gaps - 1) * pitch + one.columns
    is_copied = one.is_padded or prod(one.strides) > 1 or positions < machine.lanes
    copied = copy_cycles(one.input_bytes) if is_copied else 0.0
    most = max(min(one.outputs, MAX_ROWS), 1)  # one row even without outputs
    choices = [(r, v) for r, v in product(range(1, most + 1), range(1, 9)) if r * v + v < machine.registers]
    apart = _PLANE_STEP * (_APART if one.inputs >= _MANY_PLANES else 1.0)
    segments = one.outputs * one.rows if pitch > one.columns and one.rows > 1 else 0
    size = one.outputs, positions, one.depth * apart
    lines = one.inputs * one.kernel[0] * machine.vector_bytes  # of the image, which every tile of output channels reads again
    products = min(grid_cycles(machine, *tile, size, Step(lines * tile[1], shifted=True)) for tile in choices)
    return copied + one.images * one.groups * (products + segments * _SEGMENT_CYCLES)
