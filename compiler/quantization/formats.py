"""The arithmetic of quantized formats on arrays: numbers q of a few bits that stand for (q - zero point) * scale.

Activations are 8 bits, unsigned, with one scale and zero point for a tensor ("static": from ranges that were observed) or one
for each row ("rows": from the row itself, while the program runs). Weights are 8 bits, signed and symmetric, with one scale for
each output channel; or 4 or 8 bits with one scale for each group of neighbours along k, the dimension that is summed over.

Rounding is to the nearest, ties to even, as QuantizeLinear's (https://onnx.ai/onnx/operators/onnx__QuantizeLinear.html). What is
beyond the range, infinities included, becomes the nearest end of it, and NaN becomes 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from ..ir.assignments.pairs import within_pairs

Bits: TypeAlias = Literal[4, 8]

LEVELS = 255  # steps between the least and the greatest unsigned number of 8 bits
SMALLEST_SCALE = float(np.finfo(np.float32).tiny)  # with a smaller one 1 / scale overflows, or the scale is flushed to zero
LARGEST = 1e38  # ends of ranges are held within it: what any number stands for is finite then
_PAIR_LASTS = (64, 80, 96, 112)  # what the largest weight of a channel may become, where pairs are cut
_LARGEST: dict[Bits, int] = {4: 7, 8: 127}  # of symmetric weights: -8 and -128 are left out


@dataclass(frozen=True, slots=True)
class Affine:
    """A scale (float32) and a zero point (of the type of the numbers), of shapes that broadcast over the tensor."""

    scale: np.ndarray
    zero: np.ndarray

    def __post_init__(self) -> None:
        assert self.scale.dtype == np.float32, self.scale.dtype
        assert (self.scale >= SMALLEST_SCALE).all(), "a scale is zero, negative, subnormal or NaN"
        assert self.scale.shape == self.zero.shape

    def quantize(self, x: np.ndarray) -> np.ndarray:
        """The nearest numbers, of the zero point's type."""
        limits = np.iinfo(self.zero.dtype)
        with np.errstate(over="ignore", invalid="ignore"):  # infinities saturate
            steps = np.rint(np.asarray(x, np.float32) / self.scale) + self.zero.astype(np.float32)
        known = np.where(np.isnan(steps), self.zero.astype(np.float32), steps)
        return np.clip(known, limits.min, limits.max).astype(self.zero.dtype)

    def dequantize(self, q: np.ndarray) -> np.ndarray:
        """What numbers stand for, as float32."""
        centred = q.astype(np.float32) - self.zero.astype(np.float32)  # exact: whole numbers below 2^24
        return np.asarray(centred * self.scale)

    def rounded(self, x: np.ndarray) -> np.ndarray:
        """What is left of `x` when it was stored in the format."""
        return self.dequantize(self.quantize(x))


@dataclass(frozen=True, slots=True)
class Quantized:
    """Numbers of a few bits (uint8, int8; of 4 bits one a byte here) and what they stand for."""

    numbers: np.ndarray
    affine: Affine

    def dequantize(self) -> np.ndarray:
        """What they stand for, as float32."""
        return self.affine.dequantize(self.numbers)


def unsigned_affine(low: np.ndarray | float, high: np.ndarray | float) -> Affine:
    """The format of uint8 activations that reaches from `low` to `high`, and to 0, which it has exactly (padding is 0).

    The zero point is the nearest number, so the range may end half a step beyond what is held. A range without extent, such as
    that of a tensor of zeros, has the scale 1 and the zero point 0; and the scale is a normal number of float32 in any case.
    """
    least, greatest = np.minimum(low, 0.0, dtype=np.float64), np.maximum(high, 0.0, dtype=np.float64)
    assert np.isfinite(least + greatest).all(), "the range is not finite"
    least, greatest = np.maximum(least, -LARGEST), np.minimum(greatest, LARGEST)
    span = greatest - least
    scale = np.where(span > 0, np.maximum(span / LEVELS, SMALLEST_SCALE), 1.0).astype(np.float32)
    zero = np.clip(np.rint(-least / scale.astype(np.float64)), 0, LEVELS).astype(np.uint8)
    return Affine(scale, np.asarray(zero))


def signed_affine(largest: np.ndarray | float, bits: Bits = 8, last: int = 0) -> Affine:
    """The symmetric format of int8 (of 4 bits: -7 to 7) from -`largest` to `largest`; its scale is 1 where that is 0. `last`: the
    number that stands for `largest`, if it is not the last one of the bits."""
    most = np.asarray(largest, np.float64)
    assert np.isfinite(most).all(), "the range is not finite"
    steps = np.maximum(np.minimum(most, LARGEST) / (last or _LARGEST[bits]), SMALLEST_SCALE)
    scale = np.where(most > 0, steps, 1.0).astype(np.float32)
    return Affine(scale, np.zeros(scale.shape, np.int8))


