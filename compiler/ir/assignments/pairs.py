"""Weights of int8 of which neighbouring pairs are small enough for sums of 16 bits.

VPMADDUBSW multiplies unsigned bytes x by signed bytes w and adds neighbours, x0 w0 + x1 w1, in 16 signed bits, beyond which it
saturates. That is exact for any x where neither the positive nor the negative ones of two neighbours come to more than 128:
255 * 128 = 32640. Weights of 7 bits are so whatever they are (ONNX Runtime's `reduce_range`); of 8 bits nearly all pairs are, as
large neighbours of one sign are rare.
"""

from __future__ import annotations

import numpy as np

PAIR_SUM = 128  # of neighbours of one sign, at most


def keeps_pairs(numbers: np.ndarray, axis: int) -> bool:
    """Whether all pairs (2i, 2i + 1) along a dimension are small enough; one that is left over has no partner."""
    positive, negative = _excess(numbers, axis)
    return not (positive > 0).any() and not (negative > 0).any()


def within_pairs(numbers: np.ndarray, axis: int) -> np.ndarray:
    """The numbers (int8) with what is too much of a pair taken from both of it."""
    made = np.moveaxis(numbers.astype(np.int16), axis, 0)
    whole = len(made) // 2 * 2
    first, second = made[0:whole:2], made[1:whole:2]  # views
    positive, negative = _excess(numbers, axis)
    for excess, sign in ((np.maximum(positive, 0), 1), (np.maximum(negative, 0), -1)):
        half = excess // 2
        first -= sign * (excess - half)
        second -= sign * half
    return np.moveaxis(made, 0, axis).astype(np.int8)


def _excess(numbers: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """By how much the positive ones of each pair, and the negative ones, are too much (int16); pairs are the first dimension."""
    moved = np.moveaxis(numbers, axis, 0)
    whole = len(moved) // 2 * 2
    first, second = moved[0:whole:2].astype(np.int16), moved[1:whole:2].astype(np.int16)
    zero = np.int16(0)
    positive = np.maximum(first, zero) + np.maximum(second, zero) - np.int16(PAIR_SUM)
    negative = -np.minimum(first, zero) - np.minimum(second, zero) - np.int16(PAIR_SUM)
    return positive, negative
