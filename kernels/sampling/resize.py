"""Resize of any number of dimensions, separably: for each row of outputs first the rows that it interpolates, then along the row.

Indices and weights are constant tables (resampling.py). Nearest neighbours by integer factors, as in most upsampling, are strided
copies without tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import product
from math import prod
from operator import add
from typing import TypeAlias

import numpy as np
from tvm import tirx

from ...runtime.symbolic.sizes import Size, SizeLike, estimating, greatest_of, hint_of
from ...runtime.target import Target
from ..codegen.builder import Buffer, Expr, Index, KernelBuilder, row_major
from ..cost.estimate import Estimate, with_bytes
from ..cost.memory import parallel_work
from ..cost.movement import resized_cycles
from ..groups.group import Group, Op
from ..movement.injective import as_bits, row_strides
from ..movement.strided_copy import Axis, Region, copy_regions, regions_cycles
from ..template.contract import BuiltKernel, Candidate, Operand, Refusal, packed_name
from ..template.kernel import anchor_bodies, finish, machine_of, new_builder, pointwise_cost, result_machine
from ..template.loops import merge_sections, nest, parallel_nest, store_epilogue, sweep
from ..template.values import anchor_of, followers_of
from .resampling import Column, PackResampling, Resampling
from .sized_resampling import SizedResampling

Axes: TypeAlias = Resampling | SizedResampling
OPERATORS = frozenset(["Resize"])
_MOST_UNROLLED = 8  # elements added up in one expression
_LARGEST_ROW = 1 << 16  # elements of a row on the stack, at most
_EXACT = {"float64": "float64", "int32": "float64", "int64": "float64", "uint32": "float64", "uint64": "float64"}


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes one Resize whose scales or sizes are constant, with an epilogue."""
    anchor, followers = anchor_of(group), followers_of(group)
    axes = read_axes(group, anchor)
    if isinstance(axes, Refusal):
        return axes
    if any(isinstance(axis, Resampling) and axis.outputs and not axis.inputs for axis in axes):
        return Refusal("the operand has no elements")
    nearest = anchor.attribute("mode", "nearest") == "nearest"
    known = [axis for axis in axes if isinstance(axis, Resampling)]
    regular = _regular_region(group, anchor, known) if nearest and len(known) == len(axes) else None
    if regular is not None and not any(axis.overhangs for axis in axes):
        moved = group if followers else as_bits(group, (anchor.inputs[0], anchor.outputs[0]))
        return Candidate(_copy_estimate(moved, anchor, regular, target), partial(_build_copy, moved, anchor, regular, target))
    dtype = group.types[anchor.inputs[0]].dtype
    if dtype.startswith("complex") or (dtype == "bool" and not nearest):
        return Refusal(f"no means of {dtype}")
    resize = _Resize.of(group, new_builder(target), anchor, axes)
    if resize.largest_row > _LARGEST_ROW:
        return Refusal(f"rows of {resize.largest_row} elements, more than {_LARGEST_ROW}, would wait on the stack")
    return Candidate(_estimate(group, resize, target), partial(_build, group, resize))


def _copy_estimate(group: Group, anchor: Op, region: Region, target: Target) -> Estimate:
    machine = result_machine(group, target)
    _, after = anchor_bodies(group, anchor, machine)
    cycles = regions_cycles(group, new_builder(target), anchor, group.outputs[0], [region], machine, after)
    work = group.types[anchor.outputs[0]].elements
    return with_bytes(Estimate(cycles, work, unit="vector", is_parallel=work >= parallel_work(target.machine)), group)


@estimating
def _estimate(group: Group, resize: _Resize, target: Target) -> Estimate:
    machine = machine_of(target, resize.working)
    before, after = anchor_bodies(group, resize.anchor, machine)
    *outer, last = resize.dimensions
    mixing, along = prod(d.axis.taps for d in outer if d.axis), last.axis.taps if last.axis else 0
    rows = prod(d.outputs for d in outer)
    cycles = resized_cycles(rows, last.outputs, last.inputs, (mixing, along), before + after, machine)
    work = prod(d.outputs for d in resize.dimensions) * max(mixing * max(along, 1), 1)
    return with_bytes(Estimate(cycles, work, unit="vector", is_parallel=resize.work >= parallel_work(target.machine)), group)


