"""The form of constant weights that lie as integers with scales: types and shapes of a DequantizeLinear."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import onnx_ir as ir

BITS: dict[ir.DataType, int] = {
    ir.DataType.INT2: 2,
    ir.DataType.UINT2: 2,
    ir.DataType.INT4: 4,
    ir.DataType.UINT4: 4,
    ir.DataType.INT8: 8,
    ir.DataType.UINT8: 8,
}
_WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class StoredForm:
    """Types and shapes of a DequantizeLinear: weights of a type and shape, scales of a shape, blocks of so many along an axis, or
    `block` 0: scales of each index along the axis, or one for all. Zero points, where there are any, have the scales' shape."""

    dtype: ir.DataType
    shape: tuple[int, ...]
    scales: tuple[int, ...]
    axis: int
    block: int
    has_zeros: bool = False

    def turned(self) -> StoredForm:
        """Of the transposed matrix."""
        return replace(self, shape=self.shape[::-1], scales=self.scales[::-1], axis=1 - self.axis)

    def by_columns(self, k_axis: int) -> StoredForm:
        """With a scale for each column instead of one for all."""
        if self.block or prod(self.scales) != 1:
            return self
        return replace(self, scales=(self.shape[1 - k_axis],), axis=1 - k_axis)

    def fault(self, k_axis: int) -> str:
        """Why kernels do not read weights of this form, whose dimension `k_axis` is summed over; empty if they do."""
        if self.dtype not in BITS:
            return f"weights are {self.dtype.name.lower()}, no integers of 2, 4 or 8 bits"
        if len(self.shape) != 2 or 0 in self.shape:
            return "weights are no matrix with elements"
        if not self.block:
            by_column = self.axis != k_axis and self.scales == (self.shape[1 - k_axis],)
            return "" if by_column else "scales are not one for each column"
        numbers = _WORD_BITS // BITS[self.dtype]
        if self.block % numbers:
            return f"blocks of {self.block} fill no words of {numbers}"
        wanted = tuple(-(-extent // self.block) if d == k_axis else extent for d, extent in enumerate(self.shape))
        return "" if self.axis == k_axis and self.scales == wanted else "scales are not of blocks along k"
