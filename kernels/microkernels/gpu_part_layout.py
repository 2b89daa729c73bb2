"""How a part of an operand of the matrix unit lies in shared memory, and constants that are packed so at compile time.

A part is `lines` (rows of A, columns of B) by `depth` of k, `terms` numbers of 16 bits for each element, or one of 32. Rows of
shared memory run along k, or along lines where the operand does in memory; they are made of chunks of 16 bytes, whose order
within a row depends on the row (a swizzle), so that the eight rows of a fragment lie in different banks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
from tvm import tirx

from ...runtime.plan import TensorType
from ..template.contract import Pack
from .bf16_split import split_array

CHUNK = 8  # numbers of 16 bits in 16 bytes
CHUNK_BYTES = 16
_PACKED = {4: "float32", CHUNK: "uint16", 16: "int8"}  # by numbers of a chunk
_BANK_CHUNKS = 8  # 16-byte chunks that all banks together give at once


@dataclass(frozen=True)
class PartLayout:
    """How a part of an operand lies in shared memory: rows of chunks of 16 bytes, which are `chunk` numbers each."""

    lines: int
    depth: int
    terms: int
    along_k: bool
    chunk: int = CHUNK
    is_swizzled: bool = True

    @property
    def rows(self) -> int:
        return self.lines if self.along_k else self.depth

    @property
    def row_chunks(self) -> int:
        return (self.depth if self.along_k else self.lines) // self.chunk

    @property
    def term_chunks(self) -> int:
        return self.rows * self.row_chunks

    @property
    def chunks(self) -> int:
        return self.terms * self.term_chunks

    def swizzle(self, row: Any) -> Any:
        """What the number of a chunk of a row is combined with (exclusive or); it depends on the row modulo 8 alone."""
        if not self.is_swizzled:
            return 0
        share = max(_BANK_CHUNKS // self.row_chunks, 1)  # rows that lie beside each other in all banks
        return row % _BANK_CHUNKS // share if isinstance(row, int) else tirx.floordiv(tirx.floormod(row, _BANK_CHUNKS), share)

    def place(self, row: Any, chunk: Any) -> Any:
        """Number of a chunk in the part of a term."""
        return row * self.row_chunks + (chunk ^ self.swizzle(row) if self.is_swizzled else chunk)


@dataclass(frozen=True)
class PackParts:
    """Pack a constant operand as stages of shared memory hold it: [matrices, panels, parts, terms, numbers of a part], as bits.

    `panels` makes [matrices, panels, k, lines] of it, k a multiple of nothing; parts are filled with zeros. A float32 constant
    becomes `terms` bfloat16 terms, others are one; where a chunk has four numbers all become float32, and bytes have 16. So each
    stage is one run of bytes.
    """

    panels: Pack
    layout: PartLayout

    def packed_type(self, source: TensorType) -> TensorType:
        matrices, panels, depth, lines = self.panels.packed_type(source).shape
        shape = matrices, panels, ceil(depth / self.layout.depth), self.layout.terms, lines * self.layout.depth
        return TensorType(shape, _PACKED[self.layout.chunk])

    def __call__(self, array: np.ndarray) -> np.ndarray:
        layout = self.layout
        packed = self.panels(array)
        terms = self._terms(packed)
        matrices, panels, depth, lines = packed.shape
        parts = ceil(depth / layout.depth)
        padded = np.pad(terms, ((0, 0), (0, 0), (0, 0), (0, parts * layout.depth - depth), (0, 0)))
        cut = padded.reshape(layout.terms, matrices, panels, parts, layout.depth, lines)
        chunked = matrices, panels, parts, layout.terms, lines, layout.row_chunks, layout.chunk
        rows = cut.transpose(1, 2, 3, 0, 5, 4).reshape(chunked)
        number, chunk = np.arange(lines)[:, None], np.arange(layout.row_chunks)[None]
        order = chunk ^ np.array([layout.swizzle(row) for row in range(lines)])[:, None]
        swizzled = rows[..., number, order, :]  # the swizzle is its own inverse
        return np.ascontiguousarray(swizzled.reshape(matrices, panels, parts, layout.terms, lines * layout.depth))

    def _terms(self, packed: np.ndarray) -> np.ndarray:
        if self.layout.chunk != CHUNK:
            return packed.astype(_PACKED[self.layout.chunk])[None]
        return split_array(packed, self.layout.terms) if packed.dtype == np.float32 else packed.view(np.uint16)[None]

    def __str__(self) -> str:
        layout = self.layout
        return f"parts({self.panels},{layout.depth}*{layout.terms}{'' if layout.chunk == CHUNK else ' ' + _PACKED[layout.chunk]})"
