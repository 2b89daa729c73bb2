"""GridSample of any number of dimensions: interpolation of an operand at coordinates known at run time only.

For a block of coordinates the offsets and weights of the elements that they read are computed once, into small arrays; all
channels then use them. Coordinates outside of the operand, infinite or NaN never read out of bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from math import prod
from operator import add, mul

import numpy as np
from tvm import tirx

from ...runtime.symbolic.sizes import SizeLike, minimum_of
from ...runtime.target import Target
from ..codegen.builder import Buffer, Expr, Index, KernelBuilder, row_major, unravel
from ..groups.group import Group, Op
from ..template.contract import BuiltKernel
from ..template.kernel import finish, maximum, new_builder, pointwise_cost
from ..template.loops import accumulator_type, merge_sections, parallel_nest, store_epilogue, sweep
from ..template.values import anchor_of
from .resize import rounded

OPERATORS = frozenset(["GridSample"])
_BLOCK = 64  # output positions whose offsets and weights are computed together
_MOST_UNROLLED = 16  # elements added up in one expression
_FARTHEST = 1e9  # coordinates are clamped to this, so that they fit 32 bits
_CUBIC_A = -0.75
_MODES = {"nearest": "nearest", "bilinear": "linear", "linear": "linear", "bicubic": "cubic", "cubic": "cubic"}
_TAPS = {"nearest": (0,), "linear": (0, 1), "cubic": (-1, 0, 1, 2)}


def obstacle(group: Group, target: Target) -> str:
    """Why the kernel cannot be written for a group; empty if it can."""
    anchor = anchor_of(group)
    source = group.types[anchor.inputs[0]]
    is_mean = _MODES[anchor.attribute("mode", "linear")] != "nearest"
    if source.dtype.startswith("complex"):
        return "no complex numbers"
    if is_mean and "float" not in source.dtype and np.dtype(source.dtype).kind not in "iu":
        return f"no mean of {source.dtype}"
    return "the operand has no elements" if group.types[anchor.outputs[0]].elements and not source.elements else ""


def build(group: Group, target: Target) -> BuiltKernel:
    """Takes one GridSample, with an epilogue."""
    anchor = anchor_of(group)
    mode = _MODES[anchor.attribute("mode", "linear")]
    grid = group.types[anchor.inputs[1]]
    builder = new_builder(target)
    elements = group.types[anchor.outputs[0]].elements
    work = elements * (8 * len(_TAPS[mode]) ** grid.shape[-1] + pointwise_cost(group))
    if elements:
        _Sampling(group, builder, anchor, mode).emit(work)
    return finish("grid_sample", builder, group, flops=work)


@dataclass(frozen=True)
class _Tap:
    """An element along a dimension that a coordinate reads: its index, clamped, its weight, and whether it is in the operand."""

    at: Expr
    weight: Expr | None
    inside: Expr | None


@dataclass(frozen=True)
class _Sampling:
    """The loops of one GridSample."""

    group: Group
    builder: KernelBuilder
    anchor: Op
    mode: str

    @property
    def extents(self) -> tuple[SizeLike, ...]:
        return self.group.types[self.anchor.inputs[0]].shape[2:]

    @property
    def working(self) -> str:
        """The type of the accumulators; that of the elements where they are only copied."""
        dtype = self.group.types[self.anchor.inputs[0]].dtype
        if self.mode == "nearest":
            return dtype
        return accumulator_type(dtype) if "float" in dtype else "float64"

    @property
    def taps(self) -> int:
        return int(len(_TAPS[self.mode]) ** len(self.extents))

    def emit(self, work: int) -> None:
        batch, channels, *places = self.group.types[self.anchor.outputs[0]].shape
        rank = 2 + len(places)
        merged, (_, _, runs) = merge_sections(self.group, (batch, channels, *places), ((0,), (1,), range(2, rank)), ())
        spread = [prod(places[axis - 2] for axis in run) for run in runs]
        count = prod(places)
        block = minimum_of(count, _BLOCK)
        lanes = self.builder.lanes(self.working)

        def several(index: Index) -> None:
            image, number = index
            first = self.builder.bind(tirx.min(number * _BLOCK, self.builder.bind(count - block)))
            cells = self.taps * _BLOCK
            offsets = self.builder.local(cells, "int32", "offsets")
            weights = self.builder.local(cells, self.working, "weights") if self.mode != "nearest" else None
            begin = self.builder.bind(image * self.builder.bind(count) + first)
            sweep(self.builder, block, lanes, lambda j: self._find(offsets, weights, begin + j, j))
            with self.builder.loop(channels, name="channel") as channel:
                base = self.builder.bind((image * channels + channel) * self.builder.bind(prod(self.extents)))
                self._mix(merged, (image, channel), (first, block, spread), base, (offsets, weights))

        parallel_nest(self.builder, [batch, -(-count // _BLOCK)], work, several)

    def _find(self, offsets: Buffer, weights: Buffer | None, place: Expr, j: Expr) -> None:
        """Store the offsets and weights of the elements that a coordinate reads; -1 stands for a zero outside."""
        grid = self.group.types[self.anchor.inputs[1]]
        buffer = self.builder.parameter(self.anchor.inputs[1], grid.elements, grid.dtype)
        rank = len(self.extents)
        dimensions = [self._taps(d, buffer[place * rank + (rank - 1 - d)]) for d in range(rank)]
        for number, taps in enumerate(product(*dimensions)):
            offset = row_major([tap.at for tap in taps], self.extents)
            if inside := [tap.inside for tap in taps if tap.inside is not None]:
                offset = tirx.Select(reduce(tirx.And, inside), offset, tirx.const(-1, "int32"))
            self.builder.store(offsets, number * _BLOCK + j, offset)
            if weights is not None:
                weight = reduce(mul, [tap.weight for tap in taps])
                self.builder.store(weights, number * _BLOCK + j, tirx.Cast(self.working, weight))

    def _taps(self, dimension: int, coordinate: Expr) -> list[_Tap]:
        """The elements along one dimension that a normalized coordinate reads."""
        builder = self.builder
        dtype, extent = accumulator_type(str(coordinate.ty)), builder.bind(self.extents[dimension])  # which a call may decide
        padding, aligned = self.anchor.attribute("padding_mode", "zeros"), bool(self.anchor.attribute("align_corners", 0))

        def const(value: float) -> Expr:
            return tirx.const(value, dtype)

        n = coordinate if str(coordinate.ty) == dtype else tirx.Cast(dtype, coordinate)
        size = const(extent) if isinstance(extent, int) else tirx.Cast(dtype, extent)
        scaled = (n + const(1)) * ((size - const(1)) * const(0.5))
        x = scaled if aligned else ((n + const(1)) * size - const(1)) * const(0.5)
        x = held(builder.name(x), const(-_FARTHEST), const(_FARTHEST))
        if self.mode == "nearest":
            x = tirx.nearbyint(x)
        x = builder.name(x)
        low, high = (const(0.0), size - const(1.0)) if aligned else (const(-0.5), size - const(0.5))
        # With cubic weights the elements' indices are clamped to the border, not the coordinate: as torch and ONNX Runtime do,
        # unlike onnx.reference.
        if padding == "reflection" or (padding == "border" and self.mode != "cubic"):
            is_one = aligned and isinstance(extent, int) and extent == 1
            reflected = low if is_one else _reflected(builder, x, low, high)
            back = held(x, const(0), size - const(1)) if padding == "border" else reflected
            x = builder.name(tirx.Select(tirx.Or(x < low, x > high), back, x))
        whole = builder.name(tirx.floor(x))
        weights = self._weights(builder.name(x - whole))
        first = builder.name(tirx.Cast("int32", whole))
        found = []
        for step, weight in zip(_TAPS[self.mode], weights, strict=True):
            at = first + step if step else first
            inside = tirx.And(at >= 0, at < extent) if padding == "zeros" else None
            if padding == "reflection":
                at = _reflected_index(builder, at, extent, aligned)
            at = builder.name(tirx.max(tirx.min(at, extent - 1), tirx.const(0, "int32")))
            found.append(_Tap(at, weight, inside))
        return found

    def _weights(self, r: Expr) -> list[Expr | None]:
        """Weights of the elements around a coordinate that is a fraction r beyond one (cubic: R. Keys, 1981)."""
        if self.mode == "nearest":
            return [None]
        one, a = tirx.const(1, str(r.ty)), _CUBIC_A
        if self.mode == "linear":
            return [self.builder.name(one - r), r]

        def const(value: float) -> Expr:
            return tirx.const(value, str(r.ty))

        def near(x: Expr) -> Expr:
            return (const(a + 2) * x - const(a + 3)) * x * x + one

        def far(x: Expr) -> Expr:
            return ((const(a) * x - const(5 * a)) * x + const(8 * a)) * x - const(4 * a)

        rest = self.builder.name(one - r)
        return [self.builder.name(weight) for weight in (far(r + one), near(r), near(rest), far(rest + one))]

    def _mix(
        self,
        merged: Group,
        row: tuple[Expr, Expr],
        places: tuple[Expr, SizeLike, Sequence[SizeLike]],
        base: Expr,
        tables: tuple[Buffer, Buffer | None],
    ) -> None:
        """Interpolate and store one channel at a block of coordinates."""
        builder, (first, block, spread) = self.builder, places
        offsets, weights = tables
        lanes = builder.lanes(self.working)

        def term(j: Expr, tap: Expr) -> Expr:
            value = self._load(base, offsets[tap * _BLOCK + j])
            return value if weights is None else weights[tap * _BLOCK + j] * value

        def store(j: Expr, value: Expr) -> None:
            dtype = self.group.types[self.anchor.outputs[0]].dtype
            store_epilogue(merged, builder, self.anchor, (*row, *unravel(first + j, spread)), rounded(value, dtype))

        if self.taps <= _MOST_UNROLLED:
            sweep(builder, block, lanes, lambda j: store(j, reduce(add, [term(j, tap) for tap in range(self.taps)])))
            return
        sums = builder.local(block, self.working, "sums")
        sweep(builder, block, lanes, lambda j: builder.store(sums, j, tirx.const(0, self.working)))
        with builder.loop(self.taps, name="tap") as tap:
            sweep(builder, block, lanes, lambda j: builder.store(sums, j, sums[j] + term(j, tap)))
        sweep(builder, block, lanes, lambda j: store(j, sums[j]))

    def _load(self, base: Expr, offset: Expr) -> Expr:
        kind = self.group.types[self.anchor.inputs[0]]
        source = self.builder.parameter(self.anchor.inputs[0], kind.elements, kind.dtype)
        zeros = self.anchor.attribute("padding_mode", "zeros") == "zeros"
        value = source[base + (tirx.max(offset, tirx.const(0, "int32")) if zeros else offset)]
        value = value if kind.dtype == self.working else tirx.Cast(self.working, value)
        if not zeros:
            return value
        return self.builder.masked(offset >= 0, value, tirx.const(0, self.working))


def held(x: Expr, low: Expr, high: Expr) -> Expr:
    """x clamped to [low, high]; `low` if it is NaN."""
    return tirx.Select(x > low, tirx.Select(x < high, x, high), low)


def _reflected(builder: KernelBuilder, x: Expr, low: Expr, high: Expr) -> Expr:
    """x reflected at both bounds until it is between them: a triangle wave; of equal bounds they."""
    span = builder.name(high - low)
    double = builder.name(span + span)
    far = builder.name(tirx.abs(x - low))
    rest = builder.name(far - tirx.floor(far / double) * double)
    return tirx.Select(span > tirx.const(0, str(x.ty)), low + tirx.min(rest, double - rest), low)


def _reflected_index(builder: KernelBuilder, at: Expr, extent: Expr, aligned: bool) -> Expr:
    """The same of an index: mirrored at the middle of the outer elements, or at their outer edge."""
    period = maximum(2 * (extent - 1), 1) if aligned else 2 * extent  # of one element: all are that
    rest = builder.name(tirx.floormod(at, period))
    return tirx.min(rest, (period if aligned else period - 1) - rest)