def _build_copy(group: Group, anchor: Op, region: Region, target: Target) -> BuiltKernel:
    builder = new_builder(target)
    copy_regions(group, builder, anchor, group.outputs[0], [region])
    return finish("resize", builder, group, flops=group.types[anchor.outputs[0]].elements * pointwise_cost(group))


def _build(group: Group, resize: _Resize) -> BuiltKernel:
    elements = group.types[resize.anchor.outputs[0]].elements
    if isinstance(elements, Size) or elements:
        resize.emit()
    taps = prod(d.axis.taps for d in resize.dimensions if d.axis)
    return finish("resize", resize.builder, group, flops=2 * hint_of(elements) * taps, packed=resize.packed)


def read_axes(group: Group, anchor: Op) -> Sequence[Axes] | Refusal:
    """How each dimension is resized."""
    source, result = (group.types[name].shape for name in (anchor.inputs[0], anchor.outputs[0]))
    rank = len(source)
    if any(isinstance(size, Size) for size in (*source, *result)):
        return _sized_axes(group, anchor)
    axes = [axis % rank for axis in anchor.attribute("axes") or range(rank)]
    roi, scales, sizes = (_literal(group, anchor, position) for position in (1, 2, 3))
    if scales is None and sizes is None:
        return Refusal("the sizes are known only to a run")
    coordinates = anchor.attribute("coordinate_transformation_mode", "half_pixel")
    if coordinates == "tf_crop_and_resize" and (roi is None or len(roi) != 2 * len(axes)):
        return Refusal("the region of interest is known only to a run")
    factors = [1.0] * rank
    for position, axis in enumerate(axes):
        factors[axis] = float(scales[position]) if scales is not None else sizes[position] / max(source[axis], 1)  # type: ignore[index]
    if scales is None and (policy := anchor.attribute("keep_aspect_ratio_policy", "stretch")) != "stretch":
        common = (min if policy == "not_larger" else max)(factors[axis] for axis in axes)
        factors = [common if axis in axes else 1.0 for axis in range(rank)]
    spans = [(0.0, 1.0)] * rank
    if coordinates == "tf_crop_and_resize" and roi is not None:
        for position, axis in enumerate(axes):
            spans[axis] = (float(roi[position]), float(roi[len(axes) + position]))
    whole = Resampling(
        0,
        0,
        1.0,
        anchor.attribute("mode", "nearest"),
        coordinates,
        anchor.attribute("nearest_mode", "round_prefer_floor"),
        anchor.attribute("cubic_coeff_a", -0.75),
        bool(anchor.attribute("antialias", 0)),
        bool(anchor.attribute("exclude_outside", 0)),
    )
    still = replace(whole, mode="nearest", coordinates="asymmetric", antialias=False)  # factor 1: each element itself
    parts = zip(source, result, factors, spans, strict=True)
    return [
        replace(still if i == o and factor == 1 and span == (0.0, 1.0) else whole, inputs=i, outputs=o, scale=factor, roi=span)
        for i, o, factor, span in parts
    ]


def _sized_axes(group: Group, anchor: Op) -> list[SizedResampling] | Refusal:
    """The same where a call decides sizes."""
    source, result = (group.types[name].shape for name in (anchor.inputs[0], anchor.outputs[0]))
    if anchor.attribute("antialias", 0) or anchor.attribute("exclude_outside", 0):
        return Refusal("weights of such reach need sizes that are known before a call")
    if anchor.attribute("keep_aspect_ratio_policy", "stretch") != "stretch":
        return Refusal("the least of some factors needs sizes that are known before a call")
    scales, axes = _literal(group, anchor, 2), [axis % len(source) for axis in anchor.attribute("axes") or range(len(source))]
    factors = dict[int, float]() if scales is None else dict(zip(axes, map(float, scales), strict=True))
    how = (
        anchor.attribute("mode", "nearest"),
        anchor.attribute("coordinate_transformation_mode", "half_pixel"),
        anchor.attribute("nearest_mode", "round_prefer_floor"),
        anchor.attribute("cubic_coeff_a", -0.75),
    )
    found = [SizedResampling(i, o, factors.get(axis), *how) for axis, (i, o) in enumerate(zip(source, result, strict=True))]
    reasons = [axis.obstacle for axis in found if not axis.is_identity and axis.obstacle]
    return Refusal(reasons[0]) if reasons else found


