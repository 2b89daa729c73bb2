"""Products of a recurrence by weights of int8: each row of the input, or of a state, is rounded to uint8 by its own range.

Row r is s * (q - z) for its numbers q of 0 to 255, with a scale s and a zero point z that are found when it is rounded; a line of
the weights is t * w. So the product is s * t * (sum of q * w - z * sum of w): the sums are those of integers, exact in 32 bits.
Zero is exact, as least and greatest of a row include it. A row with NaN or an infinity has a scale of NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import numpy as np
from tvm import tirx

from ...runtime.plan import TensorType
from ...runtime.target import Target
from ..codegen.builder import Buffer, Expr, KernelBuilder
from ..formats import int8
from ..formats.format import Format, Storage, format_for
from ..groups.group import Group
from ..template.contract import Operand
from .operands import RecurrentOperands
from .products import Element, pitch_of

_LEVELS = 255.0
_SMALLEST_SCALE = float(np.finfo(np.float32).tiny)
_INFINITY, _SIZE = 0x7F800000, 0x7FFFFFFF  # of the bits of a float32: the least that is not finite; all but the sign
_WORD_BYTES = 4


@dataclass(frozen=True)
class PackSums:
    """The sums of int8 weights [directions, lines, depth] over their last dimension, as int32."""

    def packed_type(self, source: TensorType) -> TensorType:
        return TensorType(source.shape[:2], "int32")

    def __call__(self, array: np.ndarray) -> np.ndarray:
        sums: np.ndarray = array.sum(2, dtype=np.int32)
        return sums


class QuantizedRows:
    """Rows of `depth` float32 numbers in the workspace as uint8, each with a scale and a zero point, for products by `weights`.

    Rows are numbered over `groups` of equally many; in memory a group's are followed by others that are never written, up to
    `group_rows`. So are the bytes of a row beyond `depth`: the weights there are zero.
    """

    is_rough = rounds = True

    def __init__(self, operands: RecurrentOperands, weights: str, groups: int, rows: int, group_rows: int, filled: int) -> None:
        self.builder, self.operands, self.weights = operands.builder, operands, weights
        self.depth, self.rows, self.group_rows = operands.group.types[weights].shape[2], rows, group_rows
        self.pitch = pitch_of(ceil(filled / _WORD_BYTES)) * _WORD_BYTES
        self.bytes: Buffer = self.builder.workspace(groups * group_rows * self.pitch, "uint8")
        self._scales: Buffer = self.builder.workspace(groups * rows, "float32")
        self._zeros: Buffer = self.builder.workspace(groups * rows, "int32")

    def begin_of(self, row: Expr) -> Expr:
        """Offset of a row's first byte."""
        if self.rows == self.group_rows:
            return row * self.pitch
        group, line = (row, 0) if self.rows == 1 else (tirx.floordiv(row, self.rows), tirx.floormod(row, self.rows))
        return (group * self.group_rows + line) * self.pitch

    def round_row(self, row: Expr, element: Element) -> None:
        """Round a row to uint8, the nearest, ties to even."""
        builder = self.builder
        least, greatest, is_finite = self._range(element)
        nothing, level = tirx.const(0, "float32"), tirx.const(1 / _LEVELS, "float32")
        step = builder.name(greatest * level - least * level)
        # A row of zeros, as states are before the first step, has the scale 1: products of subnormal scales are slow.
        is_usual = tirx.And(is_finite, step > nothing)
        scale = builder.name(
            tirx.Select(is_usual, tirx.max(step, tirx.const(_SMALLEST_SCALE, "float32")), tirx.const(1, "float32"))
        )
        inverse = builder.name(tirx.const(1, "float32") / scale)
        zero = builder.name(tirx.Select(is_finite, tirx.nearbyint(nothing - least * inverse), nothing))
        builder.store(self._scales, row, tirx.Select(is_finite, scale, tirx.const(float("nan"), "float32")))
        builder.store(self._zeros, row, tirx.Cast("int32", zero))
        begin = builder.bind(self.begin_of(row))

        def store(k: Expr, lane: Expr) -> None:
            number = tirx.nearbyint(element(k) * inverse) + zero
            inside = tirx.min(tirx.max(number, nothing), tirx.const(_LEVELS, "float32"))
            builder.store(self.bytes, begin + k, tirx.Cast("uint8", tirx.Cast("int32", inside)))

        self._each(store)

    def finished(self, total: Expr, row: Expr, line: Expr) -> Expr:
        """The float32 product of a row by line `line`, over all directions, of the weights: `total` is the sum of integers."""
        centred = total - self._zeros[row] * self._line_sums()[line]
        return tirx.Cast("float32", centred) * (self._scales[row] * self._line_scale(line))

    def _line_sums(self) -> Buffer:
        key, pack = f"{self.weights}:sums", PackSums()
        kind = pack.packed_type(self.operands.group.types[self.weights])
        self.operands.packed[key] = Operand(self.weights, pack)
        return self.builder.parameter(key, kind.elements, kind.dtype)

    def _line_scale(self, line: Expr) -> Expr:
        group, name = self.operands.group, self.operands.group.weights[self.weights].inputs[1]
        if name not in group.inputs:  # the one of a single line is no operand
            return tirx.const(float(group.literals[name].item()), "float32")
        return self.builder.parameter(name, group.types[name].elements, "float32")[line]

    def _range(self, element: Element) -> tuple[Expr, Expr, Expr]:
        """The least and the greatest of a row's elements and zero, and whether all are finite."""
        builder, lanes = self.builder, self.builder.lanes("float32")
        kinds = {"least": "float32", "most": "float32", "bits": "int32"}
        found = [builder.local(lanes, kind, name) for name, kind in kinds.items()]
        joins = (tirx.min, tirx.max, tirx.max)
        for part in found:
            with builder.loop(lanes, "vectorized", "lane") as lane:
                builder.store(part, lane, tirx.const(0, str(part.dtype)))

        def look(k: Expr, lane: Expr) -> None:
            value = builder.name(element(k))
            size = tirx.reinterpret("int32", value) & tirx.const(_SIZE, "int32")
            for part, one, join in zip(found, (value, value, size), joins, strict=True):
                builder.store(part, lane, join(part[lane], one))

        self._each(look)
        least, greatest, bits = (_folded(builder, part, lanes, join) for part, join in zip(found, joins, strict=True))
        return least, greatest, builder.name(bits < tirx.const(_INFINITY, "int32"))

    def _each(self, body: Callable[[Expr, Expr], None]) -> None:
        """`body(k, lane)` for all k of a row, whole vectors at a time, the last of which overlaps the one before."""
        builder, lanes = self.builder, self.builder.lanes("float32")
        if self.depth < lanes:
            with builder.loop(self.depth, name="k") as k:
                body(k, tirx.const(0, "int32"))
            return
        with builder.loop(self.depth // lanes, name="v") as v, builder.loop(lanes, "vectorized", "lane") as lane:
            body(v * lanes + lane, lane)
        if self.depth % lanes:
            with builder.loop(lanes, "vectorized", "lane") as lane:
                body(self.depth - lanes + lane, lane)


class ByteProduct(QuantizedRows):
    """Products of such rows on vectors, by dot products of four bytes each."""

    def __init__(self, operands: RecurrentOperands, weights: str, rows: int, target: Target) -> None:
        self.format = byte_format(operands.group, weights, target)
        self.steps = ceil(operands.group.types[weights].shape[2] / self.format.k_pack)
        super().__init__(operands, weights, 1, rows, rows, self.steps * self.format.k_pack)

    def factor(self, row: Expr, k: Expr, element: Element) -> Expr:
        """The operand of a multiply-add from a row, for iteration k of `steps`."""
        return int8.word_at(self.bytes, self.begin_of(row) + k * self.format.k_pack)

    def weight(self, packed: Expr) -> Expr:
        """The operand of a multiply-add from packed weights."""
        return packed


def byte_format(group: Group, weights: str, target: Target) -> Format:
    """The format of products of uint8 rows by int8 weights on vectors: words of four."""
    found = format_for(Storage("uint8"), group.storage(weights), target, lambda one: one.k_pack == _WORD_BYTES)
    assert found is not None, "every CPU multiplies bytes, by VPMADDWD at least"
    return found


def _folded(builder: KernelBuilder, parts: Buffer, lanes: int, join: Callable[[Expr, Expr], Expr]) -> Expr:
    """All elements of a small array, whose number is a power of two, joined into one."""
    while lanes > 2:
        lanes //= 2
        low, high = tirx.Ramp(0, 1, lanes), tirx.Ramp(lanes, 1, lanes)
        builder.store(parts, low, join(parts[low], parts[high]))
    return builder.name(join(parts[0], parts[1]))
