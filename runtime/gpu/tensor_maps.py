"""Tensor maps of a launch: what the driver encodes of them, and when, as they hold the addresses that they see."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field

from ..plan import TensorMap

MAP_BYTES = 128  # of CUtensorMap
_ALIGNMENT = 64
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
