"""Tensor maps: how copies of tensors (TMA) see memory, what a driver would refuse, and what it encodes of those of a launch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

MAP_BYTES = 128  # of CUtensorMap
_ALIGNMENT = 64
BLOCK_SHARED_BYTES = 227 * 1024  # of a block, on any GPU
_MOST_DIMENSIONS = 5  # of a tensor map; this and what follows are limits of cuTensorMapEncodeTiled
_CHUNK_BYTES = 16
_MOST_OF_BOX = 256
_MOST_EXTENT = 2**32
_MOST_STRIDE = 2**40
_SWIZZLES = (0, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class TensorMap:
    """How copies of tensors (TMA) see the memory of a kernel's pointer number `argument`: cuTensorMapEncodeTiled.

    Elements of `item_bytes`; `extents` from the innermost dimension on, `strides` in bytes of all but that one. A copy brings a
    `box` to shared memory, zeros for what lies outside, in rows whose 16-byte chunks are exchanged over `swizzle_bytes` (0: not).
    """

    argument: int
    item_bytes: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        """From the first element to behind the last."""
        outer = sum((extent - 1) * stride for extent, stride in zip(self.extents[1:], self.strides, strict=True))
        return outer + self.extents[0] * self.item_bytes


def tensor_map_fault(one: TensorMap) -> str:
    """Why the driver would refuse a tensor map; empty if it would not."""
    rank = len(one.extents)
    if not 1 <= rank <= _MOST_DIMENSIONS or (len(one.strides), len(one.box)) != (rank - 1, rank):
        return f"has {rank} dimensions, {len(one.strides)} strides and a box of {len(one.box)}"
    if one.item_bytes not in (1, 2, 4, 8) or one.swizzle_bytes not in _SWIZZLES:
        return f"has elements of {one.item_bytes} bytes and a swizzle of {one.swizzle_bytes}"
    if not all(0 < extent <= _MOST_EXTENT for extent in one.extents):
        return f"has extents {list(one.extents)}"
    if any(stride % _CHUNK_BYTES or not 0 < stride < _MOST_STRIDE for stride in one.strides):
        return f"has strides {list(one.strides)}, which are no multiples of {_CHUNK_BYTES} bytes"
    if not all(0 < extent <= _MOST_OF_BOX for extent in one.box):
        return f"has a box {list(one.box)}, of more than {_MOST_OF_BOX} elements along a dimension"
    row_bytes = one.box[0] * one.item_bytes
    if row_bytes % _CHUNK_BYTES or (one.swizzle_bytes and row_bytes > one.swizzle_bytes):
        return f"has a box with rows of {row_bytes} bytes and a swizzle of {one.swizzle_bytes}"
    if prod(one.box) * one.item_bytes > BLOCK_SHARED_BYTES:
        return f"has a box of {prod(one.box) * one.item_bytes} bytes"
    return ""


Encode = Callable[[TensorMap, int, int], None]  # the map of an address, to an address of the host


@dataclass(slots=True)
class EncodedMaps:
    """Memory of the host for the maps of a grid, encoded for the addresses that its cells held last."""

    maps: tuple[TensorMap, ...]
    _memory: ctypes.Array[ctypes.c_char] = field(init=False)
    _seen: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._memory = ctypes.create_string_buffer(len(self.maps) * MAP_BYTES + _ALIGNMENT)
        self._seen = [0] * len(self.maps)

    @property
    def addresses(self) -> list[int]:
        """Of each map."""
        first = -(-ctypes.addressof(self._memory) // _ALIGNMENT) * _ALIGNMENT
        return [first + number * MAP_BYTES for number in range(len(self.maps))]

    def encode(self, cells: ctypes.Array[ctypes.c_uint64], encode: Encode) -> None:
        """Encode those whose operand has moved since the last time."""
        for number, (one, to) in enumerate(zip(self.maps, self.addresses, strict=True)):
            address = cells[one.argument]
            if self._seen[number] != address:
                encode(one, address, to)
                self._seen[number] = address
