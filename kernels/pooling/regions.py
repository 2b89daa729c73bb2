"""RoiAlign and MaxRoiPool: regions of images, in pixels known at run time, resampled to one size.

An output position of a region is computed for many channels at a time. Where the regions have enough samples, the operand is
first converted to NHWC, so that vectors of channels are loaded, not gathered. Regions may have any corners, infinities and NaN
included: nothing outside of the operand is read, and samples far from it cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import add, mul

import numpy as np
from tvm import tirx

from ...runtime.target import Target
from ..codegen.builder import Buffer, Expr, Index, KernelBuilder
from ..expressions import math
from ..groups.group import Group, Op
from ..movement.strided_copy import transposed
from ..sampling.grid_sample import held
from ..template.contract import BuiltKernel
from ..template.kernel import finish, new_builder, pointwise_cost
from ..template.loops import accumulator_type, parallel_nest, store_epilogue, sweep
from ..template.values import anchor_of

OPERATORS = frozenset(["MaxRoiPool", "RoiAlign"])
_MOST_SAMPLES = 2.0**30  # along one side of a bin
_MOST_CHANNELS = 512  # summed at a time: their accumulators stay in L1
_TYPICAL_SAMPLES = 4  # of a bin, where their number is known at run time only: for the estimate of work


def obstacle(group: Group, target: Target) -> str:
    """Why the kernel cannot be written for a group; empty if it can."""
    anchor = anchor_of(group)
    source, result = group.types[anchor.inputs[0]], group.types[anchor.outputs[0]]
    if "float" not in source.dtype:
        return f"no regions of {source.dtype}"
    return "the operand has no elements" if result.elements and not source.elements else ""


def build(group: Group, target: Target) -> BuiltKernel:
    """Takes one operator on regions, with an epilogue."""
    anchor = anchor_of(group)
    result = group.types[anchor.outputs[0]]
    builder = new_builder(target)
    work = result.elements * (16 * _TYPICAL_SAMPLES + pointwise_cost(group))
    if result.elements:
        _Regions.of(group, builder, anchor).emit(work)
    return finish("regions", builder, group, flops=work)


@dataclass(frozen=True)
class _Bin:
    """The part of a region that one output place covers, along one dimension: it begins at `begin`, in pixels, and has `count`
    samples, `step` apart, the first half a step behind the beginning."""

    begin: Expr
    step: Expr
    count: Expr
    extent: int  # of the image


@dataclass(frozen=True)
class _Regions:
    """The loops of one operator on regions; `dtype`: of the arithmetic; `channels_last`: an NHWC copy of the operand, if any."""

    group: Group
    builder: KernelBuilder
    anchor: Op
    dtype: str
    channels_last: Buffer | None

    @staticmethod
    def of(group: Group, builder: KernelBuilder, anchor: Op) -> _Regions:
        """The loops of an operator; its operand is converted to NHWC where at least half as many pixels are sampled as it has."""
        source = group.types[anchor.inputs[0]]
        batch, channels, height, width = source.shape
        regions, _, rows, columns = group.types[anchor.outputs[0]].shape
        dtype, samples = accumulator_type(source.dtype), anchor.attribute("sampling_ratio", 0) ** 2 or _TYPICAL_SAMPLES
        pays = 2 * regions * rows * columns * samples >= batch * height * width
        fits = min(channels, height * width) >= builder.lanes(dtype)
        return _Regions(group, builder, anchor, dtype, builder.workspace(source.elements, dtype) if pays and fits else None)

    @property
    def lanes(self) -> int:
        return self.builder.lanes(self.dtype)

    @property
    def image(self) -> tuple[int, int, int, int]:
        batch, channels, height, width = self.group.types[self.anchor.inputs[0]].shape
        return batch, channels, height, width

    def emit(self, work: int) -> None:
        builder, channels = self.builder, self.image[1]
        regions, _, height, width = self.group.types[self.anchor.outputs[0]].shape
        pieces = -(-channels // _MOST_CHANNELS)
        size = -(-channels // pieces)
        compute = self._align if self.anchor.op_type == "RoiAlign" else self._pool
        if self.channels_last is not None:
            self._lay_out(self.channels_last)

        def several(index: Index) -> None:
            region, row, column, piece = index
            channel = builder.name(tirx.min(piece * size, channels - size))
            sums = builder.local(size, self.dtype, "sums")
            scale = compute(sums, size, region, (row, column), channel)

            def store(c: Expr) -> None:
                value = sums[c] if scale is None else sums[c] / scale
                dtype = self.group.types[self.anchor.outputs[0]].dtype
                value = value if dtype == self.dtype else tirx.Cast(dtype, value)
                store_epilogue(self.group, builder, self.anchor, (region, channel + c, row, column), value)

            sweep(builder, size, self.lanes, store)

        parallel_nest(builder, [regions, height, width, pieces], work, several)

    def _lay_out(self, target: Buffer) -> None:
        """Store the operand as [batch, pixels, channels], transposed in registers by squares; the last ones overlap others."""
        builder, side = self.builder, self.lanes
        batch, channels, height, width = self.image
        pixels = height * width

        def square(index: Index) -> None:
            image, i, j = index
            pixel = builder.bind(tirx.min(i * side, pixels - side))
            channel = builder.bind(tirx.min(j * side, channels - side))
            rows = builder.local(side * side, self.dtype, "rows")
            for r in range(side):
                with builder.loop(side, "vectorized", "lane") as lane:
                    place = (image * channels + channel + r) * pixels + pixel
                    builder.store(rows, r * side + lane, self._element(place + lane))
            columns = transposed(builder, rows, side)
            for c in range(side):
                with builder.loop(side, "vectorized", "lane") as lane:
                    place = (image * pixels + pixel + c) * channels + channel
                    builder.store(target, place + lane, columns[c * side + lane])

        parallel_nest(builder, [batch, -(-pixels // side), -(-channels // side)], 4 * batch * channels * pixels, square)

    def _align(self, sums: Buffer, size: int, region: Expr, place: tuple[Expr, Expr], channel: Expr) -> Expr | None:
        """The samples of a bin added up, or the greatest; what to divide by."""
        builder, takes_max = self.builder, self.anchor.attribute("mode", "avg") == "max"
        image = self._batch(self.anchor.inputs[2], region)
        bins = [self._bin(region, place[d], d) for d in (0, 1)]
        self._fill(sums, size, -np.inf if takes_max else 0)
        bounds = [self._reached(one) for one in bins]
        with (
            builder.loop(bounds[0][1] - bounds[0][0], name="y") as i,
            builder.loop(bounds[1][1] - bounds[1][0], name="x") as j,
        ):
            steps = (bounds[0][0] + i, bounds[1][0] + j)
            ats = [
                builder.name(one.begin + (tirx.Cast(self.dtype, step) + self._const(0.5)) * one.step)
                for one, step in zip(bins, steps, strict=True)
            ]
            self._sample(sums, size, (image, channel), ats, takes_max)
        count = builder.name(reduce(mul, (tirx.Cast(self.dtype, one.count) for one in bins)))
        if not takes_max:
            return tirx.max(count, self._const(1))
        skipped = [tirx.NE(last - first, one.count) for (first, last), one in zip(bounds, bins, strict=True)]
        without = tirx.Or(reduce(tirx.Or, skipped), count <= self._const(0))
        with builder.when(without):
            self._raise_to_zero(sums, size)
        return None

    def _bin(self, region: Expr, place: Expr, dimension: int) -> _Bin:
        """One side of a bin (ONNX RoiAlign; dimension 0 is y)."""
        builder, anchor = self.builder, self.anchor
        outputs = self.group.types[anchor.outputs[0]].shape[2 + dimension]
        shifted = anchor.attribute("coordinate_transformation_mode", "half_pixel") == "half_pixel"
        scale, shift = self._const(anchor.attribute("spatial_scale", 1.0)), self._const(0.5 if shifted else 0.0)
        first, last = (builder.name(self._corner(region, side * 2 + 1 - dimension) * scale - shift) for side in (0, 1))
        size = last - first if shifted else tirx.max(last - first, self._const(1))
        whole = builder.name(size / self._const(outputs))
        ratio = anchor.attribute("sampling_ratio", 0)
        if ratio > 0:
            count, number = tirx.const(ratio, "int32"), self._const(ratio)
        else:
            number = builder.name(held(tirx.ceil(whole), self._const(0), self._const(_MOST_SAMPLES)))
            count = builder.name(tirx.Cast("int32", number))
        begin = builder.name(first + tirx.Cast(self.dtype, place) * whole)
        return _Bin(begin, builder.name(whole / tirx.max(number, self._const(1))), count, self.image[2 + dimension])

    def _reached(self, one: _Bin) -> tuple[Expr, Expr]:
        """The samples [first, last) of a bin, outside of which all are too far from the image to count."""
        builder = self.builder
        whole = tirx.Cast(self.dtype, one.count)
        near = (self._const(-1) - one.begin) / one.step - self._const(2)
        far = (self._const(one.extent) - one.begin) / one.step + self._const(2)
        forward = one.step > self._const(0)
        first = tirx.Select(forward, held(near, self._const(0), whole), self._const(0))
        last = tirx.Select(forward, held(far, self._const(0), whole), whole)
        begin = builder.name(tirx.Cast("int32", first))
        return begin, builder.name(tirx.max(tirx.min(tirx.Cast("int32", last), one.count), begin))

    def _sample(self, sums: Buffer, size: int, origin: tuple[Expr, Expr], ats: list[Expr], takes_max: bool) -> None:
        """Add the bilinear sample at a position, or take the maximum of its four weighted elements."""
        builder = self.builder
        near = tirx.all(
            *(tirx.And(at >= self._const(-1), at <= self._const(n)) for at, n in zip(ats, self.image[2:], strict=True))
        )
        with builder.when(near):
            sides = [self._neighbours(at, extent) for at, extent in zip(ats, self.image[2:], strict=True)]
            terms = [(y * self.image[3] + x, wy * wx) for y, wy in sides[0] for x, wx in sides[1]]
            offsets = [(builder.name(offset), builder.name(weight)) for offset, weight in terms]
            reads = [(self._pixel(*origin, offset), weight) for offset, weight in offsets]
            combined = tirx.max if takes_max else add

            def combine(c: Expr) -> None:
                parts = [weight * read(c) for read, weight in reads]
                builder.store(sums, c, combined(sums[c], reduce(combined, parts)))

            sweep(builder, size, self.lanes, combine)
        if takes_max:
            with builder.when(tirx.Not(near)):
                self._raise_to_zero(sums, size)

    def _raise_to_zero(self, sums: Buffer, size: int) -> None:
        sweep(self.builder, size, self.lanes, lambda c: self.builder.store(sums, c, tirx.max(sums[c], self._const(0))))

    def _pixel(self, image: Expr, channel: Expr, offset: Expr) -> Callable[[Expr], Expr]:
        """Reads a channel, counted from a first one, of the pixel at an offset into its plane."""
        plane, channels = self.image[2] * self.image[3], self.image[1]
        if (laid_out := self.channels_last) is None:
            first = self.builder.bind((image * channels + channel) * plane + offset)
            return lambda c: self._element(first + c * plane)
        first = self.builder.bind((image * plane + offset) * channels + channel)
        return lambda c: laid_out[first + c]

    def _neighbours(self, at: Expr, extent: int) -> list[tuple[Expr, Expr]]:
        """The two elements around a coordinate between -1 and the extent, and their weights; at the end the last one alone."""
        builder = self.builder
        inner = builder.name(tirx.max(at, self._const(0)))
        low = builder.name(tirx.min(tirx.Cast("int32", inner), extent - 1))
        high = builder.name(tirx.min(low + 1, extent - 1))
        share = builder.name(tirx.Select(low >= extent - 1, self._const(0), inner - tirx.Cast(self.dtype, low)))
        return [(low, builder.name(self._const(1) - share)), (high, share)]

    def _pool(self, sums: Buffer, size: int, region: Expr, place: tuple[Expr, Expr], channel: Expr) -> None:
        """The greatest element of a bin whose borders are whole pixels (R. Girshick, Fast R-CNN, 2015); 0 of none."""
        builder = self.builder
        image = self._batch(self.anchor.inputs[1], region, 5)
        scale = self._const(self.anchor.attribute("spatial_scale", 1.0))
        bounds = []
        for d in (0, 1):
            outputs, extent = self.group.types[self.anchor.outputs[0]].shape[2 + d], self.image[2 + d]
            first, last = (
                builder.name(
                    tirx.floor(held(self._corner(region, 1 + side * 2 + 1 - d) * scale, *self._range) + self._const(0.5))
                )
                for side in (0, 1)
            )
            share = builder.name(tirx.max(last - first + self._const(1), self._const(1)) / self._const(outputs))
            at = tirx.Cast(self.dtype, place[d])
            begin, end = tirx.floor(at * share) + first, tirx.ceil((at + self._const(1)) * share) + first
            bounds.append(
                [builder.name(tirx.Cast("int32", held(one, self._const(0), self._const(extent)))) for one in (begin, end)]
            )
        self._fill(sums, size, -np.inf)
        (top, bottom), (left, right) = bounds
        with builder.loop(tirx.max(bottom - top, 0), name="y") as i, builder.loop(tirx.max(right - left, 0), name="x") as j:
            read = self._pixel(image, channel, (top + i) * self.image[3] + left + j)
            sweep(builder, size, self.lanes, lambda c: builder.store(sums, c, math.maximum(sums[c], builder.name(read(c)))))
        with builder.when(tirx.Or(bottom <= top, right <= left)):
            self._fill(sums, size, 0)

    @property
    def _range(self) -> tuple[Expr, Expr]:
        return self._const(-_MOST_SAMPLES), self._const(_MOST_SAMPLES)

    def _fill(self, sums: Buffer, size: int, value: float) -> None:
        sweep(self.builder, size, self.lanes, lambda c: self.builder.store(sums, c, self._const(value)))

    def _batch(self, name: str, region: Expr, columns: int = 1) -> Expr:
        """The image of a region, clamped to the batch."""
        kind = self.group.types[name]
        value = self.builder.parameter(name, kind.elements, kind.dtype)[region * columns]
        if "float" in kind.dtype:
            value = held(tirx.Cast(self.dtype, value), self._const(0), self._const(self.image[0] - 1))
            return self.builder.name(tirx.Cast("int32", value))
        bounded = tirx.max(tirx.min(tirx.Cast("int64", value), self.image[0] - 1), tirx.const(0, "int64"))
        return self.builder.name(tirx.Cast("int32", bounded))

    def _corner(self, region: Expr, column: Expr) -> Expr:
        name = self.anchor.inputs[1]
        kind = self.group.types[name]
        return tirx.Cast(self.dtype, self.builder.parameter(name, kind.elements, kind.dtype)[region * kind.shape[1] + column])

    def _element(self, offset: Expr) -> Expr:
        name = self.anchor.inputs[0]
        kind = self.group.types[name]
        value = self.builder.parameter(name, kind.elements, kind.dtype)[offset]
        return value if kind.dtype == self.dtype else tirx.Cast(self.dtype, value)

    def _const(self, value: float) -> Expr:
        return tirx.const(value, self.dtype)
