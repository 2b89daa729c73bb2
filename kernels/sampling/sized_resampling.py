"""A dimension of ONNX's Resize whose sizes a call decides: its tables are computed in front of the loops, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from ...runtime.symbolic.shapes import equal
from ...runtime.symbolic.sizes import Size, SizeLike, least_of
from ..codegen.builder import Buffer, Expr, KernelBuilder

_TAPS = {"nearest": 1, "linear": 2, "cubic": 4}  # by the modes
_COORDINATES = frozenset(["align_corners", "asymmetric", "half_pixel", "pytorch_half_pixel"])


@dataclass(frozen=True)
class SizedResampling:
    """`inputs` elements become `outputs`, as `Resampling` says; `scale` is None where it is their quotient."""

    inputs: SizeLike
    outputs: SizeLike
    scale: float | None
    mode: str
    coordinates: str
    nearest: str
    cubic_a: float

    @property
    def is_identity(self) -> bool:
        return equal(self.inputs, self.outputs) and self.scale in (None, 1.0)

    @property
    def taps(self) -> int:
        return _TAPS[self.mode]

    @property
    def overhangs(self) -> bool:
        """Whether some outputs get the extrapolation value."""
        return False

    @property
    def obstacle(self) -> str:
        """Why there are no tables for a call's sizes; empty if there are."""
        if self.mode not in _TAPS or self.coordinates not in _COORDINATES:
            return f"{self.mode} by {self.coordinates} needs sizes that are known before a call"
        return "a dimension may have no elements to read" if self.scale is None and least_of(self.inputs) < 1 else ""

    def tables(self, builder: KernelBuilder, dtype: str) -> dict[str, Buffer]:
        """Emit what fills the tables of indices and of weights, of type `dtype`: [taps, outputs]."""
        index, weight = (builder.workspace(self.taps * self.outputs, kind) for kind in ("int32", dtype))
        inputs, outputs = (builder.bind(_whole(size)) for size in (self.inputs, self.outputs))
        with builder.loop(outputs, name="place") as place:
            x = builder.name(self._position(place, inputs, outputs))

            def clamped(number: Expr) -> Expr:
                return builder.bind(tirx.max(tirx.min(tirx.Cast("int32", number), inputs - 1), 0))

            if self.mode == "nearest":
                builder.store(index, place, clamped(_ROUNDINGS[self.nearest](x)))
            else:
                below, reach = builder.name(tirx.floor(x)), self.taps // 2
                part = builder.name(x - below)
                places = [clamped(below + _float(step)) for step in range(1 - reach, reach + 1)]
                first, last = places[reach - 1], places[-1]
                is_alone = tirx.And(tirx.EQ(places[0], first), tirx.EQ(first, last))
                is_one = builder.bind(tirx.Or(is_alone, tirx.EQ(part, _float(0))))  # a weight of 0 makes inf a NaN
                for row, (at, share) in enumerate(zip(places, self._shares(part), strict=True)):
                    builder.store(index, row * outputs + place, tirx.Select(is_one, first, at))
                    share = tirx.Select(is_one, _float(1 / self.taps), share)
                    builder.store(weight, row * outputs + place, tirx.Cast(dtype, share))
        return {"index": index, "weight": weight}

    def _shares(self, part: Expr) -> list[Expr]:
        """The weights of the neighbours of a coordinate that is `part` behind one: as `Resampling` has them."""
        if self.mode == "linear":
            return [_float(1) - part, part]
        a = self.cubic_a
        near, far = (part, _float(1) - part), (part + _float(1), _float(2) - part)
        inner = [((_float(a + 2) * x - _float(a + 3)) * x * x + _float(1)) for x in near]
        outer = [((_float(a) * x - _float(5 * a)) * x + _float(8 * a)) * x - _float(4 * a) for x in far]
        return [outer[0], *inner, outer[1]]

    def _position(self, place: Expr, inputs: Expr, outputs: Expr) -> Expr:
        """The coordinate of an output in the input, as `Resampling` says; rounded once where sizes are given."""
        x = tirx.Cast("float64", place)
        if self.coordinates == "align_corners":
            last, steps = tirx.Cast("float64", inputs - 1), tirx.Cast("float64", tirx.max(outputs - 1, 1))
            return tirx.Select(outputs > 1, x * last / steps, _float(0))
        if self.coordinates == "asymmetric":
            return self._unscaled(x, inputs, outputs)
        middle = self._unscaled(x + _float(0.5), inputs, outputs) - _float(0.5)
        return middle if self.coordinates == "half_pixel" else tirx.Select(outputs > 1, middle, _float(0))

    def _unscaled(self, x: Expr, inputs: Expr, outputs: Expr) -> Expr:
        """x / scale."""
        if self.scale is not None:
            return x / _float(self.scale)
        return x * tirx.Cast("float64", inputs) / tirx.Cast("float64", outputs)


def _whole(size: SizeLike) -> Expr:
    return size if isinstance(size, Size) else tirx.const(size, "int32")


def _float(number: float) -> Expr:
    return tirx.const(number, "float64")


_ROUNDINGS: dict[str, Callable[[Expr], Expr]] = {
    "ceil": tirx.ceil,
    "floor": tirx.floor,
    "round_prefer_ceil": lambda x: tirx.floor(x + _float(0.5)),
    "round_prefer_floor": lambda x: tirx.ceil(x - _float(0.5)),
}