def _literal(group: Group, anchor: Op, position: int) -> np.ndarray | None:
    """A constant operand; None where it is absent, empty or known at run time only."""
    name = anchor.inputs[position] if position < len(anchor.inputs) else ""
    value = group.literal(name)
    return None if value is None or not value.size else np.ravel(value)


def _regular_region(group: Group, anchor: Op, axes: Sequence[Resampling]) -> Region | None:
    """The output as one strided view of the operand, where every dimension repeats or skips evenly; else None."""
    loops: list[tuple[Axis, ...]] = []
    base = 0
    for axis, stride in zip(axes, row_strides(group.types[anchor.inputs[0]].shape), strict=True):
        if axis.is_identity:
            loops.append((Axis(axis.outputs, stride),))
            continue
        (places,) = axis.indices
        if not len(places):
            loops.append((Axis(0, stride),))
            continue
        step, times = int(places[1] - places[0]) if len(places) > 1 else 1, axis.outputs // max(axis.inputs, 1)
        if np.array_equal(places, places[0] + step * np.arange(len(places))):
            loops.append((Axis(axis.outputs, step * stride),))
            base += int(places[0]) * stride
        elif np.array_equal(places, np.repeat(np.arange(axis.inputs), times)):
            loops.append((Axis(axis.inputs, stride), Axis(times, 0)))
        else:
            return None
    return Region(anchor.inputs[0], (0,) * len(axes), tuple(loops), base)


@dataclass(frozen=True)
class _Dimension:
    """A dimension of the loop nest: one that is resized, or several neighbours that are not."""

    inputs: SizeLike
    outputs: SizeLike
    axis: Axes | None