def rows_affine(x: np.ndarray) -> Affine:
    """The uint8 format of each row of `x` [..., columns], by its own least and greatest element: scales [..., 1].

    As DynamicQuantizeLinear's of a tensor. Infinite and NaN elements do not count for the range.
    """
    finite = np.where(np.isfinite(x), x, np.float32(0))
    return unsigned_affine(finite.min(-1, keepdims=True, initial=0.0), finite.max(-1, keepdims=True, initial=0.0))


def quantize_rows(x: np.ndarray) -> Quantized:
    """Activations [..., columns] with a scale and a zero point for each row."""
    affine = rows_affine(x)
    return Quantized(affine.quantize(x), affine)


def quantize_channels(w: np.ndarray, axis: int, bits: Bits = 8) -> Quantized:
    """Weights with one scale for each index along `axis`, the dimension of columns or output channels.

    The affine has as many dimensions as `w`, all but `axis` 1. A channel of zeros has the scale 1.
    """
    others = tuple(d for d in range(w.ndim) if d != axis % w.ndim)
    affine = signed_affine(np.abs(w).max(axis=others, keepdims=True, initial=0.0), bits)
    return Quantized(_symmetric(affine, w, bits), affine)


def quantize_pairs(w: np.ndarray, axis: int) -> Quantized:
    """As `quantize_channels`, of numbers whose neighbours along k are as `pairs.keeps_pairs` asks.

    Of a convolution's weights [outputs, channels, ...] these are neighbouring channels, and the taps of a row: kernels make words
    of either. Those of one channel keep all their bits, as depthwise kernels add nothing in 16 bits. What is too much of a pair
    is cut, the less the smaller the numbers; of some largest numbers each channel has the one with the least squared error.
    """
    if w.ndim > 2 and w.shape[1] == 1:
        return quantize_channels(w, axis)
    others = tuple(d for d in range(w.ndim) if d != axis % w.ndim)
    along = (1, -1) if w.ndim > 2 else (1 - axis % 2,)
    largest = np.abs(w).max(axis=others, keepdims=True, initial=0.0)
    choices = [signed_affine(largest, last=last) for last in _PAIR_LASTS]
    numbers = [_paired(one, w, along) for one in choices]
    errors = [((one.dequantize(each) - w) ** 2).sum(others, keepdims=True) for one, each in zip(choices, numbers, strict=True)]
    best = np.argmin(errors, 0)
    scale = np.choose(best, [one.scale for one in choices])
    return Quantized(np.choose(best, numbers), Affine(scale, np.zeros(scale.shape, np.int8)))


def _paired(affine: Affine, w: np.ndarray, along: Sequence[int]) -> np.ndarray:
    numbers = _symmetric(affine, w, 8)
    for axis in along:
        numbers = within_pairs(numbers, axis)
    return numbers


def quantize_groups(w: np.ndarray, group: int, bits: Bits, axis: int = 0) -> Quantized:
    """Weights with one scale for each `group` of neighbours along `axis`, which is k; the last group may be shorter.

    The affine broadcasts over `w`: scales are repeated within their group (`group_scales` has each once).
    """
    extent = w.shape[axis]
    scales = np.repeat(group_scales(w, group, bits, axis), group, axis).take(np.arange(extent), axis)
    affine = Affine(scales, np.zeros(scales.shape, np.int8))
    return Quantized(_symmetric(affine, w, bits), affine)


def group_scales(w: np.ndarray, group: int, bits: Bits, axis: int = 0) -> np.ndarray:
    """The float32 scales of `quantize_groups`, one a group: the shape of `w`, with its groups along `axis`."""
    assert group > 0
    starts = np.arange(0, w.shape[axis], group)
    largest = np.maximum.reduceat(np.abs(w), starts, axis) if w.shape[axis] else np.abs(w)
    return signed_affine(largest, bits).scale


def _symmetric(affine: Affine, w: np.ndarray, bits: Bits) -> np.ndarray:
    """The nearest numbers of a symmetric format, held within its ends; NaN is 0."""
    with np.errstate(over="ignore", invalid="ignore"):  # infinities saturate
        steps = np.asarray(w, np.float32) / affine.scale
    steps = np.where(np.isnan(steps), np.float32(0), np.rint(steps))
    return np.asarray(np.clip(steps, -_LARGEST[bits], _LARGEST[bits])).astype(affine.zero.dtype)
