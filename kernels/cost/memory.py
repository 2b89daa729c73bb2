"""Estimated cycles of copies, layout conversions and scattered stores, by bytes."""

from __future__ import annotations

from ...runtime.hardware.machine import Machine
from ...runtime.symbolic.sizes import estimating

_OPERATIONS_A_CYCLE = 10.0  # of a kernel, scalar ones, which vectors make
COPIED_BYTES = 8.0  # a cycle, when a tensor is read or written contiguously
_CONVERTED_BYTES = 3.0  # a cycle, when a tensor is transposed: strided loads
_SCATTERED_ELEMENT = 1.0  # cycles of an element that is stored alone


def parallel_work(machine: Machine) -> float:
    """Scalar operations below which a parallel region costs more than it saves: one core makes them while threads wake."""
    return _OPERATIONS_A_CYCLE * machine.wake_cycles


@estimating
def scattered_cycles(elements: int) -> float:
    """Additional cycles of storing so many elements one by one, as an NCHW transposed convolution with strides does."""
    return _SCATTERED_ELEMENT * elements


@estimating
def copy_cycles(size_bytes: int) -> float:
    """Cycles of a contiguous copy of so many bytes."""
    return 2 * size_bytes / COPIED_BYTES


@estimating
def conversion_cycles(size_bytes: int) -> float:
    """Cycles of converting a tensor of so many bytes between NCHW and NHWC."""
    return 2 * size_bytes / _CONVERTED_BYTES
