"""Estimated cycles of copies, layout conversions and scattered stores, by bytes."""

from __future__ import annotations

from dataclasses import dataclass

from ...runtime.hardware.machine import Machine
from ...runtime.symbolic.sizes import estimating

_OPERATIONS_A_CYCLE = 10.0  # of a kernel, scalar ones, which vectors make
WORK_PER_OPERATION = 16  # floating-point operations of a product that count as one scalar operation of the work dealt to threads
COPIED_BYTES = 8.0  # a cycle, when a tensor is read or written contiguously
_CONVERTED_BYTES = 3.0  # a cycle, when a tensor is transposed: strided loads
_CONVERTED_SHARE = 0.25  # of a GPU's memory rate
_SCATTERED_ELEMENT = 1.0  # cycles of an element that is stored alone


def parallel_work(machine: Machine) -> float:
    """Scalar operations below which a parallel region costs more than it saves: one core makes them while threads wake."""
    return _OPERATIONS_A_CYCLE * machine.wake_cycles


@estimating
def product_work(flops: int, size_bytes: int, machine: Machine) -> int:
    """Scalar operations that take as long as a product, to be dealt to threads: as its arithmetic, or as reading its operands
    from the nearest memory that holds them, which is what a product of few rows takes."""
    return int(max(flops // WORK_PER_OPERATION, _OPERATIONS_A_CYCLE * machine.read_cycles(size_bytes)))


@estimating
def scattered_cycles(elements: int) -> float:
    """Additional cycles of storing so many elements one by one, as an NCHW transposed convolution with strides does."""
    return _SCATTERED_ELEMENT * elements


@dataclass(frozen=True, slots=True)
class MoveCosts:
    """What moving tensors takes on a machine: `copied` and `converted` bytes a cycle, and the cycles before the first of them."""

    copied: float
    converted: float
    launch: float = 0.0

    def copy(self, size_bytes: float) -> float:
        """Cycles of a contiguous copy."""
        return self.launch + 2 * size_bytes / self.copied if size_bytes else 0.0

    def conversion(self, size_bytes: float) -> float:
        """Cycles of converting a tensor between NCHW and NHWC."""
        return self.launch + 2 * size_bytes / self.converted if size_bytes else 0.0


def move_costs(machine: Machine) -> MoveCosts:
    """Those of a core; or of a GPU, where transposes read or write parts of sectors of memory, and each kernel is a launch."""
    if machine.resident == 1:
        return MoveCosts(COPIED_BYTES, _CONVERTED_BYTES)
    rate = machine.shared_memory_bytes
    return MoveCosts(rate, _CONVERTED_SHARE * rate, machine.launch_cycles)


@estimating
def copy_cycles(size_bytes: int) -> float:
    """Cycles of a contiguous copy of so many bytes."""
    return 2 * size_bytes / COPIED_BYTES


@estimating
def conversion_cycles(size_bytes: int) -> float:
    """Cycles of converting a tensor of so many bytes between NCHW and NHWC."""
    return 2 * size_bytes / _CONVERTED_BYTES
