"""Packing weights of 2, 4 or 8 bits, with scales and zero points for blocks along k, at compile time.

A word is a 32-bit lane that belongs to one column: its four bytes hold four neighbours along k, and where numbers have fewer bits
than a byte, the first four lie in the lowest bits of the bytes, the next four above them, and so on. So one load gives a
vector of columns, and a shift and a mask the four bytes that a dot product takes (as in llama.cpp's repacked Q4_0, there for
columns of a block). All numbers are unsigned here: signed ones lie with half their range added.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np

from ...runtime.plan import TensorType
from .packing import SHARED_VECTORS

_BYTES = 4  # of a word
_SHARED_SECTION = 128  # elements of a section, at most, of weights that kernels for any number of rows read
_ITEM_BITS = {"int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "int8": 8, "uint8": 8}


def bits_of(dtype: str) -> int:
    """Bits of an integer weight; 0 where it is none that is packed here."""
    return _ITEM_BITS.get(dtype, 0)


def middle_of(dtype: str) -> int:
    """What is added to a number of this type to make it unsigned."""
    return 0 if dtype[0] == "u" else 1 << (_ITEM_BITS[dtype] - 1)


@dataclass(frozen=True)
class Sections:
    """Weights [depth, columns] of `bits` bits in words: k is cut into sections of `length`, each padded to whole words."""

    depth: int
    columns: int
    bits: int
    length: int
    tile: int  # columns of a panel

    @property
    def fields(self) -> int:
        """Numbers of a byte."""
        return 8 // self.bits

    @property
    def numbers(self) -> int:
        """Numbers of a word."""
        return _BYTES * self.fields

    @property
    def count(self) -> int:
        return ceil(self.depth / self.length)

    @property
    def words(self) -> int:
        """Words of a section of a column."""
        return ceil(self.length / self.numbers)

    @property
    def panels(self) -> int:
        return ceil(self.columns / self.tile)

    @property
    def size_bytes(self) -> int:
        return _BYTES * self.panels * self.count * self.words * self.tile


def cut_sections(depth: int, columns: int, bits: int, block: int, longest: int, tile: int) -> Sections:
    """Sections of k of at most `longest` elements, each within a block of scales (0: one block), equally long and whole words."""
    per_word = _BYTES * 8 // bits
    if not block:
        length = -(-depth // max(-(-depth // longest), 1) // per_word) * per_word
        return Sections(depth, columns, bits, max(length, per_word), tile)
    length = block
    while length > longest and length % (2 * per_word) == 0:
        length //= 2
    if length > longest:  # an odd number of words: the greatest part that is as long as all others
        length = next(one for one in range(longest // per_word * per_word, 0, -per_word) if block % one == 0)
    return Sections(depth, columns, bits, length, tile)


def shared_sections(depth: int, columns: int, bits: int, block: int, lanes: int) -> Sections:
    """The sections of weights that kernels for any number of rows read; vectors have `lanes` float32."""
    return cut_sections(depth, columns, bits, block, _SHARED_SECTION, SHARED_VECTORS * lanes)


@dataclass(frozen=True)
class PackSections:
    """Pack a constant matrix of integers as words: [panels, sections, words, tile] of int32, padded with zeros.

    The constant is [depth, columns] where `lines_last`, else [columns, depth].
    """

    sections: Sections
    lines_last: bool

    def packed_type(self, source: TensorType) -> TensorType:
        s = self.sections
        return TensorType((s.panels, s.count, s.words, s.tile), "int32")

    def __call__(self, array: np.ndarray) -> np.ndarray:
        s, middle = self.sections, middle_of(array.dtype.name)
        packed = np.zeros((s.panels, s.count, s.words, s.tile, _BYTES), np.uint8)
        for panel in range(s.panels):
            lines = slice(panel * s.tile, (panel + 1) * s.tile)
            part = array[:, lines] if self.lines_last else array[lines].T
            numbers = (part.astype(np.int16) + middle).astype(np.uint8)
            whole = np.zeros((s.count * s.length, numbers.shape[1]), np.uint8)
            whole[: s.depth] = numbers
            padded = np.zeros((s.count, s.words * s.numbers, numbers.shape[1]), np.uint8)
            padded[:, : s.length] = whole.reshape(s.count, s.length, -1)
            fields = padded.reshape(s.count, s.words, s.fields, _BYTES, -1)
            joined = fields[:, :, 0]
            for field in range(1, s.fields):
                joined = joined | (fields[:, :, field] << np.uint8(field * s.bits))
            packed[panel, :, :, : numbers.shape[1]] = joined.swapaxes(2, 3)
        return packed.reshape(*packed.shape[:-2], -1).view(np.int32)

    def __str__(self) -> str:
        s = self.sections
        return f"words({s.depth},{s.columns},{s.length},{s.tile},{'kn' if self.lines_last else 'nk'})"


@dataclass(frozen=True)
class PackBlocks:
    """Pack the scales, or the zero points, of blocks: [panels, blocks, tile], as float32, or as unsigned bytes.

    The constant has one number for each column, or `blocks` of them: [blocks, columns] where `lines_last`, else turned.
    """

    blocks: int
    columns: int
    tile: int
    lines_last: bool

    def packed_type(self, source: TensorType) -> TensorType:
        return TensorType((ceil(self.columns / self.tile), self.blocks, self.tile), _stored(source.dtype))

    def __call__(self, array: np.ndarray) -> np.ndarray:
        kind = _stored(array.dtype.name)
        numbers = array.astype(kind) if kind == "float32" else (array.astype(np.int16) + middle_of(array.dtype.name)).astype(kind)
        by_block = numbers.reshape(-1, self.columns) if self.lines_last else numbers.reshape(self.columns, -1).T
        panels = ceil(self.columns / self.tile)
        padded = np.zeros((self.blocks, panels * self.tile), kind)
        padded[:, : self.columns] = by_block
        return np.ascontiguousarray(padded.reshape(self.blocks, panels, self.tile).swapaxes(0, 1))

    def __str__(self) -> str:
        return f"blocks({self.blocks},{self.columns},{self.tile},{'kn' if self.lines_last else 'nk'})"


def _stored(dtype: str) -> str:
    return "uint8" if dtype in _ITEM_BITS else "float32"