@dataclass(frozen=True)
class _Resize:
    """The loops of one Resize over merged dimensions; `dtype`: type of the arithmetic, None where elements are only copied."""

    group: Group
    builder: KernelBuilder
    anchor: Op
    dimensions: tuple[_Dimension, ...]
    dtype: str | None
    packed: dict[str, Operand] = field(default_factory=dict)
    tables: dict[int, dict[str, Buffer]] = field(default_factory=dict)  # of dimensions that a call decides

    @staticmethod
    def of(group: Group, builder: KernelBuilder, anchor: Op, axes: Sequence[Axes]) -> _Resize:
        source, result = (group.types[name] for name in (anchor.inputs[0], anchor.outputs[0]))
        sections: list[list[int]] = []
        for axis, resampling in enumerate(axes):
            if sections and resampling.is_identity and axes[axis - 1].is_identity:
                sections[-1].append(axis)
            else:
                sections.append([axis])
        merged, runs = merge_sections(group, result.shape, sections)
        dimensions = tuple(
            _Dimension(
                prod(source.shape[a] for a in run),
                prod(result.shape[a] for a in run),
                None if axes[run[0]].is_identity else axes[run[0]],
            )
            for section in runs
            for run in section
        )
        nearest = all(dimension.axis is None or dimension.axis.mode == "nearest" for dimension in dimensions)
        return _Resize(merged, builder, anchor, dimensions, None if nearest else _EXACT.get(source.dtype, "float32"))

    @property
    def working(self) -> str:
        return self.dtype or self.group.types[self.anchor.inputs[0]].dtype

    @property
    def lanes(self) -> int:
        return self.builder.lanes(self.working)

    @property
    def largest_row(self) -> int:
        """Elements of the longest row of scratch."""
        *outer, last = self.dimensions
        taps = prod(d.axis.taps for d in outer if d.axis is not None)
        mixed = taps > 1 if last.axis is not None else taps > _MOST_UNROLLED
        summed = last.axis is not None and last.axis.taps > _MOST_UNROLLED
        inputs, outputs = greatest_of(last.inputs), greatest_of(last.outputs)
        longest: int = max(inputs if mixed else 0, outputs if summed else 0)
        return longest

    @property
    def work(self) -> SizeLike:
        return prod(d.outputs for d in self.dimensions) * (4 + 2 * sum(d.axis.taps for d in self.dimensions if d.axis))

    def emit(self) -> None:
        for number, dimension in enumerate(self.dimensions):
            if isinstance(dimension.axis, SizedResampling):
                self.tables[number] = dimension.axis.tables(self.builder, self.working)
        parallel_nest(self.builder, [d.outputs for d in self.dimensions[:-1]], self.work, self._row)

    def _row(self, at: Index) -> None:
        """All outputs along the last dimension."""
        resized = [number for number in range(len(at)) if self.dimensions[number].axis is not None]
        taps = [self._axis(number).taps for number in resized]
        last = self.dimensions[-1]
        if prod(taps) > _MOST_UNROLLED:
            self._along(at, self._added_rows(at, resized, taps))
            return
        rows = [self._origin(at, resized, tap) for tap in product(*map(range, taps))]
        source = self._source()

        def mixed(j: Expr) -> Expr:
            if self.dtype is None:
                return source[rows[0][0] + j]
            return self._sum([(factor, source[origin + j]) for origin, factor in rows])

        if last.axis is not None and len(rows) > 1:
            row = self._buffer(last.inputs, "row")
            sweep(self.builder, last.inputs, self.lanes, lambda j: self.builder.store(row, j, mixed(j)))
            self._along(at, lambda j: row[j])
        else:
            self._along(at, mixed)

    def _added_rows(self, at: Index, resized: Sequence[int], taps: Sequence[int]) -> Callable[[Expr], Expr]:
        """The weighted sum of many rows of the operand, added up one by one in a row of scratch."""
        builder, length, source = self.builder, self.dimensions[-1].inputs, self._source()
        row = self._buffer(length, "row")
        sweep(builder, length, self.lanes, lambda j: builder.store(row, j, tirx.const(0, self.working)))

        def add(tap: Index) -> None:
            origin, factor = self._origin(at, resized, tap)
            sweep(
                builder,
                length,
                self.lanes,
                lambda j: builder.store(row, j, row[j] + self._sum([(factor, source[origin + j])])),
            )

        nest(builder, taps, add)
        return lambda j: row[j]

    def _along(self, at: Index, read: Callable[[Expr], Expr]) -> None:
        """Resize the row that `read` gives along the last dimension, and store it."""
        builder, number = self.builder, len(at)
        last = self.dimensions[-1]
        left_out = [self._table(n, "outside", at[n]) for n in range(number) if self._overhangs(n)]
        skipped = [builder.bind(flag) for flag in left_out]

        def store(j: Expr, value: Expr) -> None:
            flags = [*skipped, *([self._table(number, "outside", j)] if self._overhangs(number) else [])]
            self._store((*at, j), value, flags)

        if last.axis is None:
            sweep(builder, last.outputs, self.lanes, lambda j: store(j, read(j)))
            return
        taps = last.axis.taps

        def tap(j: Expr, t: Expr) -> tuple[Expr, Expr]:
            place = t * last.outputs + j
            return self._table(number, "weight", place), read(self._table(number, "index", place))

        if self.dtype is None:
            sweep(builder, last.outputs, self.lanes, lambda j: store(j, read(self._table(number, "index", j))))
        elif taps <= _MOST_UNROLLED:
            sweep(builder, last.outputs, self.lanes, lambda j: store(j, self._sum([tap(j, t) for t in range(taps)])))
        else:
            sums = self._buffer(last.outputs, "sums")
            sweep(builder, last.outputs, self.lanes, lambda j: builder.store(sums, j, tirx.const(0, self.working)))
            with builder.loop(taps, name="tap") as t:
                sweep(
                    builder,
                    last.outputs,
                    self.lanes,
                    lambda j: builder.store(sums, j, sums[j] + self._sum([tap(j, t)])),
                )
            sweep(builder, last.outputs, self.lanes, lambda j: store(j, sums[j]))

    def _sum(self, terms: Sequence[tuple[Expr | None, Expr]]) -> Expr:
        """The sum of factor * x in the working type; a factor of None is 1."""
        parts = []
        for factor, x in terms:
            value = x if str(x.ty) == self.working else tirx.Cast(self.working, x)
            parts.append(value if factor is None else factor * value)
        return reduce(add, parts)

    def _origin(self, at: Index, resized: Sequence[int], tap: Index) -> tuple[Expr, Expr | None]:
        """Offset and weight of the row of the operand that one tap of each resized outer dimension reads."""
        place, weight = list(at), None
        for number, t in zip(resized, tap, strict=True):
            entry = t * self.dimensions[number].outputs + at[number]
            place[number] = self._table(number, "index", entry)
            if self.dtype is not None:
                factor = self._table(number, "weight", entry)
                weight = factor if weight is None else weight * factor
        shape = [dimension.inputs for dimension in self.dimensions]
        origin = self.builder.bind(row_major((*place, 0), shape))
        return origin, None if weight is None else self.builder.bind(weight)

    def _store(self, index: Index, value: Expr, outside: Sequence[Expr]) -> None:
        dtype = self.group.types[self.anchor.outputs[0]].dtype
        result = value if self.dtype is None else rounded(value, dtype)
        if outside:
            fill = tirx.const(self.anchor.attribute("extrapolation_value", 0.0), dtype)
            result = tirx.Select(reduce(tirx.Or, outside), fill, result)
        store_epilogue(self.group, self.builder, self.anchor, index, result)

    def _axis(self, number: int) -> Axes:
        axis = self.dimensions[number].axis
        assert axis is not None, f"dimension {number} is not resized"
        return axis

    def _overhangs(self, number: int) -> bool:
        """Whether some outputs along a dimension get the extrapolation value."""
        axis = self.dimensions[number].axis
        return axis is not None and axis.overhangs

    def _table(self, number: int, column: Column, entry: Expr) -> Expr:
        """An entry of one of a dimension's tables."""
        axis, dtype = self._axis(number), {"index": "int32", "weight": self.working, "outside": "int32"}[column]
        if isinstance(axis, SizedResampling):
            return self.tables[number][column][entry]
        pack = PackResampling(axis, column, dtype)
        names = self.anchor.inputs
        constant = names[3] if len(names) > 3 and names[3] else names[2]
        key = packed_name(constant, f"{number}.{column}")
        kind = pack.packed_type(self.group.types[constant])
        self.packed[key] = Operand(constant, pack)
        value = self.builder.parameter(key, kind.elements, dtype)[entry]
        return tirx.NE(value, tirx.const(0, "int32")) if column == "outside" else value

    def _source(self) -> Buffer:
        kind = self.group.types[self.anchor.inputs[0]]
        return self.builder.parameter(self.anchor.inputs[0], kind.elements, kind.dtype)

    def _buffer(self, elements: SizeLike, name: str) -> Buffer:
        return self.builder.local(greatest_of(elements), self.working, name)


def rounded(value: Expr, dtype: str) -> Expr:
    """A weighted mean in the operand's type; integers rounded, ties to even, and clamped to their range."""
    if str(value.ty) == dtype or "float" in dtype:
        return value if str(value.ty) == dtype else tirx.Cast(dtype, value)
    info = np.iinfo(dtype)
    top = np.nextafter(2.0**63, 0) if dtype == "int64" else np.nextafter(2.0**64, 0) if dtype == "uint64" else float(info.max)
    low, high = (tirx.const(float(bound), str(value.ty)) for bound in (info.min, top))
    return tirx.Cast(dtype, tirx.max(tirx.min(tirx.nearbyint(value), high), low))
