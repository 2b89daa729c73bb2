"""Estimated cycles of copies, layout conversions and scattered stores, by bytes."""

from __future__ import annotations

PARALLEL_MIN_WORK = 10_000  # scalar operations below which a parallel region costs more than it saves, though threads are awake
COPIED_BYTES = 8.0  # a cycle, when a tensor is read or written contiguously
_CONVERTED_BYTES = 3.0  # a cycle, when a tensor is transposed: strided loads
_SCATTERED_ELEMENT = 1.0  # cycles of an element that is stored alone


def scattered_cycles(elements: int) -> float:
    """Additional cycles of storing so many elements one by one, as an NCHW transposed convolution with strides does."""
    return _SCATTERED_ELEMENT * elements


def copy_cycles(size_bytes: int) -> float:
    """Cycles of a contiguous copy of so many bytes."""
    return 2 * size_bytes / COPIED_BYTES


def conversion_cycles(size_bytes: int) -> float:
    """Cycles of converting a tensor of so many bytes between NCHW and NHWC."""
    return 2 * size_bytes / _CONVERTED_BYTES
