"""Cycles of what only moves elements, by their bytes."""

from __future__ import annotations

from ...runtime.hardware.machine import Machine

_OPERATIONS_A_CYCLE = 10.0  # of a kernel, scalar ones, which vectors make
COPIED_BYTES = 8.0  # a cycle, when a tensor is read or written in order
_CONVERTED_BYTES = 3.0  # a cycle, when a tensor is transposed: strided loads
_SCATTERED_ELEMENT = 1.0  # cycles


def parallel_work(machine: Machine) -> float:
    """Scalar operations below which a parallel region costs more than it saves: one core makes them while threads wake."""
    return _OPERATIONS_A_CYCLE * machine.wake_cycles


def scattered_cycles(elements: int) -> float:
    """What it costs more to store so many elements one by one, as a strided transposed convolution does channels-first."""
    return _SCATTERED_ELEMENT * elements


def copy_cycles(size_bytes: int) -> float:
    """Of a kernel that writes so many bytes in the order in which it reads them."""
    return 2 * size_bytes / COPIED_BYTES


def conversion_cycles(size_bytes: int) -> float:
    """Of a kernel that writes a tensor of so many bytes in the other layout."""
    return 2 * size_bytes / _CONVERTED_BYTES
