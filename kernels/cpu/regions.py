"""RoiAlign and MaxRoiPool: regions of images, given in pixels by a run, brought to one size.

One output place of a region is computed for a vector of channels at a time. Regions may lie anywhere, have infinite corners or
NaN for them: nothing outside of the operand is read, and samples far from it cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import add, mul

import numpy as np
from tvm import tirx

from ...runtime.target import Target
from .. import math
from ..builder import Buffer, Expr, Index, KernelBuilder
from ..group import Group, Op
from ..template import BuiltKernel, Refusal
from ..values import pointwise_obstacle, split_anchor
from .anchored import accumulator_type, follow, parallel_nest
from .common import finish, new_builder, pointwise_cost
from .grid_sample import held

OPERATORS = frozenset(["MaxRoiPool", "RoiAlign"])
_MOST_SAMPLES = 2.0**30  # along one side of a bin
_TYPICAL_SAMPLES = 4  # of a bin, where a run decides: for the estimate of work


def build(group: Group, target: Target) -> BuiltKernel | Refusal:
    """Takes one operator on regions, with its followers."""
    anchor, _ = split_anchor(group)
    if anchor is None or anchor.op_type not in OPERATORS:
        return Refusal("has no regions")
    if reason := pointwise_obstacle(group):
        return Refusal(reason)
    source, result = group.types[anchor.inputs[0]], group.types[anchor.outputs[0]]
    if "float" not in source.dtype:
        return Refusal(f"no regions of {source.dtype}")
    if result.elements and not source.elements:
        return Refusal("the operand has no elements")
    builder = new_builder(target)
    work = result.elements * (16 * _TYPICAL_SAMPLES + pointwise_cost(group))
    if result.elements:
        _Regions(group, builder, anchor, accumulator_type(source.dtype)).emit(work)
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
    """The loops of one operator on regions; `dtype` is what it computes in."""

    group: Group
    builder: KernelBuilder
    anchor: Op
    dtype: str

    @property
    def image(self) -> tuple[int, int, int, int]:
        batch, channels, height, width = self.group.types[self.anchor.inputs[0]].shape
        return batch, channels, height, width

    def emit(self, work: int) -> None:
        builder, channels = self.builder, self.image[1]
        regions, _, height, width = self.group.types[self.anchor.outputs[0]].shape
        lanes = min(builder.lanes(self.dtype), channels)
        compute = self._align if self.anchor.op_type == "RoiAlign" else self._pool

        def several(index: Index) -> None:
            region, row, column, number = index
            channel = builder.name(tirx.min(number * lanes, channels - lanes))
            sums = builder.local(lanes, self.dtype, "sums")
            scale = compute(sums, lanes, region, (row, column), channel)

            with builder.loop(lanes, "vectorized", "lane") as lane:
                value = sums[lane] if scale is None else sums[lane] / scale
                dtype = self.group.types[self.anchor.outputs[0]].dtype
                value = value if dtype == self.dtype else tirx.Cast(dtype, value)
                follow(self.group, builder, self.anchor, (region, channel + lane, row, column), value)

        parallel_nest(builder, [regions, height, width, -(-channels // lanes)], work, several)

    def _align(self, sums: Buffer, lanes: int, region: Expr, place: tuple[Expr, Expr], channel: Expr) -> Expr | None:
        """The samples of a bin added up, or the greatest; what to divide by."""
        builder, takes_max = self.builder, self.anchor.attribute("mode", "avg") == "max"
        base = builder.name(self._batch(self.anchor.inputs[2], region) * self.image[1] + channel)
        bins = [self._bin(region, place[d], d) for d in (0, 1)]
        self._fill(sums, lanes, -np.inf if takes_max else 0)
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
            self._sample(sums, lanes, base, ats, takes_max)
        count = builder.name(reduce(mul, (tirx.Cast(self.dtype, one.count) for one in bins)))
        if not takes_max:
            return tirx.max(count, self._const(1))
        skipped = [tirx.NE(last - first, one.count) for (first, last), one in zip(bounds, bins, strict=True)]
        without = tirx.Or(reduce(tirx.Or, skipped), count <= self._const(0))
        with builder.when(without), builder.loop(lanes, "vectorized", "lane") as lane:
            builder.store(sums, lane, tirx.max(sums[lane], self._const(0)))
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
        """The samples [first, last) of a bin among which are all that lie near the image."""
        builder = self.builder
        whole = tirx.Cast(self.dtype, one.count)
        near = (self._const(-1) - one.begin) / one.step - self._const(2)
        far = (self._const(one.extent) - one.begin) / one.step + self._const(2)
        forward = one.step > self._const(0)
        first = tirx.Select(forward, held(near, self._const(0), whole), self._const(0))
        last = tirx.Select(forward, held(far, self._const(0), whole), whole)
        begin = builder.name(tirx.Cast("int32", first))
        return begin, builder.name(tirx.max(tirx.min(tirx.Cast("int32", last), one.count), begin))

    def _sample(self, sums: Buffer, lanes: int, base: Expr, ats: list[Expr], takes_max: bool) -> None:
        """Add the mean of the four elements around a place, or take the greatest of their shares of it."""
        builder = self.builder
        near = tirx.all(
            *(tirx.And(at >= self._const(-1), at <= self._const(n)) for at, n in zip(ats, self.image[2:], strict=True))
        )
        with builder.when(near):
            sides = [self._neighbours(at, extent) for at, extent in zip(ats, self.image[2:], strict=True)]
            terms = [(y * self.image[3] + x, wy * wx) for y, wy in sides[0] for x, wx in sides[1]]
            offsets = [(builder.name(offset), builder.name(weight)) for offset, weight in terms]
            plane = self.image[2] * self.image[3]
            with builder.loop(lanes, "vectorized", "lane") as lane:
                parts = [weight * self._element((base + lane) * plane + offset) for offset, weight in offsets]
                combined = tirx.max if takes_max else add
                builder.store(sums, lane, combined(sums[lane], reduce(combined, parts)))
        if takes_max:
            with builder.when(tirx.Not(near)), builder.loop(lanes, "vectorized", "lane") as lane:
                builder.store(sums, lane, tirx.max(sums[lane], self._const(0)))

    def _neighbours(self, at: Expr, extent: int) -> list[tuple[Expr, Expr]]:
        """The two elements around a coordinate between -1 and the extent, and their weights; at the end the last one alone."""
        builder = self.builder
        inner = builder.name(tirx.max(at, self._const(0)))
        low = builder.name(tirx.min(tirx.Cast("int32", inner), extent - 1))
        high = builder.name(tirx.min(low + 1, extent - 1))
        share = builder.name(tirx.Select(low >= extent - 1, self._const(0), inner - tirx.Cast(self.dtype, low)))
        return [(low, builder.name(self._const(1) - share)), (high, share)]

    def _pool(self, sums: Buffer, lanes: int, region: Expr, place: tuple[Expr, Expr], channel: Expr) -> None:
        """The greatest element of a bin whose borders are whole pixels (R. Girshick, Fast R-CNN, 2015); 0 of none."""
        builder = self.builder
        base = builder.name(self._batch(self.anchor.inputs[1], region, 5) * self.image[1] + channel)
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
            size = builder.name(tirx.max(last - first + self._const(1), self._const(1)) / self._const(outputs))
            at = tirx.Cast(self.dtype, place[d])
            begin, end = tirx.floor(at * size) + first, tirx.ceil((at + self._const(1)) * size) + first
            bounds.append(
                [builder.name(tirx.Cast("int32", held(one, self._const(0), self._const(extent)))) for one in (begin, end)]
            )
        self._fill(sums, lanes, -np.inf)
        plane = self.image[2] * self.image[3]
        (top, bottom), (left, right) = bounds
        with builder.loop(tirx.max(bottom - top, 0), name="y") as i, builder.loop(tirx.max(right - left, 0), name="x") as j:
            offset = builder.name((top + i) * self.image[3] + left + j)
            with builder.loop(lanes, "vectorized", "lane") as lane:
                builder.store(sums, lane, math.maximum(sums[lane], builder.name(self._element((base + lane) * plane + offset))))
        with builder.when(tirx.Or(bottom <= top, right <= left)):
            self._fill(sums, lanes, 0)

    @property
    def _range(self) -> tuple[Expr, Expr]:
        return self._const(-_MOST_SAMPLES), self._const(_MOST_SAMPLES)

    def _fill(self, sums: Buffer, lanes: int, value: float) -> None:
        with self.builder.loop(lanes, "vectorized", "lane") as lane:
            self.builder.store(sums, lane, self._const(value))

    def _batch(self, name: str, region: Expr, columns: int = 1) -> Expr:
        """The image of a region, held within those there are."""
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
